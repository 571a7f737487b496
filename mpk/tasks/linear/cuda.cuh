// linear: 16 rows of weights a tile (16 output columns, or 8 gate and 8 up rows), times up to 16 rows of input, on tensor cores.
//
// Operands: input [rows][k] bf16, output [rows][n] bf16 (float32 for gathered logits). Parameters: norm [k] if V::norm, then bias if
// V::bias (padded to whole panels; swiglu: gate, then up). Variant: n, k, eps, norm, bias, epilogue, gather_logit_rows.
//
// Weights are the A operand of mma.m16n8k16, activations B. Each of the 8 warps owns a contiguous eighth of the columns; sums over
// warps are taken in a fixed order, once a group of up to 8 tiles. Weights stand in fragment order, with columns permuted inside each 32
// so that the 16 bytes x[8 q .. 8 q + 7] that lane 4 g + q holds are B of two mma steps:
//   step s, lane 4 g + q: W[g][8 q + 4 s + 0, 1], W[g + 8][same], W[g][8 q + 4 s + 2, 3], W[g + 8][same].
// A norm's weight multiplies the input (rounded to bf16 once); its scale, one number a row, multiplies the sums.
#pragma once
#include "mpk/block.cuh"

namespace mpk::linear {

constexpr bool waits_inside = true;
constexpr int kStore = 0, kResidual = 1, kSwiglu = 2;
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
    uint4 v[each];
    float4 g[V::norm ? each : 1][2];
    if constexpr (V::norm) {  // constant, so it need not wait
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int piece = i * 32 + b.lane, column = first + piece * 8;
        const float4* from = reinterpret_cast<const float4*>(norm + column);
        if (piece < pieces && column < S::k) g[i][0] = __ldg(from), g[i][1] = __ldg(from + 1);
      }
    }
    b.wait();
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int piece = i * 32 + b.lane, column = first + piece * 8;
      v[i] = uint4{};
      if (piece < pieces && column < S::k) v[i] = load_16(row + column);
    }
    sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int piece = i * 32 + b.lane, column = first + piece * 8;
      if (piece >= pieces) continue;
      if constexpr (V::norm) {
        if (column < S::k) {
          sum += squares(v[i]);
          v[i] = scaled(v[i], g[i][0], g[i][1]);
        }
      }
      shared_store_16(slice + piece * 16, v[i]);
    }
    __syncwarp();
    at = slice + (b.lane & 3) * 16;
  }
  __device__ __forceinline__ void advance(int) {}
  __device__ __forceinline__ void get(int stage, uint4 (&out)[S::parts][1]) const {
#pragma unroll
    for (int p = 0; p < S::parts; ++p) out[p][0] = shared_load_16(at + (stage * S::parts + p) * 64);
  }
  // Hands in this warp's sums of squares: out[row].
  __device__ __forceinline__ void put_squares(const Block& b, float* out) {
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (b.lane == 0) out[0] = sum;
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
  uint4 next[S::parts][BLOCKS];
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
  // Starts loading stage `stage`.
  __device__ __forceinline__ void advance(int stage) {
    if (stage >= S::stages) return;
    column = begin + stage * S::parts * 32;
#pragma unroll
    for (int p = 0; p < S::parts; ++p)
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        next[p][j] = uint4{};
        if (row[j] != nullptr && column + p * 32 < S::k) next[p][j] = load_16(row[j] + column + p * 32);
      }
  }
  __device__ __forceinline__ void get(int, uint4 (&out)[S::parts][BLOCKS]) {
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
        out[p][j] = next[p][j];
        if constexpr (V::norm) {
          sum[j] += squares(next[p][j]);
          out[p][j] = scaled(next[p][j], a, c);
        }
      }
    }
  }
  __device__ __forceinline__ void put_squares(const Block& b, float* out) {
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      sum[j] += __shfl_xor_sync(~0u, sum[j], 1);
      sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
      if ((b.lane & 3) == 0) out[j * 8 + b.lane / 4] = sum[j];
    }
  }
};

