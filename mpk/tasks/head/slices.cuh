// What the head does with its slice of the logits besides computing them: see sampling.cuh for what it leaves.
// Operands: logits [logit rows][vocab] float32 (slot 1), tops [logit rows][parts] of messages (2), parts [logit rows][parts] of Part (3) and
// values [logit rows][vocab] float32, logits after penalties (4), both written for special rows only. Variant: vocab, parts, slice.
#pragma once
#include "mpk/block.cuh"
#include "mpk/sampling.cuh"

namespace mpk::head {

constexpr int LOGITS = 1, TOPS = 2, PARTS = 3, VALUES = 4;  // operand slots
constexpr int BATCH = 4;  // loads of 16 bytes that a lane has in flight

// ---- every row: the largest value, gathered from the threads that finish the logits
struct TopMemory {
  float sharp[MAX_ROWS];  // of each row of logits
  Summary groups[THREADS / 8];
};

// Takes the logits of one thread, which are all of one row. Groups of 8 threads have rows 0, 1, ... `rows` - 1, 0, ...
template <class V>
struct Top {
  Summary best;

  // Ahead of a barrier before the first logit.
  __device__ __forceinline__ void begin(const Context& c, const Block& b, TopMemory& memory) {
    best.clear();
    if (b.step->drawn_rows == 0 || b.warp != 0 || b.lane >= b.step->logit_rows) return;
    memory.sharp[b.lane] = sharpness(load_float(&c.sequences[b.step->row_slot[b.step->logit_row[b.lane]]].temperature));
  }
  static __device__ __forceinline__ float sharp_of(const Block& b, const TopMemory& memory, int row) {
    return b.step->drawn_rows >> row & 1 ? memory.sharp[row] : 0.0f;
  }
  template <int N>
  __device__ __forceinline__ void take(const Block& b, const TopMemory& memory, int row, int token, const float (&x)[N]) {
    best.add(x, token, sharp_of(b, memory, row));
  }

  // Sends the messages of slice `part`. All threads, each after its last logit; `stride`: rows that groups of threads go round, a power of two.
  template <int STRIDE>
  __device__ __forceinline__ void put(Block& b, TopMemory& memory, uint4* tops, int part) {
    static_assert((STRIDE & (STRIDE - 1)) == 0 && STRIDE <= 32, "groups of 8 threads go round the rows");
    float sharp = sharp_of(b, memory, b.thread / 8 % STRIDE);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) best.merge(best.from_lane(step), sharp);
    if (b.lane % 8 == 0) memory.groups[b.thread / 8] = best;
    b.sync();
    if (b.warp != 0) return;
    best = memory.groups[b.lane], sharp = sharp_of(b, memory, b.lane % STRIDE);
#pragma unroll
    for (int step = STRIDE; step < 32; step *= 2) best.merge(best.from_lane(step), sharp);
    if (b.lane < b.step->logit_rows)
      store_message(tops + int64_t(b.lane) * int(V::parts) + part,
                    uint4{__float_as_uint(best.max), uint32_t(best.token), __float_as_uint(best.sum), uint32_t(b.step->number)});
  }
};

// ---- special rows
// Of warp `part` of `parts`, which share the slice [begin, end) of a row; the same in all lanes.
template <class V>
__device__ __forceinline__ Summary summarise(const float* row, int begin, int end, int part, int parts, float sharp, int lane) {
  Summary s;
  s.clear();
#pragma unroll 1
  for (int at = begin + (part * 32 + lane) * 4; at < end; at += parts * 128 * BATCH) {
    float x[BATCH][4];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int first = at + j * parts * 128;
      load_logits<int(V::vocab)>(row, first < end ? first : int(V::vocab), x[j]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (first + e >= end) x[j][e] = minus_infinity();
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) s.add(x[j], at + j * parts * 128, sharp);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) s.merge(s.from_lane(step), sharp);
  return s;
}

constexpr int MARKS = 8192;  // tokens of a slice that are looked at together

// The block's memory between special rows.
struct Memory {
  Options options[MAX_ROWS];  // of each row of logits
  Summary summary[WARPS], raw[WARPS];
  int marks[MARKS];  // bit 30: seen at all, and below how often in the output
};

// values = logits with the penalties of the sequence, for tokens [begin, end); the whole block. `length`: tokens known.
__device__ __forceinline__ void penalise(const Block& b, Memory& m, const float* logits, float* values, const int32_t* tokens, int length,
                                         const Options& o, int begin, int end) {
  constexpr int SEEN = 1 << 30;
#pragma unroll 1
  for (int j = b.thread; j < end - begin; j += THREADS) m.marks[j] = 0;
  b.sync();
#pragma unroll 1
  for (int j = b.thread; j < length; j += THREADS) {
    const int at = load_int(tokens + j) - begin;
    if (at < 0 || at >= end - begin) continue;
    if (j >= o.prompt_length) atomicAdd(m.marks + at, 1);
    atomicOr(m.marks + at, SEEN);
  }
  b.sync();
#pragma unroll 1
  for (int j = b.thread; j < end - begin; j += THREADS) {
    const int mark = m.marks[j], count = mark & (SEEN - 1);
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
#pragma unroll 1
  for (int j = begin + b.thread; j < end; j += THREADS) to[j] = load_float(logits + j);
}

// Parts and penalised values of the special rows of one slice, whose logits all threads have stored before a barrier. The whole block.
template <class V>
__device__ __forceinline__ void run_special(const Context& c, const Instruction& i, Block& b, Memory& m, int tile) {
  constexpr int vocab = int(V::vocab), size = int(V::slice);
  const int begin = tile * size, end = begin + size < vocab ? begin + size : vocab;
  if (b.warp == 0 && b.lane < b.step->logit_rows) m.options[b.lane].load(c.sequences + b.step->row_slot[b.step->logit_row[b.lane]]);
  b.sync();
#pragma unroll 1
  for (unsigned left = b.step->special_rows; left != 0; left &= left - 1) {
    const int l = __ffs(left) - 1, row = b.step->logit_row[l], slot = b.step->row_slot[row], position = b.step->row_position[row];
    const Options& o = m.options[l];
    const float* logits = operand<float>(c, i, LOGITS) + int64_t(l) * vocab;
    if (o.all_logits) {
      keep_all<V>(c, b, logits, slot, position, begin, end);
      continue;
    }
    float* values = operand<float>(c, i, VALUES) + int64_t(l) * vocab;
    if (o.penalises())
#pragma unroll 1
      for (int first = begin; first < end; first += MARKS)
        penalise(b, m, logits, values, c.tokens + int64_t(slot) * c.max_context, position + 1, o, first, first + MARKS < end ? first + MARKS : end);
    const float sharp = sharpness(o.temperature);
    Summary summary = summarise<V>(o.penalises() ? values : logits, begin, end, b.warp, WARPS, sharp, b.lane), raw;
    raw.clear();
    if (o.top_logprobs >= 0) raw = summarise<V>(logits, begin, end, b.warp, WARPS, LOG2_E, b.lane);
    if (b.lane == 0) m.summary[b.warp] = summary, m.raw[b.warp] = raw;
    b.sync();
    if (b.thread == 0) {
#pragma unroll 1
      for (int w = 1; w < WARPS; ++w) summary.merge(m.summary[w], sharp), raw.merge(m.raw[w], LOG2_E);
      operand<Part>(c, i, PARTS)[int64_t(l) * int(V::parts) + tile] =
          Part{summary.max, summary.token, summary.sum, 0.0f, raw.max, raw.sum, {0.0f, 0.0f}};
    }
    b.sync();
  }
}

}  // namespace mpk::head
