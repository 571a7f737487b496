// prompt_advance: closes a prompt step and plans the next one (mpk/prompts.cuh). Operands: none. Variant: none.
#pragma once
#include "mpk/prompts.cuh"
#include "mpk/wait.cuh"

namespace mpk::prompt_advance {

constexpr bool waits_inside = true;

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction&, Block& b) {
  wait_inputs(b);
  prompts::plan(c, b, false);
}

}  // namespace mpk::prompt_advance
