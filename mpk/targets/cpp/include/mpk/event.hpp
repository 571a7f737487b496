// Event counters: the only means by which workers order their work.
//
// A counter only grows. In step s (from 1) a waiter needs `count * s`, so nothing is ever reset and there is no moment at
// which a late waiter could miss a value. Payload (activations, the step, sequences, the key-value cache) is plain memory:
//   producer: writes payload, then adds to the counter with release order;
//   waiter:   reads the counter with acquire order, then reads payload.
// Additions are read-modify-write operations, so the value a waiter sees continues the release sequence of every earlier
// addition: having seen the threshold, it sees the writes of ALL producers, not only of the last one.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "mpk/context.hpp"

namespace mpk {

// Two cache lines apart, because adjacent lines are fetched in pairs on common processors.
constexpr int EVENT_STRIDE = 128;

struct alignas(EVENT_STRIDE) Event {
  std::atomic<int64_t> count{0};

  void signal(int64_t amount) {
    count.fetch_add(amount, std::memory_order_release);  // publishes everything this worker wrote before
  }
  int64_t seen() const {
    return count.load(std::memory_order_acquire);  // pairs with signal()
  }
};

// Tells the processor that this is a polling loop.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace mpk
