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
  uint64_t open;     // a barrier: prompts, whose tasks have the same memory, are read, so stages may be filled
  Flag shut;         // 1: inputs are on their way, so few weights may be (small messages queue behind bulk copies)
  Flag stop;         // leave; STOP_*
  Flag started;      // Block::sequence of the last instruction whose inputs have come; for runs without pipelining
  Flag spare;        // 1: weights may be brought to the L2; 0: keys and values go through it, of many rows or of a long context
  // The loader's own: the stages behind those that it has brought to the L2, `ahead_left` of run `ahead_run`. Registers are few, and global
  // memory is a trip to the L2 a stage.
  int64_t ahead_from;
  int ahead_stride, ahead_bytes, ahead_left, ahead_run;
};

// Shared memory of a block: control, control of the tiles of prompts (tiles.cuh), what block.cuh says, stages, scratch. Addresses in it are
// constants of the program.
constexpr int TILES_OFFSET = 512, BLOCK_MEMORY_OFFSET = 1024, RING_OFFSET = 3072, RING_END = RING_OFFSET + STAGES * STAGE_BYTES;
static_assert(sizeof(RingControl) <= TILES_OFFSET, "control fits before the stages");
extern __shared__ __align__(1024) unsigned char block_shared[];
__device__ __forceinline__ RingControl& ring_control() { return *reinterpret_cast<RingControl*>(block_shared); }
__device__ __forceinline__ uint32_t full_barrier(int stage) { return shared_address(block_shared) + offsetof(RingControl, full) + stage * 8; }
__device__ __forceinline__ uint32_t empty_barrier(int stage) { return shared_address(block_shared) + offsetof(RingControl, empty) + stage * 8; }
__device__ __forceinline__ uint32_t open_barrier() { return shared_address(block_shared) + offsetof(RingControl, open); }
// Consumers that arrive there: one behind a barrier of all; in checked builds all, since race detectors do not follow the former.
constexpr int OPENERS = MPK_CHECKED ? WARPS * 32 : 1;
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
  __device__ __forceinline__ void spare(int value) const { ring_control().spare = value; }
};

// The loader: one thread, with few registers: whatever is constant stays among the kernel's arguments.
class Loader {
 public:
  // `weights`: their address, among the arguments too; `runs`: of the block in a step, `count` of them.
  __device__ Loader(const Kernel& kernel, const uint64_t& weights, const LoadRun* runs, int count) : kernel_(kernel), weights_(weights), runs_(runs), count_(count) {}

  // Fetches the stages of all runs, step after step, until told to stop. `instructions`: of the block in a step.
  __device__ void work(int instructions) {
    if (count_ == 0) return;
    while (!barrier_try(open_barrier(), 0))
      if (ring_control().stop) return;
    LoadRun next = *runs_;
    for (int base = 2;; base += instructions + 1) {  // Block::sequence of a step's first instruction: steps count as one as well
      for (run_ = 0; run_ < count_; ++run_) {
        const LoadRun now = next;
        next = runs_[after(run_)];  // fetched early: its address is needed when this one is done
        if (!kernel_.pipelining && !await_start(base + now.instruction)) return drain();
        const int flight = kernel_.flight_bytes / now.bytes, idle_flight = kernel_.flight_idle_bytes / now.bytes;
        const unsigned char* from = weights() + now.offset;
        for (at_ = 0; at_ < now.count; ++at_, from += now.stride)
          if (!load(from, now.bytes, flight, idle_flight)) return drain();
      }
    }
  }

 private:
  __device__ __forceinline__ const unsigned char* weights() const { return address<const unsigned char>(weights_); }
  __device__ __forceinline__ int after(int run) const { return run + 1 == count_ ? 0 : run + 1; }
  __device__ bool await_start(int instruction) {
    while (ring_control().started - instruction < 0)
      if (ring_control().stop) return false;
    return true;
  }
  // flight, idle_flight: most stages on their way.
  __device__ __forceinline__ bool load(const unsigned char* from, int bytes, int flight, int idle_flight) {
    if (!barrier_passed(empty_barrier(stage_), parity_) && !await_empty()) return false;
    while (flying_ >= idle_flight) {
      if (pop()) continue;
      if (flying_ < flight && !ring_control().shut) break;
      if (ring_control().stop) return false;
    }
    const uint32_t barrier = full_barrier(stage_);
    barrier_expect(barrier, bytes);
    bulk_load(stage_slot(stage_), from, bytes, barrier);
    ++flying_;
    if (ahead_ > 0) --ahead_;
    if (++stage_ == STAGES) stage_ = 0, parity_ ^= 1;
    return true;
  }
  // Waits for room in the ring. If it lasts until all that is on its way has come, the memory would have nothing to do: stages that come next are
  // brought to the L2 then, no faster than the memory can, so that what SMs wait for does not queue behind them.
  __device__ __forceinline__ bool await_empty() {
    while (flying_ > 0) {
      if (barrier_passed(empty_barrier(stage_), parity_)) return true;
      if (ring_control().stop) return false;
      pop();
    }
    while (ahead_ * STAGE_BYTES < kernel_.prefetch_bytes && ring_control().spare) {
      const uint32_t begin = uint32_t(now_ns());
      fetch_ahead();
      do {
        if (barrier_passed(empty_barrier(stage_), parity_)) return true;
        if (ring_control().stop) return false;
      } while (uint32_t(now_ns()) - begin < uint32_t(kernel_.prefetch_ns));
    }
    while (!barrier_try(empty_barrier(stage_), parity_))
      if (ring_control().stop) return false;
    return true;
  }
  // The next stage behind those that have been asked for.
  __device__ __forceinline__ void fetch_ahead() {
    RingControl& control = ring_control();
    if (ahead_ == 0) look_at(run_, at_);
    const int64_t from = control.ahead_from;
    const int left = control.ahead_left - 1;
    bulk_prefetch(weights() + from, control.ahead_bytes);
    ++ahead_;
    control.ahead_from = from + control.ahead_stride, control.ahead_left = left;
    if (left == 0) look_at(after(control.ahead_run), 0);
  }
  __device__ __forceinline__ void look_at(int in_run, int at) {
    RingControl& control = ring_control();
    const LoadRun run = runs_[in_run];
    control.ahead_from = run.offset + int64_t(at) * run.stride, control.ahead_stride = run.stride, control.ahead_bytes = run.bytes;
    control.ahead_left = run.count - at, control.ahead_run = in_run;
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

  const Kernel& kernel_;
  const uint64_t& weights_;
  const LoadRun* runs_;
  int count_, run_ = 0, at_ = 0;             // the stage that is loaded next: number at_ of run_
  int stage_ = 0, oldest_ = 0, flying_ = 0;  // flying: stages not known to have arrived
  uint32_t parity_ = 1, oldest_parity_ = 0;  // a barrier that is new has passed parity 1: the ring is empty
  int ahead_ = 0;                            // stages in the L2, from the next one on
};

}  // namespace mpk
