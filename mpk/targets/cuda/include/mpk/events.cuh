// Event counters: the only means by which blocks order their work.
//
// A counter only grows. In step s (from 1) a waiter needs `count * s`, so nothing is ever reset. A producer's threads write, meet at a
// barrier, then one of them fences and adds; a waiter's first thread reads the counter with acquire order, then all meet at a barrier.
#pragma once
#include "mpk/layout.hpp"
#include "mpk/ptx.cuh"

namespace mpk {

constexpr int STEP_EVENT = 0;  // its value is the number of steps planned so far

struct Arguments {
  Launch launch;
  Kernel kernel;
};

template <class T>
__device__ __forceinline__ T* address(uint64_t a) {
  return reinterpret_cast<T*>(a);
}

__device__ __forceinline__ uint64_t* counter(const Kernel& k, int event) { return address<uint64_t>(k.events + uint64_t(event) * COUNTER_STRIDE); }

// A wait that has lasted a while. Time is counted in pieces, so that a device that was taken away for a while does not look stuck.
// (No function calls in the kernel: registers could not be moved between warp groups.)
__device__ __forceinline__ bool await_event_slowly(const Arguments& a, const uint64_t* event, int index, int64_t expected, int task, int64_t step) {
  constexpr int64_t PIECE_NS = 50'000'000;
  int32_t* stop = address<int32_t>(a.kernel.stop);
  int64_t last = now_ns(), waited = 0;
  for (int i = 0;; ++i) {
    const int64_t seen = int64_t(load_acquire(event));
    if (seen >= expected) return true;
    if (i % 64) continue;
    if (load_int(stop) != RESULT_DONE) return false;
    const int64_t now = now_ns();
    waited += now - last < PIECE_NS ? now - last : PIECE_NS;
    last = now;
    if (waited < a.launch.stall_limit_ns) continue;
    if (atomicCAS(stop, RESULT_DONE, RESULT_STALLED) == RESULT_DONE)  // the first to give up reports
      *address<Stall>(a.launch.stall) = Stall{int32_t(blockIdx.x), task, index, 0, expected, seen, step};
    return false;
  }
}

__device__ __forceinline__ bool await_event(const Arguments& a, int event, int64_t expected, int task, int64_t step) {
  const uint64_t* at = counter(a.kernel, event);
  for (int i = 0; i < 4096; ++i)
    if (int64_t(load_acquire(at)) >= expected) return true;
  return await_event_slowly(a, at, event, expected, task, step);
}

__device__ __forceinline__ bool await_all(const Arguments& a, const Record& r, int64_t step) {
  const Instruction& in = r.instruction;
  for (int w = 0; w < in.wait_count; ++w) {
    const Wait wait = w < INLINE_EVENTS ? r.waits[w] : address<const Wait>(a.launch.waits)[in.wait_begin + w];
    if (!await_event(a, wait.event, int64_t(wait.count) * step, in.task, step)) return false;
  }
  return true;
}

}  // namespace mpk
