// advance: chooses the tokens of sequences that need no `sample` task, closes the step, and plans the next one, on one block.
// Operands: choice [max_batch] of messages {token, -, -, step number} from `sample`, tops [logit rows][parts] of messages from `head` (see
// sampling.cuh), logits [logit rows][vocab] float32, and where ranks share the model agreed [1] int32, flagged: whether the host has
// cancelled, as all ranks know it. Variant: vocab, parts, slice.
//
// Nobody works until this is done, so it polls what it needs word by word, and waits for counters only when it has the plan: for the last of its
// events, which says that all blocks are through with what the next step relies on, and has mostly come by then; for the logits only if it
// draws. Its code would come from a cold instruction cache: it runs through everything once before the
// data is there, without any effect.
#pragma once
#include "advance/plan.cuh"
#include "mpk/flagged.cuh"
#include "mpk/philox.hpp"
#include "mpk/sampling.cuh"
#include "mpk/wait.cuh"

namespace mpk::advance {

constexpr bool waits_inside = true;
constexpr int CHOICE = 0, TOPS = 1, LOGITS = 2, AGREED = 3;  // operand slots

template <class V>
struct Memory {
  Plan plan;
  Pick pick[MAX_ROWS];
  float draw[WARPS][DrawShape<V>::FLOATS];
};

// Greedy choice for a row of logits, by one warp, the same in all lanes; -1: no finite maximum. With a `sharp` above 0 the token is to be drawn:
// the slice to draw from goes to `pick`, and NO_TOKEN is returned. `awaits`: not a rehearsal.
template <class V>
__device__ __forceinline__ int choose(const Context& c, const Instruction& i, Block& b, int row, float sharp, uint64_t seed, bool awaits, Pick& pick) {
  constexpr int parts = int(V::parts), ITEMS = (parts + 31) / 32;
  const uint4* tops = operand<const uint4>(c, i, TOPS) + int64_t(row) * parts + b.lane * ITEMS;
  const uint32_t number = uint32_t(b.step->number);
  uint4 v[ITEMS];
  for (uint32_t polls = 0;;) {
    bool whole = true;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = b.lane * ITEMS + j < parts ? load_message(tops + j) : uint4{0xff800000u, uint32_t(NO_TOKEN), 0, number};
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) whole = whole && v[j].w == number;
    if (!awaits || __all_sync(ALL_LANES, whole || !b.may_poll(polls))) break;
  }
  float best = minus_infinity();
  unsigned token = NO_TOKEN;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j)
    if (__uint_as_float(v[j].x) > best) best = __uint_as_float(v[j].x), token = v[j].y;  // tokens ascend with parts
  const uint32_t key = key_of(best), top = __reduce_max_sync(ALL_LANES, key);
  token = __reduce_min_sync(ALL_LANES, key == top ? token : unsigned(NO_TOKEN));
  best = __uint_as_float(top >> 31 ? top ^ 0x80000000u : ~top);
  if (!is_finite(best)) return -1;
  if (sharp == 0.0f) return int(token);
  uint64_t mass[ITEMS];
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const float x = __uint_as_float(v[j].x);
    mass[j] = x > minus_infinity() ? __float2ull_rn(__uint_as_float(v[j].z) * exp2_fast((x - best) * sharp) * FIXED_ONE) : 0;
  }
  const int place = pick_slice(b.lane, mass, philox_uniform(seed, uint64_t(b.step->row_position[b.step->logit_row[row]] + 1)), pick);
#pragma unroll
  for (int j = 0; j < ITEMS; ++j)
    if (j == place) pick.max = __uint_as_float(v[j].x);
  if (b.lane == 0) pick.best = int(token);
  return NO_TOKEN;
}

// What a `sample` task has chosen for a slot.
__device__ __forceinline__ int await_choice(const Context& c, const Instruction& i, Block& b, int slot) {
  uint4 v;
  uint32_t polls = 0;
  do v = load_message(operand<const uint4>(c, i, CHOICE) + slot);
  while (v.w != uint32_t(b.step->number) && b.may_poll(polls));
  return int(__shfl_sync(ALL_LANES, v.x, 0));
}

