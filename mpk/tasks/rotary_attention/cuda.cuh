// rotary_attention: head norm and rotation of queries and new keys, append of the step's keys and values, causal softmax.
// A tile is one (key-value head, split); the last split of a head appends, and is the one that sees the step's own positions.
//
// Operands, flagged: qkv [rows][(heads + 2 kv_heads) * head_dim] bf16, rope [rows][head_dim] float32, out: [rows][heads * head_dim] bf16, or
// for splits > 1 partial results, float32 (see attention.cuh). Parameters, as far as the variant has them: q_norm, k_norm [head_dim].
// Page of the cache: keys [KV_PAGE_TOKENS][head_dim], then values transposed [head_dim][KV_PAGE_TOKENS], bf16.
// Variant: heads, kv_heads, head_dim, window, scale, eps, splits, q_norm, k_norm.
//
// Work is shared among the warps in units of (tile of 8 queries, part of the blocks of positions): with few queries the parts of a
// tile are several warps, whose results are merged in shared memory; with many, a warp has a tile to itself and goes on to the next
// without waiting for others. Past positions do not depend on the step, so every warp asks for its first block before it waits for the
// step's queries.
#pragma once
#include "mpk/wait.cuh"
#include "rotary_attention/head.cuh"

namespace mpk::rotary_attention {

constexpr bool waits_inside = true;

// One (key-value head, split) of the step.
template <class V>
class Task {
  using S = Shape<V>;
  using H = Head<V>;
  static constexpr int BATCH = H::A_WARP >= 8 ? 1 : H::A_WARP >= 2 ? 8 / H::A_WARP : 4;  // heads that a lane has in flight

 public:
  __device__ __forceinline__ Task(const Context& c, const Instruction& i, Block& b, int tile)
      : c(c), i(i), b(b), memory{b.scratch}, kv_head(tile / S::splits), split(tile % S::splits), appends(split == S::splits - 1) {}

  __device__ __forceinline__ void run(bool& waited) {
    const int lane = own_lane(), count = b.step->segment_count;
    const Segment* segment = b.step->segments + (lane < count ? lane : 0);
    const int position = segment->position, rows = lane < count ? segment->rows : 0;
    const bool any = rows > 0 && split_has_work(past_blocks(position, S::window, S::block), split, S::splits);
    if (!__any_sync(ALL_LANES, any)) return;
    const int own_tiles = (rows * S::group + TILE_QUERIES - 1) / TILE_QUERIES, first = warp_sum_before(own_tiles, lane);
    total = __shfl_sync(ALL_LANES, first + own_tiles, 31);
    if (b.warp == 0 && lane < count) memory.first_tile()[lane] = first;
    norms();
    b.sync();
    int parts = 1;
    while (2 * parts * total <= Memory<V>::units) parts *= 2;
    work(parts, waited);
  }

 private:
  const Context& c;
  const Instruction& i;
  Block& b;
  const Memory<V> memory;
  const int kv_head, split;
  const bool appends;
  int total;  // query tiles of the step

  __device__ __forceinline__ void norms() const {
    const float* params = reinterpret_cast<const float*>(c.params + i.params);
    for (int d = b.thread; d < S::head_dim; d += THREADS) {
      if (V::q_norm) memory.norms()[d] = __ldg(params + d);
      if (V::k_norm) memory.norms()[S::head_dim + d] = __ldg(params + (V::q_norm ? S::head_dim : 0) + d);
    }
  }

  __device__ __forceinline__ Tile tile(int t) const {
    int from = 0;
    for (int s = 1; s < b.step->segment_count; ++s) from += memory.first_tile()[s] <= t;
    const Segment& s = b.step->segments[from];
    return {s.slot, s.row_begin, s.rows, s.position, (t - memory.first_tile()[from]) * TILE_QUERIES, t < total};
  }

  __device__ __forceinline__ Share share(const Tile& tile) const {
    return {share_of(past_blocks(tile.position, S::window, S::block), split, S::splits), appends};
  }

