// attention_combine: one query head a tile: merges the partial results of the splits in a fixed order.
// Operands, flagged: partial [rows][kv_heads][splits][group][head_dim + 4] float32, out [rows][heads * head_dim] bf16.
// Variant: heads, kv_heads, head_dim, splits, window, least.
//
// A warp merges a (row, head) by itself: everything that it needs is on its way at once, and no other warp is waited for. Lanes stand
// side by side along the head; of a small head, groups of lanes take every second or fourth split and are merged at the end.
// A partial result is read here and nowhere else, so the reader sets it to EMPTY: what was written is cleared, and nothing else.
#pragma once
#include "mpk/attention.cuh"
#include "mpk/flagged.cuh"
#include "mpk/wait.cuh"

namespace mpk::attention_combine {

constexpr bool waits_inside = true;

template <class V>
struct Merge {
  static constexpr int heads = int(V::heads), head_dim = int(V::head_dim), splits = int(V::splits), group = heads / int(V::kv_heads);
  static constexpr int quads = head_dim / 4;  // 4 sums each, a lane's share
  static constexpr int LANES = quads <= 2 ? 2 : quads <= 4 ? 4 : quads <= 8 ? 8 : quads <= 16 ? 16 : 32, GROUPS = 32 / LANES;
  static constexpr int EACH = (quads + LANES - 1) / LANES;             // quads of a lane
  static constexpr int BATCH = EACH > 1 ? 4 : splits < 8 * GROUPS ? (splits + GROUPS - 1) / GROUPS : 8;  // splits of a lane on their way at a time
  static_assert(head_dim % 8 == 0, "16-byte pieces of a partial result");
  float sums[EACH][4], max, total;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& quad : sums) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
    max = minus_infinity(), total = 0.0f;
  }
  // Before anything with a larger maximum is added.
  __device__ __forceinline__ void raise(float top) {
    if (top == max || top == minus_infinity()) return;
    const float shrink = exp2_fast((max - top) * LOG2_E);
#pragma unroll
    for (auto& quad : sums) quad[0] *= shrink, quad[1] *= shrink, quad[2] *= shrink, quad[3] *= shrink;
    total *= shrink, max = top;
  }

  // The splits `work` (bit s - begin: split s has work) of a row, up to 32 of them.
  __device__ __forceinline__ void gather(Block& b, float* partials, int row, int head, int begin, unsigned work, int lane) {
    constexpr int STRIDE = group * partial_columns(head_dim);  // from split to split
    const int part = lane / LANES, quad = lane % LANES, first = __ffs(int(work)) - 1, last = 31 - __clz(int(work));
    const float* row_begin = partials + partial_offset(row, heads, head / group, splits, begin, group, head % group, head_dim);
#pragma unroll 1
    for (int from = first; from <= last; from += GROUPS * BATCH) {
      uint4 v[BATCH][EACH] = {};
      uint2 s[BATCH] = {};
      const float* mine = row_begin + (from + part) * STRIDE;
      const unsigned own = work >> from >> part;
      const auto has = [&](int j) { return j * GROUPS < 32 && (own >> (j * GROUPS) & 1u) != 0; };
      const auto load = [&](bool all) {  // all, or what is missing
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          load_8_if(has(j) && (all || !complete(s[j])), mine + j * (GROUPS * STRIDE) + head_dim, s[j]);
#pragma unroll
          for (int e = 0; e < EACH; ++e)
            load_16_if(has(j) && quad + e * LANES < quads && (all || !complete(v[j][e])), mine + j * (GROUPS * STRIDE) + (quad + e * LANES) * 4, v[j][e]);
        }
      };
#pragma unroll
      for (auto& statistics : s) statistics = uint2{__float_as_uint(minus_infinity()), 0};
      load(true);
      if constexpr (FLAGGED) {
#pragma unroll 1
        for (uint32_t polls = 0;;) {
          bool whole = true;
#pragma unroll
          for (int j = 0; j < BATCH; ++j) {
            whole = whole && complete(s[j]);
#pragma unroll
            for (int e = 0; e < EACH; ++e) whole = whole && complete(v[j][e]);
          }
          if (!__any_sync(ALL_LANES, !whole)) break;
          if (__any_sync(ALL_LANES, !b.may_poll(polls))) break;
          load(false);
        }
      }
      float top = max;
#pragma unroll
      for (int j = 0; j < BATCH; ++j) top = fmaxf(top, __uint_as_float(s[j].x));
      raise(top);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const float factor = top == minus_infinity() ? 0.0f : exp2_fast((__uint_as_float(s[j].x) - top) * LOG2_E);
        total += __uint_as_float(s[j].y) * factor;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          sums[e][0] += __uint_as_float(v[j][e].x) * factor, sums[e][1] += __uint_as_float(v[j][e].y) * factor;
          sums[e][2] += __uint_as_float(v[j][e].z) * factor, sums[e][3] += __uint_as_float(v[j][e].w) * factor;
        }
      }
    }
  }
  // Sets to EMPTY what gather() read.
  __device__ __forceinline__ static void empty(float* partials, int row, int head, int begin, unsigned work, int lane) {
    float* mine = partials + partial_offset(row, heads, head / group, splits, begin, group, head % group, head_dim);
#pragma unroll 1
    for (int split = __ffs(int(work)) - 1 + lane / LANES; split <= 31 - __clz(int(work)); split += GROUPS) {
      if ((work >> split & 1u) == 0) continue;
      float* at = mine + split * (group * partial_columns(head_dim));
#pragma unroll
      for (int e = 0; e < EACH; ++e)
        if (lane % LANES + e * LANES < quads) clear_16(at + (lane % LANES + e * LANES) * 4);
      if (lane % LANES == 0) clear_8(at + head_dim);
    }
  }
  // Adds up the groups of lanes.
  __device__ __forceinline__ void join() {
    float top = max;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    raise(top);
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
      total += __shfl_xor_sync(ALL_LANES, total, step);
#pragma unroll
      for (auto& quad : sums)
#pragma unroll
        for (float& v : quad) v += __shfl_xor_sync(ALL_LANES, v, step);
    }
  }
  __device__ __forceinline__ void store(bf16* out, int lane) const {
    const float inverse = 1.0f / total;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
      if (lane + e * LANES < quads && lane < LANES)
        store_8(out + (lane + e * LANES) * 4, {pack_bf16(sums[e][0] * inverse, sums[e][1] * inverse), pack_bf16(sums[e][2] * inverse, sums[e][3] * inverse)});
  }
};

