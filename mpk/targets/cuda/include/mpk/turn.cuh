// One head of one row, by a warp: norm and rotation, as prompt steps need them for queries and keys.
#pragma once
#include "mpk/ptx.cuh"
#include "mpk/reduce.cuh"

namespace mpk {

// Lane l holds elements 2 p, 2 p + 1 of the first half and of the second, which they are rotated against, for p = l, l + 32, ...
template <int HEAD_DIM>
struct HeadRow {
  static constexpr int half = HEAD_DIM / 2, pairs = half / 2, each = (pairs + 31) / 32;
  static_assert(HEAD_DIM % 8 == 0, "pieces of 16 bytes");
  uint32_t first[each], second[each];

  // From memory that other SMs wrote.
  __device__ __forceinline__ void load(const bf16* from, int lane) {
#pragma unroll
    for (int n = 0; n < each; ++n) {
      const int p = lane + n * 32;
      first[n] = second[n] = 0;
      if (p < pairs) first[n] = load_4(from + 2 * p), second[n] = load_4(from + half + 2 * p);
    }
  }

  // `norm`: weights [HEAD_DIM] or null; `rope`: cosines, then sines of the row. All lanes of the warp.
  __device__ __forceinline__ void turn(const float* norm, float eps, const float* rope, int lane) {
    float scale = 1.0f;
    if (norm != nullptr) {
      float squares = 0.0f;
#pragma unroll
      for (int n = 0; n < each; ++n)
        squares += low(first[n]) * low(first[n]) + high(first[n]) * high(first[n]) + low(second[n]) * low(second[n]) + high(second[n]) * high(second[n]);
      scale = rsqrtf(warp_sum(squares) / float(HEAD_DIM) + eps);
    }
#pragma unroll
    for (int n = 0; n < each; ++n) {
      const int p = lane + n * 32;
      if (p >= pairs) continue;
      float x[2] = {low(first[n]) * scale, high(first[n]) * scale}, y[2] = {low(second[n]) * scale, high(second[n]) * scale};
      const uint2 cosine = load_8(rope + 2 * p), sine = load_8(rope + half + 2 * p);
      if (norm != nullptr) {
        x[0] *= __ldg(norm + 2 * p), x[1] *= __ldg(norm + 2 * p + 1);
        y[0] *= __ldg(norm + half + 2 * p), y[1] *= __ldg(norm + half + 2 * p + 1);
      }
      const float c[2] = {__uint_as_float(cosine.x), __uint_as_float(cosine.y)}, s[2] = {__uint_as_float(sine.x), __uint_as_float(sine.y)};
      first[n] = pack_bf16(x[0] * c[0] - y[0] * s[0], x[1] * c[1] - y[1] * s[1]);
      second[n] = pack_bf16(y[0] * c[0] + x[0] * s[0], y[1] * c[1] + x[1] * s[1]);
    }
  }
};

}  // namespace mpk
