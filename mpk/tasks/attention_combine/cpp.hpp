// attention_combine: one query head a tile: merges the partial results of the splits in ascending order.
// Operands: partial [rows][kv_heads][splits][group][head_dim + 2], out [rows][heads * head_dim].
// Variant: heads, kv_heads, head_dim, splits.
#pragma once
#include "mpk/attention_math.hpp"
#include "mpk/context.hpp"

namespace mpk::attention_combine {

template <class V>
void run(const Context& c, const Instruction& i, Worker&) {
  constexpr int heads = int(V::heads), head_dim = int(V::head_dim), splits = int(V::splits), group = heads / int(V::kv_heads);
  constexpr int columns = partial_columns(head_dim);
  const float* partials = operand<float>(c, i, 0);
  float* out = operand<float>(c, i, 1);
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile)
    for (int s = 0; s < c.step->segments; ++s) {
      const Segment& segment = c.segments[s];
      const bool shared = rows_are_shared(segment.rows, splits);
      for (int r = 0; r < segment.rows; ++r) {
        const int64_t row = segment.row_begin + r;
        const auto at = [&](int split) {
          return partials + (row * heads * splits + (tile / group * splits + split) * group + tile % group) * columns;
        };
        float sums[head_dim] = {}, max = -INFINITY, total = 0.0f;
        const int begin = shared ? owner_of_row(r, splits) : 0, end = shared ? begin + 1 : splits;
        for (int split = begin; split < end; ++split)
          merge_partial(head_dim, sums, max, total, at(split), at(split)[head_dim], at(split)[head_dim + 1]);
        finish_row(head_dim, sums, total, out + (row * heads + tile) * head_dim);
      }
    }
}

}  // namespace mpk::attention_combine
