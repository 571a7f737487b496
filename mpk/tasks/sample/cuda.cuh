// sample: the next token of a slot, from the parts that `sample_part` left; reads values only of slices that matter.
// Operands: logits [logit rows][vocab], choice [max_batch] int32, parts [logit rows][parts] of Part, values [logit rows][vocab].
// Variant: vocab, parts, slice.
//
// Order: penalties (in `sample_part`), temperature, top-k, top-p, min-p, draw; ties and log-probabilities as in sampling.hpp.
#pragma once
#include "mpk/philox.hpp"
#include "mpk/wait.cuh"
#include "sample/select.cuh"

namespace mpk::sample {

constexpr bool waits_inside = true;

struct Choice {
  int row;  // of logits; -1: the slot has none
  Options options;
  float top_p, min_p;
  int top_k;
  uint64_t seed;
};

// Values that may be drawn: keys above the cut, tokens up to cut_token at the cut, weights of at least min_p.
struct Kept {
  uint32_t cut;
  int cut_token;
  float best, sharp, min_p;

  __device__ __forceinline__ bool has(float x, int token) const {
    if (!(x > minus_infinity())) return false;
    const uint32_t key = key_of(x);
    return (key > cut || (key == cut && token <= cut_token)) && exp2_fast((x - best) * sharp) >= min_p;
  }
};

// The row of logits of a slot, looked for by every warp.
__device__ __forceinline__ int row_of_slot(const Context& c, int slot, int lane) {
  const int count = load_int(&c.step->logit_rows);
  for (int first = 0; first < count; first += 32) {
    const bool there = first + lane < count;
    const bool mine = there && load_int(c.row_slot + load_int(c.logit_row + (there ? first + lane : 0))) == slot;
    const unsigned found = __ballot_sync(ALL_LANES, mine);
    if (found != 0) return first + __ffs(found) - 1;
  }
  return -1;
}

// The parts of the row to shared memory; returns the best of all, the same in all threads.
template <class V>
__device__ __forceinline__ Part gather(const Block& b, Memory<V>& m, const Part* parts) {
  Part best{minus_infinity(), NO_TOKEN, 0.0f, 0.0f, minus_infinity(), 0.0f, {0.0f, 0.0f}};
  const auto better = [](Part& a, float max, int token, float raw_max) {
    if (max > a.max || (max == a.max && token < a.token)) a.max = max, a.token = token;
    a.raw_max = fmaxf(a.raw_max, raw_max);
  };
  for (int j = b.thread; j < m.parts; j += THREADS) {
    union { uint4 bits[2]; Part part; };
    bits[0] = load_16(parts + j), bits[1] = load_16(reinterpret_cast<const uint4*>(parts + j) + 1);
    m.part[j] = part;
    better(best, part.max, part.token, part.raw_max);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float max = __shfl_xor_sync(ALL_LANES, best.max, step), raw = __shfl_xor_sync(ALL_LANES, best.raw_max, step);
    better(best, max, __shfl_xor_sync(ALL_LANES, best.token, step), raw);
  }
  if (b.lane == 0) m.best_of[b.warp] = best;
  b.sync();
  for (int w = 0; w < WARPS; ++w) better(best, m.best_of[w].max, m.best_of[w].token, m.best_of[w].raw_max);
  return best;
}

// Token at which the lower tokens, in a count of `wanted` among members with key `key`, end.
template <class V>
__device__ __forceinline__ int token_of_tie(const Block& b, Memory<V>& m, const float* row, uint32_t key, uint64_t wanted) {
  search<V>(b, m, row, Query{key, key, true, 0.0f, 0.0f}, wanted, 0.0);
  return m.found.reached ? int(~m.found.key) : NO_TOKEN;
}

// What top-k, top-p and min-p leave; fills memory.mass with the fixed-point weight of each part.
template <class V>
__device__ __forceinline__ Kept filter(const Block& b, Memory<V>& m, const float* row, const Choice& o, float best, float sharp) {
  Kept kept{key_of(minus_infinity()), NO_TOKEN, best, sharp, o.min_p};
  if (o.top_k > 0 && o.top_k < int(V::vocab)) {
    list_slices(b, m, bound_of_largest(b, m, o.top_k, false), false);
    search<V>(b, m, row, Query{kept.cut, 0xffffffffu, false, 0.0f, 0.0f}, o.top_k, 0.0);
    if (m.found.reached) kept.cut = m.found.key;  // values equal to the k-th stay
  }
  if (o.top_p < 1.0f) {
    list_slices(b, m, kept.cut, false);
    search<V>(b, m, row, Query{kept.cut, 0xffffffffu, false, best, sharp}, 0, o.top_p);
    const Found found = m.found;
    if (found.reached) {
      const float at = __uint_as_float(found.key >> 31 ? found.key ^ 0x80000000u : ~found.key);
      const uint64_t each = Query{0, 0, false, best, sharp}.amount(at);
      kept.cut = found.key;
      const uint64_t wanted = each == 0 ? 1 : (found.missing + each - 1) / each;
      if (each == 0 || wanted * each < found.here) kept.cut_token = token_of_tie<V>(b, m, row, found.key, wanted);
    }
  }
  list_slices(b, m, kept.cut, false);
  for (int j = b.thread; j < m.parts; j += THREADS) m.mass[j] = 0;
  b.sync();
  const Query amounts{0, 0, false, best, sharp};
  visit(b, m, row, [&](float x, int token) {
    if (kept.has(x, token)) atomicAdd(&m.mass[token / int(V::slice)], amounts.amount(x));
  });
  b.sync();
  return kept;
}

// The token at which the running weight, over ascending tokens, passes the part u of the whole.
template <class V>
__device__ __forceinline__ int draw(const Block& b, Memory<V>& m, const float* row, const Kept& kept, double u) {
  constexpr int vocab = int(V::vocab), size = int(V::slice), ITEMS = (Memory<V>::parts + THREADS - 1) / THREADS, OWN = (size + THREADS - 1) / THREADS;
  uint64_t own = 0;
  unsigned long long total;
  for (int j = 0; j < ITEMS; ++j) own += b.thread * ITEMS + j < m.parts ? m.mass[b.thread * ITEMS + j] : 0;
  uint64_t before = block_sum_before<unsigned long long>(b, own, m.sums, total);
  if (total == 0) return NO_TOKEN;
  uint64_t wanted = uint64_t(u * double(total));
  if (wanted >= total) wanted = total - 1;
  if (before <= wanted && wanted < before + own)
    for (int j = b.thread * ITEMS;; before += m.mass[j++])
      if (wanted < before + m.mass[j]) {
        m.chosen = j, m.fraction = double(wanted - before) / double(m.mass[j]);
        break;
      }
  b.sync();
  // Inside the part weights are relative to its own best value, so that they have all their digits.
  const int part = m.chosen, first = part * size + b.thread * OWN, end = part * size + size < vocab ? part * size + size : vocab;
  const Query amounts{0, 0, false, m.part[part].max, kept.sharp};
  uint64_t weights[OWN];
  float x[OWN];
#pragma unroll
  for (int j = 0; j < OWN; ++j) x[j] = b.thread * OWN + j < size && first + j < end ? load_float(row + first + j) : minus_infinity();
  own = 0;
#pragma unroll
  for (int j = 0; j < OWN; ++j) own += weights[j] = kept.has(x[j], first + j) ? amounts.amount(x[j]) : 0;
  before = block_sum_before<unsigned long long>(b, own, m.sums, total);
  wanted = uint64_t(m.fraction * double(total));
  if (wanted >= total) wanted = total - 1;
  if (own > 0 && before <= wanted && wanted < before + own) {
    int token = first;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      if (before <= wanted && wanted < before + weights[j]) token = first + j;
      before += weights[j];
    }
    m.chosen = token;
  }
  b.sync();
  return m.chosen;
}

