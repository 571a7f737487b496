// One warp's part of an attention: up to 8 queries against blocks of 16 or 32 keys, on tensor cores, from global memory to registers.
//
// Scores are computed transposed, S^T [keys x 8 queries] = K Q^T, and so are the sums, O^T [head_dim x 8 queries] = V^T P^T: keys and
// values are the A operands (16 rows), the few queries of a group fill the 8 columns of B. A lane's 16-byte piece of a key serves two
// steps along the head dimension; a lane's piece of a row of V^T (4 or 8 positions) serves one or two steps along the positions. Both
// assignments of k to lanes are permutations, which a sum does not mind as long as the other operand has the same one. The rows of
// S^T are assigned to positions such that its fragments, transposed 8 x 8 in registers, are the P^T that V^T needs.
#pragma once
#include "mpk/attention.cuh"
#include "mpk/flagged.cuh"

namespace mpk::rotary_attention {

constexpr int TILE_QUERIES = 8;

template <class V>
struct Shape {
  static constexpr int heads = int(V::heads), kv_heads = int(V::kv_heads), head_dim = int(V::head_dim), group = heads / kv_heads;
  static constexpr int splits = int(V::splits), window = int(V::window);
  static_assert(head_dim % 8 == 0 && head_dim <= 256, "pieces of 8 along the head");
  static constexpr int block = kv_block(head_dim), fragments = block / 16;  // positions, and fragments of 16 rows of S^T that they are
  static constexpr int pieces = (head_dim + 31) / 32;        // of 32 along the head, the last one may be cut
  static constexpr int section = pieces <= 4 ? pieces : 2;   // pieces that a warp holds in registers at a time
  static constexpr int sections = (pieces + section - 1) / section;
  static constexpr int tiles = 2 * section;                  // of 16 rows of V^T in a section
  static constexpr int row_stride = pieces * 32 + 8;         // of queries and keys in shared memory, bf16; 8: against bank conflicts
  static constexpr int value_stride = MAX_ROWS + 8;      // of a row of V^T in shared memory, bf16
  static constexpr int sum_stride = head_dim + (head_dim % 16 == 8 ? 12 : 4);  // of a query's sums in shared memory, float
};

// 8 queries of one segment; `query` numbers the segment's rows times the group's heads.
struct Tile {
  int slot, row, rows, position;  // of the segment
  int query;
  bool valid;
};

// What a task sees of a segment: its share of the past in the cache, and perhaps the step's own positions, in shared memory.
struct Share {
  Blocks past;
  bool fresh;
  __device__ __forceinline__ int items() const { return past.count + fresh; }  // a block each
};

template <class V>
struct Warp {
  using S = Shape<V>;
  static constexpr int FRAGMENTS = S::fragments, LANE_POSITIONS = 4 * FRAGMENTS;  // of a lane in a row of V^T
  uint4 keys[FRAGMENTS][S::section][2];
  uint32_t values[S::tiles][2][2 * FRAGMENTS];  // pairs of positions
  float sums[S::sections * S::tiles][4], max[2], total[2];  // of queries 2 * pair, 2 * pair + 1 of the tile
  int row, pair;  // this lane's row and pair of columns of a fragment

  __device__ __forceinline__ void locate() {
    const int lane = own_lane();
    row = lane / 4, pair = lane % 4;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    max[0] = max[1] = minus_infinity(), total[0] = total[1] = 0.0f;
  }

  // Position in its block of the key in row `row` of half `half` of fragment `fragment`.
  __device__ __forceinline__ int place(int fragment, int half) const { return row / 2 * LANE_POSITIONS + fragment * 4 + half * 2 + row % 2; }

  // Whether 8 columns of a piece exist; decided when compiled, except in a cut piece.
  __device__ __forceinline__ bool has_piece(int piece) const { return piece * 32 + 32 <= S::head_dim || piece * 32 + pair * 8 < S::head_dim; }
  __device__ __forceinline__ bool has_row(int tile, int half) const {
    return tile * 16 + half * 8 + 8 <= S::head_dim || tile * 16 + half * 8 + row < S::head_dim;
  }