// A step of one row: all warps of the block share a head, each has some of its columns, and lanes beside each other along the partial
// results, of which there may be many.
template <class V>
struct Columns {
  static constexpr int heads = int(V::heads), head_dim = int(V::head_dim), splits = int(V::splits), group = heads / int(V::kv_heads), quads = head_dim / 4;
  static constexpr int each = (quads + WARPS - 1) / WARPS;  // quads of a warp at least
  static constexpr int LANES = each <= 1 ? 1 : each <= 2 ? 2 : each <= 4 ? 4 : 8, GROUPS = 32 / LANES;  // GROUPS: partial results side by side
  static constexpr int turns = splits % GROUPS == 0 ? splits / GROUPS : 1;  // of a lane until it comes to the next row of the buffer
  static constexpr int BATCH = 6 % turns == 0 ? 6 : 8;                       // partial results of a lane on their way at a time

  // Place of partial result `f` of a head; the splits of one row of the buffer come before the next row.
  static constexpr __device__ __forceinline__ int place(int f) { return (f / splits * (heads * splits) + f % splits * group) * partial_columns(head_dim); }
  // Whether the places of a batch differ by the same, whatever its first one is.
  static constexpr bool REGULAR = GROUPS % splits == 0 || (splits % GROUPS == 0 && BATCH % turns == 0);
  static __device__ __forceinline__ float* at(float* of_head, int first, int j) {
    return REGULAR ? of_head + place(first) + place(j * GROUPS) : of_head + place(first + j * GROUPS);
  }

  float sums[4] = {}, max = minus_infinity(), total = 0.0f;

