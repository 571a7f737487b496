// Heads of rows on their way from the product qkv to shared memory and the cache: head norm, rotation, rounding to bf16.
#pragma once
#include "rotary_attention/attend.cuh"

namespace mpk::rotary_attention {

// The task's shared memory. Each warp that works has a place of its own, for its queries and then for its sums.
template <class V>
struct Memory {
  using S = Shape<V>;
  static constexpr int keys_bytes = MAX_ROWS * S::row_stride * 2, values_bytes = S::head_dim * S::value_stride * 2, norms_bytes = 2 * S::head_dim * 4;
  static constexpr int statistics_bytes = WARPS * 2 * TILE_QUERIES * 4, table_bytes = MAX_ROWS * 4, rope_bytes = MAX_ROWS * S::head_dim * 4;
  static constexpr int fixed = keys_bytes + values_bytes + norms_bytes + statistics_bytes + table_bytes + rope_bytes;
  static constexpr int sums_bytes = TILE_QUERIES * S::sum_stride * 4, queries_bytes = TILE_QUERIES * S::row_stride * 2;
  static constexpr int place_bytes = sums_bytes > queries_bytes ? sums_bytes : queries_bytes;
  static constexpr bool fits(int units) { return fixed + units * place_bytes <= SCRATCH_BYTES; }
  static constexpr int units = fits(8) ? 8 : fits(4) ? 4 : 2;  // warps that work at a time
  static_assert(fits(units) && WARPS == 8, "scratch");

  unsigned char* at;
  template <class T>
  __device__ __forceinline__ T* part(int offset) const { return reinterpret_cast<T*>(at + offset); }
  __device__ __forceinline__ bf16* new_keys() const { return part<bf16>(0); }               // [MAX_ROWS][row_stride]
  __device__ __forceinline__ bf16* new_values() const { return part<bf16>(keys_bytes); }    // [head_dim][value_stride]
  __device__ __forceinline__ float* norms() const { return part<float>(keys_bytes + values_bytes); }  // q_norm, k_norm [head_dim]
  __device__ __forceinline__ float* statistics() const { return part<float>(keys_bytes + values_bytes + norms_bytes); }  // maxima, totals [8][WARPS]
  __device__ __forceinline__ int* first_tile() const { return part<int>(fixed - rope_bytes - table_bytes); }  // [segment]
  __device__ __forceinline__ float* rope() const { return part<float>(fixed - rope_bytes); }                  // [row][head_dim]
  __device__ __forceinline__ float* sums(int warp) const { return part<float>(fixed + warp * place_bytes); }     // [8][sum_stride]
  __device__ __forceinline__ bf16* queries(int warp) const { return part<bf16>(fixed + warp * place_bytes); }    // [8][row_stride]
};

enum Role { QUERY, KEY, VALUE, PADDING, NOTHING };

// One head of one row. LANES lanes share it: a lane has 4 elements of the first half and the 4 that they are rotated against.
template <class V>
struct Head {
  using S = Shape<V>;
  static constexpr int half = S::head_dim / 2, quads = half / 4;
  static constexpr int LANES = quads <= 1 ? 1 : quads <= 2 ? 2 : quads <= 4 ? 4 : quads <= 8 ? 8 : quads <= 16 ? 16 : 32, A_WARP = 32 / LANES;
  Role role;
  int row, target;  // row of the step; place in shared memory
  uint2 first, second;

  __device__ __forceinline__ void load(const bf16* from, int quad) {
    first = second = {0, 0};
    if (role < PADDING && quad < quads) first = load_8(from + 4 * quad), second = load_8(from + half + 4 * quad);
  }
  // Waits for what load() asked for.
  __device__ __forceinline__ void settle(Block& b, const bf16* from, int quad) {
    if (role >= PADDING || quad >= quads) return;
    first = settled_8(b, from + 4 * quad, first), second = settled_8(b, from + half + 4 * quad, second);
  }

  // Norm and rotation; then first and second hold the rounded result. All lanes of the warp.
  __device__ __forceinline__ void turn(const Memory<V>& memory, int quad) {
    float a[4] = {low(first.x), high(first.x), low(first.y), high(first.y)}, b[4] = {low(second.x), high(second.x), low(second.y), high(second.y)};
    if constexpr (V::q_norm || V::k_norm) {
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) squares += a[j] * a[j] + b[j] * b[j];
#pragma unroll
      for (int step = LANES / 2; step > 0; step /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, step);
      if (quad < quads && ((V::q_norm && role == QUERY) || (V::k_norm && role == KEY))) {
        const float scale = rsqrtf(squares / float(S::head_dim) + float(V::eps));
        const float* norm = memory.norms() + (role == KEY ? S::head_dim : 0) + 4 * quad;
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] *= scale * norm[j], b[j] *= scale * norm[half + j];
      }
    }
    if (role > KEY || quad >= quads) return;
    const float* rope = memory.rope() + row * S::head_dim + 4 * quad;
    float x[4], y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = a[j] * rope[j] - b[j] * rope[half + j], y[j] = b[j] * rope[j] + a[j] * rope[half + j];
    first = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}, second = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
  }

  __device__ __forceinline__ static void spread(bf16* to, int stride, uint2 v) {
    to[0] = bf16{uint16_t(v.x)}, to[stride] = bf16{uint16_t(v.x >> 16)}, to[2 * stride] = bf16{uint16_t(v.y)}, to[3 * stride] = bf16{uint16_t(v.y >> 16)};
  }

  // `page`: of the cache, and `token` the place in it, where a key or a value is appended.
  __device__ __forceinline__ void store(const Memory<V>& memory, int warp, bf16* page, int token, int quad) const {
    if (role == NOTHING || quad >= quads) return;
    const int d = 4 * quad;
    const auto write = [&](bf16* to) { *reinterpret_cast<uint2*>(to + d) = first, *reinterpret_cast<uint2*>(to + half + d) = second; };
    if (role == VALUE) {
      bf16 *cache = page + KV_PAGE_TOKENS * S::head_dim + token, *own = memory.new_values() + target;
      spread(cache + d * KV_PAGE_TOKENS, KV_PAGE_TOKENS, first), spread(cache + (half + d) * KV_PAGE_TOKENS, KV_PAGE_TOKENS, second);
      spread(own + d * S::value_stride, S::value_stride, first), spread(own + (half + d) * S::value_stride, S::value_stride, second);
      return;
    }
    if (role == KEY) write(page + token * S::head_dim);
    write((role == KEY ? memory.new_keys() : memory.queries(warp)) + target * S::row_stride);
  }
};

}  // namespace mpk::rotary_attention
