// sample_part: penalties, maxima and sums of one slice of the vocabulary, for every row of logits of the step.
// Operands: logits [logit rows][vocab], parts [logit rows][parts] of Part, values [logit rows][vocab] (logits after penalties, written
// for sequences that have some); float32. Variant: vocab, parts, slice.
#pragma once
#include "mpk/sampling.cuh"
#include "mpk/wait.cuh"

namespace mpk::sample_part {

constexpr bool waits_inside = true;
constexpr int BATCH = 4;  // loads of 16 bytes that a lane has in flight

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

// Of warp `part` of `parts`, which share the slice [begin, end) of a row; the same in all lanes.
template <class V>
__device__ __forceinline__ Summary summarise(const float* row, int begin, int end, int part, int parts, float sharp, int lane) {
  Summary s;
  s.clear();
  for (int at = begin + (part * 32 + lane) * 4; at < end; at += parts * 128 * BATCH) {
    float x[BATCH][4];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) load_logits<int(V::vocab)>(row, at + j * parts * 128 < end ? at + j * parts * 128 : int(V::vocab), x[j]);
#pragma unroll
    for (int j = 0; j < BATCH; ++j) s.add(x[j], at + j * parts * 128, sharp);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) s.merge(s.from_lane(step), sharp);
  return s;
}

// values = logits with the penalties of the sequence, for the slice; the whole block. `marks` [slice]: bit 30 seen at all, and below
// how often in the output.
template <class V>
__device__ __forceinline__ void penalise(const Block& b, const float* logits, float* values, const int32_t* tokens, const Options& o, int begin, int end) {
  constexpr int SEEN = 1 << 30;
  int* marks = reinterpret_cast<int*>(b.scratch);
  for (int j = b.thread; j < end - begin; j += THREADS) marks[j] = 0;
  b.sync();
  for (int j = b.thread; j < o.length; j += THREADS) {
    const int at = load_int(tokens + j) - begin;
    if (at < 0 || at >= end - begin) continue;
    if (j >= o.prompt_length) atomicAdd(marks + at, 1);
    atomicOr(marks + at, SEEN);
  }
  b.sync();
  for (int j = b.thread; j < end - begin; j += THREADS) {
    const int mark = marks[j], count = mark & (SEEN - 1);
    float x = load_float(logits + begin + j);
    if (mark != 0) x = x < 0.0f ? x * o.repetition : __fdiv_rn(x, o.repetition);
    if (count > 0) x -= o.frequency * float(count) + o.presence;
    values[begin + j] = x;
  }
  b.sync();
}

template <class V>
__device__ __forceinline__ void keep_all(const Context& c, const Block& b, const float* logits, int slot, int position, int begin, int end) {
  float* to = c.logits_out + (slot * c.logits_out_positions + position) * int64_t(V::vocab);
  for (int j = begin + b.thread; j < end; j += THREADS) to[j] = load_float(logits + j);
}

// Up to 32 rows of logits from `first` on, their options one a lane.
template <class V>
__device__ __forceinline__ void run_rows(const Context& c, const Instruction& i, Block& b, int first, int count, bool wait) {
  constexpr int vocab = int(V::vocab), size = int(V::slice);
  static_assert(size * 4 <= SCRATCH_BYTES, "marks of a slice");
  const int row = load_int(c.logit_row + first + (b.lane < count ? b.lane : 0)), slot = load_int(c.row_slot + row), position = load_int(c.row_position + row);
  Options own;
  own.load(c.sequences + slot);
  const unsigned all = __ballot_sync(ALL_LANES, b.lane < count && own.all_logits), penalised = __ballot_sync(ALL_LANES, b.lane < count && !own.all_logits && own.penalises());
  const unsigned sampled = __ballot_sync(ALL_LANES, b.lane < count && !own.all_logits);
  const int place = __popc(sampled & ((1u << b.lane) - 1)), rows = __popc(sampled);  // this lane's among the sampled rows
  if (wait) wait_inputs(b);
  const float* logits = operand<float>(c, i, 0) + int64_t(first) * vocab;
  Part* parts = operand<Part>(c, i, 1) + int64_t(first) * int(V::parts);
  float* values = operand<float>(c, i, 2) + int64_t(first) * vocab;
  Summary* shared = reinterpret_cast<Summary*>(b.scratch);  // [warp]
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
    const int begin = tile * size, end = begin + size < vocab ? begin + size : vocab;
    for (unsigned left = all; left != 0; left &= left - 1) {
      const int l = __ffs(left) - 1;
      keep_all<V>(c, b, logits + int64_t(l) * vocab, __shfl_sync(ALL_LANES, slot, l), __shfl_sync(ALL_LANES, position, l), begin, end);
    }
    for (unsigned left = penalised; left != 0; left &= left - 1) {
      const int l = __ffs(left) - 1;
      Options o;
      o.repetition = __shfl_sync(ALL_LANES, own.repetition, l), o.presence = __shfl_sync(ALL_LANES, own.presence, l);
      o.frequency = __shfl_sync(ALL_LANES, own.frequency, l);
      o.length = __shfl_sync(ALL_LANES, own.length, l), o.prompt_length = __shfl_sync(ALL_LANES, own.prompt_length, l);
      const int32_t* tokens = c.tokens + int64_t(__shfl_sync(ALL_LANES, slot, l)) * c.max_context;
      penalise<V>(b, logits + int64_t(l) * vocab, values + int64_t(l) * vocab, tokens, o, begin, end);
    }
    int share = 1;  // warps a row
    while (2 * share * rows <= WARPS) share *= 2;
    for (int base = 0; base < rows; base += WARPS / share) {
      const int n = base + b.warp / share, part = b.warp % share;
      const bool works = n < rows;
      int l = 0;
      Summary summary, raw;
      summary.clear(), raw.clear();
      if (works) {
        l = __ffs(__ballot_sync(ALL_LANES, (sampled >> b.lane & 1) && place == n)) - 1;
        const float sharp = sharpness(__shfl_sync(ALL_LANES, own.temperature, l));
        const float* row_of = (penalised >> l & 1 ? values : logits) + int64_t(l) * vocab;
        summary = summarise<V>(row_of, begin, end, part, share, sharp, b.lane);
        if (__shfl_sync(ALL_LANES, own.top_logprobs, l) >= 0) raw = summarise<V>(logits + int64_t(l) * vocab, begin, end, part, share, LOG2_E, b.lane);
      }
      if (share > 1) {
        if (b.lane == 0) shared[b.warp] = summary, shared[WARPS + b.warp] = raw;
        b.sync();
        if (works && part == 0) {
          const float sharp = sharpness(__shfl_sync(ALL_LANES, own.temperature, l));
          for (int p = 1; p < share; ++p) summary.merge(shared[b.warp + p], sharp), raw.merge(shared[WARPS + b.warp + p], LOG2_E);
        }
        b.sync();
      }
      if (works && part == 0 && b.lane == 0)
        parts[int64_t(l) * int(V::parts) + tile] = Part{summary.max, summary.token, summary.sum, 0.0f, raw.max, raw.sum, {0.0f, 0.0f}};
    }
  }
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  const int count = load_int(&c.step->logit_rows);
  for (int first = 0; first < count; first += 32) run_rows<V>(c, i, b, first, count - first < 32 ? count - first : 32, first == 0);
  if (count == 0) wait_inputs(b);
}

}  // namespace mpk::sample_part
