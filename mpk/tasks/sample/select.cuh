// Search for the place in the order of a row's values at which a running total reaches what is wanted, by a block.
//
// Order: larger values first, lower tokens first among equals. Totals are integers (counts, or weights in fixed point), so that they
// do not depend on the order of additions. The search goes digit by digit over the 32 bits of a key: a histogram of the members
// whose higher digits are known, then the bin in which the total is reached. Only slices that can hold members are read.
#pragma once
#include "mpk/sampling.cuh"

namespace mpk::sample {

constexpr int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;

// Which values count, and how much. `by_token`: among the members, the order is that of tokens alone.
struct Query {
  uint32_t low, high;   // keys of members
  bool by_token;
  float best, sharp;    // amounts: weights e^((x - best) * sharp / log2 e) in fixed point; sharp 0: every member counts 1

  __device__ __forceinline__ bool member(float x) const { return x > minus_infinity() && key_of(x) >= low && key_of(x) <= high; }
  __device__ __forceinline__ uint32_t key(float x, int token) const { return by_token ? ~uint32_t(token) : key_of(x); }
  __device__ __forceinline__ uint64_t amount(float x) const {
    return sharp == 0.0f ? 1 : fixed_weight(x, best, sharp);
  }
};

// The key at which the total is reached, how much of it was missing before that key, and how much members with that key hold.
struct Found {
  uint32_t key;
  uint64_t missing, here;
  bool reached;
};

// 64-bit sums in shared memory, in halves: additions of 32 bits are one instruction, of 64 bits a loop that waits for its like.
template <int N>
struct Sums {
  uint32_t low[N], high[N];

  __device__ __forceinline__ void clear(int j) { low[j] = high[j] = 0; }
  __device__ __forceinline__ void add(int j, uint64_t amount) {
    const uint32_t lower = uint32_t(amount), before = atomicAdd(&low[j], lower), upper = uint32_t(amount >> 32) + (before + lower < lower);
    if (upper != 0) atomicAdd(&high[j], upper);
  }
  __device__ __forceinline__ uint64_t get(int j) const { return uint64_t(high[j]) << 32 | low[j]; }
};

template <class V>
struct Memory {
  static constexpr int parts = int(V::parts), CAPACITY = parts <= 160 ? 4096 : 2048;
  Sums<BINS> bins;
  Sums<parts> mass;
  uint64_t sums[WARPS];
  Part part[parts];
  int slices[parts], slice_count;
  Found found;
  float value[CAPACITY];  // candidates; if there are more than fit, the slices are read again instead
  int token[CAPACITY], candidates;
  Part best_of[WARPS];
  int chosen;
  Pick pick;

  __device__ __forceinline__ bool listed() const { return candidates <= CAPACITY; }
};

// Calls f(value, token) for the values of the slices listed in memory; a warp a slice, BATCH loads of 16 bytes in flight a lane.
template <int BATCH, class V, class F>
__device__ __forceinline__ void visit(const Block& b, const Memory<V>& m, const float* row, F f) {
  constexpr int vocab = int(V::vocab), size = int(V::slice);
#pragma unroll 1
  for (int n = b.warp; n < m.slice_count; n += WARPS) {
    const int begin = m.slices[n] * size, end = begin + size < vocab ? begin + size : vocab;
#pragma unroll 1
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

// Makes candidates of the values with keys of at least `low` in the listed slices.
template <class V>
__device__ __forceinline__ void collect(const Block& b, Memory<V>& m, const float* row, uint32_t low) {
  if (b.thread == 0) m.candidates = 0;
  b.sync();
  visit<8>(b, m, row, [&](float x, int token) {
    if (!(x > minus_infinity()) || key_of(x) < low) return;
    const int at = atomicAdd(&m.candidates, 1);
    if (at < m.CAPACITY) m.value[at] = x, m.token[at] = token;
  });
  b.sync();
}

// Calls f(value, token) for all candidates, or where they did not fit for all values of the listed slices.
template <class V, class F>
__device__ __forceinline__ void visit_candidates(const Block& b, const Memory<V>& m, const float* row, F f) {
  if (!m.listed()) return visit<4>(b, m, row, f);
#pragma unroll 1
  for (int j = b.thread; j < m.candidates; j += THREADS) f(m.value[j], m.token[j]);
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

// Where the total of the candidates that are members reaches `wanted`, or with wanted = 0 the part `fraction` of all of it, at least 1.
template <class V>
__device__ __forceinline__ void search(const Block& b, Memory<V>& m, const float* row, const Query& q, uint64_t wanted, double fraction) {
  // Keys are counted from the lowest possible one and spread over all 32 bits: digits of near values would all be the same, and
  // additions to one bin have to wait for each other.
  const uint32_t base = q.by_token ? ~uint32_t(int(V::vocab) - 1) : q.low, highest = q.by_token ? 0xffffffffu : min(q.high, key_of(q.best));
  const int spread = highest > base ? __clz(highest - base) : 31;
  uint32_t prefix = 0;
  uint64_t here = 0;
  bool reached = true;
#pragma unroll 1
  for (int shift = 32 - DIGIT_BITS, bits = DIGIT_BITS; reached; bits = shift < DIGIT_BITS ? shift : DIGIT_BITS, shift -= bits) {
    for (int j = b.thread; j < BINS; j += THREADS) m.bins.clear(j);
    b.sync();
    const int above = shift + bits;
    visit_candidates(b, m, row, [&](float x, int token) {
      if (!q.member(x)) return;
      const uint32_t key = (q.key(x, token) - base) << spread;
      if (above < 32 && key >> above != prefix) return;
      m.bins.add(key >> shift & ((1u << bits) - 1), q.amount(x));
    });
    b.sync();
    constexpr int OWN = BINS / THREADS;  // bins of a thread, from the last one down
    uint64_t own = 0, total;
#pragma unroll
    for (int j = 0; j < OWN; ++j) own += m.bins.get(BINS - 1 - (b.thread * OWN + j));
    uint64_t before = block_sum_before<uint64_t>(b, own, m.sums, total);
    if (wanted == 0) {
      wanted = uint64_t(fraction * double(total));
      if (wanted > total) wanted = total;
      if (wanted < 1) wanted = 1;
    }
    reached = wanted <= total;
    if (reached && before < wanted && wanted <= before + own)
      for (int j = 0; j < OWN; ++j) {
        const int bin = BINS - 1 - (b.thread * OWN + j);
        if (wanted <= before + m.bins.get(bin)) {
          m.found = Found{prefix << bits | uint32_t(bin), wanted - before, m.bins.get(bin), true};
          break;
        }
        before += m.bins.get(bin);
      }
    b.sync();
    if (!reached) break;
    prefix = m.found.key, wanted = m.found.missing, here = m.found.here;
    b.sync();
    if (shift == 0) break;
  }
  if (b.thread == 0) m.found = Found{base + (prefix >> spread), wanted, here, reached};
  b.sync();
}

}  // namespace mpk::sample
