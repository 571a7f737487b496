// Flagged buffers: activations whose words are their own flags.
//
// Every 32-bit word of a flagged buffer is EMPTY until its value of this step has been written, so a reader loads it until it is not: no
// fence, no counter, no second trip. There are two copies, used by the parity of the step's number. Whoever writes columns of the
// step's rows into this step's copy also sets the same columns of the previous step's rows in the other copy to EMPTY. Nobody reads
// those any more (a step begins after all tasks of the one before), and the next step, which writes there, begins behind counters that
// every block signals after its last clearing. The host fills both copies with EMPTY before a launch.
//
// Partial results of attention are an exception: they have one reader, which sets them to EMPTY after it has read them, in the same copy.
//
// Each word is a message of its own (32-bit accesses of one word are atomic, and relaxed ones do not race). Nothing else follows from
// it: other data that its producer wrote is NOT visible to who has read the word.
#pragma once
#include "mpk/block.cuh"

#ifndef MPK_FLAGGED
#define MPK_FLAGGED 1
#endif

namespace mpk {

// Whether the program's activations are flagged; if not, counters order everything and what follows are plain accesses.
constexpr bool FLAGGED = MPK_FLAGGED != 0;
constexpr uint32_t EMPTY = 0xffffffffu;  // as bf16 or float32: one of many NaNs
constexpr uint32_t EMPTY_VALUE = 0x7fff7fffu;  // what is written where a value happens to be EMPTY: another NaN of both types

// ---- where
// The operand in this step's copy.
template <class T>
__device__ __forceinline__ T* flagged(const Context& c, const Instruction& i, int slot, const Block& b) {
  T* first = operand<T>(c, i, slot);
  if constexpr (!FLAGGED) return first;
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + uintptr_t(b.step->number & 1) * uintptr_t(c.flagged_stride));
}
// The same place in the other copy.
template <class T>
__device__ __forceinline__ T* other_copy(const Context& c, T* in_this_copy, const Block& b) {
  if constexpr (!FLAGGED) return in_this_copy;
  const int64_t away = (b.step->number & 1) != 0 ? -c.flagged_stride : c.flagged_stride;
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(in_this_copy) + uintptr_t(away));
}
// Rows of the other copy to clear: those of the step before.
__device__ __forceinline__ int rows_to_clear(const Block& b) { return FLAGGED ? b.step->previous_rows : 0; }

// ---- reading. All loads are issued first, then each is settled: one round trip if the data is there.
__device__ __forceinline__ bool complete(uint32_t v) { return v != EMPTY; }
__device__ __forceinline__ bool complete(uint2 v) { return v.x != EMPTY && v.y != EMPTY; }
__device__ __forceinline__ bool complete(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

// `v` is what load_16(p) gave: returned if it is complete, else loaded again until it is. If the program is being stopped it returns
// anything: what is computed from then on is thrown away.
__device__ __forceinline__ uint4 settled_16(Block& b, const void* p, uint4 v) {
  if constexpr (FLAGGED) {
    for (uint32_t polls = 0; !complete(v) && b.may_poll(polls);) v = load_16(p);
  }
  return v;
}
__device__ __forceinline__ uint2 settled_8(Block& b, const void* p, uint2 v) {
  if constexpr (FLAGGED) {
    for (uint32_t polls = 0; !complete(v) && b.may_poll(polls);) v = load_8(p);
  }
  return v;
}
__device__ __forceinline__ uint32_t settled_4(Block& b, const void* p, uint32_t v) {
  if constexpr (FLAGGED) {
    for (uint32_t polls = 0; !complete(v) && b.may_poll(polls);) v = load_4(p);
  }
  return v;
}

// Several loads at once: `at(n)` is the address of v[n], where v[n] was loaded (else it is 0). The last two pieces that are missing are polled until
// they have come, then the thread asks for the rest: polling everything would take as much of the L2 as weights do.
template <int N, class At>
__device__ __forceinline__ void settle_16(Block& b, uint4 (&v)[N], At at) {
  if constexpr (FLAGGED) {
#pragma unroll 1
    for (uint32_t polls = 0;;) {
      int last = -1, before = -1;
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (!complete(v[n])) before = last, last = n;
      if (last < 0) return;
      uint4 x{}, y{};
      do {
        if (!b.may_poll(polls)) return;
        if (before >= 0) y = load_16(at(before));
        x = load_16(at(last));
      } while (!complete(x) || !complete(y));
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n == last) {
          v[n] = x;
        } else if (n == before) {
          v[n] = y;
        } else if (!complete(v[n])) {
          v[n] = load_16(at(n));
        }
      }
    }
  }
}

// ---- writing, each word once a step
__device__ __forceinline__ uint32_t not_empty(uint32_t v) { return FLAGGED && v == EMPTY ? EMPTY_VALUE : v; }

__device__ __forceinline__ void put_4(void* p, uint32_t v) { store_4(p, not_empty(v)); }
__device__ __forceinline__ void put_8(void* p, uint2 v) { store_8(p, uint2{not_empty(v.x), not_empty(v.y)}); }
__device__ __forceinline__ void put_16(void* p, uint4 v) { store_16(p, uint4{not_empty(v.x), not_empty(v.y), not_empty(v.z), not_empty(v.w)}); }

// `p` in the other copy.
__device__ __forceinline__ void clear_4(void* p) {
  if constexpr (FLAGGED) store_4(p, EMPTY);
}
__device__ __forceinline__ void clear_8(void* p) {
  if constexpr (FLAGGED) store_8(p, uint2{EMPTY, EMPTY});
}
__device__ __forceinline__ void clear_16(void* p) {
  if constexpr (FLAGGED) store_16(p, uint4{EMPTY, EMPTY, EMPTY, EMPTY});
}

}  // namespace mpk