// Whether the host has cancelled: what this block sees, or what all ranks agree on, whose steps must be the same (step 0 is nobody's).
__device__ __forceinline__ bool is_cancelled(const Context& c, const Instruction& i, Block& b) {
  if (i.operand[AGREED] < 0) return load_system(c.cancel) != 0;
  if (b.step->rows == 0) return false;
  const int32_t* agreed = flagged<const int32_t>(c, i, AGREED, b);
  return settled_4(b, agreed, load_4(agreed)) != 0;
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  static_assert(sizeof(Memory<V>) <= SCRATCH_BYTES, "scratch");
  Memory<V>& m = *reinterpret_cast<Memory<V>*>(b.scratch);
  const unsigned special = b.step->special_rows, drawn = b.step->drawn_rows & ~special;
  const int count = b.step->logit_rows, slot_of_lane = b.lane < count ? b.step->row_slot[b.step->logit_row[b.lane]] : 0;
  // Whatever takes a trip to memory, before there is nothing to do but wait.
  float temperature = 0.0f;
  uint64_t seed = 0;
  if (drawn >> b.lane & 1) {
    temperature = load_float(&c.sequences[slot_of_lane].temperature);
    seed = uint64_t(load_long(reinterpret_cast<const int64_t*>(&c.sequences[slot_of_lane].seed)));
  }
  const unsigned kept = special == 0 ? 0 : __ballot_sync(ALL_LANES, (special >> b.lane & 1) && load_int(&c.sequences[slot_of_lane].all_logits) != 0);
  Slot given{};  // on every path: else registers hold what they held, all through the program
  int free_pages = 0;
  bool cancelled = false;
  if (b.warp == 0) given.load(c, b.lane, int(V::vocab)), free_pages = load_int(c.free_page_count), cancelled = is_cancelled(c, i, b);
  b.sync();
  if (b.thread < MAX_ROWS) m.pick[b.thread] = Pick{};
  b.sync();
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool real = pass == 1;
#pragma unroll 1
    for (int l = b.warp; l < count; l += WARPS) {
      const float sharp = sharpness(__shfl_sync(ALL_LANES, temperature, l));
      int token = -1;
      if ((special >> l & 1) == 0) token = choose<V>(c, i, b, l, sharp, __shfl_sync(ALL_LANES, seed, l), real, m.pick[l]);
      else if (real && (kept >> l & 1) == 0) token = await_choice(c, i, b, b.step->row_slot[b.step->logit_row[l]]);
      if (b.lane == 0) m.plan.choice[b.step->row_slot[b.step->logit_row[l]]] = token;
    }
    if (drawn != 0) {
      if (real) wait_inputs(b);  // for the logits
      __syncwarp();
#pragma unroll 1
      for (int l = b.warp; l < count; l += WARPS) {
        int& choice = m.plan.choice[b.step->row_slot[b.step->logit_row[l]]];
        const float sharp = sharpness(__shfl_sync(ALL_LANES, temperature, l));
        if ((drawn >> l & 1) == 0 || choice != NO_TOKEN) continue;
        const int token = draw_from_slice<V>(b.lane, operand<const float>(c, i, LOGITS) + int64_t(l) * int(V::vocab), m.pick[l], sharp, m.draw[b.warp],
                                             [](float, int) { return true; });
        __syncwarp();
        if (b.lane == 0) choice = token == NO_TOKEN ? m.pick[l].best : token;
      }
    }
    b.sync();
    if (b.warp == 0) {
      Slot slot = given;
      plan_step(c, b, m.plan, slot, free_pages, cancelled, real);
      if (real) given = slot;
    }
    b.sync();
  }
  // Tasks of the head and `sample` are over, as their messages say, but where nothing has been chosen from logits (all of them are kept).
  if (drawn == 0 && kept != 0) wait_inputs(b);
  if (drawn == 0 && kept == 0) b.wait_last();
  b.sync();
  if (b.warp == 0 && !b.stopping()) {
    fence_release();  // what this block wrote, and what it has acquired from all others
    publish_step(c, b, m.plan, given);
  }
}

}  // namespace mpk::advance
