// linear: 16 rows of weights a tile (16 output columns, or 8 gate and 8 up rows), times up to 16 rows of input, on tensor cores.
//
// Operands: input [rows][k] bf16, output [rows][n] bf16 (float32 for gathered logits), residual [rows][n] bf16, what is added to the
// product if V::epilogue says so (it may be the output itself); all but float32 ones are flagged. Parameters: norm [k] if V::norm, then bias
// if V::bias (padded to whole panels; swiglu: gate, then up). Variant: n, k, eps, norm, bias, epilogue, gather_logit_rows; for kSend also
// columns, ranks, two_shot_rows, and the output is a peer buffer.
//
// Weights are the A operand of mma.m16n8k16, activations B. Each of the 8 warps owns a contiguous eighth of the columns; sums over
// warps are taken in a fixed order, once a group of up to 8 tiles. Weights stand in fragment order, with columns permuted inside each 32
// so that the 16 bytes x[8 q .. 8 q + 7] that lane 4 g + q holds are B of two mma steps:
//   step s, lane 4 g + q: W[g][8 q + 4 s + 0, 1], W[g + 8][same], W[g][8 q + 4 s + 2, 3], W[g + 8][same].
// A norm's weight multiplies the input (rounded to bf16 once); its scale, one number a row, multiplies the sums.
#pragma once
#include "mpk/flagged.cuh"
#include "mpk/peer.cuh"

namespace mpk::linear {

constexpr bool waits_inside = true;
constexpr int kStore = 0, kResidual = 1, kSwiglu = 2, kSend = 3;
constexpr int kTileRows = 16, kGroup = 8;

constexpr int round_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// How the matrix is cut (mpk/tasks/stages.py says the same).
template <class V>
struct Shape {
  static constexpr int k = int(V::k), n = int(V::n);
  static constexpr int depth = round_to(k, 512) <= round_to(k, 256) ? 512 : 256;  // columns of a stage
  static constexpr int stages = round_to(k, depth) / depth;                         // of a tile
  static constexpr int padded = depth * stages, warp_columns = padded / WARPS;
  static constexpr int parts = depth / WARPS / 32;  // runs of 32 columns that a warp owns in a stage
  static constexpr int warp_bytes = parts * 1024;   // and their bytes
  static constexpr int tile_columns = V::epilogue == kSwiglu ? 8 : 16;
  static constexpr bool wide = V::gather_logit_rows;  // float32 output
  static_assert(k % 8 == 0, "16-byte pieces of the input");
  static_assert(wide || n % 2 == 0, "outputs are stored in pairs");
  static_assert(depth * kTileRows * 2 <= STAGE_BYTES, "a stage fits its place in the ring");
};

__device__ __forceinline__ float squares(uint4 v) {
  float sum = low(v.x) * low(v.x) + high(v.x) * high(v.x);
  sum += low(v.y) * low(v.y) + high(v.y) * high(v.y);
  sum += low(v.z) * low(v.z) + high(v.z) * high(v.z);
  return sum + (low(v.w) * low(v.w) + high(v.w) * high(v.w));
}
__device__ __forceinline__ uint4 scaled(uint4 v, float4 a, float4 b) {
  return {pack_bf16(low(v.x) * a.x, high(v.x) * a.y), pack_bf16(low(v.y) * a.z, high(v.y) * a.w), pack_bf16(low(v.z) * b.x, high(v.z) * b.y),
          pack_bf16(low(v.w) * b.z, high(v.w) * b.w)};
}

// One row of input: every warp brings its whole slice into shared memory at once, normed, and needs no other warp to start.
template <class V>
struct SliceInput {
  using S = Shape<V>;
  static constexpr int kRows = 1, kBlocks = 1;  // rows; mma blocks of 8 rows
  static constexpr int kBytes = S::padded * 2;
  uint32_t at;  // shared address of the warp's slice, at the lane's 16 bytes
  float sum;    // of squares, this lane's part

