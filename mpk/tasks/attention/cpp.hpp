// attention: one (key-value head, split) a tile: causal softmax of the head's group of queries over pages of the cache.
//
// Operands: q [rows][heads * head_dim], out [rows][heads * head_dim], or for splits > 1 partial results
// [rows][kv_heads][splits][group][head_dim + 2] (see attention_math.hpp for the rule of sharing).
// Variant: bf16, heads, kv_heads, head_dim, window, scale, splits.
#pragma once
#include <type_traits>

#include "mpk/attention_math.hpp"
#include "mpk/context.hpp"
#include "mpk/kv_cache.hpp"
#include "mpk/matmul.hpp"

namespace mpk::attention {

// Up to kQueryRows consecutive rows of one sequence, times the query heads of the group.
struct Block {
  int slot, row, rows, position;  // `row` in the step, `position` of the first row in its sequence
};

// Private memory of a task; [queries] is kQueryRows * group.
template <class V>
struct Memory {
  static constexpr int head_dim = int(V::head_dim), group = int(V::heads / V::kv_heads), queries = kQueryRows * group;
  float* q;       // [queries][head_dim], scaled
  float* scores;  // [queries][KV_PAGE_TOKENS]
  float* sums;    // [queries][head_dim] of the chain being computed
  float* merged;  // [queries][head_dim] of the chains before it
  float *max, *total, *merged_max, *merged_total;  // [queries]

