// Search for the place in the order of a row's values at which a running total reaches what is wanted, by a block.
//
// Order: larger values first, lower tokens first among equals. Totals are integers (counts, or weights in fixed point), so that they
// do not depend on the order of additions. The search goes digit by digit over the 32 bits of a key: a histogram of the members
// whose higher digits are known, then the bin in which the total is reached. Only slices that can hold members are read.
#pragma once
#include "mpk/sampling.cuh"

namespace mpk::sample {

constexpr int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;
constexpr float FIXED_ONE = 1099511627776.0f;  // 2^40: a weight of 1; 2^18 weights of 1 fit 64 bits

// Larger values have larger keys; minus infinity has the smallest key of a number.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Which values count, and how much. `by_token`: among the members, the order is that of tokens alone.
struct Query {
  uint32_t low, high;   // keys of members
  bool by_token;
  float best, sharp;    // amounts: weights e^((x - best) * sharp / log2 e) in fixed point; sharp 0: every member counts 1

  __device__ __forceinline__ bool member(float x) const { return x > minus_infinity() && key_of(x) >= low && key_of(x) <= high; }
  __device__ __forceinline__ uint32_t key(float x, int token) const { return by_token ? ~uint32_t(token) : key_of(x); }
  __device__ __forceinline__ uint64_t amount(float x) const {
    return sharp == 0.0f ? 1 : __float2ull_rn(exp2_fast((x - best) * sharp) * FIXED_ONE);
  }
};

// The key at which the total is reached, how much of it was missing before that key, and how much members with that key hold.
struct Found {
  uint32_t key;
  uint64_t missing, here;
  bool reached;
};

template <class V>
struct Memory {
  static constexpr int parts = int(V::parts);
  unsigned long long bins[BINS], mass[parts], sums[WARPS];
  Part part[parts];
  int slices[parts], slice_count;
  Found found;
  float candidate[32];
  int candidate_token[32], candidates;
  Part best_of[WARPS];
  int chosen;
  double fraction;
};

// Calls f(value, token) for the values of the slices listed in memory; a warp a slice.
template <class V, class F>
__device__ __forceinline__ void visit(const Block& b, const Memory<V>& m, const float* row, F f) {
  constexpr int vocab = int(V::vocab), size = int(V::slice), BATCH = 8;
  for (int n = b.warp; n < m.slice_count; n += WARPS) {
    const int begin = m.slices[n] * size, end = begin + size < vocab ? begin + size : vocab;
    for (int at = begin + b.lane * 4; at < end; at += 128 * BATCH) {
      float x[BATCH][4];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) load_logits<vocab>(row, at + j * 128 < end ? at + j * 128 : vocab, x[j]);
#pragma unroll
      for (int j = 0; j < BATCH; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(x[j][e], at + j * 128 + e);
    }
  }
}

// Lists the slices whose largest value (`raw`: of the logits as they came in) has at least key `low`.
template <class V>
__device__ __forceinline__ void list_slices(const Block& b, Memory<V>& m, uint32_t low, bool raw) {
  if (b.thread == 0) m.slice_count = 0;
  b.sync();
  for (int j = b.thread; j < m.parts; j += THREADS) {
    const float top = raw ? m.part[j].raw_max : m.part[j].max;
    if (top > minus_infinity() && key_of(top) >= low) m.slices[atomicAdd(&m.slice_count, 1)] = j;
  }
  b.sync();
}

// A key that at least `k` values reach: the k-th largest of the slices' maxima; 0 where there are fewer slices.
template <class V>
__device__ __forceinline__ uint32_t bound_of_largest(const Block& b, Memory<V>& m, int k, bool raw) {
  const auto key = [&](int j) { return key_of(raw ? m.part[j].raw_max : m.part[j].max); };
  if (b.thread == 0) m.chosen = -1;
  b.sync();
  if (k <= m.parts)
    for (int j = b.thread; j < m.parts; j += THREADS) {
      int larger = 0;
      for (int other = 0; other < m.parts; ++other) larger += key(other) > key(j) || (key(other) == key(j) && other < j);
      if (larger == k - 1) m.chosen = j;
    }
  b.sync();
  return m.chosen < 0 ? 0 : key(m.chosen);
}

// Where the total of the listed slices' members reaches `wanted`, or with wanted = 0 the part `fraction` of all of it, at least 1.
// Not inlined: it is called in several places, and instructions have to be fetched too.
template <class V>
__device__ __forceinline__ void search(const Block& b, Memory<V>& m, const float* row, Query q, uint64_t wanted, double fraction) {
  uint32_t prefix = 0;
  uint64_t here = 0;
  bool reached = true;
#pragma unroll 1
  for (int shift = 32 - DIGIT_BITS, bits = DIGIT_BITS; reached; bits = shift < DIGIT_BITS ? shift : DIGIT_BITS, shift -= bits) {
    for (int j = b.thread; j < BINS; j += THREADS) m.bins[j] = 0;
    b.sync();
    const int above = shift + bits;
    visit(b, m, row, [&](float x, int token) {
      if (!q.member(x)) return;
      const uint32_t key = q.key(x, token);
      if (above < 32 && key >> above != prefix) return;
      atomicAdd(&m.bins[key >> shift & ((1u << bits) - 1)], q.amount(x));
    });
    b.sync();
    constexpr int OWN = BINS / THREADS;  // bins of a thread, from the last one down
    uint64_t own = 0, total;
#pragma unroll
    for (int j = 0; j < OWN; ++j) own += m.bins[BINS - 1 - (b.thread * OWN + j)];
    uint64_t before = block_sum_before<unsigned long long>(b, own, m.sums, reinterpret_cast<unsigned long long&>(total));
    if (wanted == 0) {
      wanted = uint64_t(fraction * double(total));
      if (wanted > total) wanted = total;
      if (wanted < 1) wanted = 1;
    }
    reached = wanted <= total;
    if (reached && before < wanted && wanted <= before + own)
      for (int j = 0; j < OWN; ++j) {
        const int bin = BINS - 1 - (b.thread * OWN + j);
        if (wanted <= before + m.bins[bin]) {
          m.found = Found{prefix << bits | uint32_t(bin), wanted - before, m.bins[bin], true};
          break;
        }
        before += m.bins[bin];
      }
    b.sync();
    if (!reached) break;
    prefix = m.found.key, wanted = m.found.missing, here = m.found.here;
    b.sync();
    if (shift == 0) break;
  }
  if (b.thread == 0) m.found = Found{prefix, wanted, here, reached};
  b.sync();
}

}  // namespace mpk::sample
