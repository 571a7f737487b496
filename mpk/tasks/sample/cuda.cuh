// sample: the next token of a slot that wants more than `advance` does itself (see sampling.cuh), from the parts that the head left; reads
// values only of slices that matter. For other slots there is nothing to do, not even to wait.
// Operands: logits [logit rows][vocab], choice [max_batch] of messages {token, -, -, step number}, parts [logit rows][parts] of Part, values
// [logit rows][vocab]. Variant: vocab, parts, slice.
//
// Order: penalties (in the head), temperature, top-k, top-p, min-p, draw; ties and log-probabilities as in sampling.hpp.
#pragma once
#include "mpk/philox.hpp"
#include "mpk/wait.cuh"
#include "sample/select.cuh"

namespace mpk::sample {

constexpr bool waits_inside = true;

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

// The row of logits of a slot, -1 if it has none.
__device__ __forceinline__ int row_of_slot(const Block& b, int slot) {
  const unsigned found = __ballot_sync(ALL_LANES, b.lane < b.step->logit_rows && b.step->row_slot[b.step->logit_row[b.lane % MAX_ROWS]] == slot);
  return __ffs(found) - 1;
}

// The best of all threads: largest value, lowest token; and the largest raw value. The same in all threads.
template <class V>
__device__ __forceinline__ Part best_of_block(const Block& b, Memory<V>& m, Part best) {
  const auto better = [&best](float max, int token, float raw_max) {
    if (max > best.max || (max == best.max && token < best.token)) best.max = max, best.token = token;
    best.raw_max = fmaxf(best.raw_max, raw_max);
  };
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float max = __shfl_xor_sync(ALL_LANES, best.max, step), raw = __shfl_xor_sync(ALL_LANES, best.raw_max, step);
    better(max, __shfl_xor_sync(ALL_LANES, best.token, step), raw);
  }
  if (b.lane == 0) m.best_of[b.warp] = best;
  b.sync();
  for (int w = 0; w < WARPS; ++w) better(m.best_of[w].max, m.best_of[w].token, m.best_of[w].raw_max);
  b.sync();
  return best;
}

// The parts of the row to shared memory; returns the best of all.
template <class V>
__device__ __forceinline__ Part gather(const Block& b, Memory<V>& m, const Part* parts) {
  Part best{minus_infinity(), NO_TOKEN, 0.0f, 0.0f, minus_infinity(), 0.0f, {0.0f, 0.0f}};
  for (int j = b.thread; j < m.parts; j += THREADS) {
    const uint4 v = load_16(parts + j), raw = load_16(reinterpret_cast<const uint4*>(parts + j) + 1);
    const Part part{__uint_as_float(v.x), int(v.y), __uint_as_float(v.z), 0.0f, __uint_as_float(raw.x), __uint_as_float(raw.y), {0.0f, 0.0f}};
    m.part[j] = part;
    if (part.max > best.max || (part.max == best.max && part.token < best.token)) best.max = part.max, best.token = part.token;
    best.raw_max = fmaxf(best.raw_max, part.raw_max);
  }
  return best_of_block(b, m, best);
}

// Sum of all weights, in fixed point, from the parts.
template <class V>
__device__ __forceinline__ double whole_mass(const Block& b, Memory<V>& m, float best, float sharp) {
  double own = 0.0, total;
  for (int j = b.thread; j < m.parts; j += THREADS)
    if (m.part[j].max > minus_infinity()) own += double(m.part[j].sum) * double(exp2_fast((m.part[j].max - best) * sharp));
  block_sum_before<double>(b, own, reinterpret_cast<double*>(m.sums), total);
  return total * double(FIXED_ONE);
}

