// linear: 16 rows of weights a tile (16 output columns, or 8 gate and 8 up rows), times up to 16 rows of input, on tensor cores.
//
// Operands: input [rows][k] bf16, output [rows][n] bf16 (float32 for gathered logits), residual [rows][n] bf16, what is added to the
// product if V::epilogue says so (it may be the output itself); all but float32 ones are flagged. Parameters: norm [k] if V::norm, then bias
// if V::bias (padded to whole panels; swiglu: gate, then up). If iargs[0] is set, the input is instead the rows of the step's tokens in the
// matrix of embeddings, to which `weights` then points (a word of it must not be EMPTY, which is a pair of NaNs; not with kSend). Variant: n, k,
// eps, norm, bias, epilogue, gather_logit_rows; for kSend also columns, ranks, two_shot_rows, and the output is a peer buffer.
//
// Weights are the A operand of mma.m16n8k16, activations B. Each of the 8 warps owns a contiguous eighth of the columns; sums over
// warps are taken in a fixed order, once a group of up to 8 tiles. Weights stand in fragment order, with columns permuted inside each 32
// so that the 16 bytes x[8 q .. 8 q + 7] that lane 4 g + q holds are B of two mma steps:
//   step s, lane 4 g + q: W[g][8 q + 4 s + 0, 1], W[g + 8][same], W[g][8 q + 4 s + 2, 3], W[g + 8][same].
// A norm's weight multiplies the input (rounded to bf16 once); its scale, one number a row, multiplies the sums.
#pragma once
#include "linear/input.cuh"
#include "mpk/peer.cuh"

namespace mpk::linear {

constexpr bool waits_inside = true;

// Who else wants the outputs, with BYTES of shared memory: `begin` is called first, `take` with what each thread stores (consecutive columns,
// always of the same row), and `finish` by all threads at the end. The head has one (head/cuda.cuh).
struct NoSink {
  static constexpr int BYTES = 0;
  __device__ __forceinline__ void begin(const Context&, const Block&, unsigned char*) {}
  template <int N>
  __device__ __forceinline__ void take(const Block&, unsigned char*, int, int, const float (&)[N]) {}
  template <int STRIDE>
  __device__ __forceinline__ void finish(const Context&, const Instruction&, Block&, unsigned char*) {}
};

// Where the sums of the warps meet. One row: at the end of the scratch memory, two sets of [tile of a round][warp][16 columns] and the sums
// of squares [warp] behind; so warps need to meet only once a round, before its sums are added up: while slow warps still do that, fast
// ones go on to the next round, or instruction, which uses the other set. More rows: each warp in its own part of the memory, where its
// input was: [tile of a round][row][16 columns], and the sums of squares [row] at the end.
template <class V, class Input>
struct Sums {
  static constexpr bool kOneRow = Input::kRows == 1;
  static constexpr int kRound = Input::kBlocks == 2 ? kGroup / 2 : kGroup;  // tiles summed between two barriers
  static constexpr int kRowStride = kOneRow ? 16 : 20;                      // 20: no two of the rows a warp stores share a bank
  static constexpr int kTileStride = kOneRow ? WARPS * 16 : Input::kRows * kRowStride, kWarpStride = kOneRow ? 16 : kWarpBytes / 4;
  static constexpr int kSquares = kOneRow ? kRound * kTileStride : kWarpStride - Input::kRows, kSquaresStride = kOneRow ? 1 : kWarpStride;
  static constexpr int kSetBytes = kOneRow ? (kRound * kTileStride + WARPS) * 4 : kInputBytes;
  static_assert(kOneRow || kRound * kTileStride <= kSquares, "sums of a warp");
  static constexpr bool kFits = !kOneRow || 2 * kSetBytes + Shape<V>::padded * 2 <= kInputBytes;
  static __device__ __forceinline__ float* at(const Block& b) {
    return reinterpret_cast<float*>(b.scratch + (kOneRow ? kInputBytes - (1 + (b.round & 1)) * kSetBytes : 0));
  }
};

// Where outputs go with kSend: to all ranks, or to the one that sums the tile.
template <class V, int EPILOGUE = int(V::epilogue)>
struct Sender {
  __device__ __forceinline__ Sender(const Context&, const Instruction&, const Block&, int) {}
};
template <class V>
struct Sender<V, kSend> {
  static constexpr int ranks = int(V::ranks), tiles = (int(V::n) + kTileRows - 1) / kTileRows;
  PeerBuffer<ranks, int(V::columns)> part;
  bool to_owner;
  __device__ __forceinline__ Sender(const Context& c, const Instruction& i, const Block& b, int rows) : part(c, i, 1, b), to_owner(rows > int(V::two_shot_rows)) {}
  __device__ __forceinline__ void put(int row, int column, float2 y) const {
    if (to_owner) {
      part.send_to(owner_of_tile(column / kTileRows, tiles, ranks), row, column, y.x, y.y);
    } else {
      part.send_to_all(row, column, y.x, y.y);
    }
  }
};

// Adds up one round of tiles, finishes and stores their outputs. Item: (tile, row, pair of columns).
template <class V, class Input>
struct Finish {
  using S = Shape<V>;
  using M = Sums<V, Input>;
  static constexpr int kPairs = S::tile_columns / 2, kItems = M::kRound * Input::kRows * kPairs, kEach = (kItems + THREADS - 1) / THREADS;

