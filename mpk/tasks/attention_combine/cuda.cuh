// attention_combine: one query head a tile: merges the partial results of the splits in a fixed order.
// Operands, flagged: partial [rows][kv_heads][splits][group][head_dim + 2] float32, out [rows][heads * head_dim] bf16.
// Variant: heads, kv_heads, head_dim, splits, window.
//
// With few rows several warps share a row: warp w takes the splits w, w + warps, ...; their results are merged in shared memory.
#pragma once
#include "mpk/attention.cuh"
#include "mpk/flagged.cuh"
#include "mpk/wait.cuh"

namespace mpk::attention_combine {

constexpr bool waits_inside = true;

// A lane's columns: pairs (2 * (lane + 32 * u)), u < PAIRS.
template <class V>
struct Sums {
  static constexpr int head_dim = int(V::head_dim), PAIRS = (head_dim / 2 + 31) / 32;
  float2 of[PAIRS];
  float max, total;

  __device__ __forceinline__ void clear() {
    for (auto& v : of) v = {0.0f, 0.0f};
    max = minus_infinity(), total = 0.0f;
  }
  __device__ __forceinline__ void merge(const Sums& other) {
    const float top = fmaxf(max, other.max), base = top == minus_infinity() ? 0.0f : top;
    const float keep = exp2_fast((max - base) * LOG2_E), take = exp2_fast((other.max - base) * LOG2_E);
#pragma unroll
    for (int u = 0; u < PAIRS; ++u) of[u] = {of[u].x * keep + other.of[u].x * take, of[u].y * keep + other.of[u].y * take};
    total = total * keep + other.total * take, max = top;
  }
  __device__ __forceinline__ void load(const float* from, int lane) {  // written by other SMs
#pragma unroll
    for (int u = 0; u < PAIRS; ++u) {
      const int d = 2 * (lane + 32 * u);
      if (d < head_dim) keep(of[u].x, of[u].y, load_8(from + d));
    }
    keep(max, total, load_8(from + head_dim));
  }
  // Waits for what load() asked for.
  __device__ __forceinline__ void settle(Block& b, const float* from, int lane) {
#pragma unroll
    for (int u = 0; u < PAIRS; ++u) {
      const int d = 2 * (lane + 32 * u);
      if (d < head_dim) keep(of[u].x, of[u].y, settled_8(b, from + d, {__float_as_uint(of[u].x), __float_as_uint(of[u].y)}));
    }
    keep(max, total, settled_8(b, from + head_dim, {__float_as_uint(max), __float_as_uint(total)}));
  }
  static __device__ __forceinline__ void keep(float& first, float& second, uint2 v) { first = __uint_as_float(v.x), second = __uint_as_float(v.y); }
};

// Partial results of the row that warp `part` of `parts` merges, a batch of loads in flight at a time.
template <class V>
__device__ __forceinline__ void gather(Block& b, Sums<V>& sums, const float* partials, int row, int head, int past, int part, int parts, int lane) {
  constexpr int heads = int(V::heads), splits = int(V::splits), group = heads / int(V::kv_heads), BATCH = Sums<V>::PAIRS > 2 ? 4 : 8;
  for (int begin = part; begin < splits; begin += BATCH * parts) {
    Sums<V> loaded[BATCH];
    const auto from = [&](int j) -> const float* {
      const int split = begin + j * parts;
      if (split >= splits || (split >= past && split != splits - 1)) return nullptr;
      return partials + partial_offset(row, heads, head / group, splits, split, group, head % group, int(V::head_dim));
    };
#pragma unroll
    for (int j = 0; j < BATCH; ++j) from(j) != nullptr ? loaded[j].load(from(j), lane) : loaded[j].clear();
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (from(j) != nullptr) loaded[j].settle(b, from(j), lane);
      sums.merge(loaded[j]);
    }
  }
}

template <class V>
__device__ __forceinline__ void store(const Sums<V>& sums, bf16* out, int lane) {
  const float inverse = 1.0f / sums.total;
#pragma unroll
  for (int u = 0; u < Sums<V>::PAIRS; ++u) {
    const int d = 2 * (lane + 32 * u);
    if (d < int(V::head_dim)) put_4(out + d, pack_bf16(sums.of[u].x * inverse, sums.of[u].y * inverse));
  }
}

// Blocks of past positions that the segment of a row sees.
__device__ __forceinline__ int past_count_of_row(const StepView& step, int row, int window, int block) {
  int s = 0;
  while (s + 1 < step.segment_count && row >= step.segments[s + 1].row_begin) ++s;
  return past_blocks(step.segments[s].position, window, block).count;
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int head_dim = int(V::head_dim), heads = int(V::heads);
  const int rows = b.step->rows, work = rows * (i.tile_end - i.tile_begin);
  int parts = 1;
  while (work > 0 && 2 * parts * work <= WARPS) parts *= 2;  // warps a (row, head)
  const int unit = b.warp / parts, part = b.warp % parts, units = WARPS / parts;
  const float* partials = flagged<float>(c, i, 0, b);
  bf16* out = flagged<bf16>(c, i, 1, b);
  bf16* old = other_copy(c, out, b) + i.tile_begin * head_dim;
  const int columns = (i.tile_end - i.tile_begin) * head_dim;
  for (int row = b.warp; row < rows_to_clear(b); row += WARPS)
    for (int d = b.lane * 2; d < columns; d += 64) clear_4(old + int64_t(row) * heads * head_dim + d);
  Sums<V>* shared = reinterpret_cast<Sums<V>*>(b.scratch);  // [warp][lane]
  int past = unit < work ? past_count_of_row(*b.step, unit % rows, int(V::window), kv_block(head_dim)) : 0;
  wait_inputs(b);
  for (int n = unit; n < work; n += units) {
    const int row = n % rows, head = i.tile_begin + n / rows;
    if (n != unit) past = past_count_of_row(*b.step, row, int(V::window), kv_block(head_dim));
    Sums<V> sums;
    sums.clear();
    gather(b, sums, partials, row, head, past, part, parts, b.lane);
    bf16* to = out + (int64_t(row) * heads + head) * head_dim;
    if (parts == 1) {
      store(sums, to, b.lane);
      continue;
    }
    shared[b.thread] = sums;
  }
  if (parts == 1) return;
  // More than one part: every warp had at most one row, and warps without one are there for the barrier.
  b.sync();
  if (part != 0 || unit >= work) return;
  Sums<V> sums = shared[b.thread];
  for (int p = 1; p < parts; ++p) sums.merge(shared[b.thread + 32 * p]);
  store(sums, out + (int64_t(unit % rows) * heads + i.tile_begin + unit / rows) * head_dim, b.lane);
}

}  // namespace mpk::attention_combine
