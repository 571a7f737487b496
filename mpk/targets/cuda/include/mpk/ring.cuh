// The ring of packed weights in shared memory: one loader thread fills it by bulk copies, the 8 consumer warps use it up.
//
// A stage is full when its bytes have arrived, and empty when all consumer warps have released it. Stages come in the order in which
// the block's instructions use them, across instructions and steps: weights depend on nothing, so the loader runs ahead of events.
#pragma once
#include <cstddef>

#include "mpk/layout.hpp"
#include "mpk/ptx.cuh"

namespace mpk {

constexpr int WARPS = 8;  // that consume
constexpr int MAX_STAGES = 16;
constexpr int STAGE_BYTES = 16 * 1024;  // room of a stage in the ring; stages of shallow matrices fill a part of it
#ifndef MPK_STAGES
#define MPK_STAGES 10
#endif
constexpr int STAGES = MPK_STAGES;
static_assert(STAGES <= MAX_STAGES, "a barrier for every stage");

// What loader and consumers of one block share, besides the stages.
struct RingControl {
  uint64_t full[MAX_STAGES], empty[MAX_STAGES];
  Flag shut;         // 1: inputs are on their way, so few weights may be (small messages queue behind bulk copies)
  Flag stop;         // leave; STOP_*
  Flag open;         // stages may be filled: prompts, whose tasks have the same memory, are read
  Flag started;      // Block::sequence of the last instruction whose inputs have come; for runs without pipelining
};

// Shared memory of a block: control, control of the tiles of prompts (tiles.cuh), what block.cuh says, stages, scratch. Addresses in it are
// constants of the program.
constexpr int TILES_OFFSET = 512, BLOCK_MEMORY_OFFSET = 1024, RING_OFFSET = 3072, RING_END = RING_OFFSET + STAGES * STAGE_BYTES;
static_assert(sizeof(RingControl) <= TILES_OFFSET, "control fits before the stages");
extern __shared__ __align__(1024) unsigned char block_shared[];
__device__ __forceinline__ RingControl& ring_control() { return *reinterpret_cast<RingControl*>(block_shared); }
__device__ __forceinline__ uint32_t full_barrier(int stage) { return shared_address(block_shared) + offsetof(RingControl, full) + stage * 8; }
__device__ __forceinline__ uint32_t empty_barrier(int stage) { return shared_address(block_shared) + offsetof(RingControl, empty) + stage * 8; }
__device__ __forceinline__ uint32_t stage_slot(int stage) { return shared_address(block_shared) + RING_OFFSET + stage * STAGE_BYTES; }
constexpr int STOP_DONE = 1, STOP_STARVED = 2, STOP_STALLED = 3;

// Tries of a consumer warp (each some 20 ns at least) to get a stage. A stage that does not come at all means that the plan of loads is
// wrong: the warp goes on, so that all threads reach the next barrier, where the block leaves.
constexpr uint32_t STARVED_TRIES = 1u << 27;

// The consumer's view: every thread keeps its own copy of the position.
struct WeightRing {
  int stage;
  uint32_t parity;

  // Shared address of the next stage, once it is there.
  __device__ __forceinline__ uint32_t wait() const {
    for (uint32_t i = 0; !barrier_try(full_barrier(stage), parity) && !ring_control().stop;)
      if (++i == STARVED_TRIES) ring_control().stop = STOP_STARVED;
    return stage_slot(stage);
  }
  // The warp has read the stage; all its lanes call this.
  __device__ __forceinline__ void release(int lane) {
    warp_arrive(empty_barrier(stage), lane);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void shut(int value) const { ring_control().shut = value; }
};

// The loader: one thread.
class Loader {
 public:
  __device__ explicit Loader(const Kernel& kernel)
      : flight_(kernel.flight_bytes), idle_flight_(kernel.flight_idle_bytes), pipelining_(kernel.pipelining) {}

  // Fetches the stages of all runs [begin, end), step after step, until told to stop.
  __device__ void work(const unsigned char* weights, const LoadRun* begin, const LoadRun* end, int instructions) {
    if (begin == end) return;
    while (!ring_control().open)
      if (ring_control().stop) return;
    LoadRun next = *begin;
    for (int base = 2;; base += instructions + 1) {  // Block::sequence of a step's first instruction: steps count as one as well
      for (const LoadRun* run = begin; run != end; ++run) {
        const LoadRun now = next;
        next = run + 1 == end ? *begin : run[1];  // fetched early: its address is needed when this one is done
        if (!pipelining_ && !await_start(base + now.instruction)) return drain();
        const int flight = flight_ / now.bytes, idle_flight = idle_flight_ / now.bytes;
        const unsigned char* from = weights + now.offset;
        for (int i = 0; i < now.count; ++i, from += now.stride)
          if (!load(from, now.bytes, flight, idle_flight)) return drain();
      }
    }
  }

 private:
  __device__ bool await_start(int instruction) {
    while (ring_control().started - instruction < 0)
      if (ring_control().stop) return false;
    return true;
  }
  // flight, idle_flight: most stages on their way.
  __device__ __forceinline__ bool load(const unsigned char* from, int bytes, int flight, int idle_flight) {
    if (issued_ >= STAGES)
      while (!barrier_try(empty_barrier(stage_), parity_))
        if (ring_control().stop) return false;
    while (flying_ >= idle_flight) {
      if (pop()) continue;
      if (flying_ < flight && !ring_control().shut) break;
      if (ring_control().stop) return false;
    }
    const uint32_t barrier = full_barrier(stage_);
    barrier_expect(barrier, bytes);
    bulk_load(stage_slot(stage_), from, bytes, barrier);
    ++flying_;
    if (++stage_ == STAGES) stage_ = 0, parity_ ^= 1;
    if (issued_ < STAGES) ++issued_;
    return true;
  }
  // Takes note of the arrival of the oldest stage on its way.
  __device__ __forceinline__ bool pop() {
    if (!barrier_passed(full_barrier(oldest_), oldest_parity_)) return false;
    --flying_;
    if (++oldest_ == STAGES) oldest_ = 0, oldest_parity_ ^= 1;
    return true;
  }
  // Copies must not arrive in shared memory that belongs to the next kernel.
  __device__ void drain() {
    while (flying_ > 0) pop();
  }

  int flight_, idle_flight_, pipelining_;
  int stage_ = 0, oldest_ = 0, issued_ = 0, flying_ = 0;  // flying: stages not known to have arrived
  uint32_t parity_ = 1, oldest_parity_ = 0;
};

}  // namespace mpk