  // Adds the results first, first + GROUPS, ... of this lane, BATCH of them, that are below `count`.
  __device__ __forceinline__ void gather(Block& b, float* of_head, int first, int count, int quad) {
    uint4 v[BATCH] = {};
    uint2 s[BATCH];
#pragma unroll
    for (auto& statistics : s) statistics = uint2{__float_as_uint(minus_infinity()), 0};
    const int own = quad < quads ? (count - first + GROUPS - 1) / GROUPS : 0;
    const auto load = [&](int j, bool sums_too, bool statistics_too) {
      const float* from = at(of_head, first, j);
      load_16_if(sums_too, from + quad * 4, v[j]), load_8_if(statistics_too, from + head_dim, s[j]);
    };
#pragma unroll
    for (int j = 0; j < BATCH; ++j) load(j, j < own, j < own);
    if constexpr (FLAGGED) {
#pragma unroll 1
      for (uint32_t polls = 0;;) {
        bool whole = true;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) whole = whole && complete(s[j]) && complete(v[j]);
        if (!__any_sync(ALL_LANES, !whole)) break;
        if (__any_sync(ALL_LANES, !b.may_poll(polls))) break;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) load(j, !complete(v[j]), !complete(s[j]));
      }
    }
    float top = max;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) top = fmaxf(top, __uint_as_float(s[j].x));
    const float base = top == minus_infinity() ? 0.0f : top;
    scale(exp2_fast((max - base) * LOG2_E));
    max = top;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const float factor = exp2_fast((__uint_as_float(s[j].x) - base) * LOG2_E);
      total += __uint_as_float(s[j].y) * factor;
      sums[0] += __uint_as_float(v[j].x) * factor, sums[1] += __uint_as_float(v[j].y) * factor;
      sums[2] += __uint_as_float(v[j].z) * factor, sums[3] += __uint_as_float(v[j].w) * factor;
    }
  }
  __device__ __forceinline__ void scale(float by) {
#pragma unroll
    for (float& sum : sums) sum *= by;
    total *= by;
  }
  // Adds up what lanes have of the same columns. Lanes without columns have read nothing.
  __device__ __forceinline__ void join() {
    float top = max;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    scale(max == minus_infinity() ? 0.0f : exp2_fast((max - top) * LOG2_E));
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
      total += __shfl_xor_sync(ALL_LANES, total, step);
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    }
  }

  // One head, by all threads of the block.
  static __device__ __forceinline__ void run(Block& b, float* partials, bf16* out, int head) {
    const int count = OneRow<V>(*b.step).count(), lane = own_lane(), quad = b.warp * LANES + lane % LANES;
    float* of_head = partials + partial_offset(0, heads, head / group, splits, 0, group, head % group, head_dim);
    Columns own;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += GROUPS * BATCH) own.gather(b, of_head, begin + lane / LANES, count, quad);
    b.arrived();
    own.join();
    const float inverse = 1.0f / own.total;
    if (lane < LANES && quad < quads)
      store_8(out + quad * 4, {pack_bf16(own.sums[0] * inverse, own.sums[1] * inverse), pack_bf16(own.sums[2] * inverse, own.sums[3] * inverse)});
    if constexpr (FLAGGED) {
      b.sync();  // all warps have read the maxima and totals
      if (quad >= quads) return;
#pragma unroll 1
      for (int f = lane / LANES; f < count; f += GROUPS) {
        clear_16(of_head + place(f) + quad * 4);
        if (quad == 0) clear_8(of_head + place(f) + head_dim);
      }
    }
  }
};

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  using M = Merge<V>;
  const int lane = own_lane(), tiles = i.tile_end - i.tile_begin, work = b.step->rows * tiles;
  float* partials = flagged<float>(c, i, 0, b);
  bf16* out = flagged<bf16>(c, i, 1, b);
  bf16* other = other_copy(c, out, b);
  constexpr int pieces = M::head_dim / 8;
  const auto clear = [&] {
    for (int n = b.thread; n < rows_to_clear(b) * tiles * pieces; n += THREADS)
      clear_16(other + (int64_t(n / (tiles * pieces)) * M::heads + i.tile_begin) * M::head_dim + n % (tiles * pieces) * 8);
  };
  if constexpr (OneRow<V>::POSSIBLE) {
    if (OneRow<V>::is_form_of(c, *b.step)) {
      wait_inputs(b);
#pragma unroll 1
      for (int head = i.tile_begin; head < i.tile_end; ++head) Columns<V>::run(b, partials, out + head * M::head_dim, head);
      clear();
      return;
    }
  }
  const Shares<V> shares(*b.step, lane);
  const int row_begin = lane < b.step->segment_count ? b.step->segments[lane].row_begin : 0x7fffffff;
  wait_inputs(b);
#pragma unroll 1
  for (int n = b.warp; n < work; n += WARPS) {
    const int row = n / tiles, head = i.tile_begin + n % tiles;
    const int segment = __popc(__ballot_sync(ALL_LANES, row_begin <= row)) - 1;
    M merge{};
    merge.clear();
#pragma unroll 1
    for (int begin = 0; begin < M::splits; begin += 32) {
      const unsigned splits = __ballot_sync(ALL_LANES, shares.has_work(segment, begin + lane));
      if (splits != 0) merge.gather(b, partials, row, head, begin, splits, lane);
    }
    if (n == 0) b.arrived();
    merge.join();
    merge.store(out + (int64_t(row) * M::heads + head) * M::head_dim, lane);
    if constexpr (FLAGGED) {
#pragma unroll 1
      for (int begin = 0; begin < M::splits; begin += 32) {
        const unsigned splits = __ballot_sync(ALL_LANES, shares.has_work(segment, begin + lane));
        if (splits != 0) M::empty(partials, row, head, begin, splits, lane);
      }
    }
  }
  clear();
}

}  // namespace mpk::attention_combine
