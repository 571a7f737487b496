// Short float vectors: one source for SSE, AVX2, AVX-512 and NEON through the compilers' vector extensions, and plain arrays
// where MPK_PORTABLE is defined. Width and register budget follow the compile flags.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mpk {

#if defined(MPK_PORTABLE)
constexpr int kLanes = 4;
constexpr int kAccumulators = 12;
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kAccumulators = 24;  // of 32 registers; the rest hold weights and broadcast activations
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kAccumulators = 12;  // of 16 registers
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kAccumulators = 24;  // of 32 registers
#else
constexpr int kLanes = 4;
constexpr int kAccumulators = 12;
#endif

#define MPK_INLINE inline __attribute__((always_inline))

using bf16 = uint16_t;

// Width of vectors for work whose length is a multiple of `lanes` (a power of two).
constexpr int vector_lanes(int lanes) { return lanes < kLanes ? lanes : kLanes; }

inline float bf16_to_float(bf16 h) {
  const uint32_t bits = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest, ties to even; a NaN stays a NaN.
inline bf16 float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40u);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(MPK_PORTABLE)

template <int N>
struct Vec {
  float v[N];
};

template <int N>
MPK_INLINE Vec<N> load(const float* p) {
  Vec<N> r;
  for (int i = 0; i < N; ++i) r.v[i] = p[i];
  return r;
}
template <int N>
MPK_INLINE void store(float* p, Vec<N> a) {
  for (int i = 0; i < N; ++i) p[i] = a.v[i];
}
template <int N>
MPK_INLINE Vec<N> splat(float f) {
  Vec<N> r;
  for (int i = 0; i < N; ++i) r.v[i] = f;
  return r;
}
#define MPK_ELEMENTWISE(NAME, EXPRESSION)              \
  template <int N>                                     \
  MPK_INLINE Vec<N> NAME(Vec<N> a, Vec<N> b) {         \
    Vec<N> r;                                          \
    for (int i = 0; i < N; ++i) r.v[i] = (EXPRESSION); \
    return r;                                          \
  }
MPK_ELEMENTWISE(operator+, a.v[i] + b.v[i])
MPK_ELEMENTWISE(operator-, a.v[i] - b.v[i])
MPK_ELEMENTWISE(operator*, a.v[i] * b.v[i])
MPK_ELEMENTWISE(operator/, a.v[i] / b.v[i])
MPK_ELEMENTWISE(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
MPK_ELEMENTWISE(min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef MPK_ELEMENTWISE
template <int N>
MPK_INLINE Vec<N> fma(Vec<N> a, Vec<N> b, Vec<N> c) {
  for (int i = 0; i < N; ++i) {
#if defined(__FP_FAST_FMAF)
    c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
    c.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
  }
  return c;
}
// The first (or the second: `Which` = 1) elements of N consecutive bf16 pairs.
template <int N, int Which>
MPK_INLINE Vec<N> load_of_pairs(const bf16* p) {
  Vec<N> r;
  for (int i = 0; i < N; ++i) r.v[i] = bf16_to_float(p[2 * i + Which]);
  return r;
}
// a * 2^n where `shifted` is n plus the constant kRoundShift of exp().
template <int N>
MPK_INLINE Vec<N> scale_by_power(Vec<N> a, Vec<N> shifted) {
  for (int i = 0; i < N; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &shifted.v[i], 4);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    std::memcpy(&power, &bits, 4);
    a.v[i] *= power;
  }
  return a;
}
// 0 where x < limit, a elsewhere (and where x is not a number).
template <int N>
MPK_INLINE Vec<N> zero_below(Vec<N> a, Vec<N> x, float limit) {
  for (int i = 0; i < N; ++i) a.v[i] = x.v[i] < limit ? 0.0f : a.v[i];
  return a;
}

#else  // vector extensions

template <int N>
struct VecTypes;
#define MPK_VEC_TYPES(N)                                                    \
  template <>                                                               \
  struct VecTypes<N> {                                                      \
    typedef float Float __attribute__((vector_size(4 * N)));                \
    typedef uint32_t Bits __attribute__((vector_size(4 * N)));              \
    typedef float Unaligned __attribute__((vector_size(4 * N), aligned(2), may_alias)); \
    typedef uint32_t UnalignedBits __attribute__((vector_size(4 * N), aligned(2), may_alias)); \
  };
MPK_VEC_TYPES(4)
MPK_VEC_TYPES(8)
MPK_VEC_TYPES(16)
#undef MPK_VEC_TYPES

template <int N>
struct Vec {
  typename VecTypes<N>::Float v;
};

template <int N>
MPK_INLINE Vec<N> load(const float* p) {
  return {*reinterpret_cast<const typename VecTypes<N>::Unaligned*>(p)};
}
template <int N>
MPK_INLINE void store(float* p, Vec<N> a) {
  *reinterpret_cast<typename VecTypes<N>::Unaligned*>(p) = a.v;
}
template <int N>
MPK_INLINE Vec<N> splat(float f) {
  return {f - typename VecTypes<N>::Float{}};  // minus +0 keeps the sign of a zero
}
template <int N>
MPK_INLINE Vec<N> operator+(Vec<N> a, Vec<N> b) {
  return {a.v + b.v};
}
template <int N>
MPK_INLINE Vec<N> operator-(Vec<N> a, Vec<N> b) {
  return {a.v - b.v};
}
template <int N>
MPK_INLINE Vec<N> operator*(Vec<N> a, Vec<N> b) {
  return {a.v * b.v};
}
template <int N>
MPK_INLINE Vec<N> operator/(Vec<N> a, Vec<N> b) {
  return {a.v / b.v};
}
template <int N>
MPK_INLINE Vec<N> max(Vec<N> a, Vec<N> b) {
  return {a.v > b.v ? a.v : b.v};
}
template <int N>
MPK_INLINE Vec<N> min(Vec<N> a, Vec<N> b) {
  return {a.v < b.v ? a.v : b.v};
}
// One rounding where the machine can, asked for by name: left to contraction, gcc splits some chains of multiply-adds again when
// it tunes for processors with slow chains (seen with Sapphire Rapids), and a row's bits then depend on the rows beside it.
template <int N>
MPK_INLINE Vec<N> fma(Vec<N> a, Vec<N> b, Vec<N> c) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return {(typename VecTypes<N>::Float)_mm512_fmadd_ps((__m512)a.v, (__m512)b.v, (__m512)c.v)};
#endif
#if defined(__FMA__)
  if constexpr (N == 8) return {(typename VecTypes<N>::Float)_mm256_fmadd_ps((__m256)a.v, (__m256)b.v, (__m256)c.v)};
  if constexpr (N == 4) return {(typename VecTypes<N>::Float)_mm_fmadd_ps((__m128)a.v, (__m128)b.v, (__m128)c.v)};
#endif
#if defined(__aarch64__)
  if constexpr (N == 4) return {(typename VecTypes<N>::Float)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)};
