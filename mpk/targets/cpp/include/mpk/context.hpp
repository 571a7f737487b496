// What every task body of the C++ back end sees: the shared structures, the memory of the program, and its worker.
#pragma once
#include <cstddef>
#include <cstdint>

#include "mpk/layout.hpp"  // emitted from mpk/codegen/layout.py: Instruction, Step, Segment, Sequence, ...

namespace mpk {

// Memory of a running program; written by the host before the start, constant afterwards (what it points to is not).
struct Context {
  const unsigned char* weights;  // packed matrices
  const unsigned char* params;   // packed float32 parameters
  unsigned char* arena;          // activations; Instruction::operand holds byte offsets into it
  unsigned char* kv;             // key-value cache, see kv_page()
  Step* step;
  Segment* segments;        // [max_rows]
  int32_t* row_token;       // [max_rows]
  int32_t* row_slot;        // [max_rows]
  int32_t* row_position;    // [max_rows]
  int32_t* logit_row;       // [max_rows] row of each logit row
  Sequence* sequences;      // [max_batch]
  int32_t* tokens;          // [max_batch][max_context] prompt and generated tokens
  int32_t* page_table;      // [max_batch][max_pages] page numbers of each sequence
  int32_t* free_pages;      // stack of free page numbers
  int32_t* free_page_count;
  float* chosen_logprob;    // [max_batch][max_context] at the place of the token, or null
  float* top_logprob;       // [max_batch][max_context][MAX_TOP_LOGPROBS], or null
  int32_t* top_token;       // the same shape
  float* logits_out;        // [max_batch][logits_out_positions][vocab] for sequences with all_logits, or null
  int64_t logits_out_positions;
  int64_t* token_ns;        // [max_batch][max_context] time at which a generated token was published, or null
  const int32_t* cancel;    // set by the host while the program runs: stop after this step
  int64_t flagged_stride;   // CUDA back end: bytes between the two copies of flagged buffers
  void* messages;           // CUDA back end: [max_rows] of 16 bytes, the planned step from `advance` to all blocks (step.cuh)
  int64_t* mirror;          // CUDA back end: [max_batch][max_context] in host memory, token + 1 once it is known; or null
  int32_t max_batch, max_rows, max_context, max_pages, num_pages;
  // Of targets that read prompts with a graph of its own; else null and 0.
  const int64_t* places;    // where the stages of packed matrices stand, see tiles.cuh
  Step* prompt_step;
  int32_t prompt_rows;      // most of a step
  int32_t prompt_room;      // that the graph's buffers have
  int32_t prompt_least;     // tokens that are worth a step of this kind
  int32_t attention_bytes;  // of GPUs: with more keys and values of a layer, no weights are brought to the L2 while attention reads them
  int32_t rank, ranks;      // of this program among those that share the model
  const uint64_t* peers;    // [ranks] addresses of every rank's peer memory, see peer.hpp; null where there is one rank
  uint32_t flag_base;
};

template <class T>
inline T* address(uint64_t a) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(a));
}

inline Context make_context(const Launch& l) {
  Context c{};
  c.weights = address<const unsigned char>(l.weights);
  c.params = address<const unsigned char>(l.params);
  c.arena = address<unsigned char>(l.arena);
  c.kv = address<unsigned char>(l.kv);
  c.step = address<Step>(l.step);
  c.segments = address<Segment>(l.segments);
  c.row_token = address<int32_t>(l.row_token);
  c.row_slot = address<int32_t>(l.row_slot);
  c.row_position = address<int32_t>(l.row_position);
  c.logit_row = address<int32_t>(l.logit_row);
  c.sequences = address<Sequence>(l.sequences);
  c.tokens = address<int32_t>(l.tokens);
  c.page_table = address<int32_t>(l.page_table);
  c.free_pages = address<int32_t>(l.free_pages);
  c.free_page_count = address<int32_t>(l.free_page_count);
  c.chosen_logprob = address<float>(l.chosen_logprob);
  c.top_logprob = address<float>(l.top_logprob);
  c.top_token = address<int32_t>(l.top_token);
  c.logits_out = address<float>(l.logits_out);
  c.logits_out_positions = l.logits_out_positions;
  c.flagged_stride = l.flagged_stride;
  c.token_ns = address<int64_t>(l.token_ns);
  c.cancel = address<const int32_t>(l.cancel);
  c.max_batch = l.max_batch;
  c.max_rows = l.max_rows;
  c.max_context = l.max_context;
  c.max_pages = l.max_pages;
  c.num_pages = l.num_pages;
  c.rank = l.rank;
  c.ranks = l.ranks;
  c.peers = address<const uint64_t>(l.peers);
  c.flag_base = l.flag_base;
  return c;
}

// Private memory of one worker thread.
struct Worker {
  int32_t index, count;
  unsigned char* scratch;  // 64-byte aligned, as many bytes as the graph's plan says
  // For tasks that wait for another rank: called at every try, with what is waited for; false: give up, leave the task at once.
  bool (*keep_waiting)(Worker& worker, int64_t tries, int source, uint32_t expected, uint32_t seen);
  void* loop;    // the worker's loop, for keep_waiting
  bool gave_up;  // keep_waiting said so
};

template <class T>
inline T* operand(const Context& c, const Instruction& i, int slot) {
  return reinterpret_cast<T*>(c.arena + i.operand[slot]);
}

// First element of a page of one layer and key-value head: KV_PAGE_TOKENS * head_dim elements of keys, then as many of values,
// both in the packed form of kv_cache.hpp.
template <class T>
inline T* kv_page(const Context& c, int layer, int page, int head, int kv_heads, int head_dim) {
  const int64_t per_head = int64_t(2) * KV_PAGE_TOKENS * head_dim;
  return reinterpret_cast<T*>(c.kv) + ((int64_t(layer) * c.num_pages + page) * kv_heads + head) * per_head;
}

}  // namespace mpk
