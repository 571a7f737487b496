// What `rotary_attention` and `attention_combine` share: how the context is shared among splits, and where partial results stand.
// The same rule as mpk/tasks/rotary_attention/sharing.py.
#pragma once
#include "mpk/context.hpp"
#include "mpk/reduce.cuh"

namespace mpk {

// Positions that a warp takes at a time: as many as its registers hold keys and values of.
constexpr int kv_block(int head_dim) { return head_dim <= 64 ? 32 : 16; }

// Blocks of positions [begin, begin + count).
struct Blocks {
  int begin, count;
};

// Blocks of `block` positions with past positions (before the segment's first one) that some row of the segment sees.
__device__ __forceinline__ Blocks past_blocks(int position, int window, int block) {
  const int first = window > 0 && position >= window ? position - window + 1 : 0;
  if (first >= position) return {0, 0};
  return {first / block, (position + block - 1) / block - first / block};
}

// Equal, contiguous shares; the first ones are one block larger. So split s has past positions if and only if s < blocks.count.
__device__ __forceinline__ Blocks share_of(Blocks blocks, int split, int splits) {
  const int base = blocks.count / splits, extra = blocks.count % splits;
  return {blocks.begin + split * base + (split < extra ? split : extra), base + (split < extra ? 1 : 0)};
}

// The last split appends the step's keys and values, and is the one that sees them: with a short context it has nothing else.
__device__ __forceinline__ bool split_has_work(Blocks blocks, int split, int splits) { return split < blocks.count || split == splits - 1; }

// A partial result is head_dim sums (not yet divided), the maximum score, and the sum of exponentials:
// [row][kv_head][split][head in group][head_dim + 2]. Splits without work write nothing.
constexpr int partial_columns(int head_dim) { return head_dim + 2; }

__device__ __forceinline__ int64_t partial_offset(int row, int heads, int kv_head, int splits, int split, int group, int in_group, int head_dim) {
  return (int64_t(row) * heads * splits + (kv_head * splits + split) * group + in_group) * partial_columns(head_dim);
}

}  // namespace mpk