  // Tiles unit, unit + units, ... of the step, with `parts` warps a tile; more than one part: one tile at most.
  __device__ __forceinline__ void work(int parts, bool& waited) {
    const int units = Memory<V>::units / parts, unit = b.warp / parts, part = b.warp % parts;
    Tile own = tile(unit);
    own.valid = own.valid && unit < units;
    const Share mine = share(own);
    Walk blocks(own, mine, part, parts);
    Warp<V> warp{};
    if (blocks.past > 0) load_first(warp, blocks);
    const int cell = appends ? cell_of_row(own_lane()) : 0;
    if (!waited) wait_inputs(b), waited = true;

    H heads[BATCH]{};
    if (blocks.all > 0) fetch_queries(heads, own, 0);
    prepare_step(cell);
#pragma unroll 1
    for (int t = unit;;) {
      if (blocks.all > 0) {
        store_queries(heads, own);
        attend(warp, own, blocks);
        warp.finish();
      }
      if (parts > 1) {
        if (blocks.all > 0) warp.leave(memory.sums(b.warp), memory.statistics() + b.warp);
        b.sync();
        if (own.valid) merge(own, min(mine.items(), parts), part, parts);
        return;
      }
      if (blocks.all > 0) write(warp, own);
      t += units;
      if (t >= total || unit >= units) return;
      own = tile(t), blocks = Walk(own, share(own), part, parts);
      if (blocks.all == 0) continue;
      __syncwarp();  // the queries of the tile before have been read
      fetch_queries(heads, own, 0);
      if (blocks.past > 0) load_first(warp, blocks);
    }
  }

  // Where a row's key and value are appended: page * KV_PAGE_TOKENS + place in the page; 0 for rows that are not there.
  __device__ __forceinline__ int cell_of_row(int row) const {
    if (row >= b.step->rows) return 0;
    const int position = b.step->row_position[row];
    const int32_t* page = c.page_table + int64_t(b.step->row_slot[row]) * c.max_pages + position / KV_PAGE_TOKENS;
    return load_int(page) * KV_PAGE_TOKENS + position % KV_PAGE_TOKENS;
  }

  // The blocks of a warp: `past` of the cache, numbers first, first + stride, ... of their sequence, and perhaps the step's own positions.
  struct Walk {
    int first, stride, past, all;
    int slot, loaded, page;  // lane l has the page of block loaded + l

    __device__ __forceinline__ Walk(const Tile& tile, const Share& share, int part, int parts)
        : first(share.past.begin + part), stride(parts), slot(tile.slot), loaded(-32), page(0) {
      past = tile.valid && part < share.past.count ? (share.past.count - part + parts - 1) / parts : 0;
      all = past + (tile.valid && share.fresh && share.past.count % parts == part ? 1 : 0);
    }
    __device__ __forceinline__ int number(int j) const { return first + j * stride; }
  };

  // Keys of block `j`; its values stand values_after(number) elements behind.
  __device__ __forceinline__ const bf16* keys_of(Walk& blocks, int j) const {
    constexpr int in_page = KV_PAGE_TOKENS / S::block;
    if (j >= blocks.loaded + 32) {
      blocks.loaded = j;
      const int mine = j + own_lane();
      if (mine < blocks.past) blocks.page = load_int(c.page_table + int64_t(blocks.slot) * c.max_pages + blocks.number(mine) / in_page);
    }
    const bf16* keys = kv_page<bf16>(c, i.layer, __shfl_sync(ALL_LANES, blocks.page, j - blocks.loaded), kv_head, S::kv_heads, S::head_dim);
    return keys + blocks.number(j) % in_page * (S::block * S::head_dim);
  }
  __device__ __forceinline__ static int values_after(int number) {
    return KV_PAGE_TOKENS * S::head_dim - number % (KV_PAGE_TOKENS / S::block) * (S::block * (S::head_dim - 1));
  }

  __device__ __forceinline__ void load_first(Warp<V>& warp, Walk& blocks) const {
    warp.locate();
    const bf16* keys = keys_of(blocks, 0);
    warp.load_keys(keys, 0), warp.load_values(keys + values_after(blocks.number(0)), 0);
  }