  static __device__ __forceinline__ void place(int item, int& tile, int& row, int& pair) {
    pair = item % kPairs, row = item / kPairs % Input::kRows, tile = item / (kPairs * Input::kRows);
  }
  // What the sums are added to, asked for before the product so that it is there after it.
  static __device__ __forceinline__ void prefetch(const Block& b, const bf16* residual, int rows, int first, int tiles, uint32_t (&old)[kEach]) {
    if constexpr (V::epilogue == kResidual) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        int tile, row, pair;
        place(e * THREADS + b.thread, tile, row, pair);
        const int column = (first + tile) * S::tile_columns + pair * 2;
        old[e] = 0;
        if (tile < tiles && row < rows && column < S::n) old[e] = load_4(residual + int64_t(row) * S::n + column);
      }
    }
  }
  static __device__ __forceinline__ float2 total(const float* sums) {
    float2 v[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) v[w] = *reinterpret_cast<const float2*>(sums + w * M::kWarpStride);
#pragma unroll
    for (int o = 1; o < WARPS; o *= 2)
#pragma unroll
      for (int w = 0; w < WARPS; w += 2 * o) v[w].x += v[w + o].x, v[w].y += v[w + o].y;
    return v[0];
  }
  static __device__ __forceinline__ float scale(const float* sums, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[M::kSquares + w * M::kSquaresStride + row];
    return rsqrtf(sum * (1.0f / S::k) + float(V::eps));
  }
  static __device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

  template <class Sink>
  static __device__ __forceinline__ void run(Block& b, const float* sums, const float* bias, void* out, const bf16* residual, int rows, int first,
                                             int tiles, const uint32_t (&old)[kEach], const Sender<V>& sender, Sink& sink) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      int tile, row, pair;
      place(e * THREADS + b.thread, tile, row, pair);
      const int column = (first + tile) * S::tile_columns + pair * 2;
      if (tile >= tiles || row >= rows || column >= S::n) continue;
      const float* mine = sums + tile * M::kTileStride + row * M::kRowStride + pair * 2;
      float2 y = total(mine), u{};
      if constexpr (V::epilogue == kSwiglu) u = total(mine + 8);
      if constexpr (V::norm) {
        const float s = scale(sums, row);
        y.x *= s, y.y *= s, u.x *= s, u.y *= s;
      }
      if constexpr (V::bias) {  // padded, so the second column may be read in any case
        y.x += __ldg(bias + column), y.y += __ldg(bias + column + 1);
        if constexpr (V::epilogue == kSwiglu) {
          constexpr int up = round_to(S::n, 16);
          u.x += __ldg(bias + up + column), u.y += __ldg(bias + up + column + 1);
        }
      }
      if constexpr (V::epilogue == kSwiglu) y.x = gated(y.x, u.x), y.y = gated(y.y, u.y);
      if constexpr (V::epilogue == kSend) {
        sender.put(row, column, y);
        continue;
      }
      const int64_t place = int64_t(row) * S::n + column;
      if constexpr (V::epilogue == kResidual) {
        const uint32_t before = settled_4(b, residual + place, old[e]);
        y.x += low(before), y.y += high(before);
      }
      const float both[2] = {y.x, column + 1 < S::n ? y.y : __int_as_float(0xff800000)};
      sink.take(b, b.scratch + kInputBytes, row, column, both);
      if constexpr (S::wide) {
        float* to = static_cast<float*>(out) + place;
        to[0] = y.x;
        if (column + 1 < S::n) to[1] = y.y;
      } else {
        put_4(static_cast<bf16*>(out) + place, pack_bf16(y.x, y.y));
      }
    }
  }
};

