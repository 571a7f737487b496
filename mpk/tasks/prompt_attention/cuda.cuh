// prompt_attention: causal softmax of the queries of a prompt step over the whole context, which is in the cache by then, on tensor cores.
//
// Operands: qkv [rows][(heads + 2 kv_heads) * head_dim] bf16 (its queries), rope [rows][head_dim] float32, out in chunks (mpk/tiles.cuh) of
// heads * head_dim columns. Parameters: q_norm [head_dim] if V::q_norm. Pages of the cache as prompt_append leaves them.
// Variant: heads, kv_heads, head_dim, window, scale, eps, q_norm, shares.
//
// An item is one query head of 128 rows of a segment, 64 a warp group. Queries are normed, rotated and kept in shared memory; pages of keys and
// values come one ahead. Scores are products of two operands in shared memory; weights go from their sums straight to registers of
// the next product. Later rows see more, so items are dealt from the last rows on, back and forth over the tasks.
#pragma once
#include "mpk/copy.cuh"
#include "mpk/page.cuh"
#include "mpk/tiles.cuh"
#include "mpk/turn.cuh"
#include "mpk/wait.cuh"
#include "mpk/wgmma.cuh"

namespace mpk::prompt_attention {

constexpr bool waits_inside = true;
constexpr int QUERIES = 128, GROUP_ROWS = 64, PAGE = KV_PAGE_TOKENS;
static_assert(PAGE == 64, "a page of values is one row of a swizzled operand");

template <class V>
struct Shape {
  static constexpr int heads = int(V::heads), kv_heads = int(V::kv_heads), head_dim = int(V::head_dim), group = heads / kv_heads, window = int(V::window);
  static constexpr int width = (heads + 2 * kv_heads) * head_dim, columns = heads * head_dim, padded = (columns + 63) / 64 * 64;  // of qkv; of out
  static constexpr int depth = (head_dim + 15) / 16 * 16, chunks = (depth + 63) / 64;  // of scores: k, and operands of 64 columns that it takes
  static constexpr int query_bytes = chunks * QUERIES * 128, key_bytes = chunks * PAGE * 128, value_bytes = (head_dim * 128 + 1023) / 1024 * 1024;
  static constexpr int page_bytes = key_bytes + value_bytes, bytes = query_bytes + 2 * page_bytes;
  static_assert(bytes <= POOL_BYTES && head_dim % 8 == 0, "queries and two pages fit");
};

// Byte of 16-byte unit `unit` of a row in an operand of `rows` rows and any number of chunks.
__device__ __forceinline__ int unit_offset(int row, int unit, int rows) { return (unit / 8 * rows + row) * 128 + ((unit % 8) ^ (row & 7)) * 16; }

// A thread's part of the sums [64 x head_dim] of a warp group: columns [BEGIN, HEAD_DIM), in products as wide as there are.
template <int HEAD_DIM, int BEGIN = 0>
struct Columns {
  static constexpr int left = HEAD_DIM - BEGIN, width = left >= 256 ? 256 : left >= 128 ? 128 : left >= 64 ? 64 : left >= 32 ? 32 : left >= 16 ? 16 : 8;
  float d[width / 2];
  Columns<HEAD_DIM, BEGIN + width> rest;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& sum : d) sum = 0.0f;
    rest.clear();
  }
  __device__ __forceinline__ void scale(float low, float high) {  // of the thread's first and second row
#pragma unroll
    for (int e = 0; e < width / 2; ++e) d[e] *= e / 2 % 2 == 0 ? low : high;
    rest.scale(low, high);
  }
  // `values`: shared address of the page's values.
  __device__ __forceinline__ void add(uint4 weights, uint32_t values, int step) {
    Wgmma<width>::mma(d, weights, wgmma_operand(values + BEGIN * 128) + 2 * step, 1);
    rest.add(weights, values, step);
  }
  // f(column of the head, sums of a block of 8 columns), blocks in order.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int j = 0; j < width / 8; ++j) f(BEGIN + j * 8, d + 4 * j);
    rest.each(f);
  }
};
template <int HEAD_DIM>
struct Columns<HEAD_DIM, HEAD_DIM> {
  __device__ __forceinline__ void clear() {}
  __device__ __forceinline__ void scale(float, float) {}
  __device__ __forceinline__ void add(uint4, uint32_t, int) {}
  template <class F>
  __device__ __forceinline__ void each(const F&) const {}
};

