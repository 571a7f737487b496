// What `rotary_attention` and `attention_combine` share: how the context is shared among splits, and where partial results stand.
// The same rule as mpk/tasks/rotary_attention/sharing.py.
#pragma once
#include "mpk/context.hpp"
#include "mpk/reduce.cuh"

namespace mpk {

// Positions that a warp takes at a time: as many as its registers hold keys and values of.
constexpr int kv_block(int head_dim) { return head_dim <= 64 ? 32 : 16; }

constexpr int TILE_QUERIES = 8;  // queries (a row's heads of one group, row after row) that are multiplied at a time

// The work of one key-value head in a step: for each segment, its blocks of positions times its tiles of queries. Segments stand one
// after the other, and this line is cut into equal shares, one a split: a batch of sequences of whatever lengths is balanced, and a
// sequence has partial results of as few splits as can be. A short line is shared among fewer splits, `V::least` blocks each.
//
// Every lane holds one segment. Variant: heads, kv_heads, head_dim, window, splits, least.
template <class V>
struct Shares {
  static constexpr int group = int(V::heads) / int(V::kv_heads), window = int(V::window), block = kv_block(int(V::head_dim));
  int first, count, tiles;  // of this lane's segment: first block that some row sees, blocks from there on, tiles of queries
  int before;               // work of the segments before it
  int base, extra;          // of a split: base, and one more for the first `extra` splits

  // All lanes of a warp.
  __device__ __forceinline__ Shares(const StepView& step, int lane) {
    const bool there = lane < step.segment_count;
    const Segment& s = step.segments[there ? lane : 0];
    first = window > 0 && s.position >= window ? (s.position - window + 1) / block : 0;
    count = there ? (s.position + s.rows - 1) / block + 1 - first : 0;
    tiles = (s.rows * group + TILE_QUERIES - 1) / TILE_QUERIES;
    before = warp_sum_before(count * tiles, lane);
    const int total = __shfl_sync(ALL_LANES, before + count * tiles, 31);
    const int wanted = (total + int(V::least) - 1) / int(V::least), used = wanted < int(V::splits) ? wanted : int(V::splits);
    base = total / used, extra = total - base * used;
  }

  // Number, from the segment's first block on, of the block with which the share of a split begins; it ends where the next one begins.
  __device__ __forceinline__ static int begin(int split, int base, int extra, int before, int count, int tiles) {
    const int at = split * base + (split < extra ? split : extra) - before;
    if (at <= 0) return 0;
    const int blocks = (at + tiles - 1) / tiles;
    return blocks < count ? blocks : count;
  }
  __device__ __forceinline__ int begin(int split) const { return begin(split, base, extra, before, count, tiles); }
  // The same of the segment that lane `segment` holds; any lane may ask for any split.
  __device__ __forceinline__ bool has_work(int segment, int split) const {
    const int b = __shfl_sync(ALL_LANES, before, segment), n = __shfl_sync(ALL_LANES, count, segment), t = __shfl_sync(ALL_LANES, tiles, segment);
    return split < int(V::splits) && begin(split, base, extra, b, n, t) < begin(split + 1, base, extra, b, n, t);
  }
};

// A step of one row has a form of its own, because nothing else happens meanwhile: its line of blocks is dealt out to all warps of all
// splits, one block after the other from the newest one on, and each warp leaves a partial result of its own. Rows of the buffer of
// partial results beyond the first one are free then, so warp w of a split writes row w. Where that would be very many results (each head
// merges its own on one SM), the warps of a split meet first and leave one.
template <class V>
struct OneRow {
  static constexpr int window = int(V::window), block = kv_block(int(V::head_dim)), splits = int(V::splits);
  static constexpr bool POSSIBLE = splits > 1 && int(V::heads) / int(V::kv_heads) <= TILE_QUERIES && int(V::head_dim) <= 128;
  int position, last, blocks;  // of the row; number of its own block; blocks that it sees
  int used;                    // splits with work; partial result f < count() is of split f % used, row f / used
  static constexpr int MOST = 4 * splits;  // results, for which it pays not to meet

  __device__ __forceinline__ explicit OneRow(const StepView& step) {
    position = step.segments[0].position, last = position / block;
    blocks = last + 1 - (window > 0 && position >= window ? (position - window + 1) / block : 0);
    used = blocks < splits ? blocks : splits;
  }
  __device__ __forceinline__ static bool is_form_of(const Context& c, const StepView& step) { return POSSIBLE && step.rows == 1 && c.max_rows >= WARPS; }
  __device__ __forceinline__ int stride() const { return WARPS * used; }  // of a warp's blocks
  __device__ __forceinline__ bool meets() const { return blocks > MOST; }
  __device__ __forceinline__ int count() const { return meets() ? used : blocks; }
  // Warps of `split` that have blocks.
  __device__ __forceinline__ int warps(int split) const { return min((blocks - split + used - 1) / used, WARPS); }
};

// A partial result is head_dim sums (not yet divided), the maximum score, the sum of exponentials, and two words for alignment:
// [row][kv_head][split][head in group][head_dim + 4]. Splits without work on a segment write nothing for its rows.
constexpr int partial_columns(int head_dim) { return head_dim + 4; }

__device__ __forceinline__ int64_t partial_offset(int row, int heads, int kv_head, int splits, int split, int group, int in_group, int head_dim) {
  return (int64_t(row) * heads * splits + (kv_head * splits + split) * group + in_group) * partial_columns(head_dim);
}

}  // namespace mpk
