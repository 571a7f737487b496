// rotary_attention: head norm and rotation of queries and new keys, append of the step's keys and values, causal softmax.
// A tile is one (key-value head, split); the last split of a head appends, and is the one that sees the step's own positions.
//
// Operands: qkv [rows][(heads + 2 kv_heads) * head_dim] bf16, rope [rows][head_dim] float32, out: [rows][heads * head_dim] bf16, or
// for splits > 1 partial results, float32 (see attention.cuh). Parameters, as far as the variant has them: q_norm, k_norm [head_dim].
// Page of the cache: keys [KV_PAGE_TOKENS][head_dim], then values transposed [head_dim][KV_PAGE_TOKENS], bf16.
// Variant: heads, kv_heads, head_dim, window, scale, eps, splits, q_norm, k_norm.
//
// Work is shared among the warps in units of (tile of 8 queries, part of the blocks of positions): with few queries the parts of a
// tile are several warps, whose results are merged in shared memory. Past positions do not depend on the step, so every warp asks
// for its first block before it waits for the step's queries.
#pragma once
#include "mpk/wait.cuh"
#include "rotary_attention/head.cuh"

namespace mpk::rotary_attention {

constexpr bool waits_inside = true;

// Up to 32 segments of the step and the query tiles that they have, in shared memory: registers are short while a warp attends.
template <class V>
struct Segments {
  SegmentTable* table;
  int total;  // tiles

  // Every warp writes the same values and reads its own; a barrier stands between two uses of the table.
  __device__ __forceinline__ Segments(const Context& c, SegmentTable* table, int begin, int count) : table(table) {
    const int lane = own_lane();
    const Segment* s = c.segments + begin + (lane < count ? lane : 0);
    const int rows = lane < count ? load_int(&s->rows) : 0, tiles = (rows * Shape<V>::group + TILE_QUERIES - 1) / TILE_QUERIES;
    const int first = warp_sum_before(tiles, lane);
    total = __shfl_sync(ALL_LANES, first + tiles, 31);
    table->slot[lane] = load_int(&s->slot), table->row[lane] = load_int(&s->row_begin), table->position[lane] = load_int(&s->position);
    table->rows[lane] = rows, table->first[lane] = first;
    __syncwarp();
  }

  __device__ __forceinline__ Tile tile(int t) const {  // the same t in all lanes
    const int lane = own_lane(), from = 31 - __clz(__ballot_sync(ALL_LANES, table->rows[lane] > 0 && table->first[lane] <= t));
    return {table->slot[from], table->row[from], table->rows[from], table->position[from], (t - table->first[from]) * TILE_QUERIES, t < total};
  }
};

// One (key-value head, split) of the step.
template <class V>
class Task {
  using S = Shape<V>;
  static constexpr int BATCH = S::head_dim > 128 ? 1 : 2;  // heads whose loads a warp has in flight

 public:
  __device__ __forceinline__ Task(const Context& c, const Instruction& i, Block& b, int tile)
      : c(c), i(i), b(b), memory{b.scratch}, kv_head(tile / S::splits), split(tile % S::splits), rows(load_int(&c.step->rows)),
        appends(split == S::splits - 1) {}

  __device__ __forceinline__ void run(bool& waited) {
    const int count = load_int(&c.step->segments);
    const int own = appends && b.lane < rows ? place_of_row(c, b.lane) : 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 32) {
      const Segments<V> segments(c, memory.segments(), begin, count - begin < 32 ? count - begin : 32);
      int parts = 1;
      while (2 * parts * segments.total <= Memory<V>::units) parts *= 2;
      const int tiles = Memory<V>::units / parts;
#pragma unroll 1
      for (int t = 0; t < segments.total; t += tiles) pass(segments, t, tiles, parts, own, begin + t == 0, waited);
    }
  }

 private:
  const Context& c;
  const Instruction& i;
  Block& b;
  const Memory<V> memory;
  const int kv_head, split, rows;
  const bool appends;

