// The form of rotary_attention for a step of one row (OneRow of attention.cuh): every warp by itself, no barrier unless contexts are long.
#pragma once
#include "mpk/wait.cuh"
#include "rotary_attention/head.cuh"

namespace mpk::rotary_attention {

template <class V>
class OneRowTask {
  using S = Shape<V>;
  using M = Memory<V>;
  using P = Page<V>;
  using Q = Quad<V>;
  static constexpr int PASSES = (S::group + 2 + Q::A_WARP - 1) / Q::A_WARP;  // over the queries, the key and the value, Q::A_WARP at a time
  static_assert(!OneRow<V>::POSSIBLE || M::units == WARPS, "a place for the sums of every warp");
  static constexpr int KEY_ROW = TILE_QUERIES, VALUE_ROW = TILE_QUERIES + M::NEW;  // of the warp's place in shared memory

 public:
  __device__ __forceinline__ OneRowTask(const Context& c, const Instruction& i, Block& b, int tile)
      : c(c), i(i), b(b), rows(M{b.scratch}.rows(b.warp)), kv_head(tile / S::splits), split(tile % S::splits), line(*b.step) {}

  __device__ __forceinline__ void run(bool& waited) {
    const bool meets = line.meets();
    const int first = b.warp * line.used + split;
    __syncwarp();  // the memory of the tile before
    if (split < line.used && first < line.blocks) attend(first, meets, waited);
    if (!waited) wait_inputs(b), waited = true;
    if (!meets) return;
    b.sync();
    merge();
    b.sync();  // before other memory of the block comes in place of the sums
  }

 private:
  const Context& c;
  const Instruction& i;
  Block& b;
  bf16* const rows;  // the warp's place in shared memory
  const int kv_head, split;
  const OneRow<V> line;

  // Blocks f, f + stride, ... of the line; leaves a partial result, or with `meets` the warp's part of one in shared memory.
  __device__ __forceinline__ void attend(int f, bool meets, bool& waited) const {
    const bool newest = f == 0;  // the block of the row itself, which is brought and appended here
    Warp<V> warp{};  // on every path: else registers hold what they held, all through the program
    warp.locate();
    const int page = page_of(f);
    Asked asked{};
    if constexpr (FLAGGED) ask(asked, newest);  // before anything that needs the page's number: words may be there already
    bf16* keys = keys_of(f, page);
    warp.load_keys(keys, 0), warp.load_values(keys + P::VALUES, 0);
    pad_queries();
    if (!waited) wait_inputs(b), waited = true;
    if constexpr (!FLAGGED) ask(asked, newest);
    bring(asked, newest);
    if (newest) {
      const int at = line.position % S::block;
      warp.insert_key(shared_address(rows + KEY_ROW * S::row_stride), at);
      warp.cut_values(at), warp.insert_value(rows + VALUE_ROW * S::row_stride, at);
    }
    warp.clear();
    const bf16* next = keys;
    asm volatile("" : "+r"(f));  // or compilers make a copy of the loop for the newest block
#pragma unroll 1
    for (;;) {
      const int position = (line.last - f) * S::block;
      const bool more = f + line.stride() < line.blocks, whole = f != 0 && (S::window == 0 || position > line.position - S::window);
      if (more) next = keys_of(f + line.stride(), page_of(f + line.stride()));
      float scores[2 * S::fragments][4] = {};
      warp.score(scores, shared_address(rows), 0);
      if (more) warp.load_keys(next, 0);
      uint32_t weights[S::fragments][2];
      warp.join(scores);
      if (!whole) {
        const int begin = S::window > 0 ? line.position - S::window + 1 - position : 0, end = line.position + 1 - position;
        warp.hide(scores, 0, begin, end), warp.hide(scores, 1, begin, end);
      }
      warp.soften(scores, weights, float(V::scale) * LOG2_E);
      warp.accumulate(weights, 0);
      if (!more) break;
      warp.load_values(next + P::VALUES, 0);
      f += line.stride();
    }
    warp.finish();
    if (meets) {
      if (newest) append(keys);
      __syncwarp();  // the key and value stood where sums come
      warp.leave(M{b.scratch}.sums(b.warp), M{b.scratch}.statistics() + b.warp);
      return;
    }
    float* partial = partial_of(b.warp, warp.pair * 2);
#pragma unroll
    for (int q = 0; q < 2; ++q)
      if (warp.pair * 2 + q < S::group) warp.write_partial(partial + q * partial_columns(S::head_dim), q);
    if (newest) append(keys);  // nobody waits for it
  }
  // The split's result of all its warps; a warp merges a query, a lane has four columns.
  __device__ __forceinline__ void merge() const {
    const M memory{b.scratch};
    const int used = line.warps(split), d = own_lane() * 4;
#pragma unroll 1
    for (int q = b.warp; q < S::group; q += WARPS) {
      const Merged<V> merged(memory, q, 0, used);
      if (d >= S::head_dim) continue;
      float* out = partial_of(0, q);
      store_16(out + d, Turn<V>::as_words(merged.sums(memory, q, 0, used, d)));
      if (d == 0) store_8(out + S::head_dim, {__float_as_uint(merged.top * LN_2), __float_as_uint(merged.total)});
    }
  }
  __device__ __forceinline__ float* partial_of(int row, int in_group) const {
    return flagged<float>(c, i, 2, b) + partial_offset(row, S::heads, kv_head, S::splits, split, S::group, in_group, S::head_dim);
  }

  // What the warp waits for: heads of the row, and what turns them.
  struct Asked {
    Q heads[PASSES];
    Turn<V> queries, keys;
  };

  // Page of the warp's block `f`. Page numbers do not change during a step, and the SM has acquired it: they may come from the L1.
  __device__ __forceinline__ int page_of(int f) const {
    return c.page_table[int64_t(b.step->segments[0].slot) * c.max_pages + (line.last - f) / P::BLOCKS];
  }
  __device__ __forceinline__ bf16* keys_of(int f, int page) const {
    return kv_page<bf16>(c, i.layer, page, kv_head, S::kv_heads, S::head_dim) + (line.last - f) % P::BLOCKS * P::BLOCK_ELEMENTS;
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
    return flagged<bf16>(c, i, 0, b) + head * S::head_dim + own_lane() % Q::LANES * 4;
  }

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
    asked.queries.load_rope(flagged<float>(c, i, 1, b), quad), asked.queries.load_norm(params, QUERY, quad);
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
    asked.queries.settle_rope(b, flagged<float>(c, i, 1, b), quad);
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
    q.append(keys, lane < 16 ? KEY : VALUE, quad, line.position % S::block);
  }
};

}  // namespace mpk::rotary_attention