  // One base address a function, all else constants: the places of fragments are linear in their numbers.
  __device__ __forceinline__ void load_keys(const bf16* from, int section) {
    const bf16* base = from + place(0, 0) * S::head_dim + pair * 8;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int p = 0; p < S::section; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int piece = section * S::section + p;
          keys[f][p][h] = has_piece(piece) ? load_16(base + (f * 4 + h * 2) * S::head_dim + piece * 32) : uint4{0, 0, 0, 0};
        }
  }

  __device__ __forceinline__ static void set(uint32_t (&pairs)[2 * FRAGMENTS], uint4 v) {
    pairs[0] = v.x, pairs[1] = v.y;
    if constexpr (FRAGMENTS == 2) pairs[2] = v.z, pairs[3] = v.w;
  }

  __device__ __forceinline__ void load_values(const bf16* from, int section) {
    const bf16* base = from + row * KV_PAGE_TOKENS + pair * LANE_POSITIONS;
#pragma unroll
    for (int t = 0; t < S::tiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int tile = section * S::tiles + t;
        const bf16* piece = base + (tile * 16 + h * 8) * KV_PAGE_TOKENS;
        if constexpr (FRAGMENTS == 2) {
          set(values[t][h], has_row(tile, h) ? load_16(piece) : uint4{0, 0, 0, 0});
        } else {
          const uint2 v = has_row(tile, h) ? load_8(piece) : uint2{0, 0};
          values[t][h][0] = v.x, values[t][h][1] = v.y;
        }
      }
  }

