// rope_table: cosines (first half) and sines (second half) of every row's position times the inverse frequencies.
// Operands: rope [rows][head_dim]. Parameters: inverse frequencies [head_dim / 2], factor [1]. Variant: head_dim.
#pragma once
#include <cmath>

#include "mpk/context.hpp"

namespace mpk::rope_table {

template <class V>
void run(const Context& c, const Instruction& i, Worker&) {
  constexpr int head_dim = int(V::head_dim), half = head_dim / 2;
  const float* frequencies = reinterpret_cast<const float*>(c.params + i.params);
  const float factor = frequencies[half];
  float* table = operand<float>(c, i, 0);
  for (int r = 0; r < c.step->rows; ++r) {
    float* row = table + int64_t(r) * head_dim;
    const float position = float(c.row_position[r]);
    for (int d = 0; d < half; ++d) {
      const float angle = position * frequencies[d];
      row[d] = std::cos(angle) * factor;
      row[half + d] = std::sin(angle) * factor;
    }
  }
}

}  // namespace mpk::rope_table