#endif
  return {a.v * b.v + c.v};
}
// The first (or the second: `Which` = 1) elements of N consecutive bf16 pairs.
template <int N, int Which>
MPK_INLINE Vec<N> load_of_pairs(const bf16* p) {
  using Bits = typename VecTypes<N>::Bits;
  const Bits pairs = *reinterpret_cast<const typename VecTypes<N>::UnalignedBits*>(p);
  constexpr bool low = (Which == 0) == (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  const Bits wide = low ? (Bits)(pairs << 16) : (Bits)(pairs & 0xffff0000u);
  return {(typename VecTypes<N>::Float)wide};
}
// a * 2^n where `shifted` is n plus the constant kRoundShift of exp().
template <int N>
MPK_INLINE Vec<N> scale_by_power(Vec<N> a, Vec<N> shifted) {
  using Bits = typename VecTypes<N>::Bits;
  const Bits power = ((Bits)shifted.v << 23) + 0x3f800000u;
  return {a.v * (typename VecTypes<N>::Float)power};
}
// 0 where x < limit, a elsewhere (and where x is not a number).
template <int N>
MPK_INLINE Vec<N> zero_below(Vec<N> a, Vec<N> x, float limit) {
  return {x.v < splat<N>(limit).v ? typename VecTypes<N>::Float{} : a.v};
}

#endif

// Sum and maximum over lanes, in the order of a binary tree (the same for every call).
template <int N>
MPK_INLINE float sum_lanes(Vec<N> a) {
  float lanes[N];
  store(lanes, a);
  for (int half = N / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
template <int N>
MPK_INLINE float max_lanes(Vec<N> a) {
  float lanes[N];
  store(lanes, a);
  for (int half = N / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// e^x with a relative error below 2e-7: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r, times 2^n. exp(0) is exactly 1;
// results below the normal range are 0; x above 88 counts as 88.
template <int N>
MPK_INLINE Vec<N> exp(Vec<N> x) {
  constexpr float kRoundShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  constexpr float kLowest = -87.3f, kHighest = 88.0f;
  const Vec<N> given = x;
  x = min(splat<N>(kHighest), max(splat<N>(kLowest), x));  // in this order a NaN passes
  const Vec<N> shifted = fma(x, splat<N>(1.44269504088896341f), splat<N>(kRoundShift));
  const Vec<N> n = shifted - splat<N>(kRoundShift);
  Vec<N> r = fma(n, splat<N>(-0.693359375f), x);  // ln 2 in two parts, the first with few bits, so that n times it is exact
  r = fma(n, splat<N>(2.12194440054690583e-4f), r);
  // Taylor coefficients up to r^7: the remainder is below 1e-8 for |r| <= 0.35
  Vec<N> p = splat<N>(1.0f / 5040);
  p = fma(p, r, splat<N>(1.0f / 720));
  p = fma(p, r, splat<N>(1.0f / 120));
  p = fma(p, r, splat<N>(1.0f / 24));
  p = fma(p, r, splat<N>(1.0f / 6));
  p = fma(p, r, splat<N>(0.5f));
  p = fma(p, r, splat<N>(1.0f));
  p = fma(p, r, splat<N>(1.0f));
  return zero_below(scale_by_power(p, shifted), given, kLowest);
}

}  // namespace mpk
