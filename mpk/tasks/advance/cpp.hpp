// Closes a step and plans the next one. Operands: choice [max_batch] int32 (slot 0), and where ranks share the model agreed [1] int32 (3): whether
// the host has cancelled. Variant: none.
#pragma once
#include "mpk/context.hpp"
#include "mpk/plan.hpp"

namespace mpk::advance {

template <class Variant>
void run(const Context& c, const Instruction& in, Worker&) {
  // The flag has no payload, so relaxed; the host reads results after the program returned.
  const bool cancelled = in.operand[3] >= 0 ? *operand<const int32_t>(c, in, 3) != 0 : __atomic_load_n(c.cancel, __ATOMIC_RELAXED) != 0;
  close_step(c, operand<const int32_t>(c, in, 0), cancelled);
  plan_step(c);
}

}  // namespace mpk::advance
