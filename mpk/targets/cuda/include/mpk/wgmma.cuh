// Tensor core products of a warp group (4 warps, 64 rows): asynchronous, B (and perhaps A) from shared memory, sums in registers.
//
// D[64 x N] += A[64 x 16] B[16 x N], bf16 in, float32 out. Warp w of the group holds rows 16 w to 16 w + 15 of A and D as fragments of
// mma.m16n8k16: lane 4 g + q has D[g][8 j + 2 q, + 1] in d[4 j], d[4 j + 1] and D[g + 8][same] in d[4 j + 2], d[4 j + 3].
// B stands in shared memory as rows of N, 64 columns of k (128 bytes) each, 16-byte unit u of row r at place u ^ (r % 8), 1024-byte aligned.
// Registers and shared memory that a product uses may be touched again once wgmma_wait() says that it is done.
#pragma once
#include "mpk/ptx.cuh"

namespace mpk {

// Orders what this thread wrote to registers and shared memory before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N of the committed groups are not done.
template <int N>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Says that ordinary accesses to shared memory (of the block) or global memory come before those of the tensor cores and bulk copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Descriptor of 64 columns of k at a shared address: swizzle of 128 bytes, groups of 8 rows 1024 bytes apart. 16 columns on: + 2.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t at) {
  return uint64_t(at >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// mma: A from registers; mma_shared: A from shared memory. sum 0: D = A B instead of D += A B.
template <int N>
struct Wgmma;

#define MPK_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MPK_D32(d, i) MPK_D8(d, i), MPK_D8(d, i + 8), MPK_D8(d, i + 16), MPK_D8(d, i + 24)

template <>
struct Wgmma<8> {
  static __device__ __forceinline__ void mma(float (&d)[4], uint4 a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3"
                 "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(sum));
  }
  static __device__ __forceinline__ void mma_shared(float (&d)[4], uint64_t a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3"
                 "}, %4, %5, p, 1, 1, 0, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b), "r"(sum));
  }
};

template <>
struct Wgmma<16> {
  static __device__ __forceinline__ void mma(float (&d)[8], uint4 a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
                 : MPK_D8(d, 0)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(sum));
  }
  static __device__ __forceinline__ void mma_shared(float (&d)[8], uint64_t a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, %8, %9, p, 1, 1, 0, 0;}"
                 : MPK_D8(d, 0)
                 : "l"(a), "l"(b), "r"(sum));
  }
};

template <>
struct Wgmma<32> {
  static __device__ __forceinline__ void mma(float (&d)[16], uint4 a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
                 : MPK_D8(d, 0), MPK_D8(d, 8)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(sum));
  }
  static __device__ __forceinline__ void mma_shared(float (&d)[16], uint64_t a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, p, 1, 1, 0, 0;}"
                 : MPK_D8(d, 0), MPK_D8(d, 8)
                 : "l"(a), "l"(b), "r"(sum));
  }
};

template <>
struct Wgmma<64> {
  static __device__ __forceinline__ void mma(float (&d)[32], uint4 a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : MPK_D32(d, 0)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(sum));
  }
  static __device__ __forceinline__ void mma_shared(float (&d)[32], uint64_t a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1, 0, 0;}"
                 : MPK_D32(d, 0)
                 : "l"(a), "l"(b), "r"(sum));
  }
};

template <>
struct Wgmma<128> {
  static __device__ __forceinline__ void mma(float (&d)[64], uint4 a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
                 : MPK_D32(d, 0), MPK_D32(d, 32)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(sum));
  }
  static __device__ __forceinline__ void mma_shared(float (&d)[64], uint64_t a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1, 0, 0;}"
                 : MPK_D32(d, 0), MPK_D32(d, 32)
                 : "l"(a), "l"(b), "r"(sum));
  }
};

template <>
struct Wgmma<256> {
  static __device__ __forceinline__ void mma(float (&d)[128], uint4 a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;}"
                 : MPK_D32(d, 0), MPK_D32(d, 32), MPK_D32(d, 64), MPK_D32(d, 96)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(sum));
  }
  static __device__ __forceinline__ void mma_shared(float (&d)[128], uint64_t a, uint64_t b, int sum) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, %128, %129, p, 1, 1, 0, 0;}"
                 : MPK_D32(d, 0), MPK_D32(d, 32), MPK_D32(d, 64), MPK_D32(d, 96)
                 : "l"(a), "l"(b), "r"(sum));
  }
};

#undef MPK_D32
#undef MPK_D8

}  // namespace mpk
