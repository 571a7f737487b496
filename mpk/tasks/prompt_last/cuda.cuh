// prompt_last: the rows of a prompt step whose logits are sampled from, side by side, so that the head sees a step of so many rows.
// Operands: x [rows][hidden] bf16, last [logit rows][hidden] bf16. Variant: hidden, shares. A task takes every `shares`-th row.
#pragma once
#include "mpk/wait.cuh"

namespace mpk::prompt_last {

constexpr bool waits_inside = true;

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int hidden = int(V::hidden);
  wait_inputs(b);
  for (int l = i.tile_begin; l < b.step->logit_rows; l += int(V::shares)) {
    const bf16* from = operand<bf16>(c, i, 0) + int64_t(load_int(c.logit_row + l)) * hidden;
    bf16* to = operand<bf16>(c, i, 1) + int64_t(l) * hidden;
    for (int d = b.thread * 8; d < hidden; d += THREADS * 8) *reinterpret_cast<uint4*>(to + d) = load_16(from + d);
  }
}

}  // namespace mpk::prompt_last
