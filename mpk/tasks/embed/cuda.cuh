// embed: 16 columns a tile of the embeddings of the step's tokens. The matrix is row-major bf16 [vocab][hidden].
// Operands: x [rows][hidden] bf16. Variant: hidden.
#pragma once
#include "mpk/wait.cuh"

namespace mpk::embed {

constexpr bool waits_inside = true;

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int hidden = int(V::hidden), tile = 16;
  static_assert(hidden % 8 == 0, "rows of 16-byte pieces");
  const bf16* matrix = reinterpret_cast<const bf16*>(c.weights + i.weights);
  const int begin = i.tile_begin * tile, end = i.tile_end * tile < hidden ? i.tile_end * tile : hidden;
  const int pieces = (end - begin) / 8, rows = b.step->rows;
  wait_inputs(b);  // x is in use by the step before until then
  bf16* x = operand<bf16>(c, i, 0);
  for (int j = b.thread; j < rows * pieces; j += THREADS) {
    const int row = j / pieces, column = begin + j % pieces * 8;
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(matrix + int64_t(b.step->row_token[row]) * hidden + column));
    *reinterpret_cast<uint4*>(x + int64_t(row) * hidden + column) = piece;
  }
}

}  // namespace mpk::embed
