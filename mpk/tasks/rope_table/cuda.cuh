// rope_table: cosines (first half) and sines (second half) of every row's position times the inverse frequencies.
// Operands: rope [rows][head_dim] float32, flagged. Parameters: inverse frequencies [head_dim / 2], factor [1]. Variant: head_dim.
#pragma once
#include "mpk/flagged.cuh"
#include "mpk/wait.cuh"

namespace mpk::rope_table {

constexpr bool waits_inside = true;

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int head_dim = int(V::head_dim), half = head_dim / 2;
  const float* frequencies = reinterpret_cast<const float*>(c.params + i.params);
  const float factor = __ldg(frequencies + half);
  const int rows = b.step->rows;
  wait_inputs(b);
  float* table = flagged<float>(c, i, 0, b);
  for (int j = b.thread; j < rows * half; j += THREADS) {
    const int row = j / half, d = j % half;
    // The angle is rounded to float32, as models were trained; its reduction to half turns is done in double, because positions
    // of 10^5 leave a float32 reduction without digits (and sincosf() for them needs a table in local memory).
    const float angle = float(b.step->row_position[row]) * __ldg(frequencies + d);
    const double turns = double(angle) * 0.318309886183790671538;
    float sine, cosine;
    sincospif(float(turns - 2.0 * rint(0.5 * turns)), &sine, &cosine);
    float* at = table + int64_t(row) * head_dim + d;
    put_4(at, __float_as_uint(cosine * factor)), put_4(at + half, __float_as_uint(sine * factor));
  }
  float* old = other_copy(c, table, b);
  for (int j = b.thread; j < rows_to_clear(b) * head_dim; j += THREADS) clear_4(old + j);
}

}  // namespace mpk::rope_table
