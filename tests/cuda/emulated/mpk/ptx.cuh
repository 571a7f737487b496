// What mpk/ptx.cuh of the CUDA back end offers to task bodies, in emulation.
#pragma once
#include <cstdint>

namespace mpk {

struct alignas(2) bf16 {
  uint16_t bits;
};
inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float to_float(bf16 v) { return low(v.bits); }
inline bf16 to_bf16(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t(bits >> 16 | 0x40)};
  return bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline uint32_t pack_bf16(float first, float second) { return to_bf16(first).bits | uint32_t(to_bf16(second).bits) << 16; }

inline uint4 load_16(const void* p) { return emulation::load<uint4>(p); }
inline uint2 load_8(const void* p) { return emulation::load<uint2>(p); }
inline uint32_t load_4(const void* p) { return emulation::load<uint32_t>(p); }
inline uint16_t load_2(const void* p) { return emulation::load<uint16_t>(p); }
inline ulonglong2 load_words(const uint64_t* p) { return emulation::load<ulonglong2>(p); }
inline uint64_t load_word(const uint64_t* p) { return emulation::load<uint64_t>(p); }
inline void store_words(uint64_t* p, uint64_t first, uint64_t second) { emulation::store(p, ulonglong2{first, second}); }
inline void store_word(uint64_t* p, uint64_t v) { *p = v; }
inline void load_16_if(bool wanted, const void* p, uint4& v) {
  if (wanted) v = load_16(p);
}
inline void load_8_if(bool wanted, const void* p, uint2& v) {
  if (wanted) v = load_8(p);
}
inline void prefetch(const void*) {}
inline float load_float(const float* p) { return *p; }
inline int32_t load_int(const int32_t* p) { return *p; }
inline int64_t load_long(const int64_t* p) { return *p; }
inline bf16 load_bf16(const bf16* p) { return *p; }
inline void store_4(void* p, uint32_t v) { emulation::store(p, v); }
inline void store_8(void* p, uint2 v) { emulation::store(p, v); }
inline void store_16(void* p, uint4 v) { emulation::store(p, v); }
inline uint4 load_message(const void* p) { return emulation::load<uint4>(p); }
inline uint4 load_message_acquire(const void* p) { return emulation::load<uint4>(p); }
inline void store_message(void* p, uint4 v) { emulation::store(p, v); }
inline void fence_release() {}
inline void store_system(int64_t* p, int64_t v) { *p = v; }
inline int32_t load_system(const int32_t* p) { return *p; }
inline uint64_t load_acquire(const uint64_t* p) { return *p; }
inline void add_release(uint64_t* p, uint64_t amount) { *p += amount; }
inline int64_t now_ns() { return 1; }

inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const unsigned char*>(p) - emulation::shared_memory); }
inline uint4 shared_load_16(uint32_t p) { return emulation::shared_load<uint4>(p); }
inline uint2 shared_load_8(uint32_t p) { return emulation::shared_load<uint2>(p); }

inline void shared_store_16(uint32_t p, uint4 v) { emulation::shared_store(p, v); }
inline void copy_16(uint32_t to, const void* from, bool wanted) { emulation::shared_store(to, wanted ? load_16(from) : uint4{}); }
inline void close_copies() {}
template <int N>
inline void await_copies() {}

inline int own_lane() { return emulation::thread % 32; }
inline void hold(int&) {}
inline void hold(float&) {}
inline float exp2_fast(float x) { return std::exp2(x); }

// Element (row, column) of the 8 x 8 matrix whose rows stand in four lanes each, two elements a lane; word `w` of their messages.
inline uint32_t element(const emulation::Message* all, int w, int row, int column) {
  const uint32_t pair = all[row * 4 + column / 2].word[w];
  return column % 2 != 0 ? pair >> 16 : pair & 0xffffu;
}

inline uint32_t transpose_8x8(uint32_t pair) {
  const emulation::Message* all = emulation::exchange({{pair}});
  const int row = own_lane() / 4, column = own_lane() % 4 * 2;
  return element(all, 0, column, row) | element(all, 0, column + 1, row) << 16;
}

inline void mma(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  const emulation::Message* all = emulation::exchange({{a.x, a.y, a.z, a.w, b0, b1}});
  for (int e = 0; e < 4; ++e) {
    const int row = own_lane() / 4, half = e / 2, column = own_lane() % 4 * 2 + e % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) sum += low(element(all, half + 2 * (k / 8), row, k % 8)) * low(element(all, 4 + k / 8, column, k % 8));
    d[e] += sum;
  }
}

}  // namespace mpk
