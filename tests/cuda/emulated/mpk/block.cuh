// What mpk/block.cuh of the CUDA back end offers to task bodies, in emulation.
#pragma once
#include "mpk/context.hpp"
#include "mpk/ptx.cuh"

namespace mpk {

constexpr int WARPS = emulation::WARPS, THREADS = emulation::THREADS, BLOCK_THREADS = THREADS, SCRATCH_BYTES = emulation::SHARED_BYTES, MAX_ROWS = 16;

struct StepView {
  int rows, logit_rows, segment_count, previous_rows;
  int64_t number;
  int32_t row_token[MAX_ROWS], row_slot[MAX_ROWS], row_position[MAX_ROWS], logit_row[MAX_ROWS];
  Segment segments[MAX_ROWS];
};

struct Block {
  const StepView* step;
  int sm, sms, thread, warp, lane;
  unsigned char* scratch;
  void sync() const { emulation::block_meeting.attend(THREADS); }
  void wait() {}
  void arrived() {}
  bool may_poll(uint32_t&) const { std::fprintf(stderr, "a flagged word is EMPTY that nobody will write\n"), std::abort(); }
  bool may_poll_rank(uint32_t&, int source, uint32_t, uint32_t) const { std::fprintf(stderr, "no part of rank %d\n", source), std::abort(); }
};

}  // namespace mpk
