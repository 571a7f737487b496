// Event counters: the only means by which blocks order their work.
//
// A counter only grows. In step s (from 1) a waiter needs `count * s`, so nothing is ever reset. A producer's threads write, meet at a
// barrier, then one of them fences and adds; a waiter's first thread reads the counter with acquire order, then all meet at a barrier.
#pragma once
#include "mpk/context.hpp"
#include "mpk/ptx.cuh"

namespace mpk {

constexpr int STEP_EVENT = 0;  // its value is the number of steps planned so far

struct Arguments {
  Launch launch;
  Kernel kernel;
};

__device__ __forceinline__ uint64_t* counter(const Kernel& k, int event) { return address<uint64_t>(k.events + uint64_t(event) * COUNTER_STRIDE); }

// What a block keeps about its waits, in shared memory. Threads that wait at the same time share the clock, which only makes them
// notice the limit together.
struct WaitState {
  Clock last_ns, waited_ns;
  Stall stall;   // why it gave up
  int gave_up;
};

// Called now and then by a wait that lasts: whether to give up, because others did or because of the limit. Time is counted in pieces, so
// that a device that was taken away for a while does not look stuck.
__device__ __forceinline__ bool gives_up(const Arguments& a, WaitState& w, bool first) {
  constexpr int64_t PIECE_NS = 50'000'000;
  if (load_int(address<int32_t>(a.kernel.stop)) != RESULT_DONE) return true;
  const int64_t now = now_ns(), passed = now - w.last_ns, waited = first ? 0 : w.waited_ns + (passed < PIECE_NS ? passed : PIECE_NS);
  w.waited_ns = waited, w.last_ns = now;
  return waited > a.launch.stall_limit_ns;
}

// Polls an event; false: the program stops.
__device__ __forceinline__ bool await_event(const Arguments& a, WaitState& w, int event, int64_t expected, int task, int64_t step) {
  constexpr int PATIENCE = 1024;  // polls between looks at the clock
  const uint64_t* at = counter(a.kernel, event);
  for (int i = 1;; ++i) {
    const int64_t seen = int64_t(load_acquire(at));
    if (seen >= expected) return true;
    if (i % PATIENCE != 0 || !gives_up(a, w, i == PATIENCE)) continue;
    w.stall.task = task, w.stall.event = event, w.stall.expected = expected, w.stall.seen = seen, w.stall.step = step;
    w.gave_up = 1;
    return false;
  }
}

// Every block that gives up says what it waited for: the host looks for the earliest task among them, which is where it began.
__device__ __forceinline__ void report(const Arguments& a, const WaitState& w) {
  Stall stall = w.stall;
  stall.worker = own_block();
  address<Stall>(a.launch.stall)[stall.worker] = stall;
  atomicCAS(address<int32_t>(a.kernel.stop), RESULT_DONE, RESULT_STALLED);
}

__device__ __forceinline__ bool await_all(const Arguments& a, WaitState& w, const Record& r, int first, int64_t step) {
  const Instruction& in = r.instruction;
#pragma unroll 1
  for (int n = first; n < in.wait_count; ++n) {
    const Wait wait = n < INLINE_EVENTS ? r.waits[n] : address<const Wait>(a.launch.waits)[in.wait_begin + n];
    if (!await_event(a, w, wait.event, int64_t(wait.count) * step, in.task, step)) return false;
  }
  return true;
}

}  // namespace mpk
