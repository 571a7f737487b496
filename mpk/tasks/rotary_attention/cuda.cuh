// rotary_attention: head norm and rotation of queries and new keys, append of the step's keys and values, causal softmax.
// A tile is one (key-value head, split); what a split sees of the step's segments, Shares of attention.cuh says.
//
// Operands, flagged: qkv [rows][(heads + 2 kv_heads) * head_dim] bf16, rope [rows][head_dim] float32, out: [rows][heads * head_dim]
// bf16, or for splits > 1 partial results, float32 (see attention.cuh). Parameters, as far as the variant has them: q_norm, k_norm
// [head_dim]. Pages of the cache: Page of attend.cuh.
// Variant: heads, kv_heads, head_dim, window, scale, eps, splits, least, q_norm, k_norm.
//
// Work is shared among the warps in units of (tile of 8 queries, part of the blocks of positions): with few queries the parts of a
// tile are several warps, whose results are merged in shared memory; with many, a warp has a tile to itself and goes on to the next.
// A warp needs no other one until its sums are there: it waits for its own queries' words, and where its blocks hold positions of the
// step itself, it turns those keys as well. Where a segment is one row, its key and value are put beside the cached ones in registers;
// those of more rows are read from the cache after they have been appended. Past positions do not depend on the step, so every warp
// asks for its first block before the queries are there.
#pragma once
#include "rotary_attention/one_row.cuh"

namespace mpk::rotary_attention {

constexpr bool waits_inside = true;

// One (key-value head, split) of the step.
template <class V>
class Task {
  using S = Shape<V>;
  using M = Memory<V>;
  using Q = Quad<V>;
  using P = Page<V>;
  static constexpr int BATCH = (TILE_QUERIES + 2 + Q::A_WARP - 1) / Q::A_WARP < 5 ? (TILE_QUERIES + 2 + Q::A_WARP - 1) / Q::A_WARP : 5;  // heads that a lane has in flight
  static constexpr bool WHOLE = S::sections == 1;  // all of a block is in registers at a time

 public:
  __device__ __forceinline__ Task(const Context& c, const Instruction& i, Block& b, int tile)
      : c(c), i(i), b(b), memory{b.scratch}, kv_head(tile / S::splits), split(tile % S::splits) {}

  __device__ __forceinline__ void run(bool& waited) {
#pragma unroll 1
    for (int t = 0, step = 0;; t += step) {  // what this begins with is computed for every tile again rather than kept
      const Shares<V> shares(*b.step, own_lane());
      const int from = shares.begin(split), count = shares.begin(split + 1) - from;  // of this lane's segment
      const int tiles = count > 0 ? shares.tiles : 0, before = warp_sum_before(tiles, own_lane());
      const int total = __shfl_sync(ALL_LANES, before + tiles, 31);  // query tiles that the split has
      int parts = 1;                                                  // warps a tile; more than one: a warp has one tile at most
      if (__any_sync(ALL_LANES, count > 1))
        while (2 * parts * total <= M::units) parts *= 2;
      const int units = M::units / parts;
      if (step == 0) t = b.warp / parts < units ? b.warp / parts : total, step = units;
      const unsigned holds = __ballot_sync(ALL_LANES, before <= t && t < before + tiles);
      if (holds == 0 && parts == 1) break;
      const int segment = holds != 0 ? __ffs(int(holds)) - 1 : 0, part = b.warp % parts;
      const Tile own{b.step->segments + segment, (t - __shfl_sync(ALL_LANES, before, segment)) * TILE_QUERIES,
                     __shfl_sync(ALL_LANES, shares.first + from, segment), holds != 0 ? __shfl_sync(ALL_LANES, count, segment) : 0};
      work(own, part, parts, waited);
      if (parts > 1) break;
    }
    if (!waited) wait_inputs(b), waited = true;
  }

 private:
  const Context& c;
  const Instruction& i;
  Block& b;
  const M memory;
  const int kv_head, split;

  // The blocks of a warp: numbers first, first + stride, ... of their sequence.
  struct Walk {
    int first, stride, count;
    int loaded, page;  // lane l has the page of block loaded + l

