// Copies of 16 bytes from global to shared memory that threads do not wait for.
#pragma once
#include "mpk/ptx.cuh"

namespace mpk {

__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {  // at the L2
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's committed groups have not arrived.
template <int N>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void shared_store_4(uint32_t p, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
__device__ __forceinline__ void shared_store_8(uint32_t p, uint2 v) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(p), "r"(v.x), "r"(v.y) : "memory"); }

}  // namespace mpk
