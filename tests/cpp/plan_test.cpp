// Plans and closes steps without workers, one call at a time.
#include "advance/cpp.hpp"
#include "mpk/program.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
struct NoConstants {};
}  // namespace

EXPORT void plan_step(const mpk::Launch* launch) { mpk::plan_step(mpk::make_context(*launch)); }

// `choice` of the step stands at the beginning of the arena.
EXPORT void advance(const mpk::Launch* launch) {
  mpk::Instruction instruction{};
  for (auto& operand : instruction.operand) operand = -1;
  instruction.operand[0] = 0;  // choice; one rank has nothing to agree on
  mpk::Worker worker{};
  mpk::advance::run<NoConstants>(mpk::make_context(*launch), instruction, worker);
}