    __device__ __forceinline__ Walk(const Tile& tile, int part, int parts) : first(tile.begin + part), stride(parts), loaded(-32), page(0) {
      count = part < tile.count ? (tile.count - part + parts - 1) / parts : 0;
    }
    __device__ __forceinline__ int number(int j) const { return first + j * stride; }
  };

  // What the warp's blocks hold of the step itself, in groups of up to M::NEW positions of a block, which are brought one after the other.
  struct New {
    int block;         // of the walk, that the present group is in; behind the last one if there is none
    int place, count;  // of the group in its block

    __device__ __forceinline__ New(const Tile& tile, const Walk& blocks) {
      const int ahead = tile.position() / S::block - blocks.first;
      begin(tile, blocks, ahead > 0 ? (ahead + blocks.stride - 1) / blocks.stride : 0);
    }
    __device__ __forceinline__ void begin(const Tile& tile, const Walk& blocks, int at) {
      block = at, place = max(tile.position() - blocks.number(at) * S::block, 0);
      count = at < blocks.count ? min(end(tile, blocks) - place, M::NEW) : 0;
    }
    __device__ __forceinline__ int end(const Tile& tile, const Walk& blocks) const {
      return min(tile.position() + tile.rows() - blocks.number(block) * S::block, S::block);
    }
    __device__ __forceinline__ void advance(const Tile& tile, const Walk& blocks) {
      place += count, count = min(end(tile, blocks) - place, M::NEW);
      if (count <= 0) begin(tile, blocks, block + 1);
    }
  };

  // One of `parts` warps of a tile.
  __device__ __forceinline__ void work(const Tile& own, int part, int parts, bool& waited) {
    Walk blocks(own, part, parts);
    Warp<V> warp{};  // on every path: else registers hold what they held, all through the program
    if (blocks.count > 0) {
      prepare(warp, own, blocks, waited);
      attend(warp, own, blocks), warp.finish();
    }
    if (!waited) wait_inputs(b), waited = true;  // warps without blocks
    if (parts > 1) {
      if (blocks.count > 0) warp.leave(memory.sums(b.warp), memory.statistics() + b.warp);
      b.sync();
      if (own.count > 0) merge(own, min(own.count, parts), part, parts);
    } else if (blocks.count > 0) {
      write(warp, own);
    }
  }

  // Keys of block `number` of the sequence, which stands in `page`; its values stand P::VALUES elements behind.
  __device__ __forceinline__ bf16* block_at(int number, int page) const {
    return kv_page<bf16>(c, i.layer, page, kv_head, S::kv_heads, S::head_dim) + number % P::BLOCKS * P::BLOCK_ELEMENTS;
  }
  // Page numbers do not change during a step, and the SM has acquired it: they may come from the L1.
  __device__ __forceinline__ int page_at(const Tile& tile, int number) const {
    return c.page_table[int64_t(tile.slot()) * c.max_pages + number / P::BLOCKS];
  }
  // Keys of block `j` of the warp. Blocks are asked for in ascending order.
  __device__ __forceinline__ bf16* keys_of(Walk& blocks, const Tile& tile, int j) const {
    if (j >= blocks.loaded + 32) {
      blocks.loaded = j;
      if (j + own_lane() < blocks.count) blocks.page = page_at(tile, blocks.number(j + own_lane()));
    }
    return block_at(blocks.number(j), __shfl_sync(ALL_LANES, blocks.page, j - blocks.loaded));
  }

  __device__ __forceinline__ void load_first(Warp<V>& warp, Walk& blocks, const Tile& tile) const {
    warp.locate();
    const bf16* keys = keys_of(blocks, tile, 0);
    warp.load_keys(keys, 0), warp.load_values(keys + P::VALUES, 0);
  }