  __device__ __forceinline__ const bf16* head_of(int row, int head) const {
    constexpr int width = (S::heads + 2 * S::kv_heads) * S::head_dim;
    return flagged<bf16>(c, i, 0, b) + int64_t(row) * width + head * S::head_dim;
  }

  // Makes `h` the place `target` of the tile, a query or padding.
  __device__ __forceinline__ void identify(H& h, const Tile& own, int target) const {
    const int query = own.query + target;
    const bool there = target < TILE_QUERIES && query < own.rows * S::group;
    h.target = target, h.role = there ? QUERY : target < TILE_QUERIES ? PADDING : NOTHING, h.row = there ? own.row + query / S::group : 0;
  }

  __device__ __forceinline__ const bf16* query_of(const H& h, const Tile& own) const {
    return head_of(h.row, kv_head * S::group + (own.query + h.target) % S::group);
  }

  // Queries of a tile from place `begin` on, by one warp: as many as are in flight at a time.
  __device__ __forceinline__ void fetch_queries(H (&heads)[BATCH], const Tile& own, int begin) const {
    const int lane = own_lane();
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      identify(heads[j], own, begin + j * H::A_WARP + lane / H::LANES);
      heads[j].load(query_of(heads[j], own), lane % H::LANES);
    }
  }

  // All queries of a tile, the first of which are on their way, to shared memory.
  __device__ __forceinline__ void store_queries(H (&heads)[BATCH], const Tile& own) const {
    const int lane = own_lane(), quad = lane % H::LANES;
#pragma unroll 1
    for (int begin = 0;;) {
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        identify(heads[j], own, begin + j * H::A_WARP + lane / H::LANES);  // again: kept in registers it would cost some
        heads[j].settle(b, query_of(heads[j], own), quad);
        heads[j].turn(memory, quad), heads[j].store(memory, b.warp, nullptr, 0, quad);
      }
      begin += BATCH * H::A_WARP;
      if (begin >= TILE_QUERIES) break;
      fetch_queries(heads, own, begin);
    }
    __syncwarp();
  }

  // The step's rotation to shared memory, and for the split that appends the keys and values of all rows, there and to the cache. The
  // last warps come first: with few positions the first ones have keys and values on their way, and would wait for these as well.
  __device__ __forceinline__ void prepare_step(int cell) const {
    const int lane = own_lane(), warp = WARPS - 1 - b.warp, thread = warp * 32 + lane, rows = b.step->rows;
    const float* rope = flagged<float>(c, i, 1, b);
    for (int j = thread * 4; j < rows * S::head_dim; j += THREADS * 4)
      *reinterpret_cast<uint4*>(memory.rope() + j) = settled_16(b, rope + j, load_16(rope + j));
    b.sync();
    if (!appends) return;
    const int quad = lane % H::LANES;
#pragma unroll 1
    for (int begin = warp * H::A_WARP; begin < 2 * rows; begin += WARPS * H::A_WARP) {
      const int n = begin + lane / H::LANES;
      H h;
      h.role = n >= 2 * rows ? NOTHING : n % 2 == 0 ? KEY : VALUE, h.row = h.target = n < 2 * rows ? n / 2 : 0;
      const bf16* from = head_of(h.row, S::heads + n % 2 * S::kv_heads + kv_head);
      h.load(from, quad), h.settle(b, from, quad);
      h.turn(memory, quad);
      const int to = __shfl_sync(ALL_LANES, cell, h.row);
      h.store(memory, b.warp, kv_page<bf16>(c, i.layer, to / KV_PAGE_TOKENS, kv_head, S::kv_heads, S::head_dim), to % KV_PAGE_TOKENS, quad);
    }
    // Places of V^T without a row are multiplied by weights of 0, so they must hold numbers.
    for (int j = thread; j < S::head_dim * MAX_ROWS; j += THREADS)
      if (j % MAX_ROWS >= rows) memory.new_values()[j / MAX_ROWS * S::value_stride + j % MAX_ROWS] = bf16{0};
    b.sync();
  }

  // All blocks of the warp. While one is multiplied, the next is on its way; the first one of the past is there already.
  __device__ __forceinline__ void attend(Warp<V>& warp, const Tile& tile, Walk& blocks) const {
    warp.locate();
    const uint32_t queries = shared_address(memory.queries(b.warp));
    const uint32_t new_keys = shared_address(memory.new_keys()), new_values = shared_address(memory.new_values());
    const auto load_keys = [&](const bf16* keys, int j, int section) {
      j < blocks.past ? warp.load_keys(keys, section) : warp.load_new_keys(new_keys, section);
    };
    const auto load_values = [&](const bf16* keys, int j, int section) {
      j < blocks.past ? warp.load_values(keys + values_after(blocks.number(j)), section) : warp.load_new_values(new_values, section);
    };
    warp.clear();
    const bf16* keys = nullptr;
    if (blocks.past > 0 && S::sections > 1) keys = keys_of(blocks, 0);
#pragma unroll 1
    for (int j = blocks.past > 0 ? 0 : -1; j < blocks.all; ++j) {  // -1: nothing but the loads of block 0
      const bool more = j + 1 < blocks.all;
      const bf16* next = nullptr;
      if (j + 1 < blocks.past) next = keys_of(blocks, j + 1);
      float scores[2 * S::fragments][4] = {};
      if (j >= 0) {
#pragma unroll
        for (int section = 0; section < S::sections; ++section) {
          if (section > 0) load_keys(keys, j, section);
          warp.score(scores, queries, section);
        }
      }
      if (more) load_keys(next, j + 1, 0);
      if (j >= 0) {
        // The places of new positions in shared memory are rows of the step.
        const bool past = j < blocks.past;
        const int position = past ? blocks.number(j) * S::block : tile.position - tile.row;
        const bool whole = past && position >= oldest_of(tile) && position + S::block <= tile.position;
        uint32_t weights[S::fragments][2];
        warp.join(scores);
        if (!whole) mask(warp, scores, tile, position, past);
        warp.soften(scores, weights, float(V::scale) * LOG2_E);
#pragma unroll
        for (int section = 0; section < S::sections; ++section) {
          if (section > 0) load_values(keys, j, section);
          if (past && !whole) warp.cut_values(tile.position - position);
          warp.accumulate(weights, section);
        }
      }
      if (more) load_values(next, j + 1, 0);
      if (S::sections > 1) keys = next;
    }
  }

  // First position that all queries of a tile see.
  __device__ __forceinline__ static int oldest_of(const Tile& tile) {
    return S::window > 0 ? max(tile.position + min((tile.query + TILE_QUERIES - 1) / S::group, tile.rows - 1) - S::window + 1, 0) : 0;
  }

  // Scores of positions that a query does not see become minus infinity.
  __device__ __forceinline__ static void mask(const Warp<V>& warp, float (&scores)[2 * S::fragments][4], const Tile& tile, int position, bool past) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int at = tile.position + min((tile.query + warp.pair * 2 + q) / S::group, tile.rows - 1);  // the query's own position
      const int begin = max(S::window > 0 ? at - S::window + 1 : 0, past ? 0 : tile.position), end = past ? tile.position : at + 1;
      warp.hide(scores, q, begin - position, end - position);
    }
  }

  __device__ __forceinline__ float* partial_of(int row, int in_group) const {
    return flagged<float>(c, i, 2, b) + partial_offset(row, S::heads, kv_head, S::splits, split, S::group, in_group, S::head_dim);
  }
  __device__ __forceinline__ bf16* result_of(int row, int in_group) const {
    return flagged<bf16>(c, i, 2, b) + (int64_t(row) * S::heads + kv_head * S::group + in_group) * S::head_dim;
  }

  // The result of a warp that has a tile to itself.
  __device__ __forceinline__ void write(const Warp<V>& warp, const Tile& own) const {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int query = own.query + warp.pair * 2 + q;
      const bool there = query < own.rows * S::group;
      const int row = own.row + query / S::group, in_group = query % S::group;
      if constexpr (S::splits == 1)
        warp.write_result(there ? result_of(row, in_group) : nullptr, q);
      else if (there)
        warp.write_partial(partial_of(row, in_group), q);
    }
  }

  // Merges the first `used` parts of a tile (if any) in ascending order: its warps take queries in turn, a lane 4 columns.
  __device__ __forceinline__ void merge(const Tile& own, int used, int part, int parts) const {
    const int lane = own_lane(), first = b.warp - part;  // warp of the tile's first part
#pragma unroll 1
    for (int q = part; q < TILE_QUERIES; q += parts) {
      const int query = own.query + q;
      if (used == 0 || query >= own.rows * S::group) return;
      float factor[WARPS], totals[WARPS], top = minus_infinity(), total = 0.0f;
      *reinterpret_cast<float4*>(factor) = *reinterpret_cast<const float4*>(memory.statistics() + q * WARPS);
      *reinterpret_cast<float4*>(factor + 4) = *reinterpret_cast<const float4*>(memory.statistics() + q * WARPS + 4);
      *reinterpret_cast<float4*>(totals) = *reinterpret_cast<const float4*>(memory.statistics() + (TILE_QUERIES + q) * WARPS);
      *reinterpret_cast<float4*>(totals + 4) = *reinterpret_cast<const float4*>(memory.statistics() + (TILE_QUERIES + q) * WARPS + 4);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w < first || w >= first + used) factor[w] = minus_infinity();
        top = fmaxf(top, factor[w]);
      }
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        factor[w] = factor[w] == minus_infinity() ? 0.0f : exp2_fast(factor[w] - top);
        if (factor[w] != 0.0f) total += totals[w] * factor[w];
      }
      const int row = own.row + query / S::group, in_group = query % S::group;
