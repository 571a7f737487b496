// The form of rotary_attention for a step that only decodes (SingleRows of attention.cuh): every warp by itself, no barrier.
#pragma once
#include "mpk/wait.cuh"
#include "rotary_attention/head.cuh"

namespace mpk::rotary_attention {

// The warp's part of a row: blocks first, first + stride, ... of the row's, of which number 0 is the newest one.
template <class V>
struct Part {
  using S = Shape<V>;
  int position = 0, slot = 0, first = 0, stride = 1, blocks = 0;

  __device__ __forceinline__ int last() const { return position / S::block; }  // the newest one's number in the sequence
};

// Of the only row of a step: what stands before the warp asks for its queries is on the way of every layer, so it is this little.
template <class V>
struct PartOfOne : Part<V> {
  using S = Shape<V>;
  static constexpr bool ALONE = true;
  static constexpr int row = 0;

  __device__ __forceinline__ PartOfOne(const Block& b, int split) {
    using R = SingleRows<V>;
    const Segment& segment = b.step->segments[0];
    this->slot = segment.slot, this->position = segment.position, this->blocks = R::blocks(this->position);
    this->first = b.warp * S::splits + split, this->stride = R::parts_of_one(this->blocks);
  }
  __device__ __forceinline__ bool none() const { return this->first >= this->stride; }
};

template <class V>
struct PartOfSeveral : Part<V> {
  using S = Shape<V>;
  static constexpr bool ALONE = false;
  int row = -1;  // no part

  __device__ __forceinline__ PartOfSeveral(const Block& b, int split) {
    const auto& of = SingleRows<V>::of(b);
    const int f = b.warp * S::splits + split, rows = b.step->rows;
    if (f >= of.begin[rows]) return;
    row = of.row_of(f, rows);
    const int begin = of.begin[row], stride = of.begin[row + 1] - begin;
    // Newest blocks, which take longer, are in different places of their rows, so that they are on different SMs.
    int first = f - begin - (row < stride ? row : 0);
    if (first < 0) first += stride;
    this->stride = stride, this->first = first;
    this->slot = b.step->segments[row].slot, this->position = b.step->segments[row].position, this->blocks = SingleRows<V>::blocks(this->position);
  }
  __device__ __forceinline__ bool none() const { return row < 0; }
};

template <class V, class Own>
class SingleRowsTask {
  using S = Shape<V>;
  using M = Memory<V>;
  using P = Page<V>;
  using Q = Quad<V>;
  static constexpr int PASSES = (S::group + 2 + Q::A_WARP - 1) / Q::A_WARP;  // over the queries, the key and the value, Q::A_WARP at a time
  static constexpr int KEY_ROW = TILE_QUERIES, VALUE_ROW = TILE_QUERIES + M::NEW;  // of the warp's place in shared memory

 public:
  __device__ __forceinline__ SingleRowsTask(const Context& c, const Instruction& i, Block& b, int tile)
      : c(c), i(i), b(b), rows(M{b.scratch}.rows(b.warp)), kv_head(tile / S::splits), split(tile % S::splits), own(b, split) {}

  __device__ __forceinline__ void run(bool& waited) {
    __syncwarp();  // the memory of the tile before
    if (own.none()) return;
    int n = own.first;
    const bool newest = n == 0;  // the block of the row itself, which is brought and appended here
    Warp<V> warp{};  // on every path: else registers hold what they held, all through the program
    warp.locate();
    if constexpr (Own::ALONE)
      attend_alone(warp, n, newest, waited);
    else
      attend_several(warp, n, newest, waited);
  }

 private:
  // What the warp waits for: heads of the row, and what turns them.
  struct Asked {
    Q heads[PASSES];
    Turn<V> queries, keys;
  };

  // One row: warps have a block each unless the context is long.
  __device__ __forceinline__ void attend_alone(Warp<V>& warp, int n, bool newest, bool& waited) const {
    const int page = page_of(n);
    Asked asked{};
    if constexpr (FLAGGED) ask(asked, newest);  // before anything that needs the page's number: words may be there already
    bf16* keys = keys_of(n, page);
    warp.load_keys(keys, 0), warp.load_values(keys + P::VALUES, 0);
    bring_inputs(warp, asked, newest, waited);
    const bf16* next = keys;
    asm volatile("" : "+r"(n));  // or compilers make a copy of the loop for the newest block
#pragma unroll 1
    for (;;) {
      const bool more = n + own.stride < own.blocks;
      if (more) next = keys_of(n + own.stride, page_of(n + own.stride));
      attend(warp, warp, n, more, next);
      if (!more) break;
      n += own.stride;
    }
    leave(warp, keys, newest);
  }