  // ---- queries and new keys and values
  // Number `n` of: the tile's first `queries` queries, keys of the present group of what is new, its values. Fills in `q` but for data.
  __device__ __forceinline__ void identify(Q& q, const Tile& own, const Walk& blocks, const New& fresh, int queries, int n) const {
    const int query = own.query + (n < queries ? n : 0), k = n - queries, at = k < fresh.count ? k : k - fresh.count;
    int row = query / S::group, head = kv_head * S::group + query % S::group;  // also of places beyond the last one
    const Role role = n < queries ? QUERY : k < fresh.count ? KEY : k < 2 * fresh.count ? VALUE : NOTHING;
    int target = n;
    if (role == KEY || role == VALUE) {
      row = blocks.number(fresh.block) * S::block + fresh.place + at - own.position(), head = S::heads + (role == VALUE ? S::kv_heads : 0) + kv_head;
      target = TILE_QUERIES + (role == VALUE ? M::NEW : 0) + at;
    }
    q.what = role | target << 8 | row << 16, q.from = ((own.row() + row) * (S::heads + 2 * S::kv_heads) + head) * S::head_dim + own_lane() % Q::LANES * 4;
  }

  // Waits for the heads, turns them, and leaves them in shared memory; keys and values also in the cache.
  __device__ __forceinline__ void bring(const Tile& own, const Walk& blocks, const New& fresh, int queries) const {
    const int lane = own_lane(), quad = lane % Q::LANES, passes = (queries + 2 * fresh.count + Q::A_WARP - 1) / Q::A_WARP;
    const bf16* qkv = flagged<bf16>(c, i, 0, b);
    const float *rope = flagged<float>(c, i, 1, b) + int64_t(own.row()) * S::head_dim, *params = reinterpret_cast<const float*>(c.params + i.params);
    // One tile appends, or all do, the same values, because they read them there.
    const int number = blocks.number(fresh.block);
    bf16* keys = fresh.count > 0 && (own.query == 0 || !is_inserted(own)) ? block_at(number, page_at(own, number)) : nullptr;
    Turn<V> turn{};
    turn.load_rope(rope, quad), turn.ask_for_norms(params);
#pragma unroll 1
    for (int first = 0; first < passes; first += BATCH) {
      Q heads[BATCH] = {};
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        identify(heads[j], own, blocks, fresh, queries, (first + j) * Q::A_WARP + lane / Q::LANES);
        heads[j].first = heads[j].second = uint2{0, 0};
        const bool wanted = first + j < passes && quad < Q::quads;
        load_8_if(wanted, qkv + heads[j].from, heads[j].first), load_8_if(wanted, qkv + heads[j].from + Q::half, heads[j].second);
      }
      if constexpr (FLAGGED) {  // all that is missing is asked for together
#pragma unroll 1
        for (uint32_t polls = 0;;) {
          bool whole = true;
#pragma unroll
          for (int j = 0; j < BATCH; ++j) whole = whole && complete(heads[j].first) && complete(heads[j].second);
          if (!__any_sync(ALL_LANES, !whole)) break;
          if (__any_sync(ALL_LANES, !b.may_poll(polls))) break;
#pragma unroll
          for (int j = 0; j < BATCH; ++j) {
            load_8_if(!complete(heads[j].first), qkv + heads[j].from, heads[j].first);
            load_8_if(!complete(heads[j].second), qkv + heads[j].from + Q::half, heads[j].second);
          }
        }
      }
      if (first == 0) turn.settle_rope(b, rope, quad);
      if (first == 0 && queries > 0) b.arrived();
#pragma unroll 1
      for (int j = 0; j < BATCH && first + j < passes; ++j) {
        if (own.rows() > 1) {
          const float* of_row = rope + int64_t(heads[0].row()) * S::head_dim;
          turn.load_rope(of_row, quad), turn.settle_rope(b, of_row, quad);
        }
        turn.load_norm(params, heads[0].role(), quad);
        turn.apply(heads[0], heads[0].role(), Turn<V>::all_squares(heads[0]));
        store(heads[0], quad, keys, fresh.place);
#pragma unroll
        for (int k = 0; k + 1 < BATCH; ++k) heads[k] = heads[k + 1];
      }
    }
    __syncwarp();
  }

  // `keys`: of the block in the cache that the head is appended to, null if another warp does that. `place`: of the group in the block.
  __device__ __forceinline__ void store(const Q& q, int quad, bf16* keys, int place) const {
    if (q.role() == NOTHING || quad >= Q::quads) return;
    bf16* row = memory.rows(b.warp) + q.target() * S::row_stride + 4 * quad;
    *reinterpret_cast<uint2*>(row) = q.first, *reinterpret_cast<uint2*>(row + Q::half) = q.second;
    if (keys != nullptr && q.role() != QUERY) q.append(keys, q.role(), quad, place + q.target() - TILE_QUERIES - (q.role() == VALUE ? M::NEW : 0));
  }

