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

template <class V>
struct Shape {
  static constexpr int heads = int(V::heads), kv_heads = int(V::kv_heads), head_dim = int(V::head_dim), group = heads / kv_heads;
  static constexpr int splits = int(V::splits), window = int(V::window);
  static_assert(head_dim % 8 == 0 && head_dim <= 256, "pieces of 8 along the head");
  static constexpr int block = kv_block(head_dim), fragments = block / 16;  // positions, and fragments of 16 rows of S^T that they are
  static constexpr int pieces = (head_dim + 31) / 32;        // of 32 along the head, the last one may be cut
  static constexpr int section = pieces <= 4 ? pieces : 2;   // pieces that a warp holds in registers at a time
  static constexpr int sections = (pieces + section - 1) / section;
  static constexpr int lane_dims = head_dim / 8;             // rows of V^T of a lane: lane_dims * (its row of fragments) and those after it
  static constexpr int tiles = sections == 1 ? (lane_dims + 1) / 2 : 2 * section;  // of 16 rows of V^T in a section
  static constexpr int row_stride = pieces * 32 + 8;         // of queries, keys and values in shared memory, bf16; 8: against bank conflicts
  static constexpr int sum_stride = head_dim + 4;            // of a query's sums in shared memory, float
};

// 8 queries of one segment and the blocks of positions that this split has of it; `query` numbers the segment's rows times the
// group's heads. What shared memory knows of the segment is read there each time, since registers are scarce.
struct Tile {
  const Segment* segment;
  int query;
  int begin, count;  // blocks; no blocks: no tile

  __device__ __forceinline__ int slot() const { return segment->slot; }
  __device__ __forceinline__ int row() const { return segment->row_begin; }
  __device__ __forceinline__ int rows() const { return segment->rows; }
  __device__ __forceinline__ int position() const { return segment->position; }
};

// Consecutive values in shared or global memory, in pieces of up to 16 bytes.
template <int N>
constexpr int width_of() { return N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1; }

// Places in the cache. A page is KV_PAGE_TOKENS positions of one head: keys, then values, each in blocks of S::block positions. In a block
// stand 16-byte pieces in the order in which the lanes of a warp load them: keys [fragment][half][32 columns][row of the fragment]
// [8 columns], values [two rows of V^T of a lane][lane][row of V^T][its positions].
template <class V>
struct Page {
  using S = Shape<V>;
  static constexpr int BLOCKS = KV_PAGE_TOKENS / S::block, BLOCK_ELEMENTS = S::block * S::head_dim, VALUES = KV_PAGE_TOKENS * S::head_dim;
  static constexpr int LANE_POSITIONS = 4 * S::fragments;
  // Pieces of 8 columns in piece `piece` of 32.
  static constexpr __device__ __forceinline__ int pairs(int piece) { return piece * 32 + 32 <= S::head_dim ? 4 : (S::head_dim - piece * 32) / 8; }

  // Element of column `d`, a multiple of 4, of the key at place `at` of a block; the next 3 follow.
  __device__ __forceinline__ static int key(int at, int d) {
    const int row = at / LANE_POSITIONS * 2 + at % 2, fragment = at % LANE_POSITIONS / 4, half = at % 4 / 2, piece = d / 32;
    return (fragment * 2 + half) * 8 * S::head_dim + piece * 256 + (row * pairs(piece) + d % 32 / 8) * 8 + d % 8;
  }
  // The same of a value; any column.
  __device__ __forceinline__ static int value(int at, int d) {
    const int row = d / S::lane_dims, j = d % S::lane_dims, lane = row * 4 + at / LANE_POSITIONS, own = at % LANE_POSITIONS;
    if (S::fragments == 2) return (j * 32 + lane) * 8 + own;
    if (j / 2 * 2 + 1 < S::lane_dims) return (j / 2 * 32 + lane) * 8 + j % 2 * 4 + own;
    return j / 2 * 256 + lane * 4 + own;
  }
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
  // Rows of V^T are given to fragments such that a lane's are consecutive: half `half` of tile `tile` is row 2 * tile + half of each lane.
  static constexpr __device__ __forceinline__ bool has_half(int tile, int half) { return 2 * tile + half < S::lane_dims; }

