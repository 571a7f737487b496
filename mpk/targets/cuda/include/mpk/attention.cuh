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

// A step that only decodes (every segment is one row) has a form of its own, because much of what it takes is instructions one after the
// other: the blocks that a row sees are dealt out to single warps of all splits, one block after the other from the newest one on, and each
// warp leaves a partial result of its own. Parts of rows stand one after the other; part f is of warp f / splits of split f % splits, and
// its result in row f / splits of the buffer of partial results, whatever row of the step it is of.
//
// A row has as many parts as it takes for none to have more blocks than `most`, which is the least for which there are warps enough. The
// first task of a step that wants to know computes this, each warp for itself, and leaves it for later ones (Block::notes).
//
// Variant: heads, kv_heads, head_dim, window, splits.
template <class V>
struct SingleRows {
  static constexpr int window = int(V::window), block = kv_block(int(V::head_dim)), splits = int(V::splits), room = WARPS * splits;
  static constexpr bool POSSIBLE = splits > 1 && int(V::heads) / int(V::kv_heads) <= TILE_QUERIES && int(V::head_dim) <= 128;
  uint32_t step;  // number of the step that the rest is of, 0 at first
  int32_t seen;   // and the window
  uint16_t begin[MAX_ROWS + 2];  // first part of each row, and the end

  // With fewer warps than twice the rows, rows of different lengths would not be balanced.
  __device__ __forceinline__ static bool is_form_of(const Context& c, const StepView& s) {
    return POSSIBLE && s.segment_count == s.rows && 2 * s.rows <= room && c.max_rows >= WARPS;
  }
  // Blocks that the row at `position` sees.
  __device__ __forceinline__ static int blocks(int position) {
    return position / block + 1 - (window > 0 && position >= window ? (position - window + 1) / block : 0);
  }
  // All lanes of a warp.
  __device__ __forceinline__ static const SingleRows& of(const Block& b) {
    static_assert(sizeof(SingleRows) <= NOTE_BYTES && WARPS * splits < 65536, "room for it");
    SingleRows& own = *reinterpret_cast<SingleRows*>(b.notes + b.warp * (NOTE_BYTES / 16));
    if (own.step != uint32_t(b.step->number) || own.seen != window) own.plan(*b.step);
    return own;
  }
  // Parts of the only row of a step, by the same rule.
  __device__ __forceinline__ static int parts_of_one(int blocks) { return blocks <= room ? blocks : parts(blocks, parts(blocks, room)); }
  // Row of part `f`, if there is such a part.
  __device__ __forceinline__ int row_of(int f, int rows) const {
    const int lane = own_lane();
    return __popc(__ballot_sync(ALL_LANES, lane < rows && int(begin[lane < rows ? lane : 0]) <= f)) - 1;
  }

 private:
  __device__ __forceinline__ static int parts(int blocks, int most) { return int(unsigned(blocks + most - 1) / unsigned(most)); }

  __device__ __forceinline__ void plan(const StepView& s) {
    const int lane = own_lane(), rows = s.rows, count = lane < rows ? blocks(s.segments[lane].position) : 0, total = warp_sum(count);
    // The sum of count / most, each rounded up, is less than (total - rows) / most + rows.
    int too_few = parts(total, room) - 1, most = max(parts(total - rows, room - rows), 1);
#pragma unroll 1
    while (too_few + 1 < most) {
      const int between = (too_few + most) / 2;
      (warp_sum(parts(count, between)) <= room ? most : too_few) = between;
    }
    const int before = warp_sum_before(parts(count, most), lane);
    __syncwarp();
    if (lane <= rows) begin[lane] = uint16_t(before);
    if (lane == 0) step = uint32_t(s.number), seen = window;
    __syncwarp();
  }
};

// A partial result is head_dim sums (not yet divided), the maximum score, the sum of exponentials, and two words for alignment:
// [row][kv_head][split][head in group][head_dim + 4]. Splits without work on a segment write nothing for its rows.
constexpr int partial_columns(int head_dim) { return head_dim + 4; }

__device__ __forceinline__ int64_t partial_offset(int row, int heads, int kv_head, int splits, int split, int group, int in_group, int head_dim) {
  return (int64_t(row) * heads * splits + (kv_head * splits + split) * group + in_group) * partial_columns(head_dim);
}

}  // namespace mpk
