// Closes a step: appends the chosen tokens, ends sequences that are complete, plans the rows of the next step.
#pragma once
#include <algorithm>

#include "mpk/context.hpp"
#include "mpk/event.hpp"
#include "mpk/plan.hpp"

namespace mpk::advance {

inline bool is_stop(const Sequence& s, int32_t token) {
  return std::find(s.stop, s.stop + s.stop_count, token) != s.stop + s.stop_count;
}

// Appends a token and makes it visible to the host.
inline void append(const Context& c, int slot, int32_t token) {
  Sequence& s = c.sequences[slot];
  const int64_t place = int64_t(slot) * c.max_context + s.length;
  c.tokens[place] = token;
  if (c.token_ns != nullptr) c.token_ns[place] = now_ns();
  // Release: a host that reads the new length (with acquire, see poll()) also reads the token, its time and log-probabilities.
  __atomic_store_n(&s.length, s.length + 1, __ATOMIC_RELEASE);
}

// What the step that just ended means for one sequence all of whose known tokens are computed now.
inline void complete(const Context& c, int slot, int32_t token) {
  Sequence& s = c.sequences[slot];
  if (s.all_logits) {
    finish_sequence(c, slot, FINISH_LENGTH);
  } else if (token < 0) {
    finish_sequence(c, slot, FINISH_ERROR);  // no finite logits
  } else {
    append(c, slot, token);
    if (is_stop(s, token)) {
      finish_sequence(c, slot, FINISH_STOP);
    } else if (s.length >= s.max_length) {
      finish_sequence(c, slot, FINISH_LENGTH);
    }
  }
}

template <class Variant>
void run(const Context& c, const Instruction& in, Worker&) {
  const int32_t* choice = operand<const int32_t>(c, in, 0);
  for (int i = 0; i < c.step->segments; ++i) {
    const Segment& segment = c.segments[i];
    Sequence& s = c.sequences[segment.slot];
    s.computed = segment.position + segment.rows;
    if (s.computed == s.length) complete(c, segment.slot, choice[segment.slot]);
  }
  // A flag without payload, so relaxed; the host reads results after the program returned.
  if (__atomic_load_n(c.cancel, __ATOMIC_RELAXED) != 0) {
    for (int slot = 0; slot < c.max_batch; ++slot) {
      if (running(c.sequences[slot])) finish_sequence(c, slot, FINISH_CANCELLED);
    }
  }
  plan_step(c);
}

}  // namespace mpk::advance