// Log-probability of `token` and of the most likely tokens, of the logits as they came in, to the place where `advance` puts the token.
template <class V>
__device__ __forceinline__ void log_probabilities(const Context& c, const Block& b, Memory<V>& m, const float* logits, const Options& o, int slot,
                                                  int token, float best) {
  const int64_t place = int64_t(slot) * c.max_context + o.length;
  float own = 0.0f;
  for (int j = b.thread; j < m.parts; j += THREADS)
    if (m.part[j].raw_max > minus_infinity()) own += m.part[j].raw_sum * exp2_fast((m.part[j].raw_max - best) * LOG2_E);
  double total;
  block_sum_before<double>(b, double(own), reinterpret_cast<double*>(m.sums), total);
  const float norm = best + logf(float(total));
  if (b.thread == 0) c.chosen_logprob[place] = load_float(logits + token) - norm;
  const int count = o.top_logprobs < MAX_TOP_LOGPROBS ? o.top_logprobs : MAX_TOP_LOGPROBS;
  if (count <= 0) return;
  list_slices(b, m, bound_of_largest(b, m, count, true), true);
  search<V>(b, m, logits, Query{key_of(minus_infinity()), 0xffffffffu, false, 0.0f, 0.0f}, count, 0.0);
  const Found found = m.found;
  uint32_t cut = found.reached ? found.key : 0;  // fewer numbers than asked for: all of them
  const int cut_token = found.reached && found.missing < found.here ? token_of_tie<V>(b, m, logits, cut, found.missing) : NO_TOKEN;
  if (b.thread == 0) m.candidates = 0;
  b.sync();
  visit(b, m, logits, [&](float x, int id) {
    if (!(x > minus_infinity()) || key_of(x) < cut || (key_of(x) == cut && id > cut_token)) return;
    const int at = atomicAdd(&m.candidates, 1);
    m.candidate[at] = x, m.candidate_token[at] = id;
  });
  b.sync();
  if (b.thread >= count) return;
  const int64_t tops = place * MAX_TOP_LOGPROBS;
  if (b.thread >= m.candidates) {
    c.top_logprob[tops + b.thread] = minus_infinity(), c.top_token[tops + b.thread] = -1;
    return;
  }
  const float x = m.candidate[b.thread];
  const int id = m.candidate_token[b.thread];
  int rank = 0;
  for (int j = 0; j < m.candidates; ++j) rank += m.candidate[j] > x || (m.candidate[j] == x && m.candidate_token[j] < id);
  c.top_logprob[tops + rank] = x - norm, c.top_token[tops + rank] = id;
}