// Empties what the step before left of the task's columns in the other copy.
template <class V>
__device__ __forceinline__ void clear_old(const Context& c, const Instruction& in, const Block& b) {
  using S = Shape<V>;
  if constexpr (!FLAGGED || S::wide || V::epilogue == kSend) return;
  const int begin = in.tile_begin * S::tile_columns, end = in.tile_end * S::tile_columns < S::n ? in.tile_end * S::tile_columns : S::n;
  bf16* old = other_copy(c, flagged<bf16>(c, in, 1, b), b);
  for (int row = b.warp; row < rows_to_clear(b); row += WARPS)
    for (int column = begin + b.lane * 2; column < end; column += 64) clear_4(old + int64_t(row) * S::n + column);
}

// Multiplies a stage of a tile's weights with a stage of the input.
template <int PARTS, int BLOCKS>
__device__ __forceinline__ void multiply(float (&acc)[2][4], const uint4 (&w)[PARTS][2], const uint4 (&x)[PARTS][BLOCKS]) {
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    if constexpr (BLOCKS == 1) {  // two chains of sums
      mma(acc[0], w[p][0], x[p][0].x, x[p][0].y);
      mma(acc[1], w[p][1], x[p][0].z, x[p][0].w);
    } else {
      mma(acc[0], w[p][0], x[p][0].x, x[p][0].y);
      mma(acc[1], w[p][0], x[p][1].x, x[p][1].y);
      mma(acc[0], w[p][1], x[p][0].z, x[p][0].w);
      mma(acc[1], w[p][1], x[p][1].z, x[p][1].w);
    }
  }
}

// The sums of a warp over a group of `count` tiles. `arrives`: the first stage of the input is what the product has waited for; `opens`: weights
// may then come as fast as they can.
template <class V, class Input>
__device__ __forceinline__ void sum_up(Block& b, Input& input, int count, bool arrives, bool opens, float (&acc)[kGroup][2][4]) {
  using S = Shape<V>;
#pragma unroll
  for (int t = 0; t < kGroup; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[t][i / 4][i % 4] = 0.0f;
  input.begin(b);
#pragma unroll 1
  for (int stage = 0; stage < S::stages; ++stage) {
    uint4 x[S::parts][Input::kBlocks];
    input.get(b, stage, x);
    if (stage == 0) {
      if (arrives) b.arrived();
      if (opens && b.thread == 0) b.ring.shut(0);
    }
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      if (t >= count) break;
      const uint32_t at = b.ring.wait() + b.warp * S::warp_bytes + b.lane * 16;
      uint4 w[S::parts][2];  // all asked for before the first is used
#pragma unroll
      for (int p = 0; p < S::parts; ++p) w[p][0] = shared_load_16(at + p * 1024), w[p][1] = shared_load_16(at + p * 1024 + 512);
      multiply(acc[t], w, x);
      b.ring.release(b.lane);
    }
  }
}

