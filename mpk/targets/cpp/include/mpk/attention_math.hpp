// What `attention` and `attention_combine` share: how work is shared among splits, and the mathematics of partial results.
#pragma once
#include <cmath>
#include <cstdint>

#include "mpk/context.hpp"
#include "mpk/simd.hpp"

namespace mpk {

// The rule of sharing. A row's softmax is made of `splits` chains: chain s runs over the pages p of the context with
// p % splits == s in ascending order; the chains are merged in ascending s. Who computes the chains depends on the segment:
// few rows (decode): task s computes chain s of every row. Many rows (a prompt chunk): blocks of kQueryRows rows go around
// the tasks; the owner computes all chains of its rows and merges them. Either way the operations on a row are the same.
constexpr int kQueryRows = 16;

inline bool rows_are_shared(int segment_rows, int splits) { return splits > 1 && segment_rows >= kQueryRows * splits; }
inline int owner_of_row(int row_in_segment, int splits) { return row_in_segment / kQueryRows % splits; }

// A partial result is head_dim sums (not yet divided), the maximum score, and the sum of exponentials (0: nothing seen).
constexpr int partial_columns(int head_dim) { return head_dim + 2; }

// Merge (sums, max, total) of one chain into that of the chains before it. Not inlined, so that every caller runs the very
// same instructions: a compiler may round a * b + c * d in two ways.
inline __attribute__((noinline)) void merge_partial(int head_dim, float* sums, float& max, float& total, const float* chain_sums,
                                                    float chain_max, float chain_total) {
  constexpr int N = vector_lanes(8);
  if (chain_total == 0.0f) return;
  const float top = max > chain_max ? max : chain_max;
  const float keep = total == 0.0f ? 0.0f : std::exp(max - top), take = std::exp(chain_max - top);
  for (int d = 0; d < head_dim; d += N)
    store(sums + d, fma(load<N>(sums + d), splat<N>(keep), load<N>(chain_sums + d) * splat<N>(take)));
  total = total * keep + chain_total * take;
  max = top;
}

// out = sums / total.
inline void finish_row(int head_dim, const float* sums, float total, float* out) {
  constexpr int N = vector_lanes(8);
  const Vec<N> inverse = splat<N>(1.0f / total);
  for (int d = 0; d < head_dim; d += N) store(out + d, load<N>(sums + d) * inverse);
}

// One page of the softmax of one query: scores [columns] become exponentials in place; those outside [begin, end) become 0.
// Returns the factor by which earlier sums shrink; updates the maximum and the sum of exponentials. `columns` is a multiple
// of 16; zeros change no sum, so neither does a larger `columns`.
inline float softmax_page(float* scores, int begin, int end, int columns, float& max, float& total) {
  constexpr int N = kLanes;
  for (int j = 0; j < begin; ++j) scores[j] = -INFINITY;
  for (int j = end; j < columns; ++j) scores[j] = -INFINITY;
  Vec<N> tops = load<N>(scores);
  for (int j = N; j < columns; j += N) tops = mpk::max(load<N>(scores + j), tops);
  const float page_max = max_lanes(tops);
  const float top = page_max > max ? page_max : max;
  Vec<N> sums = splat<N>(0.0f);
  for (int j = 0; j < columns; j += N) {
    const Vec<N> e = mpk::exp(load<N>(scores + j) - splat<N>(top));
    sums = sums + e;
    store(scores + j, e);
  }
  const float shrink = max == top ? 1.0f : std::exp(max - top);
  total = total * shrink + sum_lanes(sums);
  max = top;
  return shrink;
}

}  // namespace mpk