  // A block of keys and a block of values stand in the cache in the order in which lanes hold them (see Page): one base address a
  // function, all else constants.
  __device__ __forceinline__ void load_keys(const bf16* from, int section) {
    const int lane = row * 4 + pair;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int p = 0; p < S::section; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int piece = section * S::section + p, pairs = Page<V>::pairs(piece);
          const bf16* base = from + (pairs == 4 ? lane : row * pairs + pair) * 8;
          keys[f][p][h] = has_piece(piece) ? load_16(base + (f * 2 + h) * 8 * S::head_dim + piece * 256) : uint4{0, 0, 0, 0};
        }
  }

  __device__ __forceinline__ void load_values(const bf16* from, int section) {
    const int lane = row * 4 + pair;
#pragma unroll
    for (int t = 0; t < S::tiles; ++t) {
      const int tile = section * S::tiles + t;
      uint4 v[2] = {};
      if constexpr (FRAGMENTS == 2) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (has_half(tile, h)) v[h] = load_16(from + (tile * 2 + h) * 256 + lane * 8);
        values[t][0][0] = v[0].x, values[t][0][1] = v[0].y, values[t][0][2] = v[0].z, values[t][0][3] = v[0].w;
        values[t][1][0] = v[1].x, values[t][1][1] = v[1].y, values[t][1][2] = v[1].z, values[t][1][3] = v[1].w;
      } else {
        if (has_half(tile, 1)) {
          v[0] = load_16(from + tile * 256 + lane * 8);
        } else if (has_half(tile, 0)) {
          const uint2 w = load_8(from + tile * 256 + lane * 4);
          v[0].x = w.x, v[0].y = w.y;
        }
        values[t][0][0] = v[0].x, values[t][0][1] = v[0].y, values[t][1][0] = v[0].z, values[t][1][1] = v[0].w;
      }
    }
  }

  // Puts a key in place that is not in the cache yet, at place `at` of the block; it stands in shared memory.
  __device__ __forceinline__ void insert_key(uint32_t key, int at) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (place(f, h) != at) continue;
