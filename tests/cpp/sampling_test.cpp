// Gives Python the sampling functions one by one.
#include "mpk/sampling.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t scratch_bytes(int vocab) { return mpk::SamplingScratch::bytes(vocab); }

EXPORT int32_t choose(const float* logits, int vocab, const mpk::Sequence* s, const int32_t* tokens, unsigned char* scratch) {
  return mpk::choose(logits, vocab, *s, tokens, mpk::SamplingScratch::in(scratch, vocab));
}

// Choices at `count` positions, counted from the sequence's length on, into `out`.
EXPORT void choose_many(const float* logits, int vocab, const mpk::Sequence* s, const int32_t* tokens, unsigned char* scratch, int count,
                        int32_t* out) {
  mpk::Sequence moved = *s;
  for (int i = 0; i < count; ++i) {
    moved.seed = s->seed + i;
    out[i] = mpk::choose(logits, vocab, moved, tokens, mpk::SamplingScratch::in(scratch, vocab));
  }
}

EXPORT float log_probabilities(const float* logits, int vocab, int32_t token, int count, float* top, int32_t* top_token,
                               unsigned char* scratch) {
  return mpk::log_probabilities(logits, vocab, token, count, top, top_token, mpk::SamplingScratch::in(scratch, vocab));
}

EXPORT void philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  const auto r = mpk::philox4x32({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  std::copy(r.word, r.word + 4, out);
}

EXPORT void exponentials(const float* z, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = mpk::exp_nonpositive(z[i]);
}

EXPORT int select_largest(const float* x, int n, int k, mpk::Candidate* out) { return mpk::select_largest(x, n, k, out); }
