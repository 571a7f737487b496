// How a warp multiplies a tile of weights, 16 or 8 rows, with the input, and hands in its sums.
//
// 16 rows: weights are the A operand of mma.m16n8k16, input rows are columns of B. Weights stand in fragment order, with columns permuted
// inside each 32 so that the 16 bytes x[8 q .. 8 q + 7] that lane 4 g + q holds are B of two mma steps:
//   step s, lane 4 g + q: W[g][8 q + 4 s + 0, 1], W[g + 8][same], W[g][8 q + 4 s + 2, 3], W[g + 8][same].
// 8 rows: a lane's 16 bytes of weights are of one row: lane 4 g + q has W[g][8 q .. 8 q + 7] of 32 columns, so that a stage holds twice the
// columns, two levels of the input. No product of either form is wasted:
//   One row of input: weights are A all the same, whose rows g and g + 8 are then row g at different columns of the 32 (8 q + 0, 1, 4, 5 and
//   8 q + 2, 3, 6, 7). Columns 0 to 3 of B hold the input for the former, 4 to 7 for the latter: D[g][0] + D[g + 8][4] is the sum.
//   More rows: operands change sides. Up to 16 rows of input are A, 8 rows of weights are B, one 16-byte piece of either makes two steps.
#pragma once
#include "linear/input.cuh"

namespace mpk::linear {

// ROWS: of a tile. `get`: the input of a stage; `multiply`: with a warp's part of a tile's stage, which begins at shared address `at`; `put`: sums of a
// tile go to `to`, [row][ROW_STRIDE], a tile's columns first.
template <class V, class Input, int ROWS = Shape<V>::tile_rows>
struct Tile;

template <class V, class Input>
struct Tile<V, Input, 16> {
  using S = Shape<V>;
  static constexpr int kBlocks = Input::kBlocks;
  uint4 x[S::parts][kBlocks];

  __device__ __forceinline__ void get(Block& b, Input& input, int stage) { input.get(b, stage, x); }
  __device__ __forceinline__ void multiply(float (&acc)[2][4], uint32_t at) const {
    uint4 w[S::parts][2];  // all asked for before the first is used
#pragma unroll
    for (int p = 0; p < S::parts; ++p) w[p][0] = shared_load_16(at + p * 1024), w[p][1] = shared_load_16(at + p * 1024 + 512);
#pragma unroll
    for (int p = 0; p < S::parts; ++p) {
      if constexpr (kBlocks == 1) {  // two chains of sums
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
  template <int ROW_STRIDE>
  static __device__ __forceinline__ void put(const Block& b, const float (&a)[2][4], float* to) {
    to += b.lane / 4;
    if constexpr (Input::kRows == 1) {  // all columns of the mma hold the same
      if ((b.lane & 3) == 0) to[0] = a[0][0] + a[1][0], to[8] = a[0][2] + a[1][2];
    } else {
      to += (b.lane & 3) * 2 * ROW_STRIDE;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j, to += 8 * ROW_STRIDE)
        to[0] = a[j][0], to[ROW_STRIDE] = a[j][1], to[8] = a[j][2], to[ROW_STRIDE + 8] = a[j][3];
    }
  }
};

template <class V, class Input>
struct Tile<V, Input, 8> {
  using S = Shape<V>;
  static constexpr int kRuns = S::parts * S::levels_a_stage;  // of 32 columns
  static constexpr bool kOneRow = Input::kRows == 1;
  static_assert(Input::kBlocks == (kOneRow ? 1 : 2), "one row of input, or up to 16");
  uint2 columns[kOneRow ? kRuns : 1];
  uint4 rows[kOneRow ? 1 : kRuns][2];

  __device__ __forceinline__ void get(Block& b, Input& input, int stage) {
#pragma unroll
    for (int level = 0; level < S::levels_a_stage; ++level) {
      uint4 x[S::parts][Input::kBlocks];
      input.get(b, stage * S::levels_a_stage + level, x);
#pragma unroll
      for (int p = 0; p < S::parts; ++p) {
        const int run = level * S::parts + p;
        if constexpr (kOneRow) {
          const bool low_rows = b.lane < 16;
          columns[run] = {low_rows ? x[p][0].x : x[p][0].y, low_rows ? x[p][0].z : x[p][0].w};
        } else {
          rows[run][0] = {x[p][0].x, x[p][1].x, x[p][0].y, x[p][1].y};
          rows[run][1] = {x[p][0].z, x[p][1].z, x[p][0].w, x[p][1].w};
        }
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&acc)[2][4], uint32_t at) const {
    uint4 w[kRuns];  // all asked for before the first is used
#pragma unroll
    for (int r = 0; r < kRuns; ++r) w[r] = shared_load_16(at + r * 512);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {  // two chains of sums
      if constexpr (kOneRow) {
        mma(acc[r % 2], w[r], columns[r].x, columns[r].y);
      } else {
        mma(acc[0], rows[r][0], w[r].x, w[r].y);
        mma(acc[1], rows[r][1], w[r].z, w[r].w);
      }
    }
  }
  template <int ROW_STRIDE>
  static __device__ __forceinline__ void put(const Block& b, const float (&a)[2][4], float* to) {
    if constexpr (kOneRow) {
      const float other = __shfl_xor_sync(~0u, a[0][2] + a[1][2], 2);  // of lane 4 g + 2, whose D[g + 8][4] it is
      if ((b.lane & 3) == 0) to[b.lane / 4] = a[0][0] + a[1][0] + other;
    } else {
      to += b.lane / 4 * ROW_STRIDE + (b.lane & 3) * 2;
      *reinterpret_cast<float2*>(to) = {a[0][0] + a[1][0], a[0][1] + a[1][1]};
      *reinterpret_cast<float2*>(to + 8 * ROW_STRIDE) = {a[0][2] + a[1][2], a[0][3] + a[1][3]};
    }
  }
};

}  // namespace mpk::linear
