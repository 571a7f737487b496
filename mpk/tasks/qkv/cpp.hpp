// qkv: one head a tile (query heads, then key heads, then value heads): RMS norm, product, bias, head norm, rotation; query
// heads go to q, keys and values are appended to the cache.
//
// Operands: x [rows][hidden], rope [rows][head_dim], q [rows][heads * head_dim]. Parameters, as far as the variant has them:
// norm [hidden], bias (every head's padded to whole panels), q_norm [head_dim], k_norm [head_dim].
// Variant: bf16, heads, kv_heads, head_dim, hidden, eps, norm, bias, q_norm, k_norm.
#pragma once
#include <type_traits>

#include "mpk/context.hpp"
#include "mpk/kv_cache.hpp"
#include "mpk/matmul.hpp"
#include "mpk/rows.hpp"

namespace mpk::qkv {

// (a, b) halves of a head turned by the angles whose cosines and sines stand in `rope`.
template <int HEAD_DIM>
MPK_INLINE void rotate(const float* head, const float* rope, float* out) {
  constexpr int half = HEAD_DIM / 2;
  for (int d = 0; d < half; ++d) {
    const float a = head[d], b = head[half + d], cosine = rope[d], sine = rope[half + d];
    out[d] = a * cosine - b * sine;
    out[half + d] = b * cosine + a * sine;
  }
}

template <class V>
void run(const Context& c, const Instruction& i, Worker& worker) {
  using W = std::conditional_t<V::bf16, bf16, float>;
  constexpr int hidden = int(V::hidden), head_dim = int(V::head_dim), heads = int(V::heads), kv_heads = int(V::kv_heads);
  constexpr int panels = divide_up(head_dim, kPanel), width = panels * kPanel;
  constexpr int64_t panel = int64_t(kPanel) * hidden;
  const int rows = c.step->rows;
  const float* norm = reinterpret_cast<const float*>(c.params + i.params);
  const float* bias = norm + (V::norm ? hidden : 0);
  const float* q_norm = bias + (V::bias ? (heads + 2 * kv_heads) * width : 0);
  const float* k_norm = q_norm + (V::q_norm ? head_dim : 0);
  float* sums = reinterpret_cast<float*>(worker.scratch);
  const float* x = operand<float>(c, i, 0);
  if constexpr (V::norm) {
    float* prepared = sums + int64_t(c.max_rows) * width;
    prepare_rows<true>(x, nullptr, rows, norm, hidden, float(V::eps), prepared);
    x = prepared;
  }
  const float* rope = operand<float>(c, i, 1);
  float* q = operand<float>(c, i, 2);
  const W* weights = reinterpret_cast<const W*>(c.weights + i.weights);
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
    product<W>(weights + tile * panels * panel, panel, panels, hidden, x, hidden, rows, sums, width);
    const bool is_query = tile < heads, is_key = !is_query && tile < heads + kv_heads;
    const int kv_head = is_key ? tile - heads : tile - heads - kv_heads;
    for (int r = 0; r < rows; ++r) {
      float* head = sums + int64_t(r) * width;
      if constexpr (V::bias)
        for (int d = 0; d < head_dim; ++d) head[d] += bias[tile * width + d];
      if constexpr (V::q_norm)
        if (is_query) rms_normalise(head, q_norm, head_dim, float(V::eps), head);
      if constexpr (V::k_norm)
        if (is_key) rms_normalise(head, k_norm, head_dim, float(V::eps), head);
      if (is_query) {
        rotate<head_dim>(head, rope + int64_t(r) * head_dim, q + int64_t(r) * heads * head_dim + tile * head_dim);
        continue;
      }
      const int position = c.row_position[r], token = position % KV_PAGE_TOKENS;
      const int page = c.page_table[int64_t(c.row_slot[r]) * c.max_pages + position / KV_PAGE_TOKENS];
      W* keys = kv_page<W>(c, i.layer, page, kv_head, kv_heads, head_dim);
      if (is_key) {
        float rotated[head_dim];
        rotate<head_dim>(head, rope + int64_t(r) * head_dim, rotated);
        store_key(keys, token, head_dim, rotated);
      } else {
        store_value(keys + KV_PAGE_TOKENS * head_dim, token, head_dim, head);
      }
    }
  }
}

}  // namespace mpk::qkv