  // Queries beyond the tile's last one are multiplied like others, so they must be numbers.
  __device__ __forceinline__ void pad_queries(int queries) const {
    const int row = own_lane() / 4, pair = own_lane() % 4;
    if (row < queries) return;
#pragma unroll
    for (int p = 0; p < S::pieces; ++p) *reinterpret_cast<uint4*>(memory.rows(b.warp) + row * S::row_stride + p * 32 + pair * 8) = uint4{0, 0, 0, 0};
  }

  // ---- attention
  // Whether the step's own key and value go from shared memory into registers, and not through the cache.
  __device__ __forceinline__ static bool is_inserted(const Tile& tile) { return WHOLE && tile.rows() == 1; }

  // Brings the queries, and the new keys and values of the warp's blocks. Afterwards the first block is on its way.
  __device__ __forceinline__ void prepare(Warp<V>& warp, const Tile& tile, Walk& blocks, bool& waited) const {
    New fresh(tile, blocks);
    const bool early = is_inserted(tile) || fresh.block > 0;
    if (early) load_first(warp, blocks, tile);
    int queries = min(tile.rows() * S::group - tile.query, TILE_QUERIES);
    __syncwarp();  // the queries of the tile before have been read
    pad_queries(queries);
    if (!waited) wait_inputs(b), waited = true;
#pragma unroll 1
    do {
      bring(tile, blocks, fresh, queries), queries = 0;
      fresh.advance(tile, blocks);
    } while (fresh.count > 0);
    if (!early) load_first(warp, blocks, tile);
  }

  // All blocks of the warp. While one is multiplied, the next is on its way.
  __device__ __forceinline__ void attend(Warp<V>& warp, const Tile& tile, Walk& blocks) const {
    warp.locate();
    const bf16* rows = memory.rows(b.warp);
    const int own_block = is_inserted(tile) ? tile.position() / S::block : -1;  // that of the key and value to insert
    warp.clear();
    bf16* keys = nullptr;
    if (!WHOLE) keys = block_at(blocks.number(0), page_at(tile, blocks.number(0)));
#pragma unroll 1
    for (int j = 0; j < blocks.count; ++j) {
      const bool more = j + 1 < blocks.count;
      bf16* next = nullptr;
      if (more) next = keys_of(blocks, tile, j + 1);
      const int position = blocks.number(j) * S::block;
      if constexpr (WHOLE) {
        if (blocks.number(j) == own_block) {
          warp.insert_key(shared_address(rows + TILE_QUERIES * S::row_stride), tile.position() - position);
          warp.insert_value(rows + (TILE_QUERIES + M::NEW) * S::row_stride, tile.position() - position);
        }
      }
      float scores[2 * S::fragments][4] = {};
#pragma unroll
      for (int section = 0; section < S::sections; ++section) {
        if (section > 0) warp.load_keys(keys, section);
        warp.score(scores, shared_address(rows), section);
      }
      if (more) warp.load_keys(next, 0);
      const bool whole = position >= oldest_of(tile) && position + S::block - 1 <= tile.position() + tile.query / S::group;
      uint32_t weights[S::fragments][2];
      warp.join(scores);
      if (!whole) mask(warp, scores, tile, position);
      warp.soften(scores, weights, float(V::scale) * LOG2_E);
#pragma unroll
      for (int section = 0; section < S::sections; ++section) {
        if (section > 0) warp.load_values(keys + P::VALUES, section);
        if (!whole) warp.cut_values(tile.position() + tile.rows() - position);
        warp.accumulate(weights, section);
      }
      if (more) warp.load_values(next + P::VALUES, 0);
      if (!WHOLE) keys = next;
    }
    __syncwarp();  // all lanes have read the queries
  }

  // First position that all queries of a tile see.
  __device__ __forceinline__ static int oldest_of(const Tile& tile) {
    return S::window > 0 ? max(tile.position() + min((tile.query + TILE_QUERIES - 1) / S::group, tile.rows() - 1) - S::window + 1, 0) : 0;
  }

