// Closes a step and plans the next one. Operands: choice [max_batch] int32. Variant: none.
#pragma once
#include "mpk/context.hpp"
#include "mpk/plan.hpp"

namespace mpk::advance {

template <class Variant>
void run(const Context& c, const Instruction& in, Worker&) {
  // The flag has no payload, so relaxed; the host reads results after the program returned.
  close_step(c, operand<const int32_t>(c, in, 0), __atomic_load_n(c.cancel, __ATOMIC_RELAXED) != 0);
  plan_step(c);
}

}  // namespace mpk::advance
