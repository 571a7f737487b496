// How a planned step gets from the block that runs `advance` to all others: one message a row.
//
// A message is 16 bytes that are seen as a whole: {step number, token, position, what follows}. The number says which step it belongs to,
// so that it is its own flag: nothing is reset, and reading it is all there is to do at the start of a step. Rows of one sequence stand
// side by side. A step without rows is one message and means that no work is left.
//
// The planner has seen the counters of all blocks (acquire) before it fences and writes; a reader acquires. So what any block wrote
// before its last signal of the step before is visible to whoever has read a message.
#pragma once
#include "mpk/block.cuh"
#include "mpk/reduce.cuh"

namespace mpk {

// What follows in the fourth word: slot, rows of the step, and whether the row ...
constexpr uint32_t SLOT_BITS = 8, FIRST = 1u << 16, LOGITS = 1u << 17, DRAWN = 1u << 18, SPECIAL = 1u << 19;  // ... begins a segment, has logits

__device__ __forceinline__ uint4 row_message(int64_t step, int token, int position, int slot, int rows, uint32_t flags) {
  return {uint32_t(step), uint32_t(token), uint32_t(position), uint32_t(slot) | uint32_t(rows) << SLOT_BITS | flags};
}

// Looks for the plan of step `number`, by one warp; true: it is there, and `out` holds it but for its number. (It is decoded in any case, so that the code for
// it is at hand when it comes.)
__device__ __forceinline__ bool read_step(const uint4* messages, int64_t number, int lane, StepView& out) {
  const uint4 v = load_message_acquire(messages + (lane < MAX_ROWS ? lane : 0));
  const bool new_one = v.x == uint32_t(number);
  const uint32_t about = v.w;
  const int rows = int(__shfl_sync(ALL_LANES, about, 0) >> SLOT_BITS & 0xffu);
  const bool mine = lane < rows;
  const unsigned below = (1u << lane) - 1, firsts = __ballot_sync(ALL_LANES, mine && about & FIRST), with = __ballot_sync(ALL_LANES, mine && about & LOGITS);
  const int place = __popc(with & below);
  const bool logits = mine && about & LOGITS;
  __syncwarp();  // other lanes have read what is overwritten, or written it at the poll before
  if (mine) {
    out.row_token[lane] = int(v.y), out.row_position[lane] = int(v.z), out.row_slot[lane] = int(about & 0xffu);
    if (logits) out.logit_row[place] = lane;
    if (about & FIRST) {
      const unsigned later = firsts & ~below & ~(1u << lane);
      out.segments[__popc(firsts & below)] = Segment{int(about & 0xffu), lane, (later != 0 ? __ffs(later) - 1 : rows) - lane, int(v.z)};
    }
  }
  const unsigned bit = 1u << place;
  const unsigned drawn = __reduce_or_sync(ALL_LANES, logits && about & DRAWN ? bit : 0), special = __reduce_or_sync(ALL_LANES, logits && about & SPECIAL ? bit : 0);
  if (lane == 0) {
    out.rows = rows, out.logit_rows = __popc(with), out.segment_count = __popc(firsts);
    out.drawn_rows = drawn, out.special_rows = special;
  }
  return __all_sync(ALL_LANES, new_one || (lane > 0 && !mine)) != 0;
}

}  // namespace mpk
