#pragma once
#include "mpk/context.hpp"

namespace mpk::toy_logits {

template <class Variant>
void run(const Context& c, const Instruction& in, Worker&) {
  const float* x = operand<float>(c, in, 0);
  float* logits = operand<float>(c, in, 1);
  const auto* table = reinterpret_cast<const float*>(c.weights + in.weights);
  const auto* params = reinterpret_cast<const float*>(c.params + in.params);
  for (int l = 0; l < c.step->logit_rows; ++l) {
    const int row = c.logit_row[l], length = int(x[row * 8]);
    int64_t h = 0;
    for (int position = 0; position < length; ++position) {
      const int page = c.page_table[int64_t(c.row_slot[row]) * c.max_pages + position / KV_PAGE_TOKENS];
      h += (position + 1) * int64_t(kv_page<float>(c, 0, page, 0, 1, 8)[position % KV_PAGE_TOKENS * 8]);
    }
    for (int v = in.tile_begin; v < in.tile_end; ++v) {
      const int64_t mixed = (int64_t(params[0]) * h + int64_t(params[1]) * v) % int64_t(params[2]);
      logits[int64_t(l) * Variant::vocab + v] = table[v * 16] + Variant::scale * float(mixed);
    }
  }
}

}  // namespace mpk::toy_logits