// What top-k, top-p and min-p leave; fills memory.mass with the fixed-point weight of each part.
template <class V>
__device__ __forceinline__ Kept filter(const Block& b, Memory<V>& m, const float* row, const Options& o, float best, float sharp) {
  enum Job { TOP_K, TOP_P, TIE, DONE };
  constexpr uint32_t HIGHEST = 0xffffffffu;
  const bool top_k = o.top_k > 0 && o.top_k < int(V::vocab), top_p = o.top_p < 1.0f;
  // A bound below which nothing is kept, so that few values become candidates.
  float least = minus_infinity();
  uint32_t low = key_of(least);
  double wanted_mass = 0.0;  // of the nucleus, if all values are in the run for it
  if (top_k) {
    low = max(low, bound_of_largest(b, m, o.top_k, false));
  } else if (top_p) {
    const double whole = whole_mass(b, m, best, sharp);
    wanted_mass = double(o.top_p) * whole;
    // All values below this weight together hold less than what the nucleus leaves out.
    least = best + log2f(float((1.0 - double(o.top_p)) * whole / double(FIXED_ONE) / double(V::vocab) * 0.999)) / sharp;
  }
  if (o.min_p > 0.0f && !top_p) least = fmaxf(least, best + (log2f(o.min_p) - 1e-3f) / sharp);
  if (least > minus_infinity()) low = max(low, key_of(least));
  list_slices(b, m, low, false);
  collect(b, m, row, low);

  Kept kept{low, NO_TOKEN, best, sharp, o.min_p};
  Query query{low, HIGHEST, false, best, 0.0f};
  uint64_t wanted = o.top_k;
#pragma unroll 1
  for (int job = top_k ? TOP_K : top_p ? TOP_P : DONE; job != DONE;) {
    if (job == TOP_P) query = Query{kept.cut, HIGHEST, false, best, sharp}, wanted = top_k ? 0 : wanted_mass < 1.0 ? 1 : uint64_t(wanted_mass);
    search(b, m, row, query, wanted, o.top_p);
    const Found found = m.found;
    b.sync();
    const int previous = job;
    job = previous == TOP_K && top_p ? TOP_P : DONE;
    if (!found.reached) continue;
    if (previous == TIE) {
      kept.cut_token = int(~found.key);
      continue;
    }
    kept.cut = found.key;  // values equal to the k-th stay
    if (previous == TOP_K) continue;
    const float at = __uint_as_float(found.key >> 31 ? found.key ^ 0x80000000u : ~found.key);
    const uint64_t each = query.amount(at);
    wanted = each == 0 ? 1 : (found.missing + each - 1) / each;  // of the equal values, the lowest tokens
    if (each != 0 && wanted * each >= found.here) continue;
    query = Query{found.key, found.key, true, 0.0f, 0.0f};
    job = TIE;
  }

  for (int j = b.thread; j < m.parts; j += THREADS) m.mass.clear(j);
  b.sync();
  const Query amounts{0, 0, false, best, sharp};
  visit_candidates(b, m, row, [&](float x, int token) {
    if (kept.has(x, token)) m.mass.add(token / int(V::slice), amounts.amount(x));
  });
  b.sync();
  return kept;
}

// The token at which the running weight, over ascending tokens, passes the part u of the whole, from memory.mass; by the whole block.
template <class V>
__device__ __forceinline__ int draw(const Block& b, Memory<V>& m, const float* row, const Kept& kept, double u) {
  constexpr int ITEMS = (Memory<V>::parts + 31) / 32;
  static_assert(DrawShape<V>::FLOATS <= Memory<V>::CAPACITY, "candidates are no longer needed");
  if (b.warp == 0) {
    uint64_t mass[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) mass[j] = b.lane * ITEMS + j < m.parts ? m.mass.get(b.lane * ITEMS + j) : 0;
    const int place = pick_slice(b.lane, mass, u, m.pick);
    int token = NO_TOKEN;
    if (__ballot_sync(ALL_LANES, place >= 0) != 0) {
      if (place >= 0) m.pick.max = m.part[m.pick.part].max;
      __syncwarp();
      token = draw_from_slice<V>(b.lane, row, m.pick, kept.sharp, m.value, [&](float x, int t) { return kept.has(x, t); });
    }
    if (b.lane == 0) m.chosen = token;
  }
  b.sync();
  return m.chosen;
}