  __device__ __forceinline__ Share share(const Tile& tile) const {
    Share s{share_of(past_blocks(tile.position, S::window, S::block), split, S::splits), 0, rows <= MAX_NEW_ROWS};
    if (!appends) return s;
    s.fresh = s.in_shared ? 1 : (tile.position + tile.rows + S::block - 1) / S::block - tile.position / S::block;
    return s;
  }

  // Tiles [first, first + tiles) of the segments, `parts` warps each.
  __device__ __forceinline__ void pass(const Segments<V>& segments, int first, int tiles, int parts, int own, bool is_first, bool& waited) {
    const int unit = b.warp / parts, part = b.warp % parts;
    Tile tile = segments.tile(first + unit);
    tile.valid = tile.valid && unit < tiles;
    const Share mine = share(tile);
    Warp<V> warp;
    Pages pages{*this, tile, mine, part, parts};
    const bool works = tile.valid && part < mine.items();
    const bool early = works && part < mine.past.count;
    if (early) {
      warp.locate();
      const Positions block = pages.block(0);
      warp.load_keys(block.keys, 0), warp.load_values(block.values, 0);
    }
    if (!waited) wait_inputs(b), waited = true;
    prepare(segments, first, tiles, own, is_first && appends);
    b.sync();
    if (works) attend(warp, tile, mine, pages, unit, early);
    b.sync();  // the queries are done with: sums take their place
    if (works) warp.locate(), warp.leave(memory.sums() + b.warp * Memory<V>::sums_floats, memory.statistics() + b.warp * 2 * TILE_QUERIES);
    b.sync();
    merge(segments, first, tiles, parts);
    b.sync();
  }

  // Where the cache holds a block of positions.
  struct Positions {
    const bf16 *keys, *values;
  };

  // The items of a warp: item j is block part + j * parts of the share.
  struct Pages {
    const Task& task;
    const Tile& tile;
    const Share& share;
    int part, parts;
    int loaded = -32, page = 0;  // lane l has the page of item loaded + l

    __device__ __forceinline__ bool has(int item) const { return part + item * parts < share.items(); }
    __device__ __forceinline__ bool is_past(int item) const { return part + item * parts < share.past.count; }
    __device__ __forceinline__ int number(int item) const {  // of the block in its sequence
      const int n = part + item * parts;
      return n < share.past.count ? share.past.begin + n : tile.position / S::block + n - share.past.count;
    }
    __device__ __forceinline__ Positions block(int item) {
      constexpr int in_page = KV_PAGE_TOKENS / S::block;
      if (item >= loaded + 32) {
        loaded = item;
        const int mine = item + task.b.lane;
        if (has(mine)) page = load_int(task.c.page_table + int64_t(tile.slot) * task.c.max_pages + number(mine) / in_page);
      }
      const int where = number(item) % in_page;
      const bf16* keys = kv_page<bf16>(task.c, task.i.layer, __shfl_sync(ALL_LANES, page, item - loaded), task.kv_head, S::kv_heads, S::head_dim);
      return {keys + where * S::block * S::head_dim, keys + KV_PAGE_TOKENS * S::head_dim + where * S::block};
    }
  };

