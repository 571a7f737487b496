// What mpk/block.cuh of the CUDA back end offers to task bodies, in emulation.
#pragma once
#include "mpk/context.hpp"
#include "mpk/ptx.cuh"
#include "mpk/tile_ring.cuh"

namespace mpk {

constexpr int WARPS = emulation::WARPS, THREADS = emulation::THREADS, BLOCK_THREADS = THREADS, SCRATCH_BYTES = 64 << 10, POOL_BYTES = 224 << 10, MAX_ROWS = 16;

struct StepView {
  int rows, logit_rows, segment_count, previous_rows;
  int64_t number;
  unsigned drawn_rows, special_rows;
  int32_t row_token[MAX_ROWS], row_slot[MAX_ROWS], row_position[MAX_ROWS], logit_row[MAX_ROWS];
  Segment segments[MAX_ROWS];
};

constexpr int STAGE_BYTES = 16 * 1024;

// Every thread takes the block's stages one after the other.
struct WeightRing {
  int taken;
  uint32_t wait() const { return emulation::SHARED_BYTES + taken * STAGE_BYTES; }
  void release(int) { __syncwarp(), ++taken; }
  void shut(int) {}
  void spare(int) {}
};

struct Block {
  const StepView* step;
  int thread, warp, lane;
  unsigned char* scratch;
  WeightRing ring;
  int round;
  unsigned char* pool;
  tiles::Ring tiles;
  void sync() const { emulation::block_meeting.attend(THREADS); }
  void sync_group() const { emulation::group_meetings[warp / 4].attend(128); }
  void wait() {}
  void wait_last() {}
  void wait_events(int = 0) {}
  void arrived() {}
  bool may_poll(uint32_t&, bool = false) const {
    if (emulation::bring_word()) return true;
    std::fprintf(stderr, "data does not come that somebody waits for\n"), std::abort();
  }
  bool may_poll_rank(uint32_t&, int source, uint32_t, uint32_t) const { std::fprintf(stderr, "no part of rank %d\n", source), std::abort(); }
  bool stopping() const { return false; }
};

inline void find_thread(const Block&) {}
inline void serve_tiles(const tiles::Ring&, int) {}
inline void take_registers() {}

}  // namespace mpk