  __device__ __forceinline__ SliceInput(Block& b, const bf16* x, int, const float* norm) {
    constexpr int pieces = S::warp_columns / 8, each = (pieces + 31) / 32;
    const uint32_t slice = shared_address(b.scratch) + b.warp * S::warp_columns * 2;
    const int first = b.warp * S::warp_columns;
    const bf16* row = x + (V::gather_logit_rows ? int64_t(b.step->logit_row[0]) * S::k : 0);
    const bf16* mine = row + first + b.lane * 8;
    const auto there = [&](int i) { return (pieces % 32 == 0 || i * 32 + b.lane < pieces) && (S::padded == S::k || first + (i * 32 + b.lane) * 8 < S::k); };
    float4 g[V::norm ? each : 1][2];
    if constexpr (V::norm) {  // constant, so it need not wait
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const float4* weights = reinterpret_cast<const float4*>(norm + first + (i * 32 + b.lane) * 8);
        g[i][0] = g[i][1] = float4{};  // on every path: else registers hold what they held, all through the program
        if (there(i)) g[i][0] = __ldg(weights), g[i][1] = __ldg(weights + 1);
      }
    }
    b.wait();
    uint4 v[each];
#pragma unroll
    for (int i = 0; i < each; ++i) v[i] = there(i) ? load_16(mine + i * 256) : uint4{};
    settle_16(b, v, [&](int i) { return mine + i * 256; });
    b.arrived();
    sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (i * 32 + b.lane >= pieces) continue;
      if constexpr (V::norm) {
        if (there(i)) {
          sum += squares(v[i]);
          v[i] = scaled(v[i], g[i][0], g[i][1]);
        }
      }
      shared_store_16(slice + (i * 32 + b.lane) * 16, v[i]);
    }
    __syncwarp();
    at = slice + (b.lane & 3) * 16;
  }
  __device__ __forceinline__ void advance(int) {}
  __device__ __forceinline__ void get(Block&, int stage, uint4 (&out)[S::parts][1]) const {
#pragma unroll
    for (int p = 0; p < S::parts; ++p) out[p][0] = shared_load_16(at + (stage * S::parts + p) * 64);
  }
  // Hands in this warp's sums of squares: out[row].
  __device__ __forceinline__ void put_squares(const Block& b, float* out) const {
    float total = sum;
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (b.lane == 0) out[0] = total;
  }
};

// Up to 16 rows: lanes load the B operand of the next stage from the L2 while the present one is multiplied.
template <class V>
struct RowsInput {
  using S = Shape<V>;
  static constexpr int BLOCKS = 2, kRows = 8 * BLOCKS, kBlocks = BLOCKS;
  static constexpr int kBytes = 0;
  const bf16* row[BLOCKS];  // this lane's rows, at its first column; null: there is no such row
  const float* norm;
  int begin, column;  // first of the warp; of the next stage
  uint4 next[S::parts * BLOCKS];
  float sum[BLOCKS];

  __device__ __forceinline__ RowsInput(Block& b, const bf16* x, int rows, const float* norm_weight) {
    const int first = b.warp * S::warp_columns + (b.lane & 3) * 8;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      const int r = j * 8 + b.lane / 4;
      row[j] = r < rows ? x + int64_t(V::gather_logit_rows ? b.step->logit_row[r] : r) * S::k : nullptr;
      sum[j] = 0;
    }
    norm = norm_weight;
    begin = column = first;
    b.wait();
    advance(0);
  }
  // Part n / BLOCKS of row block n % BLOCKS, in the next stage.
  __device__ __forceinline__ bool there(int n) const { return row[n % BLOCKS] != nullptr && (S::padded == S::k || column + n / BLOCKS * 32 < S::k); }
  __device__ __forceinline__ const bf16* from(int n) const { return row[n % BLOCKS] + column + n / BLOCKS * 32; }
  // Starts loading stage `stage`.
  __device__ __forceinline__ void advance(int stage) {
    if (stage >= S::stages) return;
    column = begin + stage * S::parts * 32;
#pragma unroll
    for (int n = 0; n < S::parts * BLOCKS; ++n) next[n] = there(n) ? load_16(from(n)) : uint4{};
  }
  __device__ __forceinline__ void get(Block& b, int stage, uint4 (&out)[S::parts][BLOCKS]) {
    settle_16(b, next, [&](int n) { return from(n); });
#pragma unroll
    for (int p = 0; p < S::parts; ++p) {
      float4 a{}, c{};
      if constexpr (V::norm) {
        if (column + p * 32 < S::k) {
          const float4* g = reinterpret_cast<const float4*>(norm + column + p * 32);
          a = __ldg(g), c = __ldg(g + 1);
        }
      }
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        const uint4 v = next[p * BLOCKS + j];
        out[p][j] = v;
        if constexpr (V::norm) {
          sum[j] += squares(v);
          out[p][j] = scaled(v, a, c);
        }
      }
    }
  }
  __device__ __forceinline__ void put_squares(const Block& b, float* out) const {
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      float total = sum[j] + __shfl_xor_sync(~0u, sum[j], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if ((b.lane & 3) == 0) out[j * 8 + b.lane / 4] = total;
    }
  }
};