  // Queries of the tiles to shared memory; with `fresh` also the keys and values of all rows of the step, and to the cache.
  __device__ __forceinline__ void prepare(const Segments<V>& segments, int first, int tiles, int own, bool fresh) {
    constexpr int width = (S::heads + 2 * S::kv_heads) * S::head_dim;
    const int query_heads = tiles * TILE_QUERIES, all = query_heads + (fresh ? 2 * rows : 0);
    const bool keep = rows <= MAX_NEW_ROWS;
    const int lane = own_lane();
    const bf16* qkv = operand<bf16>(c, i, 0);
    const float* rope = operand<float>(c, i, 1);
    const float* q_norm = V::q_norm ? reinterpret_cast<const float*>(c.params + i.params) : nullptr;
    const float* k_norm = V::k_norm ? reinterpret_cast<const float*>(c.params + i.params) + (V::q_norm ? S::head_dim : 0) : nullptr;
#pragma unroll 1
    for (int begin = b.warp; begin < all; begin += BATCH * WARPS) {
      Head<V> heads[BATCH];
      int places[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int n = begin + j * WARPS;
        Head<V>& h = heads[j];
        h.role = NOTHING, h.row = 0, h.target = -1;
        if (n >= all) continue;
        int head = 0;
        if (n < query_heads) {
          const Tile tile = segments.tile(first + n / TILE_QUERIES);
          const int query = tile.query + n % TILE_QUERIES;
          h.target = n;
          if (tile.valid && query < tile.rows * S::group) h.role = QUERY, h.row = tile.row + query / S::group, head = kv_head * S::group + query % S::group;
        } else {
          const int m = n - query_heads;
          h.role = m % 2 == 0 ? KEY : VALUE, h.row = m / 2, h.target = keep ? h.row : -1;
          head = S::heads + (m % 2) * S::kv_heads + kv_head;
          places[j] = rows <= 32 ? __shfl_sync(ALL_LANES, own, h.row) : place_of_row(c, h.row);
        }
        h.load(qkv + int64_t(h.row) * width + head * S::head_dim, rope, lane);
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        Head<V>& h = heads[j];
        if (h.role == NOTHING && h.target < 0) continue;
        h.turn(h.role == QUERY ? q_norm : k_norm, lane);
        bf16* page = h.role == KEY || h.role == VALUE ? kv_page<bf16>(c, i.layer, places[j] / KV_PAGE_TOKENS, kv_head, S::kv_heads, S::head_dim) : nullptr;
        h.store(memory, page, places[j] % KV_PAGE_TOKENS, lane);
      }
    }
    if (!fresh || !keep) return;
    // Places of V^T without a row are multiplied by weights of 0, so they must hold numbers.
    for (int j = b.warp * 32 + lane; j < S::head_dim * MAX_NEW_ROWS; j += THREADS)
      if (j % MAX_NEW_ROWS >= rows) memory.new_values()[j / MAX_NEW_ROWS * S::value_stride + j % MAX_NEW_ROWS] = bf16{0};
  }