#pragma unroll
        for (int p = 0; p < S::section; ++p)
          if (has_piece(p)) keys[f][p][h] = shared_load_16(key + (pair * 8 + p * 32) * 2);
      }
  }

  // The same of a value. A position is half of a word, chosen by masks: registers have no numbers.
  __device__ __forceinline__ void insert_value(const bf16* value, int at) {
    const bf16* from = value + row * S::lane_dims;
    uint32_t chosen[2 * FRAGMENTS];
#pragma unroll
    for (int j = 0; j < 2 * FRAGMENTS; ++j) {
      const int first = pair * LANE_POSITIONS + 2 * j;
      chosen[j] = at == first ? 0xffffu : at == first + 1 ? 0xffff0000u : 0u;
    }
#pragma unroll
    for (int d = 0; d < S::lane_dims; d += 8) {
      uint32_t v[4] = {};  // pairs of rows of V^T
      if constexpr (S::lane_dims % 8 == 0) {
        const uint4 all = shared_load_16(shared_address(from + d));
        v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (d + e < S::lane_dims) v[e / 2] |= uint32_t(from[d + e].bits) << e % 2 * 16;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (d + e >= S::lane_dims) continue;
        const uint32_t twice = (e % 2 != 0 ? v[e / 2] >> 16 : v[e / 2] & 0xffffu) * 0x10001u;
        auto& pairs = values[(d + e) / 2][e % 2];
#pragma unroll
        for (int j = 0; j < 2 * FRAGMENTS; ++j) pairs[j] = (pairs[j] & ~chosen[j]) | (twice & chosen[j]);
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
    uint32_t kept[2 * FRAGMENTS];
#pragma unroll
    for (int j = 0; j < 2 * FRAGMENTS; ++j) kept[j] = (own > 2 * j ? 0xffffu : 0u) | (own > 2 * j + 1 ? 0xffff0000u : 0u);
#pragma unroll
    for (auto& tile : values)
#pragma unroll
      for (auto& half : tile)
#pragma unroll
        for (int j = 0; j < 2 * FRAGMENTS; ++j) half[j] &= kept[j];
  }

  // Adds up what the lanes of a query have seen.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total[q] += __shfl_xor_sync(ALL_LANES, total[q], step);
  }

  // Sum number `j` of this lane of query `q` of its two: of row `row * lane_dims + j` of V^T.
  __device__ __forceinline__ float sum(int q, int j) const { return sums[j / 2][j % 2 * 2 + q]; }

  // Place of a query among those of a tile in shared memory: lanes that store at the same time then use different banks.
  __device__ __forceinline__ static int shelf(int query) { return query % 2 * 4 + query / 2; }

  // Sums to `to` [shelf][sum_stride]; maxima and totals to `statistics` [2][8 queries][WARPS], of which it points at this warp's.
  __device__ __forceinline__ void leave(float* to, float* statistics) const {
    constexpr int W = width_of<S::lane_dims>();
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      if (row == 0) statistics[(pair * 2 + q) * WARPS] = max[q], statistics[(TILE_QUERIES + pair * 2 + q) * WARPS] = total[q];
      float* own = to + shelf(pair * 2 + q) * S::sum_stride + row * S::lane_dims;
#pragma unroll
      for (int j = 0; j < S::lane_dims; j += W) {
        if constexpr (W == 4)
          *reinterpret_cast<float4*>(own + j) = {sum(q, j), sum(q, j + 1), sum(q, j + 2), sum(q, j + 3)};
        else if constexpr (W == 2)
          *reinterpret_cast<float2*>(own + j) = {sum(q, j), sum(q, j + 1)};
        else
          own[j] = sum(q, j);
      }
    }
  }

  // The partial result of query `q` of this lane's two, to a flagged buffer. Arithmetic never gives EMPTY: its NaN is another one.
  __device__ __forceinline__ void write_partial(float* to, int q) const {
    constexpr int W = width_of<S::lane_dims>();
    float* own = to + row * S::lane_dims;
    const auto bits = [&](int j) { return __float_as_uint(sum(q, j)); };
#pragma unroll
    for (int j = 0; j < S::lane_dims; j += W) {
      if constexpr (W == 4)
        store_16(own + j, {bits(j), bits(j + 1), bits(j + 2), bits(j + 3)});
      else if constexpr (W == 2)
        store_8(own + j, {bits(j), bits(j + 1)});
      else
        store_4(own + j, bits(j));
    }
    if (row == 0) store_8(to + S::head_dim, {__float_as_uint(max[q] * LN_2), __float_as_uint(total[q])});
  }

  // The same, finished, if `wanted`. All lanes: a word has two values, which with an odd number of rows a lane may be of two lanes.
  __device__ __forceinline__ void write_result(bf16* to, int q, bool wanted) const {
    const float inverse = 1.0f / total[q], beyond = S::lane_dims % 2 == 0 ? 0.0f : __shfl_sync(ALL_LANES, sum(q, 0) * inverse, own_lane() + 4);
    const int begin = row * S::lane_dims;
#pragma unroll
    for (int j = 0; j < S::lane_dims; ++j) {
      const float next = j + 1 < S::lane_dims ? sum(q, j + 1) * inverse : beyond;
      if (wanted && (begin + j) % 2 == 0) store_4(to + begin + j, pack_bf16(sum(q, j) * inverse, next));
    }
  }
};

}  // namespace mpk::rotary_attention
