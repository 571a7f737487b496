// linear: 16 rows of weights a tile (16 output columns, or 8 gate and 8 up rows), or half as many, times up to 16 rows of input, on tensor cores.
//
// Operands: input [rows][k] bf16, output [rows][n] bf16 (float32 for gathered logits), residual [rows][n] bf16, what is added to the
// product if the epilogue says so (it may be the output itself); all but float32 ones are flagged. Parameters: norm [k] if there is one, then bias
// if there is one (padded to whole panels; swiglu: gate, then up). If iargs[0] is set, the input is instead the rows of the step's tokens in the
// matrix of embeddings, to which `weights` then points (a word of it must not be EMPTY, which is a pair of NaNs; not with kSend). Variant: n, k,
// eps, norm, bias, epilogue, gather_logit_rows, tile_columns; for kSend also columns, ranks, two_shot_rows, and the output is a peer buffer. Code is compiled for what `Shape` takes from a variant; the rest is a `Product`.
//
// Each of the 8 warps owns a contiguous eighth of the columns (tiles.cuh has how it multiplies); sums over warps are taken in a fixed order,
// once a group of up to 8 tiles. A norm's weight multiplies the input (rounded to bf16 once); its scale, one number a row, multiplies the sums.
#pragma once
#include "linear/tiles.cuh"
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
  // 20, and 8 for tiles of 8 columns: no two of the rows a warp stores share a bank.
  static constexpr int kRowStride = kOneRow ? 16 : Shape<V>::tile_rows == 8 ? 8 : 20;
  static constexpr int kTileStride = kOneRow ? WARPS * 16 : Input::kRows * kRowStride, kWarpStride = kOneRow ? 16 : kWarpBytes / 4;
  static constexpr int kSquares = kOneRow ? kRound * kTileStride : kWarpStride - Input::kRows, kSquaresStride = kOneRow ? 1 : kWarpStride;
  static constexpr int kSetBytes = kOneRow ? (kRound * kTileStride + WARPS) * 4 : kInputBytes;
  static_assert(kOneRow || kRound * kTileStride <= kSquares, "sums of a warp");
  static __device__ __forceinline__ bool fits(const Product& p) { return !kOneRow || 2 * kSetBytes + p.padded * 2 <= kInputBytes; }
  static __device__ __forceinline__ float* at(const Block& b) {
    return reinterpret_cast<float*>(b.scratch + (kOneRow ? kInputBytes - (1 + (b.round & 1)) * kSetBytes : 0));
  }
};

// Where outputs go with kSend: to all ranks, or to the one that sums the tile.
template <class V, bool SENDS = Shape<V>::sends>
struct Sender {
  __device__ __forceinline__ Sender(const Context&, const Instruction&, const Block&, int) {}
};
template <class V>
struct Sender<V, true> {
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
  static constexpr int kItems = M::kRound * Input::kRows * (S::tile_rows / 2), kEach = (kItems + THREADS - 1) / THREADS;  // at most

  struct Place {
    int tile, row, column;  // of the round; of the outputs
    bool wanted;
  };
  // Place of this thread's item `e` in a round whose first tile is `first`, of `tiles`, the round's and those behind it.
  static __device__ __forceinline__ Place place(const Block& b, const Product& p, int e, int first, int tiles, int rows, int& pair) {
    const int item = e * THREADS + b.thread, in_tile = item >> p.pair_bits;
    pair = item & ((1 << p.pair_bits) - 1);
    Place at{in_tile / Input::kRows, in_tile % Input::kRows, 0, false};
    at.column = (first + at.tile) * p.tile_columns + pair * 2;
    at.wanted = at.tile < tiles && at.tile < M::kRound && at.row < rows && at.column < p.n;
    return at;
  }
  // What the sums are added to, asked for before the product so that it is there after it.
  static __device__ __forceinline__ void prefetch(const Block& b, const Product& p, const bf16* residual, int rows, int first, int tiles, uint32_t (&old)[kEach]) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      old[e] = 0;
      if (p.epilogue != kResidual) continue;
      int pair;
      const Place at = place(b, p, e, first, tiles, rows, pair);
      if (at.wanted) old[e] = load_4(residual + int64_t(at.row) * p.n + at.column);
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
  static __device__ __forceinline__ float scale(const Product& p, const float* sums, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[M::kSquares + w * M::kSquaresStride + row];
    return rsqrtf(__fdividef(sum, float(p.k)) + p.eps);
  }
  static __device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

