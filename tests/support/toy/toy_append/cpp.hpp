#pragma once
#include "mpk/context.hpp"

namespace mpk::toy_append {

template <class Variant>
void run(const Context& c, const Instruction& in, Worker&) {
  float* x = operand<float>(c, in, 0);
  for (int r = 0; r < c.step->rows; ++r) {
    const int position = c.row_position[r];
    const int page = c.page_table[int64_t(c.row_slot[r]) * c.max_pages + position / KV_PAGE_TOKENS];
    float* k = kv_page<float>(c, in.layer, page, 0, 1, Variant::head_dim) + position % KV_PAGE_TOKENS * Variant::head_dim;
    for (int d = 0; d < Variant::head_dim; ++d) k[d] = Variant::scale * float(c.row_token[r]);
    x[r * 8] = float(position + 1);
  }
}

}  // namespace mpk::toy_append