// 128 rows of a segment (fewer at its beginning, since blocks are counted from its end).
struct Rows {
  int slot, row, position, count, end;  // first row of the step, its position, rows; positions of the segment end here
  bool valid;
};

__device__ __forceinline__ int blocks_of(const Segment& s) { return (s.rows + QUERIES - 1) / QUERIES; }

// Block `n` of all segments, last ones first.
__device__ __forceinline__ Rows rows_of(const StepView& step, int n) {
  for (int j = step.segment_count - 1; j >= 0; --j) {
    const Segment s = step.segments[j];
    const int blocks = blocks_of(s);
    if (n >= blocks) {
      n -= blocks;
      continue;
    }
    const int first = (blocks - 1 - n) * QUERIES;
    return {s.slot, s.row_begin + first, s.position + first, min(QUERIES, s.rows - first), s.position + s.rows, true};
  }
  return {};
}

template <class V>
class Item {
  using S = Shape<V>;

 public:
  __device__ __forceinline__ Item(const Context& c, const Instruction& i, Block& b, const Rows& rows, int head)
      : c(c), i(i), b(b), rows(rows), head(head), queries(shared_address(b.pool)), pages(queries + S::query_bytes) {}

  __device__ __forceinline__ void run() {
    const int last = (rows.position + rows.count - 1) / PAGE;
    const int oldest = S::window > 0 ? max(rows.position - S::window + 1, 0) : 0, first = oldest / PAGE;
    uint4 held[HELD] = {};
    fetch(held, first, 0);
    copy_async_commit();
    constexpr bool early = S::head_dim > 128;  // there are not enough registers to hold values meanwhile
    if (early) store(held, first, 0);
    prepare();
    if (!early) store(held, first, 0);
    const int lane = own_lane(), group = b.warp / 4;
    const int own_row = group * GROUP_ROWS + b.warp % 4 * 16 + lane / 4;  // and 8 on
    const int from = rows.position + group * GROUP_ROWS, to = min(from + GROUP_ROWS, rows.position + rows.count);  // positions of the group
    Columns<S::head_dim> sums;
    sums.clear();
    float top[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int page = first; page <= last; ++page) {
      const int buffer = (page - first) & 1;
      copy_async_wait<0>();
      fence_async();
      b.sync();
      if (page < last) fetch(held, page + 1, buffer ^ 1);
      copy_async_commit();
      if (early && page < last) store(held, page + 1, buffer ^ 1);
      const bool seen = page * PAGE < to && (S::window == 0 || (page + 1) * PAGE > from - S::window + 1);
      if (seen) attend(sums, top, total, page, buffer, own_row, from, to);
      if (!early && page < last) store(held, page + 1, buffer ^ 1);
    }
    b.sync();
    finish(sums, total, own_row);
    b.sync();
  }

 private:
  const Context& c;
  const Instruction& i;
  Block& b;
  const Rows rows;
  const int head;
  const uint32_t queries, pages;
  static constexpr int HELD = (PagePlace<S::head_dim>::PIECES + THREADS - 1) / THREADS;  // 16-byte pieces of a page's values that a thread has in flight

  __device__ __forceinline__ uint32_t keys(int buffer) const { return pages + buffer * S::page_bytes; }
  __device__ __forceinline__ uint32_t values(int buffer) const { return keys(buffer) + S::key_bytes; }

  // Starts copies of a page: keys to a buffer, values to registers, since their pieces hold two columns and are cut in half on the way.
  __device__ __forceinline__ void fetch(uint4 (&held)[HELD], int page, int buffer) const {
    constexpr int units = S::head_dim / 8;
    const int number = load_int(c.page_table + int64_t(rows.slot) * c.max_pages + page);
    const bf16* from = kv_page<bf16>(c, i.layer, number, head / S::group, S::kv_heads, S::head_dim);
    for (int j = b.thread; j < PAGE * units; j += THREADS)
      copy_async_16(keys(buffer) + unit_offset(j / units, j % units, PAGE), from + PagePlace<S::head_dim>::key(j / units, j % units * 8));
#pragma unroll
    for (int n = 0; n < HELD; ++n)
      if (n * THREADS + b.thread < PagePlace<S::head_dim>::PIECES) held[n] = load_16(from + PagePlace<S::head_dim>::VALUES + (n * THREADS + b.thread) * 8);
  }