// Where the sums of the warps meet: [set][tile of a round][warp][row][16 columns], then the sums of squares [warp][row].
template <class V, class Input>
struct Sums {
  static constexpr int kRound = Input::kBlocks == 2 ? kGroup / 2 : kGroup;   // tiles summed between two barriers
  static constexpr int kRowStride = Input::kRows == 1 ? 16 : 20;             // 20: no two of the rows a warp stores share a bank
  static constexpr int kWarpStride = Input::kRows * kRowStride, kTileStride = WARPS * kWarpStride;
  static constexpr int kSets = Input::kRows == 1 ? 2 : 1;                    // two: the next group may store while this one is summed
  static constexpr int kFloats = kSets * kRound * kTileStride, kSquares = WARPS * Input::kRows;
  static constexpr int kBytes = Input::kBytes + (kFloats + kSquares) * 4;
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
  static __device__ __forceinline__ void prefetch(const Block& b, const bf16* out, int rows, int first, int tiles, uint32_t (&old)[kEach]) {
    if constexpr (V::epilogue == kResidual) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        int tile, row, pair;
        place(e * THREADS + b.thread, tile, row, pair);
        const int column = (first + tile) * S::tile_columns + pair * 2;
        old[e] = 0;
        if (tile < tiles && row < rows && column < S::n) old[e] = load_4(out + int64_t(row) * S::n + column);
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

  static __device__ __forceinline__ void run(const Block& b, const float* sums, const float* squares, const float* bias, void* out, int rows,
                                             int first, int tiles, const uint32_t (&old)[kEach]) {
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
      if constexpr (V::epilogue == kResidual) y.x += low(old[e]), y.y += high(old[e]);
      const int64_t place = int64_t(row) * S::n + column;
      if constexpr (S::wide) {
        float* to = static_cast<float*>(out) + place;
        to[0] = y.x;
        if (column + 1 < S::n) to[1] = y.y;
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(out) + place) = pack_bf16(y.x, y.y);
      }
    }
  }
};

template <class V, class Input>
__device__ __forceinline__ void product(const Context& c, const Instruction& in, Block& b, int rows) {
  using S = Shape<V>;
  using M = Sums<V, Input>;
  using F = Finish<V, Input>;
  constexpr int rounds = kGroup / M::kRound;
  static_assert(M::kBytes <= SCRATCH_BYTES, "scratch");
  const float* params = reinterpret_cast<const float*>(c.params + in.params);
  const float* bias = params + (V::norm ? S::k : 0);
  void* out = operand<unsigned char>(c, in, 1);
  float* sums = reinterpret_cast<float*>(b.scratch + Input::kBytes);
  float* squares = sums + M::kFloats;
  Input input(b, operand<const bf16>(c, in, 0), rows, params);
  const int tiles = in.tile_end - in.tile_begin, groups = (tiles + kGroup - 1) / kGroup, each = tiles / groups, larger = tiles % groups;
  if (tiles > 1 && b.thread == 0) b.ring.shut(0);  // the input is here: weights may come as fast as they can
  int first = in.tile_begin, set = 0;
  for (int group = 0; group < groups; ++group) {
    const int count = each + (group < larger);
    uint32_t old[rounds][F::kEach];
#pragma unroll
    for (int r = 0; r < rounds; ++r) F::prefetch(b, static_cast<const bf16*>(out), rows, first + r * M::kRound, count - r * M::kRound, old[r]);
    float acc[kGroup][2][4];
#pragma unroll
    for (int t = 0; t < kGroup; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[t][i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int stage = 0; stage < S::stages; ++stage) {
      uint4 x[S::parts][Input::kBlocks];
      input.get(stage, x);
      input.advance(stage + 1);
#pragma unroll
      for (int t = 0; t < kGroup; ++t) {
        if (t >= count) break;
        const uint32_t at = b.ring.wait() + b.warp * S::warp_bytes + b.lane * 16;
#pragma unroll
        for (int p = 0; p < S::parts; ++p) {
          const uint4 w0 = shared_load_16(at + p * 1024), w1 = shared_load_16(at + p * 1024 + 512);
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
    if constexpr (V::norm)
      if (group == 0) input.put_squares(b, squares + b.warp * Input::kRows);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      float* mine = sums + set * M::kRound * M::kTileStride + b.warp * M::kWarpStride;
#pragma unroll
      for (int t = 0; t < M::kRound; ++t) {
        if (r * M::kRound + t >= count) break;
        const float(&a)[2][4] = acc[r * M::kRound + t];
        float* to = mine + t * M::kTileStride + b.lane / 4;
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
      b.sync();
      F::run(b, sums + set * M::kRound * M::kTileStride, squares, bias, out, rows, first + r * M::kRound, count - r * M::kRound, old[r]);
      if constexpr (M::kSets == 1) b.sync();  // before the sums are overwritten
      set = (set + 1) % M::kSets;
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
}

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& in, Block& b) {
  using Slice = SliceInput<V>;
  const int rows = V::gather_logit_rows ? b.step->logit_rows : b.step->rows;
  if (rows == 0) return skip<V>(in, b);
  if constexpr (Sums<V, Slice>::kBytes <= SCRATCH_BYTES)
    if (rows == 1) return product<V, Slice>(c, in, b, rows);
  // Half of the columns of the tensor core idle with 8 rows or fewer, which costs no time: weights come more slowly than that.
  product<V, RowsInput<V>>(c, in, b, rows);
}

}  // namespace mpk::linear
