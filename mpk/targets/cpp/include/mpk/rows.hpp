// Rows of activations on their way into a product: gathered and normalised once a task, into private memory.
#pragma once
#include <cmath>
#include <cstdint>

#include "mpk/matmul.hpp"
#include "mpk/simd.hpp"

namespace mpk {

// Sum of squares of n values, n a multiple of 8: the same order for every call.
inline float sum_of_squares(const float* x, int n) {
  constexpr int N = vector_lanes(8);
  Vec<N> sums[4] = {splat<N>(0.0f), splat<N>(0.0f), splat<N>(0.0f), splat<N>(0.0f)};
  int i = 0;
  for (; i + 4 * N <= n; i += 4 * N)
    for (int j = 0; j < 4; ++j) {
      const Vec<N> a = load<N>(x + i + j * N);
      sums[j] = fma(a, a, sums[j]);
    }
  for (int j = 0; i < n; i += N, ++j) {
    const Vec<N> a = load<N>(x + i);
    sums[j] = fma(a, a, sums[j]);
  }
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = x / sqrt(mean(x^2) + eps) * weight, n a multiple of 8; `out` may be `x`.
inline void rms_normalise(const float* x, const float* weight, int n, float eps, float* out) {
  constexpr int N = vector_lanes(8);
  const Vec<N> scale = splat<N>(1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps));
  for (int i = 0; i < n; i += N) store(out + i, load<N>(x + i) * scale * load<N>(weight + i));
}

// Rows `index[r]` (or r where `index` is null) of x [.][n]: normalised where NORM, else as they are, in `out` [rows][n].
template <bool NORM>
inline void prepare_rows(const float* x, const int32_t* index, int rows, const float* weight, int n, float eps, float* out) {
  constexpr int N = vector_lanes(8);
  for (int r = 0; r < rows; ++r) {
    const float* from = x + int64_t(index ? index[r] : r) * n;
    float* to = out + int64_t(r) * n;
    if constexpr (NORM) {
      rms_normalise(from, weight, n, eps, to);
    } else {
      for (int i = 0; i < n; i += N) store(to + i, load<N>(from + i));
    }
  }
}

}  // namespace mpk