  // Scores of positions that a query does not see become minus infinity.
  __device__ __forceinline__ static void mask(const Warp<V>& warp, float (&scores)[2 * S::fragments][4], const Tile& tile, int position) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int at = tile.position() + min((tile.query + warp.pair * 2 + q) / S::group, tile.rows() - 1);  // the query's own position
      warp.hide(scores, q, S::window > 0 ? at - S::window + 1 - position : 0, at + 1 - position);
    }
  }

  // ---- results
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
      const int query = own.query + warp.pair * 2 + q, row = own.row() + query / S::group, in_group = query % S::group;
      const bool wanted = query < own.rows() * S::group;
      if constexpr (S::splits == 1)
        warp.write_result(result_of(row, in_group), q, wanted);
      else if (wanted)
        warp.write_partial(partial_of(row, in_group), q);
    }
  }

  // Merges the first `used` parts of a tile (if any) in ascending order: its warps take queries in turn, a lane 4 columns.
  __device__ __forceinline__ void merge(const Tile& own, int used, int part, int parts) const {
    const int lane = own_lane(), first = b.warp - part;  // warp of the tile's first part
#pragma unroll 1
    for (int q = part; q < TILE_QUERIES; q += parts) {
      const int query = own.query + q;
      if (query >= own.rows() * S::group) return;
      const Merged<V> merged(memory, q, first, used);
      const int row = own.row() + query / S::group, in_group = query % S::group;
#pragma unroll
      for (int begin = 0; begin < S::head_dim; begin += 128) {
        const int d = begin + lane * 4;
        if (d >= S::head_dim) continue;
        const float4 sum = merged.sums(memory, q, first, used, d);
        if constexpr (S::splits == 1) {
          const float inverse = 1.0f / merged.total;
          store_8(result_of(row, in_group) + d, {pack_bf16(sum.x * inverse, sum.y * inverse), pack_bf16(sum.z * inverse, sum.w * inverse)});
        } else {
          float* out = partial_of(row, in_group);
          store_16(out + d, Turn<V>::as_words(sum));
          if (d == 0) store_8(out + S::head_dim, {__float_as_uint(merged.top * LN_2), __float_as_uint(merged.total)});
        }
      }
    }
  }
};

// With one split the results are `attn` itself, and those of the step before are cleared here.
template <class V>
__device__ __forceinline__ void clear(const Context& c, const Instruction& i, const Block& b) {
  constexpr int pieces = int(V::heads) / int(V::kv_heads) * int(V::head_dim) / 8;  // of a row and key-value head
  const int tiles = i.tile_end - i.tile_begin;
  bf16* other = other_copy(c, flagged<bf16>(c, i, 2, b), b);
  for (int n = b.thread; n < rows_to_clear(b) * tiles * pieces; n += THREADS)
    clear_16(other + int64_t(n / (tiles * pieces)) * int(V::heads) * int(V::head_dim) + (i.tile_begin * pieces + n % (tiles * pieces)) * 8);
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  bool waited = false;
  if constexpr (OneRow<V>::POSSIBLE) {
    if (OneRow<V>::is_form_of(c, *b.step)) {
      // Many keys and values would evict weights that are brought to the L2 meanwhile, and any wait behind such as are not needed soon.
      const bool alone = OneRow<V>(*b.step).blocks * (int64_t(V::kv_heads) * Page<V>::BLOCK_ELEMENTS * 2 * int(sizeof(bf16))) > c.attention_bytes;
      if (alone && b.thread == 0) b.ring.spare(0);
#pragma unroll 1
      for (int tile = i.tile_begin; tile < i.tile_end; ++tile) OneRowTask<V>(c, i, b, tile).run(waited);
      if (alone && b.thread == 0) b.ring.spare(1);
      return;
    }
  }
#pragma unroll 1
  for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
    if (tile > i.tile_begin) b.sync();  // the memory of the tile before
    Task<V>(c, i, b, tile).run(waited);
  }
  if (!waited) wait_inputs(b);
  if constexpr (V::splits == 1) clear<V>(c, i, b);
}

}  // namespace mpk::rotary_attention
