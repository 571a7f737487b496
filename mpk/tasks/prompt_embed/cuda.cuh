// prompt_embed: embeddings and rotations of the rows of a prompt step. The matrix is row-major bf16 [vocab][hidden].
// Operands: x [rows][hidden] bf16, rope [rows][head_dim] float32. Parameters: inverse frequencies [head_dim / 2], factor [1].
// Variant: hidden, head_dim, shares. A task takes every `shares`-th run of 8 rows, a row a warp.
#pragma once
#include "mpk/wait.cuh"

namespace mpk::prompt_embed {

constexpr bool waits_inside = true;

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int hidden = int(V::hidden), head_dim = int(V::head_dim), half = head_dim / 2, shares = int(V::shares);
  static_assert(hidden % 8 == 0, "rows of 16-byte pieces");
  const bf16* matrix = reinterpret_cast<const bf16*>(c.weights + i.weights);
  const float* frequencies = reinterpret_cast<const float*>(c.params + i.params);
  const float factor = __ldg(frequencies + half);
  wait_inputs(b);
  bf16* x = operand<bf16>(c, i, 0);
  float* rope = operand<float>(c, i, 1);
  for (int row = i.tile_begin * WARPS + b.warp; row < b.step->rows; row += shares * WARPS) {
    const bf16* from = matrix + int64_t(load_int(c.row_token + row)) * hidden;
    const int position = load_int(c.row_position + row);
    for (int d = b.lane * 8; d < hidden; d += 256)
      *reinterpret_cast<uint4*>(x + int64_t(row) * hidden + d) = __ldg(reinterpret_cast<const uint4*>(from + d));
    for (int d = b.lane; d < half; d += 32) {
      const double turns = double(float(position) * __ldg(frequencies + d)) * 0.318309886183790671538;  // as rope_table does
      float sine, cosine;
      sincospif(float(turns - 2.0 * rint(0.5 * turns)), &sine, &cosine);
      rope[int64_t(row) * head_dim + d] = cosine * factor, rope[int64_t(row) * head_dim + half + d] = sine * factor;
    }
  }
}

}  // namespace mpk::prompt_embed
