// embed: 16 columns a tile of the embeddings of the step's tokens. The matrix is row-major bf16 [vocab][hidden].
// Operands: x [rows][hidden] bf16, flagged. Variant: hidden.
#pragma once
#include "mpk/flagged.cuh"
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
  wait_inputs(b);  // if x is not flagged, it is in use by the step before until then
  bf16* x = flagged<bf16>(c, i, 0, b);
  for (int j = b.thread; j < rows * pieces; j += THREADS) {
    const int row = j / pieces, column = begin + j % pieces * 8;
    put_16(x + int64_t(row) * hidden + column, __ldg(reinterpret_cast<const uint4*>(matrix + int64_t(b.step->row_token[row]) * hidden + column)));
  }
  bf16* old = other_copy(c, x, b);
  for (int j = b.thread; j < rows_to_clear(b) * pieces; j += THREADS) clear_16(old + int64_t(j / pieces) * hidden + begin + j % pieces * 8);
}

}  // namespace mpk::embed
