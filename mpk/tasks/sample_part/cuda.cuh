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

// The block's memory between rows; marks of a slice stand behind it.
struct Memory {
  Options options[MAX_ROWS];  // of each row of logits
  Summary summary[WARPS], raw[WARPS];
};

// values = logits with the penalties of the sequence, for the slice; the whole block. `marks` [slice]: bit 30 seen at all, and below
// how often in the output.
template <class V>
__device__ __forceinline__ void penalise(const Block& b, const float* logits, float* values, const int32_t* tokens, const Options& o, int begin, int end) {
  constexpr int SEEN = 1 << 30;
  int* marks = reinterpret_cast<int*>(b.scratch + sizeof(Memory));
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
  if (c.logits_out == nullptr) return;  // another rank hands them out
  float* to = c.logits_out + (slot * c.logits_out_positions + position) * int64_t(V::vocab);
  for (int j = begin + b.thread; j < end; j += THREADS) to[j] = load_float(logits + j);
}

// One slice of all rows; `own`: the options of the row of this lane.
template <class V>
__device__ __forceinline__ void run_slice(const Context& c, const Instruction& i, Block& b, Memory& m, int tile, const Options& own) {
  constexpr int vocab = int(V::vocab), size = int(V::slice);
  const int count = b.step->logit_rows, begin = tile * size, end = begin + size < vocab ? begin + size : vocab;
  const unsigned all = __ballot_sync(ALL_LANES, b.lane < count && own.all_logits);
  const unsigned sampled = __ballot_sync(ALL_LANES, b.lane < count && !own.all_logits);
  const unsigned penalised = __ballot_sync(ALL_LANES, b.lane < count && !own.all_logits && own.penalises());
  const int place = __popc(sampled & ((1u << b.lane) - 1)), rows = __popc(sampled);  // this lane's row among the sampled ones
  const float* logits = operand<float>(c, i, 0);
  Part* parts = operand<Part>(c, i, 1);
  float* values = operand<float>(c, i, 2);
  for (unsigned left = all; left != 0; left &= left - 1) {
    const int l = __ffs(left) - 1, row = b.step->logit_row[l];
    keep_all<V>(c, b, logits + int64_t(l) * vocab, b.step->row_slot[row], b.step->row_position[row], begin, end);
  }
  for (unsigned left = penalised; left != 0; left &= left - 1) {
    const int l = __ffs(left) - 1;
    const int32_t* tokens = c.tokens + int64_t(b.step->row_slot[b.step->logit_row[l]]) * c.max_context;
    penalise<V>(b, logits + int64_t(l) * vocab, values + int64_t(l) * vocab, tokens, m.options[l], begin, end);
  }
  int share = 1;  // warps a row
  while (rows > 0 && 2 * share * rows <= WARPS) share *= 2;
#pragma unroll 1
  for (int base = 0; base < rows; base += WARPS / share) {
    const int n = base + b.warp / share, part = b.warp % share;
    const bool works = n < rows;
    const int l = works ? __ffs(__ballot_sync(ALL_LANES, (sampled >> b.lane & 1) && place == n)) - 1 : 0;
    const float sharp = sharpness(m.options[l].temperature);
    Summary summary, raw;
    summary.clear(), raw.clear();
    if (works) {
      summary = summarise<V>((penalised >> l & 1 ? values : logits) + int64_t(l) * vocab, begin, end, part, share, sharp, b.lane);
      if (m.options[l].top_logprobs >= 0) raw = summarise<V>(logits + int64_t(l) * vocab, begin, end, part, share, LOG2_E, b.lane);
    }
    if (share > 1) {
      if (b.lane == 0) m.summary[b.warp] = summary, m.raw[b.warp] = raw;
      b.sync();
      if (works && part == 0)
        for (int p = 1; p < share; ++p) summary.merge(m.summary[b.warp + p], sharp), raw.merge(m.raw[b.warp + p], LOG2_E);
      b.sync();
    }
    if (works && part == 0 && b.lane == 0)
      parts[int64_t(l) * int(V::parts) + tile] = Part{summary.max, summary.token, summary.sum, 0.0f, raw.max, raw.sum, {0.0f, 0.0f}};
  }
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  static_assert(sizeof(Memory) + int(V::slice) * 4 <= SCRATCH_BYTES, "marks of a slice");
  Memory& m = *reinterpret_cast<Memory*>(b.scratch);
  // By one warp: all SMs ask for the same few lines, which the L2 serves one after the other.
  if (b.warp == 0 && b.lane < b.step->logit_rows) m.options[b.lane].load(c.sequences + b.step->row_slot[b.step->logit_row[b.lane]]);
  b.sync();
  const Options own = m.options[b.lane < b.step->logit_rows ? b.lane : 0];
  wait_inputs(b);
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) run_slice<V>(c, i, b, m, tile, own);
}

}  // namespace mpk::sample_part
