// Before the first step of a launch: prompts are read in steps of many rows, by a graph of their own, all but the last token of each.
//
// That token is left to the first ordinary step, whose logits choose the next one; so prompt steps write nothing but the cache, except
// for sequences that want the logits of all positions, which end here. A prompt step has its own counters and its own place for what it
// computes (`Kernel::prompt_step`, one Step); rows and segments stand where those of ordinary steps will.
#pragma once
#include "mpk/block.cuh"

namespace mpk {
namespace prompts {

// First token of a sequence that prompt steps leave.
__device__ __forceinline__ int goal(const Context& c, int slot) {
  const Sequence* s = c.sequences + slot;
  if (load_int(&s->active) == 0 || load_int(&s->finish) != FINISH_RUNNING) return 0;
  return load_int(&s->length) - (load_int(&s->all_logits) != 0 ? 0 : 1);
}

__device__ __forceinline__ int pages_for(int tokens) { return (tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS; }

// Makes sure that positions below `end` have pages; false: there are not enough. One thread.
__device__ __forceinline__ bool take_pages(const Context& c, int slot, int computed, int end) {
  const int have = pages_for(computed), need = pages_for(end), free = load_int(c.free_page_count);
  if (need - have > free) return false;
  for (int p = have; p < need; ++p) c.page_table[int64_t(slot) * c.max_pages + p] = load_int(c.free_pages + free - 1 - (p - have));
  if (need > have) *c.free_page_count = free - (need - have);
  return true;
}

__device__ __forceinline__ void finish(const Context& c, int slot, int computed, int reason) {
  const int pages = pages_for(computed), free = load_int(c.free_page_count);
  for (int p = 0; p < pages; ++p) c.free_pages[free + pages - 1 - p] = load_int(c.page_table + int64_t(slot) * c.max_pages + p);
  *c.free_page_count = free + pages;
  c.sequences[slot].finish = reason;
}

// Notes what the present step has computed. One thread.
__device__ __forceinline__ void close(const Context& c, const Step& step) {
  const int segments = load_int(&step.segments);
  for (int i = 0; i < segments; ++i) {
    const int slot = load_int(&c.segments[i].slot), computed = load_int(&c.segments[i].position) + load_int(&c.segments[i].rows);
    c.sequences[slot].computed = computed;
    if (load_int(&c.sequences[slot].all_logits) != 0 && computed == load_int(&c.sequences[slot].length)) finish(c, slot, computed, FINISH_LENGTH);
  }
}

// Chooses the rows of the next step: sequences in the order of their slots, as far as there is room. rows 0: prompts are read, or fewer
// tokens are left than a step of many rows is worth (`least`), or the host has cancelled. One thread.
__device__ __forceinline__ void choose(const Context& c, Step& step, int room, int least) {
  int rows = 0, segments = 0, logit_rows = 0, left = 0;
  for (int slot = 0; slot < c.max_batch; ++slot) {
    const int end = goal(c, slot);
    if (end > 0) left += end - load_int(&c.sequences[slot].computed);
  }
  if (left < least || load_system(c.cancel) != 0) left = 0;
  for (int slot = 0; left > 0 && slot < c.max_batch && rows < room; ++slot) {
    const int end = goal(c, slot), position = load_int(&c.sequences[slot].computed), count = min(end - position, room - rows);
    if (end == 0 || count < 1) continue;
    if (!take_pages(c, slot, position, position + count)) {
      finish(c, slot, position, FINISH_ERROR);
      continue;
    }
    c.segments[segments++] = Segment{slot, rows, count, position};
    if (load_int(&c.sequences[slot].all_logits) != 0) logit_rows += count;
    rows += count;
  }
  step.rows = rows, step.segments = segments, step.logit_rows = logit_rows, step.number += 1;
}

// Rows of the segments that were chosen. All threads.
__device__ __forceinline__ void fill(const Context& c, const Step& step, int thread) {
  const int segments = load_int(&step.segments);
  for (int i = 0; i < segments; ++i) {
    const int slot = load_int(&c.segments[i].slot), begin = load_int(&c.segments[i].row_begin), position = load_int(&c.segments[i].position);
    const int count = load_int(&c.segments[i].rows);
    for (int r = thread; r < count; r += THREADS) {
      c.row_token[begin + r] = load_int(c.tokens + int64_t(slot) * c.max_context + position + r);
      c.row_slot[begin + r] = slot, c.row_position[begin + r] = position + r;
    }
  }
}

// Plans a step: the first one of a launch, or the one behind the present one. All threads of one block.
__device__ __forceinline__ void plan(const Context& c, const Block& b, bool first) {
  Step& step = *c.prompt_step;
  if (b.thread == 0) {
    if (!first) close(c, step);
    choose(c, step, c.prompt_rows, first ? c.prompt_least : 1);
  }
  b.sync();
  fill(c, step, b.thread);
}

}  // namespace prompts
}  // namespace mpk