  // The same from the step's own keys [MAX_ROWS][row_stride] and values [head_dim][value_stride] in shared memory.
  __device__ __forceinline__ void load_new_keys(uint32_t from, int section) {
    const uint32_t base = from + (place(0, 0) * S::row_stride + pair * 8) * 2;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int p = 0; p < S::section; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int piece = section * S::section + p;
          const bool there = has_piece(piece) && (FRAGMENTS == 1 || place(f, h) < MAX_ROWS);
          keys[f][p][h] = there ? shared_load_16(base + ((f * 4 + h * 2) * S::row_stride + piece * 32) * 2) : uint4{0, 0, 0, 0};
        }
  }

  __device__ __forceinline__ void load_new_values(uint32_t from, int section) {
    const uint32_t base = from + (row * S::value_stride + pair * LANE_POSITIONS) * 2;
#pragma unroll
    for (int t = 0; t < S::tiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int tile = section * S::tiles + t;
        const uint32_t piece = base + (tile * 16 + h * 8) * S::value_stride * 2;
        if constexpr (FRAGMENTS == 2) {
          set(values[t][h], has_row(tile, h) && pair * LANE_POSITIONS < MAX_ROWS ? shared_load_16(piece) : uint4{0, 0, 0, 0});
        } else {
          const uint2 v = has_row(tile, h) ? shared_load_8(piece) : uint2{0, 0};
          values[t][h][0] = v.x, values[t][h][1] = v.y;
        }
      }
  }

  // scores[fragment][...] += the section's part of K Q^T; `queries`: the tile's in shared memory.
  __device__ __forceinline__ void score(float (&scores)[2 * FRAGMENTS][4], uint32_t queries, int section) {
#pragma unroll
    for (int p = 0; p < S::section; ++p) {
      const int piece = section * S::section + p;
      const uint4 q = has_piece(piece) ? shared_load_16(queries + (row * S::row_stride + pair * 8 + piece * 32) * 2) : uint4{0, 0, 0, 0};
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        const uint4 a = keys[f][p][0], b = keys[f][p][1];
        mma(scores[f], {a.x, b.x, a.y, b.y}, q.x, q.y);
        mma(scores[FRAGMENTS + f], {a.z, b.z, a.w, b.w}, q.z, q.w);
      }
    }
  }

  // sums += V^T P^T for the rows of the section.
  __device__ __forceinline__ void accumulate(const uint32_t (&weights)[FRAGMENTS][2], int section) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int t = 0; t < S::tiles; ++t) {
        const auto &a = values[t][0], &b = values[t][1];
        mma(sums[section * S::tiles + t], {a[2 * f], b[2 * f], a[2 * f + 1], b[2 * f + 1]}, weights[f][0], weights[f][1]);
      }
  }

  // Two chains of products make a score, so that the tensor cores have more to do at a time.
  __device__ __forceinline__ void join(float (&scores)[2 * FRAGMENTS][4]) const {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[f][e] += scores[FRAGMENTS + f][e];
  }

  // Scores of query `q` of this lane's two outside of places [begin, end) of the block become minus infinity.
  __device__ __forceinline__ void hide(float (&scores)[2 * FRAGMENTS][4], int q, int begin, int end) const {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (place(f, h) < begin || place(f, h) >= end) scores[f][2 * h + q] = minus_infinity();
  }

  // Scores [fragment][half * 2 + query] to weights relative to the new maximum, sums shrunk to it.
  __device__ __forceinline__ void soften(float (&scores)[2 * FRAGMENTS][4], uint32_t (&weights)[FRAGMENTS][2], float scale) {
    float top[2] = {max[0], max[1]};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[f][e] *= scale;
        top[e % 2] = fmaxf(top[e % 2], scores[f][e]);
      }
    float shrink[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[q] = fmaxf(top[q], __shfl_xor_sync(ALL_LANES, top[q], step));
      const float base = top[q] == minus_infinity() ? 0.0f : top[q];  // nothing seen yet: every weight below is 0
      shrink[q] = exp2_fast(max[q] - base);
      max[q] = top[q], top[q] = base;
      total[q] *= shrink[q];
    }
    if (__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (auto& tile : sums) tile[0] *= shrink[0], tile[1] *= shrink[1], tile[2] *= shrink[0], tile[3] *= shrink[1];
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = exp2_fast(scores[f][2 * h] - top[0]), b = exp2_fast(scores[f][2 * h + 1] - top[1]);
        total[0] += a, total[1] += b;
        weights[f][h] = transpose_8x8(pack_bf16(a, b));
      }
  }

  // Values at and beyond `valid` positions of the block become 0: that memory was never written, and 0 times a NaN is a NaN.
  __device__ __forceinline__ void cut_values(int valid) {
    const int own = valid - pair * LANE_POSITIONS;
#pragma unroll
    for (auto& tile : values)
#pragma unroll
      for (auto& half : tile)
#pragma unroll
        for (int j = 0; j < 2 * FRAGMENTS; ++j) half[j] = own >= 2 * j + 2 ? half[j] : own == 2 * j + 1 ? half[j] & 0xffffu : 0u;
  }

  // Adds up what the lanes of a query have seen.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total[q] += __shfl_xor_sync(ALL_LANES, total[q], step);
  }

  // Sums to `to` [8 queries][sum_stride]; maxima and totals to `statistics` [2][8 queries][WARPS], of which it points at this warp's.
  __device__ __forceinline__ void leave(float* to, float* statistics) const {
    if (row == 0) {
#pragma unroll
      for (int q = 0; q < 2; ++q)
        statistics[(pair * 2 + q) * WARPS] = max[q], statistics[(TILE_QUERIES + pair * 2 + q) * WARPS] = total[q];
    }
    float* base = to + pair * 2 * S::sum_stride + row;
#pragma unroll
    for (int t = 0; t < S::sections * S::tiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (has_row(t, e / 2)) base[e % 2 * S::sum_stride + t * 16 + e / 2 * 8] = sums[t][e];
  }

  // The partial result of query `q` of this lane's two, to global memory.
  __device__ __forceinline__ void write_partial(float* to, int q) const {
#pragma unroll
    for (int t = 0; t < S::sections * S::tiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (has_row(t, h)) put_4(to + row + t * 16 + h * 8, __float_as_uint(sums[t][2 * h + q]));
    if (row == 0) put_8(to + S::head_dim, {__float_as_uint(max[q] * LN_2), __float_as_uint(total[q])});
  }

  // The same, finished.
  // All lanes; null: not this one's. Rows 2 n and 2 n + 1 of the result make one word, and stand in lanes that differ by 4.
  __device__ __forceinline__ void write_result(bf16* to, int q) const {
    const float inverse = 1.0f / total[q];
#pragma unroll
    for (int t = 0; t < S::sections * S::tiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float mine = sums[t][2 * h + q] * inverse, next = __shfl_xor_sync(ALL_LANES, mine, 4);
        if (to != nullptr && row % 2 == 0 && has_row(t, h)) put_4(to + row + t * 16 + h * 8, pack_bf16(mine, next));
      }
  }
};

}  // namespace mpk::rotary_attention
