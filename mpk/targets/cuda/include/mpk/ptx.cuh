// Thin names for the PTX instructions that the CUDA back end uses, and bf16.
//
// Activations, the step and sequences are written by one SM and read by another within one launch. L1 caches are not coherent,
// so such data is read with load_* below (relaxed, at the L2), after an acquire of the event that orders the writes.
#pragma once
#include <cstdint>

namespace mpk {

// ---- bf16
struct alignas(2) bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float(uint32_t(v.bits) << 16); }
__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }           // first element in memory
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }  // second
__device__ __forceinline__ uint32_t pack_bf16(float first, float second) {  // rounds to nearest, ties to even
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ __forceinline__ bf16 to_bf16(float v) { return bf16{uint16_t(pack_bf16(v, 0.0f))}; }

// ---- global memory that other SMs write: read at the L2
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_8(const void* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_4(const void* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint16_t load_2(const void* p) {
  uint16_t v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
// The same where `wanted`, else `v` stays; without a branch.
__device__ __forceinline__ void load_16_if(bool wanted, const void* p, uint4& v) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(uint32_t(wanted))
               : "memory");
}
__device__ __forceinline__ void load_8_if(bool wanted, const void* p, uint2& v) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(p), "r"(uint32_t(wanted))
               : "memory");
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }  // what is constant
__device__ __forceinline__ float load_float(const float* p) { return __uint_as_float(load_4(p)); }
__device__ __forceinline__ int32_t load_int(const int32_t* p) { return int32_t(load_4(p)); }
__device__ __forceinline__ int64_t load_long(const int64_t* p) {
  int64_t v;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ bf16 load_bf16(const bf16* p) { return bf16{load_2(p)}; }
// Each 32-bit word is seen whole; the words of one access may be seen one after the other.
__device__ __forceinline__ void store_4(void* p, uint32_t v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ void store_8(void* p, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_16(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---- messages between ranks: words of 8 bytes, two an access, at the system's scope (see peer.cuh)
__device__ __forceinline__ ulonglong2 load_words(const uint64_t* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t load_word(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_words(uint64_t* p, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void store_word(uint64_t* p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// ---- messages: 16 bytes that are seen as a whole, since one 128-bit access is one access and not four
__device__ __forceinline__ uint4 load_message(const void* p) {
  uint64_t a, b;
  asm volatile("{.reg .b128 v; ld.relaxed.gpu.global.b128 v, [%2]; mov.b128 {%0,%1}, v;}" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return {uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)};
}
__device__ __forceinline__ uint4 load_message_acquire(const void* p) {
  uint64_t a, b;
  asm volatile("{.reg .b128 v; ld.acquire.gpu.global.b128 v, [%2]; mov.b128 {%0,%1}, v;}" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return {uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)};
}
__device__ __forceinline__ void store_message(void* p, uint4 v) {
  asm volatile("{.reg .b64 a, b; .reg .b128 v; mov.b64 a, {%1,%2}; mov.b64 b, {%3,%4}; mov.b128 v, {a,b}; st.relaxed.gpu.global.b128 [%0], v;}" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- events
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release(uint64_t* p, uint64_t amount) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(amount) : "memory");
}
// Orders what this thread, and those that met it at a barrier, wrote before what it writes after. (__threadfence() is the costlier
// sequentially consistent fence.)
__device__ __forceinline__ void fence_release() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void add_relaxed(uint64_t* p, uint64_t amount) {  // after fence_release(): a release
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(amount) : "memory");
}
__device__ __forceinline__ void store_release(int32_t* p, int32_t v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// To and from the host while the kernel runs (pinned host memory).
__device__ __forceinline__ void store_release_system(int32_t* p, int32_t v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_system(int64_t* p, int64_t v) {
  asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ int32_t load_system(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int64_t now_ns() {  // ticks in steps of some 32 ns
  int64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ---- shared memory
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ uint4 shared_load_16(uint32_t p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint2 shared_load_8(uint32_t p) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ void shared_store_16(uint32_t p, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---- copies of 16 bytes to shared memory on this thread's behalf, in groups that are waited for in their order
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool wanted) {  // zeros if not; `from` must be an address all the same
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void await_copies() {  // all groups but the last N
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- mbarriers and bulk copies
__device__ __forceinline__ void barrier_init(uint32_t b, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ bool barrier_passed(uint32_t b, uint32_t parity) {  // does not wait
  uint32_t ok;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  return ok;
}
__device__ __forceinline__ bool barrier_try(uint32_t b, uint32_t parity) {  // waits for a time that the hardware chooses
  uint32_t ok;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  return ok;
}
// Weights are used once a step, so they are the first to be evicted from the L2.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier), "l"(0x12F0000000000000ull)
               : "memory");
}

// Brings bytes to the L2. Nothing tells when they are there, or whether they stay: whoever loads them then is only faster or not.
__device__ __forceinline__ void bulk_prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// ---- tensor cores: d[16 x 8] += a[16 x 16] * b[16 x 8], bf16 in, float32 out
__device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements: row r stands in lanes 4 r to 4 r + 3, two elements a lane.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// ---- race detectors
// Programs built with MPK_CHECKED=1 hand over in ways that race detectors can follow. They know nothing of a flag that one thread polls (an
// access of the memory model's relaxed kind, but an ordinary instruction in shared memory) nor of a warp whose first lane arrives for all.
#ifndef MPK_CHECKED
#define MPK_CHECKED 0
#endif

// A word of shared memory that threads set and poll without waiting for one another.
struct Flag {
  volatile int value;
#if MPK_CHECKED
  __device__ __forceinline__ operator int() const { return atomicOr(const_cast<int*>(&value), 0); }
  __device__ __forceinline__ void operator=(int v) { atomicExch(const_cast<int*>(&value), v); }
#else
  __device__ __forceinline__ operator int() const { return value; }
  __device__ __forceinline__ void operator=(int v) { value = v; }
#endif
};
// A time that threads keep together.
struct Clock {
  volatile int64_t value;
#if MPK_CHECKED
  using Word = unsigned long long;
  __device__ __forceinline__ operator int64_t() const { return int64_t(atomicAdd(reinterpret_cast<Word*>(const_cast<int64_t*>(&value)), Word(0))); }
  __device__ __forceinline__ void operator=(int64_t v) { atomicExch(reinterpret_cast<Word*>(const_cast<int64_t*>(&value)), Word(v)); }
#else
  __device__ __forceinline__ operator int64_t() const { return value; }
  __device__ __forceinline__ void operator=(int64_t v) { value = v; }
#endif
};

// A warp has read what `barrier` guards; all its lanes call this. WARP_ARRIVALS: how often a warp arrives.
constexpr int WARP_ARRIVALS = MPK_CHECKED ? 32 : 1;
__device__ __forceinline__ void warp_arrive(uint32_t barrier, int lane) {
  __syncwarp();
  if (MPK_CHECKED || lane == 0) barrier_arrive(barrier);
}

// ---- of one thread
// This thread's lane, asked of the hardware again. What follows from a lane (addresses of fragments, say) is then computed where it
// is used; otherwise compilers compute all of it once, outside of every loop, and keep it in registers that are not there.
__device__ __forceinline__ int own_lane() {
  int lane;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  return lane;
}

// And of its block.
__device__ __forceinline__ int own_block() {
  int block;
  asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(block));
  return block;
}

// From here on a value stands in a register, and where it came from is forgotten.
__device__ __forceinline__ void hold(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void hold(float& v) { asm volatile("" : "+f"(v)); }

// This thread's number in its block, likewise.
__device__ __forceinline__ int own_thread() {
  int thread;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
  return thread;
}

// 2^x with a relative error of some 2^-22; 0 for minus infinity.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mpk
