// Chooses the next token of each slot of the batch that has a row of logits, or keeps the logits where they are asked for.
#pragma once
#include <cstring>

#include "mpk/context.hpp"
#include "mpk/sampling.hpp"

namespace mpk::sample {

// Token for one row of logits of a slot, with its log-probabilities where the sequence wants them.
inline int32_t choose_for(const Context& c, int slot, const float* logits, int vocab, const SamplingScratch& scratch) {
  const Sequence& s = c.sequences[slot];
  const int64_t begin = int64_t(slot) * c.max_context;
  const int32_t token = choose(logits, vocab, s, c.tokens + begin, scratch);
  if (token >= 0 && s.top_logprobs >= 0 && c.chosen_logprob != nullptr) {
    const int64_t place = begin + s.length;  // where `advance` will put the token
    const int64_t tops = place * MAX_TOP_LOGPROBS;
    c.chosen_logprob[place] =
        log_probabilities(logits, vocab, token, s.top_logprobs, c.top_logprob + tops, c.top_token + tops, scratch);
  }
  return token;
}

template <class Variant>
void run(const Context& c, const Instruction& in, Worker& worker) {
  constexpr int vocab = Variant::vocab;
  const float* logits = operand<float>(c, in, 0);
  int32_t* choice = operand<int32_t>(c, in, 1);
  const SamplingScratch scratch = SamplingScratch::in(worker.scratch, vocab);
  for (int slot = in.tile_begin; slot < in.tile_end; ++slot) {
    choice[slot] = -1;
    if (slot >= c.max_batch) continue;
    for (int l = 0; l < c.step->logit_rows; ++l) {
      const int row = c.logit_row[l];
      if (c.row_slot[row] != slot) continue;
      const float* mine = logits + int64_t(l) * vocab;
      if (c.sequences[slot].all_logits) {
        if (c.logits_out == nullptr) continue;  // another rank hands them out
        const int64_t place = slot * c.logits_out_positions + c.row_position[row];
        std::memcpy(c.logits_out + place * vocab, mine, sizeof(float) * vocab);
      } else {
        choice[slot] = choose_for(c, slot, mine, vocab, scratch);
      }
    }
  }
}

}  // namespace mpk::sample