// The token of one slot; the same in all threads.
template <class V>
__device__ __forceinline__ int choose(const Context& c, const Instruction& i, Block& b, Memory<V>& m, int slot, const Choice& o) {
  const float* logits = operand<float>(c, i, 0) + int64_t(o.row) * int(V::vocab);
  const float* values = operand<float>(c, i, 3) + int64_t(o.row) * int(V::vocab);
  const Part best = gather(b, m, operand<Part>(c, i, 2) + int64_t(o.row) * int(V::parts));
  int token = best.token;
  if (!is_finite(best.max)) return -1;
  if (o.options.temperature > 0.0f) {
    const float* row = o.options.penalises() ? values : logits;
    const float sharp = sharpness(o.options.temperature);
    Kept kept{key_of(minus_infinity()), NO_TOKEN, best.max, sharp, 0.0f};
    if ((o.top_k > 0 && o.top_k < int(V::vocab)) || o.top_p < 1.0f || o.min_p > 0.0f) {
      kept = filter<V>(b, m, row, o, best.max, sharp);
    } else {
      for (int j = b.thread; j < m.parts; j += THREADS)
        m.mass[j] = m.part[j].max > minus_infinity() ? __float2ull_rn(m.part[j].sum * exp2_fast((m.part[j].max - best.max) * sharp) * FIXED_ONE) : 0;
      b.sync();
    }
    token = draw<V>(b, m, row, kept, philox_uniform(o.seed, uint64_t(o.options.length)));
    if (token == NO_TOKEN) token = best.token;
  }
  if (o.options.top_logprobs >= 0 && c.chosen_logprob != nullptr) log_probabilities<V>(c, b, m, logits, o.options, slot, token, best.raw_max);
  return token;
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  static_assert(sizeof(Memory<V>) <= SCRATCH_BYTES, "scratch");
  Memory<V>& memory = *reinterpret_cast<Memory<V>*>(b.scratch);
  bool waited = false;
  for (int slot = i.tile_begin; slot < i.tile_end; ++slot) {
    Choice o;
    o.row = -1;
    if (slot < c.max_batch) {
      const Sequence* s = c.sequences + slot;
      o.options.load(s);
      o.top_p = load_float(&s->top_p), o.min_p = load_float(&s->min_p), o.top_k = load_int(&s->top_k);
      o.seed = uint64_t(load_long(reinterpret_cast<const int64_t*>(&s->seed)));
      o.row = row_of_slot(c, slot, b.lane);
    }
    if (!waited) wait_inputs(b), waited = true;
    int token = -1;
    if (o.row >= 0 && !o.options.all_logits) token = choose<V>(c, i, b, memory, slot, o);
    if (b.thread == 0) operand<int32_t>(c, i, 1)[slot] = token;
    b.sync();
  }
}

}  // namespace mpk::sample
