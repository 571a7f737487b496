// Heads of rows on their way from the product qkv to shared memory and the cache: head norm, rotation, rounding to bf16.
#pragma once
#include "rotary_attention/attend.cuh"

namespace mpk::rotary_attention {

// The task's shared memory: each warp that works has a place of its own, for queries and what is new in its blocks, then for its sums.
template <class V>
struct Memory {
  using S = Shape<V>;
  static constexpr int NEW = 4;  // keys, and values, that are brought at a time
  static constexpr int statistics_bytes = WARPS * 2 * TILE_QUERIES * 4;
  static constexpr int sums_bytes = TILE_QUERIES * S::sum_stride * 4, rows_bytes = (TILE_QUERIES + 2 * NEW) * S::row_stride * 2;
  static constexpr int place_bytes = sums_bytes > rows_bytes ? sums_bytes : rows_bytes;
  static constexpr bool fits(int units) { return statistics_bytes + units * place_bytes <= SCRATCH_BYTES; }
  static constexpr int units = fits(8) ? 8 : fits(4) ? 4 : 2;  // warps that work at a time
  static_assert(fits(units) && WARPS == 8, "scratch");

  unsigned char* at;
  __device__ __forceinline__ float* statistics() const { return reinterpret_cast<float*>(at); }  // maxima, totals [8][WARPS]
  __device__ __forceinline__ float* sums(int warp) const { return reinterpret_cast<float*>(at + statistics_bytes + warp * place_bytes); }
  // [row_stride] each: queries, new keys, new values.
  __device__ __forceinline__ bf16* rows(int warp) const { return reinterpret_cast<bf16*>(at + statistics_bytes + warp * place_bytes); }
};

// What warps [first, first + used) of the block have left of query `q` of a tile, added up in ascending order.
template <class V>
struct Merged {
  using S = Shape<V>;
  float factor[WARPS], top = minus_infinity(), total = 0.0f;  // of each warp's sums; maximum and sum of exponentials of all

  __device__ __forceinline__ Merged(const Memory<V>& memory, int q, int first, int used) {
    float totals[WARPS];
    const float* statistics = memory.statistics() + q * WARPS;
    *reinterpret_cast<float4*>(factor) = *reinterpret_cast<const float4*>(statistics);
    *reinterpret_cast<float4*>(factor + 4) = *reinterpret_cast<const float4*>(statistics + 4);
    *reinterpret_cast<float4*>(totals) = *reinterpret_cast<const float4*>(statistics + TILE_QUERIES * WARPS);
    *reinterpret_cast<float4*>(totals + 4) = *reinterpret_cast<const float4*>(statistics + TILE_QUERIES * WARPS + 4);
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
  }
  // Columns d to d + 3.
  __device__ __forceinline__ float4 sums(const Memory<V>& memory, int q, int first, int used, int d) const {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w < first || w >= first + used) continue;
      const float4 v = *reinterpret_cast<const float4*>(memory.sums(w) + Warp<V>::shelf(q) * S::sum_stride + d);
      sum.x += factor[w] * v.x, sum.y += factor[w] * v.y, sum.z += factor[w] * v.z, sum.w += factor[w] * v.w;
    }
    return sum;
  }
};

enum Role { QUERY, KEY, VALUE, NOTHING };

// LANES lanes share one head of one row: a lane has 4 elements of its first half and the 4 that they are rotated against.
template <class V>
struct Quad {
  static constexpr int head_dim = int(V::head_dim), half = head_dim / 2, quads = half / 4;
  static constexpr int LANES = quads <= 1 ? 1 : quads <= 2 ? 2 : quads <= 4 ? 4 : quads <= 8 ? 8 : quads <= 16 ? 16 : 32, A_WARP = 32 / LANES;
  uint2 first, second;
  int from;    // place in qkv, elements
  int what;    // role, row of the warp's place in shared memory, row of the segment

