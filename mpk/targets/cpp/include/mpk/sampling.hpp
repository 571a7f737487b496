// Choice of the next token from one row of logits.
//
// Order: repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p, draw. Each filter keeps at
// least the most likely token. The vocabulary is passed over a few times with loops that compilers turn into vector code;
// only candidates are ever sorted. Log-probabilities are those of the model: log-softmax of the logits as they come in.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "mpk/context.hpp"
#include "mpk/philox.hpp"

namespace mpk {

struct Candidate {
  float value;
  int32_t id;
};

// Order of candidates: larger value first, lower id first among equals.
inline bool before(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Memory for one choice, carved out of a worker's scratch.
struct SamplingScratch {
  float* values;          // [vocab]
  int32_t* counts;        // [vocab], contents undefined between uses
  Candidate* candidates;  // [vocab]

  static int64_t bytes(int vocab) { return int64_t(vocab) * 16 + 192; }
  static SamplingScratch in(unsigned char* memory, int vocab) {
    const int64_t part = (int64_t(vocab) * 4 + 63) / 64 * 64;
    return {reinterpret_cast<float*>(memory), reinterpret_cast<int32_t*>(memory + part),
            reinterpret_cast<Candidate*>(memory + 2 * part)};
  }
};

constexpr int LANES = 16;  // width that the loops below are unrolled to
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Largest value; numbers that are not a number are passed over.
inline float maximum(const float* x, int n) {
  float lane[LANES];
  std::fill(lane, lane + LANES, NONE);
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int j = 0; j < LANES; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  }
  for (; i < n; ++i) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
  return *std::max_element(lane, lane + LANES);
}

// First index of the largest value; -1 when there is none that is finite.
inline int32_t argmax(const float* x, int n) {
  const float m = maximum(x, n);
  if (!std::isfinite(m)) return -1;
  return int32_t(std::find(x, x + n, m) - x);
}

// e^z for z <= 0, relative error below 2e-7; 0 for z < -87 and for what is not a number. Range reduction and polynomial as in
// Cephes' expf (Moshier): no table and no branch, so that a loop over it becomes vector code.
inline float exp_nonpositive(float z) {
  const float clamped = z > -87.0f ? z : -87.0f;
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float n = shifted - 12582912.0f;
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;  // the integer's low bits become the exponent of 2^n
  float scale;
  std::memcpy(&scale, &bits, 4);
  return z >= -87.0f ? p * scale : 0.0f;
}

// Sum in a fixed order: lanes within blocks in float, blocks in double.
inline double sum(const float* x, int n) {
  constexpr int BLOCK = 64 * LANES;
  double total = 0;
  for (int b = 0; b < n; b += BLOCK) {
    const int end = std::min(b + BLOCK, n);
    float lane[LANES] = {};
    int i = b;
    for (; i + LANES <= end; i += LANES) {
      for (int j = 0; j < LANES; ++j) lane[j] += x[i + j];
    }
    for (; i < end; ++i) lane[0] += x[i];
    for (float v : lane) total += v;
  }
  return total;
}

// The k largest of x into `out` (capacity n), in no order; fewer when x holds fewer numbers above minus infinity.
// One pass: what does not exceed the k-th best so far is skipped 64 at a time; the buffer is cut back to k when full.
inline int select_largest(const float* x, int n, int k, Candidate* out) {
  const int capacity = int(std::min<int64_t>(n, std::max<int64_t>(int64_t(2) * k, int64_t(k) + 1024)));
  float threshold = NONE;
  int size = 0;
  const auto cut = [&] {
    if (size <= k) return;
    std::nth_element(out, out + k - 1, out + size, before);
    size = k;
    threshold = out[k - 1].value;
  };
  constexpr int BLOCK = 64;
  for (int b = 0; b < n; b += BLOCK) {
    const int end = std::min(b + BLOCK, n);
    if (end - b == BLOCK) {
      int any = 0;
      for (int j = 0; j < BLOCK; ++j) any |= x[b + j] > threshold;
      if (any == 0) continue;
    }
    for (int i = b; i < end; ++i) {
      if (!(x[i] > threshold)) continue;
      if (size == capacity) {
        cut();
        if (!(x[i] > threshold)) continue;
      }
      out[size++] = {x[i], i};
    }
  }
  cut();
  return size;
}

// Repetition penalty (Keskar et al., CTRL, arXiv 1909.05858) once for every token of prompt or output; presence penalty once
// and frequency penalty per occurrence for every token of the output.
inline void penalize(float* x, const Sequence& s, const int32_t* tokens, int32_t* counts) {
  if (s.repetition_penalty != 1.0f) {
    for (int i = 0; i < s.length; ++i) counts[tokens[i]] = 1;
    for (int i = 0; i < s.length; ++i) {
      const int32_t t = tokens[i];
      if (counts[t] == 0) continue;
      counts[t] = 0;
      x[t] = x[t] < 0 ? x[t] * s.repetition_penalty : x[t] / s.repetition_penalty;
    }
  }
  if (s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f) {
    for (int i = s.prompt_length; i < s.length; ++i) counts[tokens[i]] = 0;
    for (int i = s.prompt_length; i < s.length; ++i) counts[tokens[i]] += 1;
    for (int i = s.prompt_length; i < s.length; ++i) {
      const int32_t t = tokens[i];
      if (counts[t] == 0) continue;
      x[t] -= s.frequency_penalty * float(counts[t]) + s.presence_penalty;
      counts[t] = 0;
    }
  }
}

inline bool penalized(const Sequence& s) {
  return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
}

// Top-p (nucleus) over weights p: keeps the shortest run of candidates, best first, whose sum reaches top_p of the total.
// Nothing is sorted but the last few around the cut: the run is halved by nth_element and summed until it is known where it ends.
inline void keep_nucleus(float* p, int n, double top_p, Candidate* c) {
  const double total = sum(p, n), wanted = top_p * total;
  // All tokens below this weight together hold less than what the nucleus leaves out, so none of them is in it.
  const float floor = float((1.0 - top_p) * total / n * 0.999);
  int begin = 0, end = 0;
  for (int i = 0; i < n; ++i) {
    if (p[i] > floor) c[end++] = {p[i], i};
  }
  double reached = 0;
  while (end - begin > 64) {
    const int middle = begin + (end - begin) / 2;
    std::nth_element(c + begin, c + middle, c + end, before);
    double mass = 0;
    for (int i = begin; i < middle; ++i) mass += c[i].value;
    if (reached + mass >= wanted) {
      end = middle;
    } else {
      reached += mass;
      begin = middle;
    }
  }
  std::sort(c + begin, c + end, before);
  int last = begin;
  while (last + 1 < end && (reached += c[last].value) < wanted) ++last;
  const Candidate cut = c[last];
  for (int i = 0; i < n; ++i) p[i] = p[i] > cut.value || (p[i] == cut.value && i <= cut.id) ? p[i] : 0.0f;
}

// Index drawn with probability p[i] / sum(p) by inverting the cumulative sum over ascending ids at u in [0, 1).
inline int32_t draw(const float* p, int n, double u) {
  constexpr int BLOCK = 1024;
  const double wanted = u * sum(p, n);
  double reached = 0;
  for (int b = 0; b < n; b += BLOCK) {
    const int end = std::min(b + BLOCK, n);
    const double block = sum(p + b, end - b);
    if (reached + block <= wanted) {
      reached += block;
      continue;
    }
    for (int i = b; i < end; ++i) {
      reached += p[i];
      if (reached > wanted) return i;
    }
  }
  for (int i = n - 1; i >= 0; --i) {  // rounding left the sum just short of `wanted`: the last token takes what is left
    if (p[i] > 0) return i;
  }
  return -1;
}

// The next token of a sequence, -1 when the logits hold no finite maximum (a model with broken weights).
inline int32_t choose(const float* logits, int vocab, const Sequence& s, const int32_t* tokens, const SamplingScratch& scratch) {
  if (s.temperature == 0 && !penalized(s)) return argmax(logits, vocab);
  float* x = scratch.values;
  std::memcpy(x, logits, sizeof(float) * vocab);
  penalize(x, s, tokens, scratch.counts);
  if (s.temperature == 0) return argmax(x, vocab);

  const float best = maximum(x, vocab);
  if (!std::isfinite(best)) return -1;
  float smallest = NONE;  // of what top-k keeps; tokens equal to the k-th stay
  if (s.top_k > 0 && s.top_k < vocab) {
    const int size = select_largest(x, vocab, s.top_k, scratch.candidates);
    if (size == s.top_k) smallest = std::max_element(scratch.candidates, scratch.candidates + size, before)->value;
  }
  // Weights relative to the best token, whose weight is 1.
  const float sharpness = 1.0f / s.temperature;
  for (int i = 0; i < vocab; ++i) x[i] = x[i] >= smallest ? exp_nonpositive((x[i] - best) * sharpness) : 0.0f;
  if (s.top_p < 1.0f) keep_nucleus(x, vocab, s.top_p, scratch.candidates);
  if (s.min_p > 0.0f) {
    for (int i = 0; i < vocab; ++i) x[i] = x[i] >= s.min_p ? x[i] : 0.0f;
  }
  return draw(x, vocab, philox_uniform(s.seed, uint64_t(s.length)));
}

// Log of the sum of e^logits.
inline double log_sum_exp(const float* logits, int vocab, float* scratch) {
  const float best = maximum(logits, vocab);
  for (int i = 0; i < vocab; ++i) scratch[i] = exp_nonpositive(logits[i] - best);
  return double(best) + std::log(sum(scratch, vocab));
}

// Log-probability of `token`, and of the `count` most likely tokens, best first, into `top` and `top_token`.
inline float log_probabilities(const float* logits, int vocab, int32_t token, int count, float* top, int32_t* top_token,
                               const SamplingScratch& scratch) {
  const double total = log_sum_exp(logits, vocab, scratch.values);
  if (count > 0) {
    const int size = select_largest(logits, vocab, std::min(count, vocab), scratch.candidates);
    std::sort(scratch.candidates, scratch.candidates + size, before);
    for (int i = 0; i < count; ++i) {
      top[i] = i < size ? float(scratch.candidates[i].value - total) : NONE;
      top_token[i] = i < size ? scratch.candidates[i].id : -1;
    }
  }
  return float(logits[token] - total);
}

}  // namespace mpk