template <class V, class Input, class Sink>
__device__ __forceinline__ void product(const Context& c, const Instruction& in, Block& b, int rows, Sink& sink) {
  using S = Shape<V>;
  using M = Sums<V, Input>;
  using F = Finish<V, Input>;
  constexpr int rounds = kGroup / M::kRound;
  static_assert(kInputBytes + Sink::BYTES <= SCRATCH_BYTES, "scratch");
  static_assert(THREADS / F::kPairs % Input::kRows == 0, "a thread's outputs are of one row");
  const float* params = reinterpret_cast<const float*>(c.params + in.params);
  const float* bias = params + (V::norm ? S::k : 0);
  void* out = S::wide ? operand<unsigned char>(c, in, 1) : flagged<unsigned char>(c, in, 1, b);
  const bf16* residual = flagged<const bf16>(c, in, 2, b);
  const int tiles = in.tile_end - in.tile_begin, groups = (tiles + kGroup - 1) / kGroup;
  int each = tiles, larger = 0;
  if (groups > 1) each = tiles / groups, larger = tiles % groups;
  sink.begin(c, b, b.scratch + kInputBytes);
  const bool embeds = V::epilogue != kSend && in.iargs[0] != 0;
  Input input(b, embeds ? reinterpret_cast<const bf16*>(c.weights + in.weights) : flagged<const bf16>(c, in, 0, b), embeds, rows, params);
  int first = in.tile_begin;
  for (int group = 0; group < groups; ++group) {
    const int count = each + (group < larger);
    uint32_t old[rounds][F::kEach];
#pragma unroll
    for (int r = 0; r < rounds; ++r) F::prefetch(b, residual, rows, first + r * M::kRound, count - r * M::kRound, old[r]);
    float acc[kGroup][2][4];
    sum_up<V>(b, input, count, !M::kOneRow && group == 0, tiles > 1 && group == 0, acc);
    if (group + 1 == groups && b.thread == 0) b.ring.shut(1);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      if (r > 0 && r * M::kRound >= count) break;
      float *sums = M::at(b), *mine = sums + b.warp * M::kWarpStride;
      if constexpr (V::norm)
        if (M::kOneRow || group + r == 0) input.put_squares(b, sums + M::kSquares + b.warp * M::kSquaresStride);
#pragma unroll
      for (int t = 0; t < M::kRound; ++t) {
        if (r * M::kRound + t >= count) break;
        const float(&a)[2][4] = acc[r * M::kRound + t];
        float* to = mine + t * M::kTileStride + b.lane / 4;
        if constexpr (M::kOneRow) {  // all columns of the mma hold the same
          if ((b.lane & 3) == 0) to[0] = a[0][0] + a[1][0], to[8] = a[0][2] + a[1][2];
        } else {
          to += (b.lane & 3) * 2 * M::kRowStride;
#pragma unroll
          for (int j = 0; j < Input::kBlocks; ++j, to += 8 * M::kRowStride) {
            const bool joined = Input::kBlocks == 1;
            to[0] = a[j][0] + (joined ? a[1][0] : 0.0f), to[M::kRowStride] = a[j][1] + (joined ? a[1][1] : 0.0f);
            to[8] = a[j][2] + (joined ? a[1][2] : 0.0f), to[M::kRowStride + 8] = a[j][3] + (joined ? a[1][3] : 0.0f);
          }
        }
      }
      const Sender<V> sender(c, in, b, rows);
      b.sync();
      F::run(b, sums, bias, out, residual, rows, first + r * M::kRound, count - r * M::kRound, old[r], sender, sink);
      if constexpr (!M::kOneRow) b.sync();  // before the sums are overwritten
      ++b.round;
    }
    first += count;
  }
  sink.template finish<Input::kRows>(c, in, b, b.scratch + kInputBytes);
}

// No row wants this product, but its weights are in the ring.
template <class V>
__device__ __forceinline__ void skip(const Instruction& in, Block& b) {
  b.wait();
  for (int i = 0; i < (in.tile_end - in.tile_begin) * Shape<V>::stages; ++i) {
    b.ring.wait();
    b.ring.release(b.lane);
  }
  b.sync();  // once in every body
}

template <class V, class Sink = NoSink>
__device__ __forceinline__ void run(const Context& c, const Instruction& in, Block& b, Sink sink = {}) {
  using Slice = SliceInput<V>;
  const int rows = V::gather_logit_rows ? b.step->logit_rows : b.step->rows;
  if (rows == 0) return skip<V>(in, b);
  clear_old<V>(c, in, b);
  // Which of these it is, is the same for all products of a step but the last, which threads meet before (it signals): their scratch memory
  // is laid out differently.
  if constexpr (Sums<V, Slice>::kFits)
    if (rows == 1) return product<V, Slice>(c, in, b, rows, sink);
  // A form of its own for 8 rows took as long as this one on an H200 (8B: 4.80 against 4.83 ms), and a third of the time to compile.
  product<V, RowsInput<V>>(c, in, b, rows, sink);
}

}  // namespace mpk::linear