  // This lane's part of the sum of squares.
  __device__ __forceinline__ float squares() const {
    float sum = low(first.x) * low(first.x) + high(first.x) * high(first.x);
    sum += low(first.y) * low(first.y) + high(first.y) * high(first.y);
    sum += low(second.x) * low(second.x) + high(second.x) * high(second.x);
    return sum + (low(second.y) * low(second.y) + high(second.y) * high(second.y));
  }
  // A key or value to place `at` of a block of the cache.
  __device__ __forceinline__ void append(bf16* keys, Role kind, int quad, int at) const {
    using P = Page<V>;
    const int d = 4 * quad;
    if (kind == KEY) {
      *reinterpret_cast<uint2*>(keys + P::key(at, d)) = first, *reinterpret_cast<uint2*>(keys + P::key(at, half + d)) = second;
    } else {
      bf16* values = keys + P::VALUES;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t a = e / 2 == 0 ? first.x : first.y, b = e / 2 == 0 ? second.x : second.y;
        values[P::value(at, d + e)] = bf16{uint16_t(a >> e % 2 * 16)}, values[P::value(at, half + d + e)] = bf16{uint16_t(b >> e % 2 * 16)};
      }
    }
  }

  __device__ __forceinline__ Role role() const { return Role(what & 0xff); }
  __device__ __forceinline__ int target() const { return what >> 8 & 0xff; }
  __device__ __forceinline__ int row() const { return what >> 16; }
};

// What a lane needs to turn its quads: the rotation of a row, a head norm's weights.
template <class V>
struct Turn {
  using Q = Quad<V>;
  float4 cosine, sine, norm[2];

  // Asks for the norms' weights, so that load_norm() finds them in the L1. `params`: q_norm, k_norm.
  __device__ __forceinline__ static void ask_for_norms(const float* params) {
    constexpr int LINE = 32, values = (int(V::q_norm) + int(V::k_norm)) * Q::head_dim;
    if (own_lane() * LINE < values) prefetch(params + own_lane() * LINE);
  }
  __device__ __forceinline__ void load_norm(const float* params, Role role, int quad) {
    if constexpr (V::q_norm || V::k_norm) {
      const float* from = params + (V::q_norm && role == KEY ? Q::head_dim : 0) + (quad < Q::quads ? 4 * quad : 0);
      norm[0] = __ldg(at(from)), norm[1] = __ldg(at(from + Q::half));
    }
  }
  __device__ __forceinline__ static const float4* at(const float* p) { return reinterpret_cast<const float4*>(p); }
  __device__ __forceinline__ static float4 as_floats(uint4 v) {
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
  }
  __device__ __forceinline__ static uint4 as_words(float4 v) {
    return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
  }
  // `rope`: a row of rotations, flagged.
  __device__ __forceinline__ void load_rope(const float* rope, int quad) {
    if (quad >= Q::quads) quad = 0;
    cosine = as_floats(load_16(rope + 4 * quad)), sine = as_floats(load_16(rope + Q::half + 4 * quad));
  }
  __device__ __forceinline__ void settle_rope(Block& b, const float* rope, int quad) {
    if (quad >= Q::quads) quad = 0;
    cosine = as_floats(settled_16(b, rope + 4 * quad, as_words(cosine))), sine = as_floats(settled_16(b, rope + Q::half + 4 * quad, as_words(sine)));
  }

  // Norm and rotation of a head as its role wants it; `squares`: of the whole head.
  __device__ __forceinline__ void apply(Q& q, Role role, float squares) const {
    float a[4] = {low(q.first.x), high(q.first.x), low(q.first.y), high(q.first.y)};
    float b[4] = {low(q.second.x), high(q.second.x), low(q.second.y), high(q.second.y)};
    if ((V::q_norm && role == QUERY) || (V::k_norm && role == KEY)) {
      const float scale = rsqrtf(squares / float(Q::head_dim) + float(V::eps));
      a[0] *= scale * norm[0].x, a[1] *= scale * norm[0].y, a[2] *= scale * norm[0].z, a[3] *= scale * norm[0].w;
      b[0] *= scale * norm[1].x, b[1] *= scale * norm[1].y, b[2] *= scale * norm[1].z, b[3] *= scale * norm[1].w;
    }
    if (role > KEY) return;
    const float cosines[4] = {cosine.x, cosine.y, cosine.z, cosine.w}, sines[4] = {sine.x, sine.y, sine.z, sine.w};
    float x[4], y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = a[j] * cosines[j] - b[j] * sines[j], y[j] = b[j] * cosines[j] + a[j] * sines[j];
    q.first = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}, q.second = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
  }
  // Of the whole head, from what its lanes have. All lanes of the warp.
  __device__ __forceinline__ static float all_squares(const Q& q) {
    float sum = V::q_norm || V::k_norm ? q.squares() : 0.0f;
    if constexpr (V::q_norm || V::k_norm) {
#pragma unroll
      for (int step = Q::LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    }
    return sum;
  }
};

}  // namespace mpk::rotary_attention