// Log-probability of `token` and of the most likely tokens, of the logits as they came in, to `place`, where `advance` puts the token.
template <class V>
__device__ __forceinline__ void log_probabilities(const Context& c, const Block& b, Memory<V>& m, const float* logits, const Options& o, int64_t place,
                                                  int token, float best) {
  float own = 0.0f;
  for (int j = b.thread; j < m.parts; j += THREADS)
    if (m.part[j].raw_max > minus_infinity()) own += m.part[j].raw_sum * exp2_fast((m.part[j].raw_max - best) * LOG2_E);
  double total;
  block_sum_before<double>(b, double(own), reinterpret_cast<double*>(m.sums), total);
  const float norm = best + logf(float(total));
  if (b.thread == 0) c.chosen_logprob[place] = load_float(logits + token) - norm;
  const int count = o.top_logprobs < MAX_TOP_LOGPROBS ? o.top_logprobs : MAX_TOP_LOGPROBS;
  if (count <= 0) return;
  const uint32_t low = max(bound_of_largest(b, m, count, true), key_of(minus_infinity()));
  list_slices(b, m, low, true);
  collect(b, m, logits, low);
  const int64_t tops = place * MAX_TOP_LOGPROBS;
  const auto put = [&](int rank, float x, int id) { c.top_logprob[tops + rank] = x - norm, c.top_token[tops + rank] = id; };
  if (m.listed()) {
    for (int j = b.thread; j < m.candidates; j += THREADS) {
      int rank = 0;
      for (int other = 0; other < m.candidates && rank < count; ++other)
        rank += m.value[other] > m.value[j] || (m.value[other] == m.value[j] && m.token[other] < m.token[j]);
      if (rank < count) put(rank, m.value[j], m.token[j]);
    }
    for (int rank = m.candidates + b.thread; rank < count; rank += THREADS) put(rank, minus_infinity(), -1);
    b.sync();
    return;
  }
  // Thousands of equal logits: one after the other.
  float last = __uint_as_float(0x7f800000u);
  int last_token = NO_TOKEN;
  for (int rank = 0; rank < count; ++rank) {
    Part next{minus_infinity(), NO_TOKEN, 0.0f, 0.0f, 0.0f, 0.0f, {0.0f, 0.0f}};
    visit<1>(b, m, logits, [&](float x, int id) {
      if ((x < last || (x == last && id > last_token)) && (x > next.max || (x == next.max && id < next.token))) next.max = x, next.token = id;
    });
    next = best_of_block(b, m, next);
    last = next.max, last_token = next.token;
    if (b.thread == 0) put(rank, last, last_token == NO_TOKEN ? -1 : last_token);
  }
}

// The token for a row of logits of a slot; the same in all threads.
template <class V>
__device__ __forceinline__ int choose(const Context& c, const Instruction& i, Block& b, Memory<V>& m, int slot, int l, const Options& o) {
  const float* logits = operand<float>(c, i, 0) + int64_t(l) * int(V::vocab);
  const float* values = operand<float>(c, i, 3) + int64_t(l) * int(V::vocab);
  const int length = b.step->row_position[b.step->logit_row[l]] + 1;  // tokens known, where the new one will stand
  const Part best = gather(b, m, operand<Part>(c, i, 2) + int64_t(l) * int(V::parts));
  int token = best.token;
  if (!is_finite(best.max)) return -1;
  if (o.draws()) {
    const float* row = o.penalises() ? values : logits;
    const float sharp = sharpness(o.temperature);
    Kept kept{key_of(minus_infinity()), NO_TOKEN, best.max, sharp, 0.0f};
    if (o.filters(int(V::vocab))) {
      kept = filter<V>(b, m, row, o, best.max, sharp);
    } else {
      for (int j = b.thread; j < m.parts; j += THREADS) {
        m.mass.clear(j);
        if (m.part[j].max > minus_infinity()) m.mass.add(j, __float2ull_rn(m.part[j].sum * exp2_fast((m.part[j].max - best.max) * sharp) * FIXED_ONE));
      }
      b.sync();
    }
    token = draw<V>(b, m, row, kept, philox_uniform(o.seed, uint64_t(length)));
    if (token == NO_TOKEN) token = best.token;
  }
  if (o.top_logprobs >= 0 && c.chosen_logprob != nullptr)
    log_probabilities<V>(c, b, m, logits, o, int64_t(slot) * c.max_context + length, token, best.raw_max);
  return token;
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  static_assert(sizeof(Memory<V>) <= SCRATCH_BYTES, "scratch");
  Memory<V>& memory = *reinterpret_cast<Memory<V>*>(b.scratch);
  bool waited = false;
#pragma unroll 1
  for (int slot = i.tile_begin; slot < i.tile_end; ++slot) {
    const int l = row_of_slot(b, slot);
    if (l < 0 || (b.step->special_rows >> l & 1) == 0) continue;
    Options o;
    o.load(c.sequences + slot);
    if (o.all_logits) continue;
    if (!waited) wait_inputs(b), b.sync(), waited = true;
    const int token = choose<V>(c, i, b, memory, slot, l, o);
    if (b.thread == 0) store_message(operand<uint4>(c, i, 1) + slot, uint4{uint32_t(token), 0, 0, uint32_t(b.step->number)});
    b.sync();
  }
  if (!waited) b.arrived();
}

}  // namespace mpk::sample