  // All items of the warp. While a section of one item is multiplied, that of the next is on its way.
  __device__ __forceinline__ void attend(Warp<V>& warp, const Tile& tile, const Share& mine, Pages& pages, int unit, bool loaded) {
    warp.locate();
    const uint32_t queries = shared_address(memory.queries() + unit * TILE_QUERIES * S::row_stride);
    const uint32_t new_keys = shared_address(memory.new_keys()), new_values = shared_address(memory.new_values());
    const int last_position = tile.position + tile.rows;
    int seen_from[2], seen_to[2], oldest = 0;  // positions that this lane's queries see; from which on all queries of the tile do
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int at = tile.position + min((tile.query + warp.pair * 2 + q) / S::group, tile.rows - 1);
      seen_from[q] = S::window > 0 ? max(at - S::window + 1, 0) : 0, seen_to[q] = at + 1;
    }
    if (S::window > 0) oldest = max(tile.position + min((tile.query + TILE_QUERIES - 1) / S::group, tile.rows - 1) - S::window + 1, 0);
    const auto in_shared = [&](int item) { return mine.in_shared && !pages.is_past(item); };
    const auto load_keys = [&](const Positions& block, int item, int section) {
      in_shared(item) ? warp.load_new_keys(new_keys, section) : warp.load_keys(block.keys, section);
    };
    const auto load_values = [&](const Positions& block, int item, int section) {
      in_shared(item) ? warp.load_new_values(new_values, section) : warp.load_values(block.values, section);
    };
    warp.clear();
    Positions block{nullptr, nullptr};
    if (loaded && S::sections > 1) block = pages.block(0);
#pragma unroll 1
    for (int item = loaded ? 0 : -1; item < 0 || pages.has(item); ++item) {  // -1: nothing but the loads of item 0
      const bool more = pages.has(item + 1);
      Positions next{nullptr, nullptr};
      if (more && !in_shared(item + 1)) next = pages.block(item + 1);
      float scores[2 * S::fragments][4] = {};
      if (item >= 0) {
#pragma unroll
        for (int section = 0; section < S::sections; ++section) {
          if (section > 0) load_keys(block, item, section);
          warp.score(scores, queries, section);
        }
      }
      if (more) load_keys(next, item + 1, 0);
      if (item >= 0) {
        // Rows of the step are the places of new positions in shared memory.
        const bool past = pages.is_past(item);
        const int position = in_shared(item) ? tile.position - tile.row : pages.number(item) * S::block;
        const bool whole = past && position >= oldest && position + S::block <= tile.position;
        int begin[2], end[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          begin[q] = past ? seen_from[q] : max(seen_from[q], tile.position);
          end[q] = past ? tile.position : seen_to[q];
        }
        uint32_t weights[S::fragments][2];
        warp.soften(scores, weights, float(V::scale) * LOG2_E, !whole, position, begin, end);
#pragma unroll
        for (int section = 0; section < S::sections; ++section) {
          if (section > 0) load_values(block, item, section);
          if (!whole && !in_shared(item)) warp.cut_values((past ? tile.position : last_position) - position);
          warp.accumulate(weights, section);
        }
      }
      if (more) load_values(next, item + 1, 0);
      block = next;
    }
  }

  // Merges the parts of every query in ascending order and writes the result: a warp a query, a lane 4 columns.
  __device__ __forceinline__ void merge(const Segments<V>& segments, int first, int tiles, int parts) const {
#pragma unroll 1
    for (int n = b.warp; n < tiles * TILE_QUERIES; n += WARPS) {
      const int unit = n / TILE_QUERIES, q = n % TILE_QUERIES;
      const Tile tile = segments.tile(first + unit);
      const int query = tile.query + q, items = share(tile).items(), used = items < parts ? items : parts;
      if (!tile.valid || query >= tile.rows * S::group || used == 0) continue;
      const float* statistics = memory.statistics() + unit * parts * 2 * TILE_QUERIES + q;
      float top = minus_infinity(), total = 0.0f, factor[WARPS];
#pragma unroll
      for (int p = 0; p < WARPS; ++p)
        if (p < used) top = fmaxf(top, statistics[p * 2 * TILE_QUERIES]);
      const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll
      for (int p = 0; p < WARPS; ++p) {
        factor[p] = p < used ? exp2_fast(statistics[p * 2 * TILE_QUERIES] - base) : 0.0f;
        if (p < used) total += factor[p] * statistics[p * 2 * TILE_QUERIES + TILE_QUERIES];
      }
      const int row = tile.row + query / S::group, in_group = query % S::group;
      for (int d = own_lane() * 4; d < S::head_dim; d += 128) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < WARPS; ++p) {
          if (p >= used) continue;
          const float4 v = *reinterpret_cast<const float4*>(memory.sums() + (unit * parts + p) * Memory<V>::sums_floats + q * S::sum_stride + d);
          sum.x += factor[p] * v.x, sum.y += factor[p] * v.y, sum.z += factor[p] * v.z, sum.w += factor[p] * v.w;
        }
        if constexpr (S::splits == 1) {
          const float inverse = 1.0f / total;
          const uint2 out = {pack_bf16(sum.x * inverse, sum.y * inverse), pack_bf16(sum.z * inverse, sum.w * inverse)};
          *reinterpret_cast<uint2*>(operand<bf16>(c, i, 2) + (int64_t(row) * S::heads + kv_head * S::group + in_group) * S::head_dim + d) = out;
        } else {
          float* out = operand<float>(c, i, 2) + partial_offset(row, S::heads, kv_head, S::splits, split, S::group, in_group, S::head_dim);
          *reinterpret_cast<float2*>(out + d) = {sum.x, sum.y};
          *reinterpret_cast<float2*>(out + d + 2) = {sum.z, sum.w};
          if (d == 0) *reinterpret_cast<float2*>(out + S::head_dim) = {top * LN_2, total};
        }
      }
    }
  }
};

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  bool waited = false;
#pragma unroll 1
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) Task<V>(c, i, b, tile).run(waited);
  if (!waited) wait_inputs(b);
}

}  // namespace mpk::rotary_attention
