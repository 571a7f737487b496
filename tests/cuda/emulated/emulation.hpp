// A block of the GPU on one processor, enough for task bodies: 256 threads as fibers that take turns, warp operations and barriers as
// meetings of fibers. Included before the kernel's source, which is then ordinary C++.
//
// Finds wrong values, wrong addresses, misaligned vector accesses and barriers that not all threads reach; with EMULATION_ORDER set to
// "backward" threads take turns in another order, so that what depends on a missing barrier differs. It knows nothing of the memory
// model of the device.
#pragma once
#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

namespace emulation {

constexpr int THREADS = 256, WARPS = THREADS / 32, STACK_BYTES = 256 << 10, SHARED_BYTES = 225 << 10;
constexpr long TURNS = 2'000'000;  // after so many the block is taken to hang

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on: switching by jumps needs no call of the operating system
  bool begun, done;
};
struct Message {  // what a lane gives to the others
  uint32_t word[8];
};

inline Fiber fibers[THREADS];
inline jmp_buf scheduler;
inline int thread, block, blocks;
inline void (*body)();
alignas(1024) inline unsigned char shared_memory[SHARED_BYTES];

inline void give_turn() {
  if (_setjmp(fibers[thread].place) == 0) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void take_turn(Fiber& f) {
  if (_setjmp(scheduler) != 0) return;
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  setcontext(&f.context);
}

// A meeting of `count` fibers.
struct Meeting {
  int arrived = 0;
  long number = 0;
  void attend(int count) {
    const long mine = number;
    if (++arrived == count) {
      arrived = 0, ++number;
      return;
    }
    while (number == mine) give_turn();
  }
};
inline Meeting warp_meetings[WARPS], group_meetings[WARPS / 4], block_meeting;
inline Message messages[WARPS][2][32];  // two sets: nobody overwrites what a slower lane has still to read

inline const Message* exchange(const Message& own) {
  const int warp = thread / 32;
  Message* set = messages[warp][warp_meetings[warp].number % 2];
  set[thread % 32] = own;
  warp_meetings[warp].attend(32);
  return set;
}

template <class T>
T from_lane(T value, int lane) {
  Message own{};
  std::memcpy(own.word, &value, sizeof value);
  std::memcpy(&value, exchange(own)[lane & 31].word, sizeof value);
  return value;
}

inline void start() {
  body();
  fibers[thread].done = true;
  give_turn();
}

// Runs the body on one block; false: it hangs.
inline bool run_block() {
  static unsigned char* stacks = static_cast<unsigned char*>(std::malloc(size_t(THREADS) * STACK_BYTES));
  std::fill(reinterpret_cast<uint32_t*>(shared_memory), reinterpret_cast<uint32_t*>(shared_memory + SHARED_BYTES), 0x7fc0beefu);  // NaN
  for (int i = 0; i < THREADS; ++i) {
    Fiber& f = fibers[i];
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + size_t(i) * STACK_BYTES, f.context.uc_stack.ss_size = STACK_BYTES, f.context.uc_link = nullptr;
    makecontext(&f.context, start, 0);
    f.begun = f.done = false;
  }
  for (Meeting& m : warp_meetings) m = Meeting{};
  for (Meeting& m : group_meetings) m = Meeting{};
  block_meeting = Meeting{};
  const char* order = std::getenv("EMULATION_ORDER");
  const bool backward = order != nullptr && std::strcmp(order, "backward") == 0;
  for (long turn = 0; turn < TURNS; ++turn) {
    bool left = false;
    for (int i = 0; i < THREADS; ++i) {
      thread = backward ? THREADS - 1 - i : i;
      if (fibers[thread].done) continue;
      left = true;
      take_turn(fibers[thread]);
    }
    if (!left) return true;
  }
  return false;
}

// Words that are not there yet: one comes each time somebody polls. Afterwards everybody may look once more.
struct LateWord {
  uint32_t* at;
  uint64_t value;
};
inline const LateWord *next_late, *late_end;
inline int last_looks;
inline bool bring_word() {
  if (next_late == late_end) return --last_looks >= 0;
  *next_late->at = uint32_t(next_late->value), ++next_late;
  return true;
}

template <class T>
T load(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) std::fprintf(stderr, "misaligned access of %zu bytes\n", sizeof(T)), std::abort();
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void store(void* p, T value) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) std::fprintf(stderr, "misaligned access of %zu bytes\n", sizeof(T)), std::abort();
  std::memcpy(p, &value, sizeof value);
}

// Behind the block's shared memory stands what comes through the ring of weights: slots of 16 KB in the order of their use.
inline const unsigned char* stages;

template <class T>
T shared_load(uint32_t place) {
  if (place >= SHARED_BYTES) return load<T>(stages + (place - SHARED_BYTES));
  if (place + sizeof(T) > SHARED_BYTES) std::fprintf(stderr, "shared memory ends before byte %u\n", place), std::abort();
  return load<T>(shared_memory + place);
}

template <class T>
void shared_store(uint32_t place, T value) {
  if (place + sizeof(T) > SHARED_BYTES) std::fprintf(stderr, "shared memory ends before byte %u\n", place), std::abort();
  store(shared_memory + place, value);
}

struct Index {
  int x;
};

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::thread})
#define blockIdx (emulation::Index{emulation::block})
#define gridDim (emulation::Index{emulation::blocks})

// ---- operations of a warp
template <class T>
T __shfl_sync(unsigned, T value, int lane) { return emulation::from_lane(value, lane); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return emulation::from_lane(value, emulation::thread % 32 ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = emulation::thread % 32;
  return emulation::from_lane(value, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const emulation::Message* all = emulation::exchange({{vote}});
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= all[lane].word[0] << lane;
  return votes;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const emulation::Message* all = emulation::exchange({{value}});
  unsigned most = 0;
  for (int lane = 0; lane < 32; ++lane) most = max(most, all[lane].word[0]);
  return most;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) { return ~__reduce_max_sync(mask, ~value); }
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const emulation::Message* all = emulation::exchange({{value}});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= all[lane].word[0];
  return bits;
}
inline void __syncthreads() { emulation::block_meeting.attend(emulation::THREADS); }
inline void __syncwarp() { emulation::exchange({}); }

// ---- operations of a thread
inline float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline float __int_as_float(unsigned bits) { return __uint_as_float(bits); }
inline unsigned __float_as_uint(float f) { unsigned bits; std::memcpy(&bits, &f, 4); return bits; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x != 0 ? __builtin_clz(unsigned(x)) : 32; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(std::llrint(x)); }
inline void sincospif(float x, float* sine, float* cosine) { *sine = float(std::sin(M_PI * double(x))), *cosine = float(std::cos(M_PI * double(x))); }
template <class T>
T __ldg(const T* p) { return emulation::load<T>(p); }
template <class T>
T atomicAdd(T* p, T by) { const T before = *p; return *p += by, before; }
template <class T>
T atomicOr(T* p, T by) { const T before = *p; return *p |= by, before; }
