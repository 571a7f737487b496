// prompt_append: norm and rotation of the keys of a prompt step, append of keys and values to the cache.
//
// Operands: qkv [rows][(heads + 2 kv_heads) * head_dim] bf16, rope [rows][head_dim] float32. Parameters: k_norm [head_dim] if V::k_norm.
// Page of the cache: mpk/page.cuh, bf16.
// Variant: heads, kv_heads, head_dim, eps, k_norm, shares. An item is one key-value head of the rows of one segment that share a page; a
// task takes every `shares`-th item.
#pragma once
#include "mpk/page.cuh"
#include "mpk/turn.cuh"
#include "mpk/wait.cuh"

namespace mpk::prompt_append {

constexpr bool waits_inside = true;

// Rows of one segment on one page.
struct Rows {
  int slot, page, first, count, row;  // first: place in the page; row: of the step
};

__device__ __forceinline__ int pages_touched(const Segment& s) { return (s.position + s.rows - 1) / KV_PAGE_TOKENS - s.position / KV_PAGE_TOKENS + 1; }

// The rows of page `n` of all that the step touches, in the order of segments; count 0: there are not so many.
__device__ __forceinline__ Rows rows_of(const StepView& step, int n) {
  for (int j = 0; j < step.segment_count; ++j) {
    const Segment s = step.segments[j];
    const int pages = pages_touched(s);
    if (n >= pages) {
      n -= pages;
      continue;
    }
    const int page = s.position / KV_PAGE_TOKENS + n, begin = max(s.position, page * KV_PAGE_TOKENS);
    const int end = min(s.position + s.rows, (page + 1) * KV_PAGE_TOKENS);
    return {s.slot, page, begin - page * KV_PAGE_TOKENS, end - begin, s.row_begin + begin - s.position};
  }
  return {};
}

template <class V>
__device__ __forceinline__ void keys(const Context& c, const Instruction& i, const Block& b, const Rows& rows, int head, bf16* page) {
  constexpr int head_dim = int(V::head_dim), width = (int(V::heads) + 2 * int(V::kv_heads)) * head_dim;
  using H = HeadRow<head_dim>;
  const float* norm = V::k_norm ? reinterpret_cast<const float*>(c.params + i.params) : nullptr;
#pragma unroll 2  // more spills registers
  for (int r = b.warp; r < rows.count; r += WARPS) {
    H h;
    h.load(operand<bf16>(c, i, 0) + int64_t(rows.row + r) * width + (int(V::heads) + head) * head_dim, b.lane);
    h.turn(norm, float(V::eps), operand<float>(c, i, 1) + int64_t(rows.row + r) * head_dim, b.lane);
    const auto to = [&](int d) { return reinterpret_cast<uint32_t*>(page + PagePlace<head_dim>::key(rows.first + r, d)); };
#pragma unroll
    for (int n = 0; n < H::each; ++n) {
      const int p = b.lane + n * 32;
      if (p >= H::pairs) continue;
      *to(2 * p) = h.first[n], *to(H::half + 2 * p) = h.second[n];
    }
  }
}

// Values meet in shared memory, row by row, and leave it column by column.
template <class V>
__device__ __forceinline__ void values(const Context& c, const Instruction& i, const Block& b, const Rows& rows, int head, bf16* page) {
  constexpr int head_dim = int(V::head_dim), width = (int(V::heads) + 2 * int(V::kv_heads)) * head_dim, stride = head_dim + 2, pairs = head_dim / 2;
  bf16* meeting = reinterpret_cast<bf16*>(b.pool);
  const bf16* from = operand<bf16>(c, i, 0) + int64_t(rows.row) * width + (int(V::heads) + int(V::kv_heads) + head) * head_dim;
#pragma unroll 4
  for (int j = b.thread; j < rows.count * pairs; j += THREADS) {
    const int r = j / pairs, d = j % pairs * 2;
    *reinterpret_cast<uint32_t*>(meeting + (rows.first + r) * stride + d) = load_4(from + int64_t(r) * width + d);
  }
  b.sync();
  constexpr int groups = KV_PAGE_TOKENS / 4;
#pragma unroll 2
  for (int j = b.thread; j < head_dim * groups; j += THREADS) {
    const int d = j % head_dim, begin = j / head_dim * 4, end = rows.first + rows.count;
    bf16* to = page + PagePlace<head_dim>::value(begin, d);
    const bf16* own = meeting + begin * stride + d;
    if (begin >= rows.first && begin + 4 <= end)
      *reinterpret_cast<uint2*>(to) = {own[0].bits | uint32_t(own[stride].bits) << 16, own[2 * stride].bits | uint32_t(own[3 * stride].bits) << 16};
    else
      for (int e = 0; e < 4; ++e)
        if (begin + e >= rows.first && begin + e < end) to[e] = own[e * stride];
  }
  b.sync();
}

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int kv_heads = int(V::kv_heads);
  wait_inputs(b);
  for (int item = i.tile_begin;; item += int(V::shares)) {
    const Rows rows = rows_of(*b.step, item / kv_heads);
    if (rows.count == 0) return;
    const int head = item % kv_heads, number = load_int(c.page_table + int64_t(rows.slot) * c.max_pages + rows.page);
    bf16* page = kv_page<bf16>(c, i.layer, number, head, kv_heads, int(V::head_dim));
    keys<V>(c, i, b, rows, head, page);
    values<V>(c, i, b, rows, head, page);
  }
}

}  // namespace mpk::prompt_append
