// What `head`, `sample` and `advance` share: the options of a sequence, what a slice of the vocabulary leaves for a row of logits, and how
// a token is drawn from a slice.
//
// The head's tasks are the slices. For every row of logits a task sends one message of 16 bytes (see `load_message`): {largest value, the
// lowest token that has it, sum of e^((value - largest) / temperature), step number}. That is all that `advance` needs to choose greedily
// or to draw from all tokens. Rows that want more ("special": penalties, filters, log-probabilities) get a Part as well, and a `sample`
// task chooses for them.
#pragma once
#include "mpk/context.hpp"
#include "mpk/reduce.cuh"

namespace mpk {

constexpr int PART_COLUMNS = 8;  // floats of a Part; PART_COLUMNS of mpk/tasks/head/sharing.py
constexpr int NO_TOKEN = 0x7fffffff;
constexpr float FIXED_ONE = 1099511627776.0f;  // 2^40: a weight of 1; 2^18 weights of 1 fit 64 bits

// One slice of one special row. `raw_*`: of the logits as they came in, only where log-probabilities are wanted.
struct alignas(16) Part {
  float max;       // largest value after penalties
  int32_t token;   // the lowest token that has it; NO_TOKEN if there is no number
  float sum;       // of e^((value - max) / temperature); 0 for greedy choice
  float unused;
  float raw_max, raw_sum;
  float unused_too[2];
};
static_assert(sizeof(Part) == PART_COLUMNS * 4, "layout of the buffer of parts");

struct Options {
  float temperature, repetition, presence, frequency, top_p, min_p;
  int top_k, prompt_length, top_logprobs, all_logits;
  uint64_t seed;

  __device__ __forceinline__ void load(const Sequence* s) {  // written by the host before the launch
    temperature = load_float(&s->temperature), repetition = load_float(&s->repetition_penalty);
    presence = load_float(&s->presence_penalty), frequency = load_float(&s->frequency_penalty);
    top_p = load_float(&s->top_p), min_p = load_float(&s->min_p), top_k = load_int(&s->top_k);
    prompt_length = load_int(&s->prompt_length), top_logprobs = load_int(&s->top_logprobs), all_logits = load_int(&s->all_logits);
    seed = uint64_t(load_long(reinterpret_cast<const int64_t*>(&s->seed)));
  }
  __device__ __forceinline__ bool penalises() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
  __device__ __forceinline__ bool filters(int vocab) const { return (top_k > 0 && top_k < vocab) || top_p < 1.0f || min_p > 0.0f; }
  __device__ __forceinline__ bool draws() const { return temperature > 0.0f; }
  // Whether the slices' messages are not all that is needed to choose a token.
  __device__ __forceinline__ bool special(int vocab) const {
    return all_logits || penalises() || top_logprobs >= 0 || (draws() && filters(vocab));
  }
};

// Factor of the exponent to base 2 of a weight; 0 for greedy choice.
__device__ __forceinline__ float sharpness(float temperature) { return temperature > 0.0f ? LOG2_E / temperature : 0.0f; }

// Larger values have larger keys; minus infinity has the smallest key of a number.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// A weight e^((x - best) / temperature) in fixed point, so that sums do not depend on the order of additions.
__device__ __forceinline__ uint64_t fixed_weight(float x, float best, float sharp) { return __float2ull_rn(exp2_fast((x - best) * sharp) * FIXED_ONE); }

// Maximum, its lowest token, and the sum of weights relative to it.
struct Summary {
  float max;
  int token;
  float sum;

  __device__ __forceinline__ void clear() { max = minus_infinity(), token = NO_TOKEN, sum = 0.0f; }

