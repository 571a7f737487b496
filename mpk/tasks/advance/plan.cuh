// Closes a step and plans the next one as plan.hpp says, by one warp: lane l has slot l.
//
// The rows of the plan go out as messages (step.cuh). Everything else that changes (lengths, free pages, counts) is read by this block
// alone, but for tokens and page tables, which are written before the fence ahead of the messages.
#pragma once
#include "mpk/block.cuh"
#include "mpk/sampling.cuh"
#include "mpk/step.cuh"

namespace mpk::advance {

struct Plan {
  int choice[32];              // token of each slot that completes; -1: it has no finite logits
  int row_slot[MAX_ROWS];      // of the planned rows
  uint4 message[MAX_ROWS];
  int rows, logit_rows, segments, free_pages;
};

constexpr int page_count(int tokens) { return (tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS; }

// A sequence of the batch.
struct Slot {
  int length, computed, max_length, prompt_length, finish, stop_count;
  bool running, all_logits, appended;
  uint32_t flags;  // of its rows with logits: DRAWN, SPECIAL
  uint4 stop[MAX_STOP_TOKENS / 4];

  __device__ __forceinline__ void load(const Context& c, int slot, int vocab) {
    running = false, appended = false, flags = 0, finish = FINISH_RUNNING, length = computed = 0;
    if (slot >= c.max_batch) return;
    const Sequence* s = c.sequences + slot;
    Options o;
    o.load(s);
    flags = (o.draws() ? DRAWN : 0) | (o.special(vocab) ? SPECIAL : 0), all_logits = o.all_logits != 0, prompt_length = o.prompt_length;
    length = load_int(&s->length), computed = load_int(&s->computed), max_length = load_int(&s->max_length);
    finish = load_int(&s->finish), stop_count = load_int(&s->stop_count), running = load_int(&s->active) != 0 && finish == FINISH_RUNNING;
    static_assert(MAX_STOP_TOKENS % 4 == 0 && sizeof(Sequence) % 8 == 0 && offsetof(Sequence, stop) % 8 == 0, "stop tokens in pieces of 8 bytes");
#pragma unroll
    for (int j = 0; j < MAX_STOP_TOKENS / 4; ++j) {
      const uint2 low = load_8(s->stop + 4 * j), high = load_8(s->stop + 4 * j + 2);
      stop[j] = {low.x, low.y, high.x, high.y};
    }
  }
  __device__ __forceinline__ bool stops_at(int token) const {
    bool found = false;
#pragma unroll
    for (int j = 0; j < MAX_STOP_TOKENS / 4; ++j) {
      found = found || (4 * j < stop_count && int(stop[j].x) == token) || (4 * j + 1 < stop_count && int(stop[j].y) == token);
      found = found || (4 * j + 2 < stop_count && int(stop[j].z) == token) || (4 * j + 3 < stop_count && int(stop[j].w) == token);
    }
    return found;
  }
};

// Gives the pages of sequences that end back, one sequence after the other.
__device__ __forceinline__ void end_sequences(const Context& c, int lane, Slot& s, bool ends, int& free_pages, bool real) {
  if (ends) s.running = false;
#pragma unroll 1
  for (unsigned left = __ballot_sync(ALL_LANES, ends); left != 0; left &= left - 1) {
    const int slot = __ffs(left) - 1, pages = page_count(__shfl_sync(ALL_LANES, s.computed, slot));
#pragma unroll 1
    for (int p = lane; p < pages; p += 32)
      if (real) c.free_pages[free_pages + pages - 1 - p] = load_int(c.page_table + int64_t(slot) * c.max_pages + p);
    free_pages += pages;
    __syncwarp();
  }
}

// What the step that ends means for the sequence of this lane; `token`: the one chosen for it.
__device__ __forceinline__ bool close_slot(const Context& c, const Block& b, Slot& s, int token, bool cancelled, bool real) {
  bool complete = false;
  s.appended = false;
#pragma unroll 1
  for (int n = 0; n < b.step->segment_count; ++n) {
    const Segment& segment = b.step->segments[n];
    if (segment.slot == b.lane) s.computed = segment.position + segment.rows, complete = s.computed == s.length;
  }
  if (complete && s.all_logits) {
    s.finish = FINISH_LENGTH;
  } else if (complete && token < 0) {
    s.finish = FINISH_ERROR;
  } else if (complete) {
    if (real) c.tokens[int64_t(b.lane) * c.max_context + s.length] = token;
    s.appended = true, ++s.length;
    s.finish = s.stops_at(token) ? FINISH_STOP : s.length >= s.max_length ? FINISH_LENGTH : FINISH_RUNNING;
  }
  if (cancelled && s.running && s.finish == FINISH_RUNNING) s.finish = FINISH_CANCELLED;
  return s.running && s.finish != FINISH_RUNNING;
}

// Rows of the next step: one for every sequence that decodes, then prompts while there is room. `before`: rows of sequences ahead of this
// lane's. If pages are missing, the first sequence that finds none ends and all is planned anew.
__device__ __forceinline__ int share_rows(const Context& c, int lane, Slot& s, int& before, int& free_pages, bool real) {
  const unsigned below = (1u << lane) - 1;
  const int room = c.max_rows < MAX_ROWS ? c.max_rows : MAX_ROWS;
#pragma unroll 1
  for (;;) {
    const int left = s.running ? s.length - s.computed : 0;
    const unsigned decodes = __ballot_sync(ALL_LANES, left == 1);
    const int prompts_before = warp_sum_before(left > 1 ? left : 0, lane);
    before = left == 1 ? __popc(decodes & below) : __popc(decodes) + prompts_before;
    const int rows = left < 1 || before >= room ? 0 : left < room - before ? left : room - before;
    const int have = page_count(s.computed), grow = rows > 0 ? page_count(s.computed + rows) - have : 0;
    if (__ballot_sync(ALL_LANES, grow > 0) == 0) return rows;
    const int decode_grow = left == 1 ? grow : 0, prompt_grow = left == 1 ? 0 : grow;
    const int decodes_before = warp_sum_before(decode_grow, lane), decode_total = __shfl_sync(ALL_LANES, decodes_before + decode_grow, 31);
    const int prompt_before = warp_sum_before(prompt_grow, lane), total = decode_total + __shfl_sync(ALL_LANES, prompt_before + prompt_grow, 31);
    const int taken = left == 1 ? decodes_before : decode_total + prompt_before;  // pages of sequences ahead
    const bool missing = grow > 0 && taken + grow > free_pages;
    if (__ballot_sync(ALL_LANES, missing) == 0) {
#pragma unroll 1
      for (int p = 0; p < grow; ++p)
        if (real) c.page_table[int64_t(lane) * c.max_pages + have + p] = load_int(c.free_pages + free_pages - 1 - taken - p);
      free_pages -= total;
      return rows;
    }
    const unsigned first = __reduce_min_sync(ALL_LANES, missing ? unsigned(taken) : 0xffffffffu);
    const bool fails = missing && unsigned(taken) == first;
    if (fails) s.finish = FINISH_ERROR;
    end_sequences(c, lane, s, fails, free_pages, real);
  }
}

// Closes the step with the tokens in `plan.choice` and fills the rest of `plan`; without effect on global memory unless `real`.
__device__ __forceinline__ void plan_step(const Context& c, const Block& b, Plan& plan, Slot& s, int free_pages, bool cancelled, bool real) {
  const int lane = b.lane, token = plan.choice[lane];
  int before;
  const bool ends = close_slot(c, b, s, token, cancelled, real);
  end_sequences(c, lane, s, ends, free_pages, real);
  const int rows = share_rows(c, lane, s, before, free_pages, real);
  for (int r = 0; r < rows; ++r) plan.row_slot[before + r] = lane;
  __syncwarp();
  const int last = __reduce_max_sync(ALL_LANES, unsigned(rows > 0 ? before + rows : 0)), slot = lane < last ? plan.row_slot[lane] : 0;
  const int first = __shfl_sync(ALL_LANES, before, slot), position = __shfl_sync(ALL_LANES, s.computed, slot) + lane - first;
  const int length = __shfl_sync(ALL_LANES, s.length, slot), newest = __shfl_sync(ALL_LANES, s.appended ? token : -1, slot);
  const uint32_t flags = __shfl_sync(ALL_LANES, s.flags, slot);
  const bool all_logits = __shfl_sync(ALL_LANES, int(s.all_logits), slot) != 0;
  const bool here = lane < last, logits = here && (all_logits || position + 1 == length);
  if (here) {
    const int known = position + 1 == length && newest >= 0 ? newest : load_int(c.tokens + int64_t(slot) * c.max_context + position);
    plan.message[lane] = row_message(b.step->number + 1, known, position, slot, last, (lane == first ? FIRST : 0) | (logits ? LOGITS | flags : 0));
  } else if (lane == 0) {
    plan.message[0] = row_message(b.step->number + 1, 0, 0, 0, 0, 0);
  }
  const unsigned with = __ballot_sync(ALL_LANES, logits), firsts = __ballot_sync(ALL_LANES, here && lane == first);
  if (lane == 0) plan.rows = last, plan.logit_rows = __popc(with), plan.segments = __popc(firsts), plan.free_pages = free_pages;
  __syncwarp();
}

// Sends the plan to all blocks, then keeps the state for the next step and for the host. After a fence of this warp.
__device__ __forceinline__ void publish_step(const Context& c, const Block& b, const Plan& plan, const Slot& s) {
  const int lane = b.lane;
  if (lane < plan.rows || lane == 0) store_message(static_cast<uint4*>(c.messages) + lane, plan.message[lane]);
  if (lane < c.max_batch) {
    Sequence& own = c.sequences[lane];
    own.length = s.length, own.computed = s.computed, own.finish = s.finish;
    if (s.appended) {
      const int64_t place = int64_t(lane) * c.max_context + s.length - 1;
      if (c.token_ns != nullptr) c.token_ns[place] = now_ns();
      if (c.mirror != nullptr) store_system(c.mirror + place, int64_t(plan.choice[lane]) + 1);
    }
  }
  if (lane == 0) {
    Step& step = *c.step;
    step.number = b.step->number + 1, step.rows = plan.rows, step.logit_rows = plan.logit_rows, step.segments = plan.segments;
    step.done = plan.rows == 0;
    *c.free_page_count = plan.free_pages;
  }
}

}  // namespace mpk::advance