  // Several rows: there are two blocks at a time, so that one may be on its way while the other is used, and the pages of 32 in the lanes.
  __device__ __forceinline__ void attend_several(Warp<V>& warp, int n, bool newest, bool& waited) const {
    Held<V> other{};
    other.row = warp.row, other.pair = warp.pair;
    Asked asked{};
    if constexpr (FLAGGED) ask(asked, newest);
    int pages = pages_from(n);
    bf16* keys = keys_of(n, __shfl_sync(ALL_LANES, pages, 0));
    warp.load_keys(keys, 0), warp.load_values(keys + P::VALUES, 0);
    if (n + own.stride < own.blocks) {
      const bf16* second = keys_of(n + own.stride, __shfl_sync(ALL_LANES, pages, 1));
      other.load_keys(second, 0), other.load_values(second + P::VALUES, 0);
    }
    bring_inputs(warp, asked, newest, waited);
    asm volatile("" : "+r"(n));
#pragma unroll 1
    for (int k = 0; attend_next(warp, warp, n, k, pages) && attend_next(warp, other, n, k, pages);) continue;
    leave(warp, keys, newest);
  }

  // Has the queries in shared memory, and what the step itself adds to the first block in its place.
  __device__ __forceinline__ void bring_inputs(Warp<V>& warp, Asked& asked, bool newest, bool& waited) const {
    pad_queries();
    if (!waited) wait_inputs(b), waited = true;
    if constexpr (!FLAGGED) ask(asked, newest);
    bring(asked, newest);
    if (newest) {
      const int at = own.position % S::block;
      warp.insert_key(shared_address(rows + KEY_ROW * S::row_stride), at);
      warp.cut_values(at), warp.insert_value(rows + VALUE_ROW * S::row_stride, at);
    }
    warp.clear();
  }

  __device__ __forceinline__ void leave(Warp<V>& warp, bf16* keys, bool newest) const {
    warp.finish();
    float* partial = flagged<float>(c, i, 2, b) + partial_offset(b.warp, S::heads, kv_head, S::splits, split, S::group, warp.pair * 2, S::head_dim);
#pragma unroll
    for (int q = 0; q < 2; ++q)
      if (warp.pair * 2 + q < S::group) warp.write_partial(partial + q * partial_columns(S::head_dim), q);
    if (newest) append(keys);
  }

  // The row's block `n`, which is in `held`; with `more`, the one that stands at `next` is asked for in its place as soon as there is room.
  __device__ __forceinline__ void attend(Warp<V>& warp, Held<V>& held, int n, bool more, const bf16* next) const {
    const int position = (own.last() - n) * S::block;
    const bool whole = n != 0 && (S::window == 0 || position > own.position - S::window);
    float scores[2 * S::fragments][4] = {};
    warp.score(held, scores, shared_address(rows), 0);
    if (more) held.load_keys(next, 0);
    uint32_t weights[S::fragments][2];
    warp.join(scores);
    if (!whole) {
      const int begin = S::window > 0 ? own.position - S::window + 1 - position : 0, end = own.position + 1 - position;
      warp.hide(scores, 0, begin, end), warp.hide(scores, 1, begin, end);
    }
    warp.soften(scores, weights, float(V::scale) * LOG2_E);
    warp.accumulate(held, weights, 0);
    if (more) held.load_values(next + P::VALUES, 0);
  }
  // The same of number `k` of the warp's blocks; the one after the next takes its place. False: there is no next one.
  __device__ __forceinline__ bool attend_next(Warp<V>& warp, Held<V>& held, int& n, int& k, int& pages) const {
    const int later = n + 2 * own.stride;
    const bool more = later < own.blocks;
    if ((k += 1) % 32 == 31) pages = pages_from(later);
    attend(warp, held, n, more, keys_of(more ? later : n, __shfl_sync(ALL_LANES, pages, (k + 1) % 32)));
    n += own.stride;
    return n < own.blocks;
  }

  const Context& c;
  const Instruction& i;
  Block& b;
  bf16* const rows;  // the warp's place in shared memory
  const int kv_head, split;
  const Own own;

  // Page of the row's block `n`. Page numbers do not change during a step, and the SM has acquired it: they may come from the L1.
  __device__ __forceinline__ int page_of(int n) const { return c.page_table[int64_t(own.slot) * c.max_pages + (own.last() - n) / P::BLOCKS]; }
  // Lane l has the page of the warp's block that is l after the row's number `n`, as far as there are any.
  __device__ __forceinline__ int pages_from(int n) const { return page_of(min(n + own_lane() * own.stride, own.blocks - 1)); }
  __device__ __forceinline__ bf16* keys_of(int n, int page) const {
    return kv_page<bf16>(c, i.layer, page, kv_head, S::kv_heads, S::head_dim) + (own.last() - n) % P::BLOCKS * P::BLOCK_ELEMENTS;
  }
  // Queries beyond the group's last one are multiplied like others, so they must be numbers.
  __device__ __forceinline__ void pad_queries() const {
    const int row = own_lane() / 4, pair = own_lane() % 4;
    if (row < S::group) return;
#pragma unroll
    for (int p = 0; p < S::pieces; ++p) *reinterpret_cast<uint4*>(rows + row * S::row_stride + p * 32 + pair * 8) = uint4{0, 0, 0, 0};
  }