  template <int N>
  __device__ __forceinline__ void add(const float (&x)[N], int first, float sharp) {  // tokens first, first + 1, ...
    const float before = max;
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (x[e] > max) max = x[e], token = first + e;  // false for what is not a number
    if (sharp == 0.0f || max == minus_infinity()) return;
    sum *= exp2_fast((before - max) * sharp);
#pragma unroll
    for (int e = 0; e < N; ++e) sum += x[e] > minus_infinity() ? exp2_fast((x[e] - max) * sharp) : 0.0f;
  }
  __device__ __forceinline__ void merge(const Summary& other, float sharp) {
    const float top = fmaxf(max, other.max);
    if (top == minus_infinity()) return;
    if (sharp != 0.0f) sum = sum * exp2_fast((max - top) * sharp) + other.sum * exp2_fast((other.max - top) * sharp);
    token = max == other.max ? (token < other.token ? token : other.token) : max > other.max ? token : other.token;
    max = top;
  }
  __device__ __forceinline__ Summary from_lane(int step) const {
    return {__shfl_xor_sync(ALL_LANES, max, step), __shfl_xor_sync(ALL_LANES, token, step), __shfl_xor_sync(ALL_LANES, sum, step)};
  }
};

// Four consecutive logits; those beyond the row are minus infinity.
template <int VOCAB>
__device__ __forceinline__ void load_logits(const float* row, int at, float (&x)[4]) {
  if constexpr (VOCAB % 4 == 0) {
    uint4 v = {0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u};
    if (at < VOCAB) v = load_16(row + at);
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = at + e < VOCAB ? load_float(row + at + e) : minus_infinity();
  }
}

// A slice from which a token is to be drawn, and where in it: at the part `fraction` of its weight.
struct Pick {
  int part, best;  // best: the lowest token with the largest value of the row
  float max;       // largest value of the slice: weights are relative to it, so that they have all their digits
  double fraction;
};

// Chooses a slice by their weights, by one warp: at the part u of the whole; lane l holds ITEMS parts from l * ITEMS on. The lane of the slice
// writes `pick` but for its `max` and returns the number of the slice among its own, others -1; `pick` is not written if no weight is positive.
template <int ITEMS>
__device__ __forceinline__ int pick_slice(int lane, const uint64_t (&mass)[ITEMS], double u, Pick& pick) {
  uint64_t own = 0;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) own += mass[j];
  uint64_t before = warp_sum_before(own, lane);
  const uint64_t total = __shfl_sync(ALL_LANES, before + own, 31);
  uint64_t wanted = uint64_t(u * double(total));
  if (wanted >= total) wanted = total - 1;
  int place = -1;
  if (total > 0 && before <= wanted && wanted < before + own) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      if (place < 0 && wanted < before + mass[j]) place = j, pick.part = lane * ITEMS + j, pick.fraction = double(wanted - before) / double(mass[j]);
      before += mass[j];
    }
  }
  return place;
}

// Shared memory that a draw from a slice needs, in floats: a lane has OWN consecutive tokens at a time, one word of padding each.
template <class V>
struct DrawShape {
  static constexpr int MOST = 48, share = (int(V::slice) + 127) / 128 * 4, OWN = share < MOST ? share : MOST;
  static constexpr int TOKENS = 32 * OWN, CHUNKS = (int(V::slice) + TOKENS - 1) / TOKENS;
  static constexpr int FLOATS = 32 * (OWN + 1);
};

// The token of a picked slice at which the running weight over ascending tokens passes the part `fraction` of the whole; by one warp, the same
// in all lanes (NO_TOKEN: none counts). `keeps(value, token)`: which tokens count. Loops are not unrolled: this runs once a step at most, from
// a cold instruction cache.
template <class V, class Keeps>
__device__ __forceinline__ int draw_from_slice(int lane, const float* row, const Pick& pick, float sharp, float* memory, Keeps keeps) {
  using S = DrawShape<V>;
  constexpr int vocab = int(V::vocab), LOADS = (S::OWN + 3) / 4;
  const int begin = pick.part * int(V::slice), end = begin + int(V::slice) < vocab ? begin + int(V::slice) : vocab;
  float* own = memory + lane * (S::OWN + 1);
  const auto load = [&](int first) {
    float x[LOADS][4];
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
      const int at = first + (n * 32 + lane) * 4;
      load_logits<vocab>(row, at < end ? at : vocab, x[n]);
    }
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
      const int token = (n * 32 + lane) * 4;  // four that the same lane will add up
      float* to = memory + token + token / S::OWN;
      if (token < S::TOKENS) to[0] = x[n][0], to[1] = x[n][1], to[2] = x[n][2], to[3] = x[n][3];
    }
    __syncwarp();
  };
  const auto weight = [&](int first, int j) -> uint64_t {
    const float x = own[j];
    const int token = first + lane * S::OWN + j;
    return token < end && x > minus_infinity() && keeps(x, token) ? fixed_weight(x, pick.max, sharp) : 0;
  };
  const auto sum = [&](int first) {
    uint64_t total = 0;
#pragma unroll 2
    for (int j = 0; j < S::OWN; ++j) total += weight(first, j);
    return total;
  };
  uint64_t total = 0, mine = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
    if (chunk > 0) __syncwarp();
    load(begin + chunk * S::TOKENS);
    mine = sum(begin + chunk * S::TOKENS);
    total += __shfl_sync(ALL_LANES, warp_sum_before(mine, lane) + mine, 31);
  }
  uint64_t wanted = uint64_t(pick.fraction * double(total)), before = 0;
  if (wanted >= total) wanted = total - 1;
  int token = NO_TOKEN;
#pragma unroll 1
  for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
    const int first = begin + chunk * S::TOKENS;
    if (S::CHUNKS > 1) __syncwarp(), load(first), mine = sum(first);
    uint64_t at = before + warp_sum_before(mine, lane);
    before = __shfl_sync(ALL_LANES, at + mine, 31);
    if (wanted >= at && wanted < at + mine)
#pragma unroll 1
      for (int j = 0; token == NO_TOKEN; ++j) {
        at += weight(first, j);
        if (wanted < at) token = first + lane * S::OWN + j;
      }
  }
  return int(__reduce_min_sync(ALL_LANES, unsigned(token)));
}

}  // namespace mpk