  // Values that were fetched, to a buffer. Those of tokens that are not there are multiplied by weights of 0, so they must be numbers.
  __device__ __forceinline__ void store(const uint4 (&held)[HELD], int page, int buffer) const {
    const int count = rows.end - page * PAGE;
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      const int piece = n * THREADS + b.thread;
      if (piece >= PagePlace<S::head_dim>::PIECES) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto [d, token] = PagePlace<S::head_dim>::half(piece, h);
        uint2 v = h == 0 ? uint2{held[n].x, held[n].y} : uint2{held[n].z, held[n].w};
        const int left = count - token;  // tokens that are there
        if (left < 4) v.y = left == 3 ? v.y & 0xffffu : 0u;
        if (left < 2) v.x = left == 1 ? v.x & 0xffffu : 0u;
        shared_store_8(values(buffer) + unit_offset(d, token / 8, S::head_dim) + token % 8 * 2, v);
      }
    }
  }

  // Queries to shared memory, and zeros where the head is shorter than the products are deep.
  __device__ __forceinline__ void prepare() const {
    using H = HeadRow<S::head_dim>;
    const float* norm = V::q_norm ? reinterpret_cast<const float*>(c.params + i.params) : nullptr;
    const auto store = [&](int row, int d, uint32_t pair) { shared_store_4(queries + unit_offset(row, d / 8, QUERIES) + d % 8 * 2, pair); };
    constexpr int BATCH = 4;  // rows that a warp has in flight
#pragma unroll 1
    for (int begin = b.warp; begin < QUERIES; begin += WARPS * BATCH) {
      H h[BATCH];
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        const int row = min(begin + n * WARPS, rows.count - 1);
        h[n].load(operand<bf16>(c, i, 0) + int64_t(rows.row + row) * S::width + head * S::head_dim, b.lane);
      }
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        const int row = begin + n * WARPS, there = min(row, rows.count - 1);
        h[n].turn(norm, float(V::eps), operand<float>(c, i, 1) + int64_t(rows.row + there) * S::head_dim, b.lane);
#pragma unroll
        for (int e = 0; e < H::each; ++e) {
          const int p = b.lane + e * 32;
          if (p < H::pairs) store(row, 2 * p, h[n].first[e]), store(row, H::half + 2 * p, h[n].second[e]);
        }
      }
    }
    if constexpr (S::depth > S::head_dim) {
      for (int row = b.thread; row < QUERIES; row += THREADS) shared_store_16(queries + unit_offset(row, S::head_dim / 8, QUERIES), uint4{});
      for (int row = b.thread; row < 2 * PAGE; row += THREADS)
        shared_store_16(keys(row / PAGE) + unit_offset(row % PAGE, S::head_dim / 8, PAGE), uint4{});
    }
  }

  // One page.
  __device__ __forceinline__ void attend(Columns<S::head_dim>& sums, float (&top)[2], float (&total)[2], int page, int buffer, int own_row, int from,
                                         int to) const {
    constexpr float sharp = float(V::scale) * LOG2_E;
    float s[PAGE / 2] = {};  // defined on every path: else registers would hold what they held, all through the program
    const uint32_t own_queries = queries + b.warp / 4 * (GROUP_ROWS * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::depth / 16; ++k)
      Wgmma<PAGE>::mma_shared(s, wgmma_operand(own_queries + k / 4 * (QUERIES * 128)) + 2 * (k % 4), wgmma_operand(keys(buffer) + k / 4 * (PAGE * 128)) + 2 * (k % 4),
                              k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    const bool whole = (page + 1) * PAGE - 1 <= from && (S::window == 0 || page * PAGE > to - 1 - S::window);
    if (!whole) mask(s, page * PAGE, rows.position + own_row);
    float now[2] = {top[0], top[1]};
#pragma unroll
    for (int e = 0; e < PAGE / 2; ++e) now[e / 2 % 2] = fmaxf(now[e / 2 % 2], s[e]);
    float change[2], base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(ALL_LANES, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(ALL_LANES, now[r], 2));
      base[r] = now[r] == minus_infinity() ? 0.0f : now[r] * sharp;  // nothing seen yet: all weights are 0
      change[r] = exp2_fast(top[r] * sharp - base[r]);
      top[r] = now[r], total[r] *= change[r];
    }
    uint4 weights[PAGE / 16];
#pragma unroll
    for (int t = 0; t < PAGE / 16; ++t) {
      float w[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) w[e] = exp2_fast(s[8 * t + e] * sharp - base[e / 2 % 2]), total[e / 2 % 2] += w[e];
      weights[t] = {pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3]), pack_bf16(w[4], w[5]), pack_bf16(w[6], w[7])};
    }
    sums.scale(change[0], change[1]);
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < PAGE / 16; ++t) sums.add(weights[t], values(buffer), t);
    wgmma_commit();
    wgmma_wait<0>();
  }

  // Scores of positions that a row does not see become minus infinity; `position`: of the thread's first row.
  static __device__ __forceinline__ void mask(float (&s)[PAGE / 2], int begin, int position) {
    const int lane = own_lane();
#pragma unroll
    for (int e = 0; e < PAGE / 2; ++e) {
      const int at = begin + e / 4 * 8 + lane % 4 * 2 + e % 2, own = position + e / 2 % 2 * 8;
      if (at > own || (S::window > 0 && at <= own - S::window)) s[e] = minus_infinity();
    }
  }

  __device__ __forceinline__ void finish(const Columns<S::head_dim>& sums, float (&total)[2], int own_row) const {
    unsigned char* out = operand<unsigned char>(c, i, 2);
    const int lane = own_lane();
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(ALL_LANES, total[r], 1);
      total[r] += __shfl_xor_sync(ALL_LANES, total[r], 2);
      scale[r] = 1.0f / total[r];
    }
    uint32_t unit[2][4] = {};  // columns 8 q + 2 (lane % 4), + 1 of 32, q = 0 to 3
    sums.each([&](int column, const float* d) {
      const int at = head * S::head_dim + column + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = own_row + r * 8;
        const uint32_t pair = pack_bf16(d[2 * r] * scale[r], d[2 * r + 1] * scale[r]);
        if constexpr (S::head_dim % 32 == 0) {
          unit[r][column / 8 % 4] = pair;
          if (column % 32 == 24 && row < rows.count)
            *reinterpret_cast<uint4*>(out + tiles::chunk_offset(rows.row + row, at - 24, c.prompt_room)) = {unit[r][0], unit[r][1], unit[r][2], unit[r][3]};
        } else {
          if (row < rows.count) *reinterpret_cast<uint32_t*>(out + tiles::chunk_offset(rows.row + row, at, c.prompt_room)) = pair;
        }
      }
    });
    if (S::padded > S::columns && head == S::heads - 1)
      for (int j = b.thread; j < rows.count * ((S::padded - S::columns) / 2); j += THREADS) {
        const int row = rows.row + j % rows.count, column = S::columns + j / rows.count * 2;
        *reinterpret_cast<uint32_t*>(out + tiles::chunk_offset(row, column, c.prompt_room)) = 0u;
      }
  }
};

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& i, Block& b) {
  using S = Shape<V>;
  constexpr int shares = int(V::shares);
  wait_inputs(b);
  for (int round = 0;; ++round) {
    find_thread(b);  // or what follows from it is computed once for all rounds, and kept
    const int n = round * shares + (round % 2 == 0 ? i.tile_begin : shares - 1 - i.tile_begin);
    const Rows rows = rows_of(*b.step, n / S::heads);
    if (!rows.valid) {
      if (!rows_of(*b.step, round * shares / S::heads).valid) break;
      continue;
    }
    Item<V>(c, i, b, rows, n % S::heads).run();
  }
}

}  // namespace mpk::prompt_attention
