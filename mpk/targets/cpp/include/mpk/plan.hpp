// Closes a step (appends the chosen tokens, ends sequences that are complete) and plans which rows the next one computes.
//
// Rows: first one row for every sequence that decodes (only its newest token is not computed yet), then prompts, in chunks
// that fill what is left of max_rows. Sequences stand in slot order, so the plan depends on nothing but the sequences.
// What is decided one after the other is done by one thread; filling the rows can be shared by many.
#pragma once
#include "mpk/context.hpp"
#include "mpk/platform.hpp"

namespace mpk {

inline bool running(const Sequence& s) { return s.active && s.finish == FINISH_RUNNING; }
inline int pages_of(int tokens) { return (tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS; }

// Ends a sequence and gives its pages back.
inline void finish_sequence(const Context& c, int slot, int reason) {
  Sequence& s = c.sequences[slot];
  const int pages = pages_of(s.computed), free = *c.free_page_count;
  const int32_t* own = c.page_table + int64_t(slot) * c.max_pages;
  for (int p = pages - 1; p >= 0; --p) c.free_pages[free + pages - 1 - p] = fresh(own + p);
  *c.free_page_count = free + pages;
  publish(&s.finish, reason);  // the host polls it, and may look at the sequence's tokens once it is set
}

// ---- closing a step
inline bool is_stop(const Sequence& s, int32_t token) {
  for (int i = 0; i < s.stop_count; ++i)
    if (s.stop[i] == token) return true;
  return false;
}

// Appends a token and makes it visible to the host.
inline void append(const Context& c, int slot, int32_t token) {
  Sequence& s = c.sequences[slot];
  const int64_t place = int64_t(slot) * c.max_context + s.length;
  c.tokens[place] = token;
  if (c.token_ns != nullptr) c.token_ns[place] = now_ns();
  // A host that reads the new length (with acquire order) also reads the token, its time and log-probabilities.
  publish(&s.length, s.length + 1);
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

// Closes the step; `choice`: a token a slot, `cancelled`: end every sequence.
inline void close_step(const Context& c, const int32_t* choice, bool cancelled) {
  for (int i = 0; i < c.step->segments; ++i) {
    const Segment& segment = c.segments[i];
    Sequence& s = c.sequences[segment.slot];
    s.computed = segment.position + segment.rows;
    if (s.computed == s.length) complete(c, segment.slot, choice[segment.slot]);
  }
  if (!cancelled) return;
  for (int slot = 0; slot < c.max_batch; ++slot)
    if (running(c.sequences[slot])) finish_sequence(c, slot, FINISH_CANCELLED);
}

// ---- planning the next one
// Makes sure that positions below `end` have pages; false: there are not enough.
inline bool allocate_pages(const Context& c, int slot, int end) {
  const int have = pages_of(c.sequences[slot].computed), need = pages_of(end), free = *c.free_page_count;
  if (need - have > free) return false;
  for (int p = have; p < need; ++p) c.page_table[int64_t(slot) * c.max_pages + p] = fresh(c.free_pages + free - 1 - (p - have));
  *c.free_page_count = free - (need > have ? need - have : 0);
  return true;
}

// Adds the next `rows` tokens of a sequence to the step.
inline void add_segment(const Context& c, int slot, int rows) {
  Step& step = *c.step;
  const Sequence& s = c.sequences[slot];
  if (!allocate_pages(c, slot, s.computed + rows)) {
    finish_sequence(c, slot, FINISH_ERROR);
    return;
  }
  c.segments[step.segments++] = Segment{slot, step.rows, rows, s.computed};
  step.logit_rows += s.all_logits ? rows : s.computed + rows == s.length ? 1 : 0;
  step.rows += rows;
}

// Counts and segments of the step that follows the current one; `done` is set when no sequence has work left.
inline void plan_segments(const Context& c) {
  Step& step = *c.step;
  step.number += 1;
  step.rows = step.logit_rows = step.segments = 0;
  for (int prompts = 0; prompts < 2; ++prompts) {
    for (int slot = 0; slot < c.max_batch && step.rows < c.max_rows; ++slot) {
      const Sequence& s = c.sequences[slot];
      const int left = s.length - s.computed, room = c.max_rows - step.rows;
      if (!running(s) || left < 1 || (left > 1) != (prompts == 1)) continue;
      add_segment(c, slot, left < room ? left : room);
    }
  }
  step.done = step.rows == 0;
}

// Rows of the planned segments; of each segment rows begin, begin + stride, ...
inline void fill_rows(const Context& c, int begin, int stride) {
  int logit_rows = 0;
  for (int i = 0; i < c.step->segments; ++i) {
    const Segment segment = c.segments[i];
    const Sequence& s = c.sequences[segment.slot];
    for (int r = begin; r < segment.rows; r += stride) {
      const int row = segment.row_begin + r, position = segment.position + r;
      c.row_token[row] = fresh(c.tokens + int64_t(segment.slot) * c.max_context + position);
      c.row_slot[row] = segment.slot;
      c.row_position[row] = position;
      if (s.all_logits)
        c.logit_row[logit_rows + r] = row;
      else if (position + 1 == s.length)
        c.logit_row[logit_rows] = row;
    }
    logit_rows += s.all_logits ? segment.rows : segment.position + segment.rows == s.length ? 1 : 0;
  }
}

// Fills the step that follows the current one from the sequences.
inline void plan_step(const Context& c) {
  plan_segments(c);
  fill_rows(c, 0, 1);
}

}  // namespace mpk