#pragma unroll
      for (int begin = 0; begin < S::head_dim; begin += 128) {
        const int d = begin + lane * 4;
        const bool there = d < S::head_dim;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          if (w < first || w >= first + used || !there) continue;
          const float4 v = *reinterpret_cast<const float4*>(memory.sums(w) + q * S::sum_stride + d);
          sum.x += factor[w] * v.x, sum.y += factor[w] * v.y, sum.z += factor[w] * v.z, sum.w += factor[w] * v.w;
        }
        if (!there) continue;
        if constexpr (S::splits == 1) {
          const float inverse = 1.0f / total;
          put_8(result_of(row, in_group) + d, {pack_bf16(sum.x * inverse, sum.y * inverse), pack_bf16(sum.z * inverse, sum.w * inverse)});
        } else {
          float* out = partial_of(row, in_group);
          put_8(out + d, {__float_as_uint(sum.x), __float_as_uint(sum.y)});
          put_8(out + d + 2, {__float_as_uint(sum.z), __float_as_uint(sum.w)});
          if (d == 0) put_8(out + S::head_dim, {__float_as_uint(top * LN_2), __float_as_uint(total)});
        }
      }
    }
  }
};

// Empties what the step before left in the other copy: of all tiles of the task, whether they have work now or not.
template <class V>
__device__ __forceinline__ void clear_old(const Context& c, const Instruction& i, const Block& b) {
  using S = Shape<V>;
  constexpr int a_tile = S::group * (S::splits == 1 ? S::head_dim * 2 : partial_columns(S::head_dim) * 4), a_row = S::kv_heads * S::splits * a_tile;
  static_assert(a_tile % 8 == 0, "pieces of 8 bytes");
  unsigned char* old = other_copy(c, flagged<unsigned char>(c, i, 2, b), b) + i.tile_begin * a_tile;
  for (int row = 0; row < rows_to_clear(b); ++row)
    for (int at = b.thread * 8; at < (i.tile_end - i.tile_begin) * a_tile; at += THREADS * 8) clear_8(old + int64_t(row) * a_row + at);
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  clear_old<V>(c, i, b);
  bool waited = false;
#pragma unroll 1
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
    if (tile > i.tile_begin) b.sync();  // the memory of the tile before
    Task<V>(c, i, b, tile).run(waited);
  }
  if (!waited) wait_inputs(b);
}

}  // namespace mpk::rotary_attention
