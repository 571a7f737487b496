// Closes a step and plans the next one. Operands: choice [max_batch] int32, and where ranks share the model agreed [1] int32: whether the
// host has cancelled. Variant: none.
//
// The state is a few hundred words that are read and changed one after the other, at half a microsecond each in global memory. So
// it is copied to shared memory by all threads, changed there by one, and copied back.
#pragma once
#include "mpk/plan.hpp"
#include "mpk/wait.cuh"

namespace mpk::advance {

constexpr bool waits_inside = true;

__device__ __forceinline__ void copy_in(const Block& b, void* to, const void* from, int bytes) {  // multiples of 4
  for (int j = b.thread; j < bytes / 4; j += THREADS) static_cast<uint32_t*>(to)[j] = load_4(static_cast<const uint32_t*>(from) + j);
}
__device__ __forceinline__ void copy_out(const Block& b, void* to, const void* from, int bytes) {
  for (int j = b.thread; j < bytes / 4; j += THREADS) static_cast<uint32_t*>(to)[j] = static_cast<const uint32_t*>(from)[j];
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  const int most = c.max_batch < c.max_rows ? c.max_batch : c.max_rows;  // segments: at most one a sequence, at least a row each
  struct Head {
    Step step;
    int32_t free_pages, cancelled;
  };
  Head& head = *reinterpret_cast<Head*>(b.scratch);
  Sequence* sequences = reinterpret_cast<Sequence*>(b.scratch + sizeof(Head));
  Segment* segments = reinterpret_cast<Segment*>(sequences + c.max_batch);
  int32_t* choice = reinterpret_cast<int32_t*>(segments + most);
  copy_in(b, &head.step, c.step, sizeof(Step));
  copy_in(b, sequences, c.sequences, c.max_batch * int(sizeof(Sequence)));
  copy_in(b, segments, c.segments, most * int(sizeof(Segment)));
  if (b.thread == 0) head.free_pages = load_int(c.free_page_count), head.cancelled = load_system(c.cancel);
  wait_inputs(b);
  copy_in(b, choice, operand<int32_t>(c, i, 0), c.max_batch * 4);
  if (b.thread == 0 && i.operand[1] >= 0) head.cancelled = load_int(operand<int32_t>(c, i, 1));
  b.sync();
  Context own = c;
  own.step = &head.step, own.sequences = sequences, own.segments = segments, own.free_page_count = &head.free_pages;
  if (b.thread == 0) {
    close_step(own, choice, head.cancelled != 0);
    plan_segments(own);
  }
  b.sync();
  fill_rows(own, b.thread, THREADS);
  copy_out(b, c.sequences, sequences, c.max_batch * int(sizeof(Sequence)));
  copy_out(b, c.segments, segments, head.step.segments * int(sizeof(Segment)));
  copy_out(b, c.step, &head.step, sizeof(Step));
  if (b.thread == 0) *c.free_page_count = head.free_pages;
}

}  // namespace mpk::advance
