// What `sample_part` and `sample` share: the options of a sequence, and what a part of the vocabulary leaves for a row of logits.
#pragma once
#include "mpk/context.hpp"
#include "mpk/reduce.cuh"

namespace mpk {

constexpr int PART_COLUMNS = 8;  // floats of a Part; PART_COLUMNS of mpk/tasks/sample_part/sharing.py

// One slice of one row. `raw_*`: of the logits as they came in, only where log-probabilities are wanted.
struct alignas(16) Part {
  float max;       // largest value after penalties
  int32_t token;   // the lowest token that has it; INT32_MAX if there is no number
  float sum;       // of e^((value - max) / temperature); 0 for greedy choice
  float unused;
  float raw_max, raw_sum;
  float unused_too[2];
};
static_assert(sizeof(Part) == PART_COLUMNS * 4, "layout of the buffer of parts");

constexpr int NO_TOKEN = 0x7fffffff;

struct Options {
  float temperature, repetition, presence, frequency;
  int length, prompt_length, top_logprobs, all_logits;

  __device__ __forceinline__ void load(const Sequence* s) {  // written by the host and by `advance`
    temperature = load_float(&s->temperature), repetition = load_float(&s->repetition_penalty);
    presence = load_float(&s->presence_penalty), frequency = load_float(&s->frequency_penalty);
    length = load_int(&s->length), prompt_length = load_int(&s->prompt_length);
    top_logprobs = load_int(&s->top_logprobs), all_logits = load_int(&s->all_logits);
  }
  __device__ __forceinline__ bool penalises() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
};

// Factor of the exponent to base 2 of a weight; 0 for greedy choice.
__device__ __forceinline__ float sharpness(float temperature) { return temperature > 0.0f ? LOG2_E / temperature : 0.0f; }

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

}  // namespace mpk