  explicit Memory(unsigned char* scratch) {
    float* at = reinterpret_cast<float*>(scratch);
    const auto take = [&at](int count) { return at += count, at - count; };
    q = take(queries * head_dim), scores = take(queries * KV_PAGE_TOKENS);
    sums = take(queries * head_dim), merged = take(queries * head_dim);
    max = take(queries), total = take(queries), merged_max = take(queries), merged_total = take(queries);
  }
};

template <class V>
inline void load_queries(const Context& c, const Instruction& i, int kv_head, const Block& b, Memory<V>& m) {
  constexpr int N = vector_lanes(8), head_dim = m.head_dim;
  const float* q = operand<float>(c, i, 0) + kv_head * m.group * head_dim;
  for (int r = 0; r < b.rows; ++r)
    for (int d = 0; d < m.group * head_dim; d += N)
      store(m.q + r * m.group * head_dim + d, load<N>(q + int64_t(b.row + r) * V::heads * head_dim + d) * splat<N>(float(V::scale)));
}

// The block's softmax over one page, merged into the chain so far; `valid` tokens of the page exist for the last row. The
// chain's next page lies `ahead` bytes on: its keys are fetched while these are in use, then its values.
template <class V, class W>
inline void attend_page(const W* keys, int64_t ahead, int page_position, int valid, const Block& b, Memory<V>& m) {
  constexpr int head_dim = m.head_dim, full = head_dim / kPanel;
  const int queries = b.rows * m.group, key_panels = divide_up(valid, kPanel), columns = key_panels * kPanel;
  product<W>(keys, int64_t(kPanel) * head_dim, key_panels, head_dim, m.q, head_dim, queries, m.scores, KV_PAGE_TOKENS,
             true, ahead);
  for (int n = 0; n < queries; ++n) {
    const int in_page = b.position + n / m.group - page_position;  // the query's own place, counted from the page's first token
    const int end = in_page + 1 < valid ? in_page + 1 : valid;
    const int begin = V::window > 0 && in_page >= V::window ? in_page - int(V::window) + 1 : 0;
    float* scores = m.scores + n * KV_PAGE_TOKENS;
    if (begin >= end) {
      for (int j = 0; j < columns; ++j) scores[j] = 0.0f;
      continue;
    }
    const float shrink = softmax_page(scores, begin, end, columns, m.max[n], m.total[n]);
    if (shrink != 1.0f)
      for (int d = 0; d < head_dim; ++d) m.sums[n * head_dim + d] *= shrink;
  }
  const W* values = keys + KV_PAGE_TOKENS * head_dim;
  const int tokens = int(round_up(valid, 2));
  if constexpr (full > 0)
    product<W>(values, KV_PAGE_TOKENS * kPanel, full, tokens, m.scores, KV_PAGE_TOKENS, queries, m.sums, head_dim, false, ahead);
  if constexpr (head_dim % kPanel != 0)
    product<W, 8>(values + KV_PAGE_TOKENS * kPanel * full, 0, 1, tokens, m.scores, KV_PAGE_TOKENS, queries, m.sums + full * kPanel,
                  head_dim, false, ahead);
}

// Chain `chain` of the block: sums, max and total over the pages that belong to it.
template <class V>
inline void attend_chain(const Context& c, const Instruction& i, int kv_head, const Block& b, int chain, Memory<V>& m) {
  using W = std::conditional_t<V::bf16, bf16, float>;
  const int queries = b.rows * m.group;
  for (int n = 0; n < queries; ++n) m.max[n] = -INFINITY, m.total[n] = 0.0f;
  for (int d = 0; d < queries * m.head_dim; ++d) m.sums[d] = 0.0f;
  const int last = b.position + b.rows - 1, first = V::window > 0 && b.position >= V::window ? b.position - int(V::window) + 1 : 0;
  constexpr int splits = int(V::splits);
  const int first_page = first / KV_PAGE_TOKENS, last_page = last / KV_PAGE_TOKENS;
  const int32_t* pages = c.page_table + int64_t(b.slot) * c.max_pages;
  const auto keys_of = [&](int p) { return kv_page<W>(c, i.layer, pages[p], kv_head, int(V::kv_heads), m.head_dim); };
  for (int p = first_page + (chain + splits - first_page % splits) % splits; p <= last_page; p += splits) {
    const int begin = p * KV_PAGE_TOKENS, valid = last + 1 - begin < KV_PAGE_TOKENS ? last + 1 - begin : KV_PAGE_TOKENS;
    const W* keys = keys_of(p);
    const int64_t ahead = p + splits <= last_page ? int64_t(keys_of(p + splits) - keys) * int64_t(sizeof(W)) : kPrefetchBytes;
    attend_page<V>(keys, ahead, begin, valid, b, m);
  }
}

// Where the partial result of one query stands.
template <class V>
inline float* partial(const Context& c, const Instruction& i, int row, int kv_head, int split, int in_group) {
  constexpr int group = Memory<V>::group, columns = partial_columns(Memory<V>::head_dim);
  return operand<float>(c, i, 1) + (int64_t(row) * V::heads * V::splits + (kv_head * V::splits + split) * group + in_group) * columns;
}

template <class V>
inline void write_partial(float* to, const float* sums, float max, float total) {
  for (int d = 0; d < Memory<V>::head_dim; ++d) to[d] = sums[d];
  to[Memory<V>::head_dim] = max, to[Memory<V>::head_dim + 1] = total;
}

// One chain of a block whose rows are not shared: the result itself, or a partial result.
template <class V>
inline void attend_split(const Context& c, const Instruction& i, int kv_head, int split, const Block& b, Memory<V>& m) {
  attend_chain<V>(c, i, kv_head, b, split, m);
  for (int n = 0; n < b.rows * m.group; ++n) {
    const int row = b.row + n / m.group, in_group = n % m.group;
    const float* sums = m.sums + n * m.head_dim;
    if constexpr (V::splits == 1)
      finish_row(m.head_dim, sums, m.total[n],
                 operand<float>(c, i, 1) + (int64_t(row) * V::heads + kv_head * m.group + in_group) * m.head_dim);
    else
      write_partial<V>(partial<V>(c, i, row, kv_head, split, in_group), sums, m.max[n], m.total[n]);
  }
}

// All chains of a block that this task owns, merged and finished; a partial result with total 1 stands for a finished row.
template <class V>
inline void attend_owned(const Context& c, const Instruction& i, int kv_head, int split, const Block& b, Memory<V>& m) {
  const int queries = b.rows * m.group;
  for (int n = 0; n < queries; ++n) m.merged_max[n] = -INFINITY, m.merged_total[n] = 0.0f;
  for (int d = 0; d < queries * m.head_dim; ++d) m.merged[d] = 0.0f;
  for (int chain = 0; chain < V::splits; ++chain) {
    attend_chain<V>(c, i, kv_head, b, chain, m);
    for (int n = 0; n < queries; ++n)
      merge_partial(m.head_dim, m.merged + n * m.head_dim, m.merged_max[n], m.merged_total[n], m.sums + n * m.head_dim, m.max[n],
                    m.total[n]);
  }
  for (int n = 0; n < queries; ++n) {
    finish_row(m.head_dim, m.merged + n * m.head_dim, m.merged_total[n], m.sums);
    write_partial<V>(partial<V>(c, i, b.row + n / m.group, kv_head, split, n % m.group), m.sums, 0.0f, 1.0f);
  }
}

template <class V>
void run(const Context& c, const Instruction& i, Worker& worker) {
  Memory<V> memory(worker.scratch);
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
    const int kv_head = tile / int(V::splits), split = tile % int(V::splits);
    for (int s = 0; s < c.step->segments; ++s) {
      const Segment& segment = c.segments[s];
      const bool shared = rows_are_shared(segment.rows, int(V::splits));
      for (int r = 0; r < segment.rows; r += kQueryRows) {
        if (shared && owner_of_row(r, int(V::splits)) != split) continue;
        const Block block{segment.slot, segment.row_begin + r, segment.rows - r < kQueryRows ? segment.rows - r : kQueryRows,
                          segment.position + r};
        load_queries<V>(c, i, kv_head, block, memory);
        shared ? attend_owned<V>(c, i, kv_head, split, block, memory) : attend_split<V>(c, i, kv_head, split, block, memory);
      }
    }
  }
}

}  // namespace mpk::attention