  // Head `n` of a lane in pass `p`: the group's queries, the key, the value, nothing.
  __device__ __forceinline__ static int number(int p) { return p * Q::A_WARP + own_lane() / Q::LANES; }
  static constexpr __device__ __forceinline__ bool all_queries(int p) { return (p + 1) * Q::A_WARP <= S::group; }
  // This lane's first quad of it.
  __device__ __forceinline__ const bf16* from(int p) const {
    const int n = number(p), query = kv_head * S::group + n;
    const int head = all_queries(p) || n < S::group ? query : n == S::group ? S::heads + kv_head : S::heads + S::kv_heads + kv_head;
    return flagged<bf16>(c, i, 0, b) + (own.row * (S::heads + 2 * S::kv_heads) + head) * S::head_dim + own_lane() % Q::LANES * 4;
  }

  __device__ __forceinline__ const float* rope() const { return flagged<float>(c, i, 1, b) + own.row * S::head_dim; }

  // Asks for the group's queries, with `newest` for the row's key and value, and for what turns them.
  __device__ __forceinline__ void ask(Asked& asked, bool newest) const {
    const int quad = own_lane() % Q::LANES;
    const float* params = reinterpret_cast<const float*>(c.params + i.params);
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      Q& q = asked.heads[p];
      const bool wanted = quad < Q::quads && (all_queries(p) || number(p) < S::group || (newest && number(p) < S::group + 2));
      load_8_if(wanted, from(p), q.first), load_8_if(wanted, from(p) + Q::half, q.second);
    }
    asked.queries.load_rope(rope(), quad), asked.queries.load_norm(params, QUERY, quad);
    if (newest) asked.keys.load_norm(params, KEY, quad);
  }

  // Waits for it all, turns it and leaves it in shared memory.
  __device__ __forceinline__ void bring(Asked& asked, bool newest) const {
    const int quad = own_lane() % Q::LANES;
    auto& heads = asked.heads;
    if constexpr (FLAGGED) {  // all that is missing is asked for together
#pragma unroll 1
      for (uint32_t polls = 0;;) {
        bool whole = true;
#pragma unroll
        for (int p = 0; p < PASSES; ++p) whole = whole && complete(heads[p].first) && complete(heads[p].second);
        if (!__any_sync(ALL_LANES, !whole)) break;
        if (__any_sync(ALL_LANES, !b.may_poll(polls))) break;
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
          load_8_if(!complete(heads[p].first), from(p), heads[p].first);
          load_8_if(!complete(heads[p].second), from(p) + Q::half, heads[p].second);
        }
      }
    }
    b.arrived();
    asked.queries.settle_rope(b, rope(), quad);
    asked.keys.cosine = asked.queries.cosine, asked.keys.sine = asked.queries.sine;
    constexpr int OF_QUERIES = S::group / Q::A_WARP;  // passes that have nothing else
    turn<0, OF_QUERIES>(asked, quad);
    if (newest || OF_QUERIES * Q::A_WARP < S::group) turn<OF_QUERIES, PASSES>(asked, quad);
    __syncwarp();
  }

  // Passes [BEGIN, END), side by side.
  template <int BEGIN, int END>
  __device__ __forceinline__ void turn(Asked& asked, int quad) const {
    if constexpr (BEGIN < END) {
      float scale[PASSES] = {};
      if constexpr (V::q_norm || V::k_norm) {
#pragma unroll
        for (int p = BEGIN; p < END; ++p) scale[p] = asked.heads[p].squares();
#pragma unroll
        for (int step = Q::LANES / 2; step > 0; step /= 2)
#pragma unroll
          for (int p = BEGIN; p < END; ++p) scale[p] += __shfl_xor_sync(ALL_LANES, scale[p], step);
      }
#pragma unroll
      for (int p = BEGIN; p < END; ++p) {
        Q& q = asked.heads[p];
        const int n = number(p);
        if (all_queries(p) || n < S::group)
          asked.queries.apply(q, QUERY, scale[p]);
        else if (n == S::group)
          asked.keys.apply(q, KEY, scale[p]);
        const int row = all_queries(p) || n < S::group ? n : n == S::group ? KEY_ROW : VALUE_ROW;
        bf16* to = rows + row * S::row_stride + 4 * quad;
        if (quad < Q::quads && (all_queries(p) || n < S::group + 2))
          *reinterpret_cast<uint2*>(to) = q.first, *reinterpret_cast<uint2*>(to + Q::half) = q.second;
      }
    }
  }

  // The row's key and value to the cache; half of the warp has each.
  __device__ __forceinline__ void append(bf16* keys) const {
    const int lane = own_lane(), quad = lane % 16;
    static_assert(Q::quads <= 16, "half a warp has a head");
    if (quad >= Q::quads) return;
    const bf16* from = rows + (lane < 16 ? KEY_ROW : VALUE_ROW) * S::row_stride + 4 * quad;
    Q q;
    q.first = *reinterpret_cast<const uint2*>(from), q.second = *reinterpret_cast<const uint2*>(from + Q::half);
    q.append(keys, lane < 16 ? KEY : VALUE, quad, own.position % S::block);
  }
};

}  // namespace mpk::rotary_attention
