// Plans which rows the next step computes, and gives key-value pages to the sequences that need them.
//
// Rows: first one row for every sequence that decodes (only its newest token is not computed yet), then prompts, in chunks
// that fill what is left of max_rows. Sequences stand in slot order, so the plan depends on nothing but the sequences.
#pragma once
#include <algorithm>

#include "mpk/context.hpp"

namespace mpk {

inline bool running(const Sequence& s) { return s.active && s.finish == FINISH_RUNNING; }

// Ends a sequence and gives its pages back.
inline void finish_sequence(const Context& c, int slot, int reason) {
  Sequence& s = c.sequences[slot];
  const int pages = (s.computed + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  for (int p = pages - 1; p >= 0; --p) c.free_pages[(*c.free_page_count)++] = c.page_table[int64_t(slot) * c.max_pages + p];
  // Release: the host polls `finish`, and may look at the sequence's tokens once it is set.
  __atomic_store_n(&s.finish, reason, __ATOMIC_RELEASE);
}

// Makes sure that positions below `end` have pages; false: there are not enough.
inline bool allocate_pages(const Context& c, int slot, int end) {
  const int have = (c.sequences[slot].computed + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  const int need = (end + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  if (need - have > *c.free_page_count) return false;
  for (int p = have; p < need; ++p) c.page_table[int64_t(slot) * c.max_pages + p] = c.free_pages[--*c.free_page_count];
  return true;
}

// Adds the next `rows` tokens of a sequence to the step.
inline void add_segment(const Context& c, int slot, int rows) {
  Step& step = *c.step;
  Sequence& s = c.sequences[slot];
  const int first = s.computed;
  if (!allocate_pages(c, slot, first + rows)) {
    finish_sequence(c, slot, FINISH_ERROR);
    return;
  }
  c.segments[step.segments++] = Segment{slot, step.rows, rows, first};
  for (int r = 0; r < rows; ++r) {
    const int row = step.rows + r, position = first + r;
    c.row_token[row] = c.tokens[int64_t(slot) * c.max_context + position];
    c.row_slot[row] = slot;
    c.row_position[row] = position;
    if (s.all_logits || position + 1 == s.length) c.logit_row[step.logit_rows++] = row;
  }
  step.rows += rows;
}

// Fills the step that follows the current one from the sequences; `done` is set when none of them has work left.
inline void plan_step(const Context& c) {
  Step& step = *c.step;
  step.number += 1;
  step.rows = step.logit_rows = step.segments = 0;
  for (const bool prompts : {false, true}) {
    for (int slot = 0; slot < c.max_batch && step.rows < c.max_rows; ++slot) {
      const Sequence& s = c.sequences[slot];
      const int left = s.length - s.computed;
      if (!running(s) || left < 1 || (left > 1) != prompts) continue;
      add_segment(c, slot, std::min(left, c.max_rows - step.rows));
    }
  }
  step.done = step.rows == 0;
}

}  // namespace mpk
