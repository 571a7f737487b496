// Reductions over warps, in a fixed order: every lane gets the same bits.
#pragma once
#include "mpk/block.cuh"

namespace mpk {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ bool is_finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
  return v;
}
__device__ __forceinline__ int warp_sum(int v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
  return v;
}

// Sum of the values of lower lanes.
template <class T>
__device__ __forceinline__ T warp_sum_before(T v, int lane) {
  T inclusive = v;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T below = __shfl_up_sync(ALL_LANES, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  return inclusive - v;
}

// Values of lower threads of the block, and the total; `memory`: WARPS values of shared memory, free again after the next sync.
template <class T>
__device__ __forceinline__ T block_sum_before(const Block& b, T v, T* memory, T& total) {
  const T in_warp = warp_sum_before(v, b.lane);
  if (b.lane == 31) memory[b.warp] = in_warp + v;
  b.sync();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w == b.warp) before = total;
    total += memory[w];
  }
  b.sync();
  return before + in_warp;
}

}  // namespace mpk
