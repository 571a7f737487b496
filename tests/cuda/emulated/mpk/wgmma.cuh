// What mpk/wgmma.cuh of the CUDA back end offers, in emulation: a warp computes its 16 rows at once.
#pragma once
#include "mpk/ptx.cuh"

namespace mpk {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N>
inline void wgmma_wait() { emulation::exchange({}); }
inline void fence_async() {}
inline uint64_t wgmma_operand(uint32_t at) {
  if (at % 1024 != 0) std::fprintf(stderr, "operand at shared address %u, expected a multiple of 1024\n", at), std::abort();
  return at / 16;
}

// Element `k` of 16 of row `row` of an operand in shared memory.
inline float operand_element(uint64_t operand, int row, int k) {
  const uint32_t at = uint32_t(operand) * 16, base = at & ~127u, unit = at % 128 / 16 + k / 8;
  return low(emulation::shared_load<uint16_t>(base + row * 128 + (unit ^ (row & 7)) * 16 + k % 8 * 2));
}

template <int N>
struct Wgmma {
  static void mma(float (&d)[N / 2], uint4 a, uint64_t b, int sum) {
    const emulation::Message* all = emulation::exchange({{a.x, a.y, a.z, a.w}});
    float rows[2][16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k) rows[half][k] = low(element(all, half + 2 * (k / 8), own_lane() / 4, k % 8));
    multiply(d, rows, b, sum);
  }
  static void mma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int sum) {
    float rows[2][16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k) rows[half][k] = operand_element(a, emulation::thread / 32 % 4 * 16 + own_lane() / 4 + half * 8, k);
    multiply(d, rows, b, sum);
  }

 private:
  static void multiply(float (&d)[N / 2], const float (&rows)[2][16], uint64_t b, int sum) {
    for (int e = 0; e < N / 2; ++e) {
      const int column = e / 4 * 8 + own_lane() % 4 * 2 + e % 2;
      float total = sum ? d[e] : 0.0f;
      for (int k = 0; k < 16; ++k) total += rows[e / 2 % 2][k] * operand_element(b, column, k);
      d[e] = total;
    }
  }
};

}  // namespace mpk
