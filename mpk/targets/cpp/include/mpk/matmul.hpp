// Products of activations with packed panels: out[row][lane] += sum over k of x[row][k] * panel[k][lane].
//
// A panel holds 16 (or 8) outputs: bf16 as [k/2][lanes][2], float32 as [k][lanes]. The promise of every function here: an
// output is ONE chain of multiply-adds over ascending k. How many rows and panels are computed side by side, and where k is
// cut into blocks, changes no bit of any result, so a row's result does not depend on the other rows of the step.
#pragma once
#include <cstdint>

#include "mpk/simd.hpp"

namespace mpk {

constexpr int kPanel = 16;  // outputs of a panel of weights

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int divide_up(int value, int by) { return (value + by - 1) / by; }

// N lanes of one of the two k (`Which`) of a pair at `p`; `lanes` is the width of the panel.
template <int N, int Which>
MPK_INLINE Vec<N> load_weights(const bf16* p, int) {
  return load_of_pairs<N, Which>(p);
}
template <int N, int Which>
MPK_INLINE Vec<N> load_weights(const float* p, int lanes) {
  return load<N>(p + Which * lanes);
}

// Elements between two vectors of the same pair of k.
template <class W>
constexpr int vector_step(int n) {
  return sizeof(W) == 2 ? 2 * n : n;
}

// Rows computed side by side, and panels for a given number of rows: as many as there are accumulator registers.
constexpr int max_block_rows(int lanes) {
  const int fit = kAccumulators / (lanes / vector_lanes(lanes));
  return fit < 6 ? fit : 6;
}
constexpr int block_panels(int lanes, int rows) {
  const int fit = kAccumulators / (rows * (lanes / vector_lanes(lanes)));
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

constexpr int kPrefetchBytes = 1024;  // how far ahead weights are asked for: 10 to 25 % faster at 4 to 16 rows

// Keeps the second k of a pair from being loaded early: its registers are needed for accumulators. Measured with AVX2 and 6
// rows: 62 GFLOP/s a core with two accumulators spilled, 82 to 90 with none.
#define MPK_KEEP_ORDER() asm volatile("" ::: "memory")
// Loops over accumulators must be gone before the compiler gives them registers.
#define MPK_UNROLL _Pragma("GCC unroll 16")

// acc += x[row][k] * panel[k] for one k of the current pair.
template <int Which, class W, int LANES, int ROWS, int N, int VECTORS>
MPK_INLINE void multiply_add(Vec<N> (&acc)[ROWS][VECTORS], const W* at, const float* x, int64_t x_stride) {
  Vec<N> weights[VECTORS];
  MPK_UNROLL
  for (int v = 0; v < VECTORS; ++v) weights[v] = load_weights<N, Which>(at + v * vector_step<W>(N), LANES);
  MPK_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const Vec<N> a = splat<N>(x[r * x_stride + Which]);
    MPK_UNROLL
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(weights[v], a, acc[r][v]);
  }
}

// ROWS x (PANELS * LANES) outputs over `pairs` pairs of k; `out` is added to, or overwritten if `fresh`.
template <class W, int LANES, int ROWS, int PANELS>
inline __attribute__((noinline)) void block_product(const W* panels, int64_t panel_stride, int pairs, const float* x, int64_t x_stride,
                                                    float* out, int64_t out_stride, bool fresh, int64_t ahead) {
  constexpr int N = vector_lanes(LANES), VECTORS = LANES / N;
  Vec<N> acc[PANELS][ROWS][VECTORS];
  MPK_UNROLL
  for (int p = 0; p < PANELS; ++p) {
    MPK_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      MPK_UNROLL
      for (int v = 0; v < VECTORS; ++v) acc[p][r][v] = fresh ? splat<N>(0.0f) : load<N>(out + r * out_stride + p * LANES + v * N);
    }
  }
  for (int pair = 0; pair < pairs; ++pair, panels += 2 * LANES, x += 2) {
    MPK_UNROLL
    for (int p = 0; p < PANELS; ++p) {
      const W* at = panels + p * panel_stride;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + ahead);
      multiply_add<0, W, LANES>(acc[p], at, x, x_stride);
      if (ROWS > 2) MPK_KEEP_ORDER();
      multiply_add<1, W, LANES>(acc[p], at, x, x_stride);
    }
  }
  MPK_UNROLL
  for (int p = 0; p < PANELS; ++p) {
    MPK_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      MPK_UNROLL
      for (int v = 0; v < VECTORS; ++v) store(out + r * out_stride + p * LANES + v * N, acc[p][r][v]);
    }
  }
}

// All panels for ROWS rows: as many panels side by side as fit, then halves of that.
template <class W, int LANES, int ROWS, int PANELS = block_panels(LANES, ROWS)>
inline void row_block(const W* panels, int64_t panel_stride, int count, int pairs, const float* x, int64_t x_stride, float* out,
                      int64_t out_stride, bool fresh, int64_t ahead) {
  int p = 0;
  for (; p + PANELS <= count; p += PANELS)
    block_product<W, LANES, ROWS, PANELS>(panels + p * panel_stride, panel_stride, pairs, x, x_stride, out + p * LANES, out_stride, fresh,
                                          ahead);
  if constexpr (PANELS > 1) {
    if (p < count)
      row_block<W, LANES, ROWS, PANELS / 2>(panels + p * panel_stride, panel_stride, count - p, pairs, x, x_stride, out + p * LANES,
                                            out_stride, fresh, ahead);
  }
}

template <class W, int LANES, int ROWS = max_block_rows(LANES)>
inline void any_row_block(int rows, const W* panels, int64_t panel_stride, int count, int pairs, const float* x, int64_t x_stride,
                          float* out, int64_t out_stride, bool fresh, int64_t ahead) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) {
      any_row_block<W, LANES, ROWS - 1>(rows, panels, panel_stride, count, pairs, x, x_stride, out, out_stride, fresh, ahead);
      return;
    }
  }
  row_block<W, LANES, ROWS>(panels, panel_stride, count, pairs, x, x_stride, out, out_stride, fresh, ahead);
}

// With several blocks of rows, k is cut so that a block of rows stays in the first-level cache while panels pass by, and
// the panels of a call in the second-level cache while rows pass by.
constexpr int kBlockDepth = 512;  // at most; blocks of a product are about equal
constexpr int kPanelGroup = 8;  // panels a call should take: enough for every block shape, few enough for that cache

// `count` panels of LANES outputs, k even: out [rows][out_stride >= count * LANES] (+)= x [rows][x_stride] times panels. What lies
// `ahead` bytes behind the weights in use is fetched meanwhile.
template <class W, int LANES = kPanel>
inline void product(const W* panels, int64_t panel_stride, int count, int k, const float* x, int64_t x_stride, int rows, float* out,
                    int64_t out_stride, bool fresh = true, int64_t ahead = kPrefetchBytes) {
  const int blocks = divide_up(rows, max_block_rows(LANES));
  const int depth = blocks > 1 ? int(round_up(divide_up(k, divide_up(k, kBlockDepth)), 2)) : k;
  for (int begin = 0; begin < k; begin += depth) {
    const int pairs = (k - begin < depth ? k - begin : depth) / 2;
    for (int b = 0, row = 0; b < blocks; ++b) {  // sizes differ by one at most
      const int size = divide_up(rows - row, blocks - b);
      any_row_block<W, LANES>(size, panels + int64_t(begin) * LANES, panel_stride, count, pairs, x + row * x_stride + begin, x_stride,
                              out + row * out_stride, out_stride, fresh && begin == 0, ahead);
      row += size;
    }
  }
}

}  // namespace mpk