  template <class Sink>
  static __device__ __forceinline__ void run(Block& b, const Product& p, const float* sums, const float* bias, void* out, const bf16* residual, int rows, int first,
                                             int tiles, const uint32_t (&old)[kEach], const Sender<V>& sender, Sink& sink) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      int pair;
      const Place at = place(b, p, e, first, tiles, rows, pair);
      if (!at.wanted) continue;
      const float* mine = sums + at.tile * M::kTileStride + at.row * M::kRowStride + pair * 2;
      float2 y = total(mine);
      const float s = p.norm ? scale(p, sums, at.row) : 1.0f;
      if (p.norm) y.x *= s, y.y *= s;
      if (p.bias) y.x += __ldg(bias + at.column), y.y += __ldg(bias + at.column + 1);  // padded, so the second column may be read in any case
      if constexpr (S::sends) {
        sender.put(at.row, at.column, y);
        continue;
      }
      if (p.epilogue == kSwiglu) {
        float2 u = total(mine + p.tile_columns);
        if (p.norm) u.x *= s, u.y *= s;
        if (p.bias) {
          const float* up = bias + round_to(p.n, 16) + at.column;
          u.x += __ldg(up), u.y += __ldg(up + 1);
        }
        y.x = gated(y.x, u.x), y.y = gated(y.y, u.y);
      }
      const int64_t place = int64_t(at.row) * p.n + at.column;
      if (p.epilogue == kResidual) {
        const uint32_t before = settled_4(b, residual + place, old[e]);
        y.x += low(before), y.y += high(before);
      }
      const float both[2] = {y.x, at.column + 1 < p.n ? y.y : __int_as_float(0xff800000)};
      sink.take(b, b.scratch + kInputBytes, at.row, at.column, both);
      if constexpr (S::wide) {
        float* to = static_cast<float*>(out) + place;
        to[0] = y.x;
        if (at.column + 1 < p.n) to[1] = y.y;
      } else {
        put_4(static_cast<bf16*>(out) + place, pack_bf16(y.x, y.y));
      }
    }
  }
};

// Empties what the step before left of the task's columns in the other copy.
template <class V>
__device__ __forceinline__ void clear_old(const Context& c, const Instruction& in, const Block& b, const Product& p) {
  using S = Shape<V>;
  if constexpr (!FLAGGED || S::wide || S::sends) return;
  const int begin = in.tile_begin * p.tile_columns, end = in.tile_end * p.tile_columns < p.n ? in.tile_end * p.tile_columns : p.n;
  bf16* old = other_copy(c, flagged<bf16>(c, in, 1, b), b);
  for (int row = b.warp; row < rows_to_clear(b); row += WARPS)
    for (int column = begin + b.lane * 2; column < end; column += 64) clear_4(old + int64_t(row) * p.n + column);
}

// The sums of a warp over a group of `count` tiles. `arrives`: the first stage of the input is what the product has waited for; `opens`: weights
// may then come as fast as they can.
template <class V, class Input>
__device__ __forceinline__ void sum_up(Block& b, const Product& p, Input& input, int count, bool arrives, bool opens, float (&acc)[kGroup][2][4]) {
  using S = Shape<V>;
#pragma unroll
  for (int t = 0; t < kGroup; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[t][i / 4][i % 4] = 0.0f;
  input.begin(b);
#pragma unroll 1
  for (int stage = 0; stage < p.stages; ++stage) {
    Tile<V, Input> tile;
    tile.get(b, input, stage);
    if (stage == 0) {
      if (arrives) b.arrived();
      if (opens && b.thread == 0) b.ring.shut(0);
    }
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      if (t >= count) break;
      tile.multiply(acc[t], b.ring.wait() + b.warp * S::warp_bytes + b.lane * 16);
      b.ring.release(b.lane);
    }
  }
}

