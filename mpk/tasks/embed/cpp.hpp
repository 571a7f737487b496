// embed: 16 columns a tile of the embeddings of the step's tokens, gathered from the packed matrix.
// Operands: x [rows][hidden]. Variant: bf16, hidden.
#pragma once
#include "mpk/context.hpp"
#include "mpk/kv_cache.hpp"
#include "mpk/matmul.hpp"

namespace mpk::embed {

inline float widen(bf16 value) { return bf16_to_float(value); }
inline float widen(float value) { return value; }

template <class V>
void run(const Context& c, const Instruction& i, Worker&) {
  using W = std::conditional_t<V::bf16, bf16, float>;
  constexpr int hidden = int(V::hidden);
  const W* matrix = reinterpret_cast<const W*>(c.weights + i.weights);
  float* x = operand<float>(c, i, 0);
  const int begin = i.tile_begin * kPanel, end = i.tile_end * kPanel < hidden ? i.tile_end * kPanel : hidden;
  for (int r = 0; r < c.step->rows; ++r) {
    const int token = c.row_token[r];
    const W* panel = matrix + int64_t(token / kPanel) * kPanel * hidden;
    float* row = x + int64_t(r) * hidden;
    for (int k = begin; k < end; ++k) row[k] = widen(panel[panel_index<W>(k, token % kPanel, kPanel)]);
  }
}

}  // namespace mpk::embed