// Where the sums of the warps meet, at the end of the scratch memory: sets of [tile of a round][warp][row][16 columns], each with the sums
// of squares [warp][row] behind it. With two sets warps need to meet only once a round, before its sums are added up: while slow
// warps still do that, fast ones go on to the next round, or instruction, which uses the other set.
template <class V, class Input>
struct Sums {
  static constexpr int kRound = Input::kBlocks == 2 ? kGroup / 2 : kGroup;   // tiles summed between two barriers
  static constexpr int kRowStride = Input::kRows == 1 ? 16 : 20;             // 20: no two of the rows a warp stores share a bank
  static constexpr int kWarpStride = Input::kRows * kRowStride, kTileStride = WARPS * kWarpStride;
  static constexpr int kSets = Input::kRows == 1 ? 2 : 1;
  static constexpr int kFloats = kRound * kTileStride, kSquares = WARPS * Input::kRows, kSetBytes = (kFloats + kSquares) * 4;
  static constexpr int kBytes = Input::kBytes + kSets * kSetBytes;
  static __device__ __forceinline__ float* at(const Block& b) {
    return reinterpret_cast<float*>(b.scratch + SCRATCH_BYTES - kSets * kSetBytes + (kSets == 2 ? (b.round & 1) * kSetBytes : 0));
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
  static __device__ __forceinline__ float scale(const float* squares, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += squares[w * Input::kRows + row];
    return rsqrtf(sum * (1.0f / S::k) + float(V::eps));
  }
  static __device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

  static __device__ __forceinline__ void run(Block& b, const float* sums, const float* bias, void* out, const bf16* residual, int rows, int first,
                                             int tiles, const uint32_t (&old)[kEach], const Sender<V>& sender) {
    const float* squares = sums + M::kFloats;
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
        const float s = scale(squares, row);
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

template <class V, class Input>
__device__ __forceinline__ void product(const Context& c, const Instruction& in, Block& b, int rows) {
  using S = Shape<V>;
  using M = Sums<V, Input>;
  using F = Finish<V, Input>;
  constexpr int rounds = kGroup / M::kRound;
  static_assert(M::kBytes <= SCRATCH_BYTES, "scratch");
  const float* params = reinterpret_cast<const float*>(c.params + in.params);
  const float* bias = params + (V::norm ? S::k : 0);
  void* out = S::wide ? operand<unsigned char>(c, in, 1) : flagged<unsigned char>(c, in, 1, b);
  const bf16* residual = flagged<const bf16>(c, in, 2, b);
  const int tiles = in.tile_end - in.tile_begin, groups = (tiles + kGroup - 1) / kGroup;
  int each = tiles, larger = 0;
  if (groups > 1) each = tiles / groups, larger = tiles % groups;
  Input input(b, flagged<const bf16>(c, in, 0, b), rows, params);
  if (tiles > 1 && b.thread == 0) b.ring.shut(0);  // the input is here: weights may come as fast as they can
  int first = in.tile_begin;
  for (int group = 0; group < groups; ++group) {
    const int count = each + (group < larger);
    uint32_t old[rounds][F::kEach];
#pragma unroll
    for (int r = 0; r < rounds; ++r) F::prefetch(b, residual, rows, first + r * M::kRound, count - r * M::kRound, old[r]);
    float acc[kGroup][2][4];
#pragma unroll
    for (int t = 0; t < kGroup; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[t][i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int stage = 0; stage < S::stages; ++stage) {
      uint4 x[S::parts][Input::kBlocks];
      input.get(b, stage, x);
      if (Input::kRows > 1 && group + stage == 0) b.arrived();
      input.advance(stage + 1);
#pragma unroll
      for (int t = 0; t < kGroup; ++t) {
        if (t >= count) break;
        const uint32_t at = b.ring.wait() + b.warp * S::warp_bytes + b.lane * 16;
        uint4 w[S::parts][2];  // all asked for before the first is used
#pragma unroll
        for (int p = 0; p < S::parts; ++p) w[p][0] = shared_load_16(at + p * 1024), w[p][1] = shared_load_16(at + p * 1024 + 512);
#pragma unroll
        for (int p = 0; p < S::parts; ++p) {
          const uint4 w0 = w[p][0], w1 = w[p][1];
          if constexpr (Input::kBlocks == 1) {
            mma(acc[t][0], w0, x[p][0].x, x[p][0].y);
            mma(acc[t][1], w1, x[p][0].z, x[p][0].w);
          } else {
            mma(acc[t][0], w0, x[p][0].x, x[p][0].y);
            mma(acc[t][1], w0, x[p][1].x, x[p][1].y);
            mma(acc[t][0], w1, x[p][0].z, x[p][0].w);
            mma(acc[t][1], w1, x[p][1].z, x[p][1].w);
          }
        }
        b.ring.release(b.lane);
      }
    }
    const bool last = group + 1 == groups;
    if (last && b.thread == 0) b.ring.shut(1);
    if (!last) input.advance(0);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      float* sums = M::at(b);
      if constexpr (V::norm)
        if (M::kSets == 2 || group + r == 0) input.put_squares(b, sums + M::kFloats + b.warp * Input::kRows);
#pragma unroll
      for (int t = 0; t < M::kRound; ++t) {
        if (r * M::kRound + t >= count) break;
        const float(&a)[2][4] = acc[r * M::kRound + t];
        float* to = sums + b.warp * M::kWarpStride + t * M::kTileStride + b.lane / 4;
        if constexpr (Input::kRows == 1) {  // all columns of the mma hold the same
          if ((b.lane & 3) == 0) to[0] = a[0][0] + a[1][0], to[8] = a[0][2] + a[1][2];
        } else {
          to += (b.lane & 3) * 2 * M::kRowStride;
#pragma unroll
          for (int j = 0; j < 2; ++j, to += 8 * M::kRowStride) {
            to[0] = a[j][0], to[M::kRowStride] = a[j][1];
            to[8] = a[j][2], to[M::kRowStride + 8] = a[j][3];
          }
        }
      }
      const Sender<V> sender(c, in, b, rows);
      b.sync();
      F::run(b, sums, bias, out, residual, rows, first + r * M::kRound, count - r * M::kRound, old[r], sender);
      if constexpr (M::kSets == 1) b.sync();  // before the sums are overwritten
      ++b.round;
    }
    first += count;
  }
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

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& in, Block& b) {
  using Slice = SliceInput<V>;
  const int rows = V::gather_logit_rows ? b.step->logit_rows : b.step->rows;
  if (rows == 0) return skip<V>(in, b);
  clear_old<V>(c, in, b);
  // Which of the two is the same for all products of a step but the last, which threads meet before (it signals): their scratch memory
  // is laid out differently.
  if constexpr (Sums<V, Slice>::kBytes <= SCRATCH_BYTES)
    if (rows == 1) return product<V, Slice>(c, in, b, rows);
  // Half of the columns of the tensor core idle with 8 rows or fewer, which costs no time: weights come more slowly than that.
  product<V, RowsInput<V>>(c, in, b, rows);
}

}  // namespace mpk::linear