template <class V, class Input, class Sink>
__device__ __forceinline__ void multiply(const Context& c, const Instruction& in, Block& b, const Product& p, int rows, Sink& sink) {
  using S = Shape<V>;
  using M = Sums<V, Input>;
  using F = Finish<V, Input>;
  constexpr int rounds = kGroup / M::kRound;
  static_assert(kInputBytes + Sink::BYTES <= SCRATCH_BYTES, "scratch");
  static_assert(THREADS / (S::tile_rows / 2) % Input::kRows == 0, "a thread's outputs are of one row");
  const float* params = reinterpret_cast<const float*>(c.params + in.params);
  const float* bias = params + (p.norm ? p.k : 0);
  void* out = S::wide ? operand<unsigned char>(c, in, 1) : flagged<unsigned char>(c, in, 1, b);
  const bf16* residual = flagged<const bf16>(c, in, 2, b);
  const int tiles = in.tile_end - in.tile_begin, groups = (tiles + kGroup - 1) / kGroup;
  int each = tiles, larger = 0;
  if (groups > 1) each = tiles / groups, larger = tiles % groups;
  sink.begin(c, b, b.scratch + kInputBytes);
  const bool embeds = !S::sends && in.iargs[0] != 0;
  Input input(b, p, embeds ? reinterpret_cast<const bf16*>(c.weights + in.weights) : flagged<const bf16>(c, in, 0, b), embeds, rows, params);
  int first = in.tile_begin;
  for (int group = 0; group < groups; ++group) {
    const int count = each + (group < larger);
    uint32_t old[rounds][F::kEach];
#pragma unroll
    for (int r = 0; r < rounds; ++r) F::prefetch(b, p, residual, rows, first + r * M::kRound, count - r * M::kRound, old[r]);
    float acc[kGroup][2][4];
    sum_up<V>(b, p, input, count, !M::kOneRow && group == 0, tiles > 1 && group == 0, acc);
    if (group + 1 == groups && b.thread == 0) b.ring.shut(1);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      if (r > 0 && r * M::kRound >= count) break;
      float *sums = M::at(b), *mine = sums + b.warp * M::kWarpStride;
      if (p.norm && (M::kOneRow || group + r == 0)) input.put_squares(b, sums + M::kSquares + b.warp * M::kSquaresStride);
#pragma unroll
      for (int t = 0; t < M::kRound; ++t) {
        if (r * M::kRound + t >= count) break;
        Tile<V, Input>::template put<M::kRowStride>(b, acc[r * M::kRound + t], mine + t * M::kTileStride);
      }
      const Sender<V> sender(c, in, b, rows);
      b.sync();
      F::run(b, p, sums, bias, out, residual, rows, first + r * M::kRound, count - r * M::kRound, old[r], sender, sink);
      if constexpr (!M::kOneRow) b.sync();  // before the sums are overwritten
      ++b.round;
    }
    first += count;
  }
  sink.template finish<Input::kRows>(c, in, b, b.scratch + kInputBytes);
}

// No row wants this product, but its weights are in the ring.
__device__ __forceinline__ void skip(const Instruction& in, Block& b, const Product& p) {
  b.wait();
  for (int i = 0; i < (in.tile_end - in.tile_begin) * p.stages; ++i) {
    b.ring.wait();
    b.ring.release(b.lane);
  }
  b.sync();  // once in every body
}

// `p`: what V has as constants, or of another product for which the code is the same.
template <class V, class Sink = NoSink>
__device__ __forceinline__ void run(const Context& c, const Instruction& in, Block& b, const Product& p, Sink sink = {}) {
  using Slice = SliceInput<V>;
  const int rows = V::gather_logit_rows ? b.step->logit_rows : b.step->rows;
  if (rows == 0) return skip(in, b, p);
  clear_old<V>(c, in, b, p);
  // Which of these it is, is the same for all products of a step but the last, which threads meet before (it signals): their scratch memory
  // is laid out differently.
  if (rows == 1 && Sums<V, Slice>::fits(p)) return multiply<V, Slice>(c, in, b, p, rows, sink);
  // A form of its own for 8 rows took as long as this one on an H200 (8B: 4.80 against 4.83 ms), and a third of the time to compile.
  multiply<V, RowsInput<V>>(c, in, b, p, rows, sink);
}
template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& in, Block& b) {
  run<V>(c, in, b, product_of<V>());
}

}  // namespace mpk::linear
