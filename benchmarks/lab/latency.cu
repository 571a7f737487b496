// What a small message costs while weights stream: latency of an L2 load, of a store made visible (store + fence) and of an atomic, in
// SMs that stream and in SMs that do not, against the bytes in flight per SM; and the bandwidth reached.
//
// 132 blocks; all but the last `quiet` stream `bytes` each through a ring by bulk copies with at most `cap` bytes in flight. One probe
// warp a block measures. Build: nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a latency.cu -o latency
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("CUDA %s line %d\n", cudaGetErrorString(e), __LINE__); exit(1); } } while (0)
constexpr int S = 132, PROBES = 4096;
__device__ __forceinline__ uint32_t s2u(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ bool mb_test(uint32_t b, uint32_t parity) {
  uint32_t ok; asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p;}" : "=r"(ok) : "r"(b), "r"(parity) : "memory"); return ok;
}
struct Args { const char* w; size_t bytes; int stage, stages, quiet, layout, hint, kind; uint32_t* hot; uint32_t* own; uint32_t* out; int* counts; };
// kind: 0 no probe, 1 load of a line that nobody writes (L2 hit), 2 store + fence, 3 atomic with result on a line of this block
__global__ void __launch_bounds__(96, 1) stream(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) unsigned char sm[]; __shared__ uint64_t full[64]; __shared__ volatile int done;
  const int t = threadIdx.x, b = blockIdx.x; const uint32_t ring = s2u(sm), f = s2u(full); const int n = b >= S - a.quiet ? 0 : (int)(a.bytes / a.stage), streams = S - a.quiet;
  if (t == 0) { for (int i = 0; i < a.stages; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(f + i * 8)); asm volatile("fence.mbarrier_init.release.cluster;"); done = 0; }
  __syncthreads();
  if (t == 0) {  // the ring is as deep as what may be in flight; a stage is free as soon as it has arrived
    int s = 0, par = 0; const char* p = a.layout ? a.w + (size_t)b * a.stage : a.w + (size_t)b * a.bytes; const size_t step = a.layout ? (size_t)streams * a.stage : a.stage;
    for (int i = 0; i < n; i++, p += step) {
      if (i >= a.stages) while (!mb_test(f + s * 8, par ^ 1)) {}
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(f + s * 8), "r"(a.stage) : "memory");
      if (a.hint) asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(ring + s * a.stage), "l"(p), "r"(a.stage), "r"(f + s * 8), "l"(0x12F0000000000000ull) : "memory");
      else asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(ring + s * a.stage), "l"(p), "r"(a.stage), "r"(f + s * 8) : "memory");
      if (++s == a.stages) { s = 0; par ^= 1; }
    }
    for (int i = max(0, n - a.stages); i < n; i++) { while (!mb_test(f + s % a.stages * 8, par ^ 1)) {} if (++s == a.stages) { s = 0; par ^= 1; } }
    done = 1;
  }
  if (t == 64 && a.kind) {  // probe
    uint32_t* o = a.out + (size_t)b * PROBES; int k = 0; const int limit = n ? PROBES : 200;
    while (k < limit && !(n && done)) {
      uint32_t v; long long c0 = clock64();
      if (a.kind == 1) { asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(a.hot + ((k * 7 + b) & 63) * 32) : "memory"); }
      else if (a.kind == 2) { asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(a.own + b * 64), "r"(k) : "memory"); __threadfence(); v = 0; }
      else { v = atomicAdd(a.own + b * 64, 1); }
      if (v == 0xdeadbeef) k++;
      long long c1 = clock64(); o[k++] = (uint32_t)(c1 - c0); __nanosleep(200);
    }
    a.counts[b] = k;
  }
}
int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  size_t per = (size_t)16 << 20, tot = per * S; char* w; uint32_t *hot, *own, *out; int* counts;
  CK(cudaMalloc(&w, tot)); CK(cudaMemset(w, 0x3c, tot)); CK(cudaMalloc(&hot, 8192 * 4)); CK(cudaMemset(hot, 0, 8192 * 4)); CK(cudaMalloc(&own, S * 256)); CK(cudaMemset(own, 0, S * 256)); CK(cudaMalloc(&out, S * PROBES * 4)); CK(cudaMalloc(&counts, S * 4));
  CK(cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024)); cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
  auto run = [&](Args a) { std::vector<float> v; for (int i = 0; i < 6; i++) { cudaEventRecord(e0); stream<<<S, 96, a.stage * a.stages>>>(a); cudaEventRecord(e1); CK(cudaGetLastError()); CK(cudaEventSynchronize(e1)); float ms; cudaEventElapsedTime(&ms, e0, e1); if (i) v.push_back(ms); } std::sort(v.begin(), v.end()); return v[2]; };
  for (int layout : {0, 1}) for (int hint : {0, 1}) for (int stage : {4096, 8192, 16384, 32768}) for (int cap : {16, 24, 32, 40, 48, 64, 96, 128, 192}) {
    int st = cap * 1024 / stage; if (st < 1 || st > 64) continue; Args a{w, per, stage, st, 0, layout, hint, 0, hot, own, out, counts}; float ms = run(a);
    printf("bandwidth: %s, hint %d, stage %2d KB, in flight %3d KB: %.3f TB/s\n", layout ? "interleaved" : "contiguous ", hint, stage / 1024, cap, tot / ms / 1e9); }
  const char* nm[] = {"", "L2 load", "store + fence", "atomic"};
  for (int kind : {1, 2, 3}) for (int cap : {0, 16, 32, 48, 64, 96, 128, 192}) {
    int q = cap ? 4 : S; Args a{w, per, 16384, std::max(1, cap / 16), q, 1, 1, kind, hot, own, out, counts}; CK(cudaMemset(counts, 0, S * 4)); float ms = run(a);
    std::vector<uint32_t> h((size_t)S * PROBES); std::vector<int> c(S); CK(cudaMemcpy(h.data(), out, h.size() * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(c.data(), counts, S * 4, cudaMemcpyDeviceToHost));
    std::vector<uint32_t> busy, quiet; for (int b = 0; b < S; b++) for (int k = 5; k < c[b]; k++) (b >= S - q ? quiet : busy).push_back(h[(size_t)b * PROBES + k]);
    auto st = [&](std::vector<uint32_t>& v) { if (v.empty()) { printf(" -"); return; } std::sort(v.begin(), v.end()); double m = 0; for (auto x : v) m += x; printf(" mean %.2f median %.2f p90 %.2f p99 %.2f", m / v.size() / 1980, v[v.size() / 2] / 1980., v[v.size() * 9 / 10] / 1980., v[v.size() * 99 / 100] / 1980.); };
    printf("%-13s in flight %3d KB (%.2f TB/s): us, in SMs that stream:", nm[kind], cap, cap ? per * (double)(S - q) / ms / 1e9 : 0.); st(busy); printf(" | in quiet SMs:"); st(quiet); printf("\n");
  }
}
