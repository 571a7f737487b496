// One head of one row on its way from the product qkv to shared memory and the cache: head norm, rotation, rounding to bf16.
#pragma once
#include "rotary_attention/attend.cuh"

namespace mpk::rotary_attention {

struct SegmentTable {
  int slot[32], row[32], rows[32], position[32], first[32];  // of 32 segments; `first`: the number of its first query tile
};

// The task's shared memory. Queries and sums are never needed at the same time.
template <class V>
struct Memory {
  using S = Shape<V>;
  static constexpr int keys_bytes = MAX_NEW_ROWS * S::row_stride * 2, values_bytes = S::head_dim * S::value_stride * 2;
  static constexpr int sums_floats = TILE_QUERIES * S::sum_stride, table_bytes = int(sizeof(SegmentTable));
  static constexpr int fixed = keys_bytes + values_bytes + table_bytes + WARPS * 2 * TILE_QUERIES * 4;
  static constexpr int units = fixed + WARPS * sums_floats * 4 <= SCRATCH_BYTES ? WARPS : WARPS / 2;  // warps that work at a time
  static_assert(fixed + units * sums_floats * 4 <= SCRATCH_BYTES && S::row_stride * 2 <= S::sum_stride * 4, "scratch");

  unsigned char* at;
  __device__ __forceinline__ bf16* new_keys() const { return reinterpret_cast<bf16*>(at); }                  // [16][row_stride]
  __device__ __forceinline__ bf16* new_values() const { return reinterpret_cast<bf16*>(at + keys_bytes); }   // [head_dim][value_stride]
  __device__ __forceinline__ SegmentTable* segments() const { return reinterpret_cast<SegmentTable*>(at + keys_bytes + values_bytes); }
  __device__ __forceinline__ float* statistics() const { return reinterpret_cast<float*>(at + keys_bytes + values_bytes + table_bytes); }  // [unit][2][8]
  __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(at + fixed); }            // [unit][8][sum_stride]
  __device__ __forceinline__ bf16* queries() const { return reinterpret_cast<bf16*>(at + fixed); }           // [tile][8][row_stride]
};

// Where a row's key and value are appended: page * KV_PAGE_TOKENS + place in the page.
__device__ __forceinline__ int place_of_row(const Context& c, int row) {
  const int position = load_int(c.row_position + row);
  const int32_t* page = c.page_table + int64_t(load_int(c.row_slot + row)) * c.max_pages + position / KV_PAGE_TOKENS;
  return load_int(page) * KV_PAGE_TOKENS + position % KV_PAGE_TOKENS;
}

enum Role { QUERY, KEY, VALUE, NOTHING };

// One head of one row on its way from the product to shared memory and the cache, by one warp; a lane has `units` times two elements
// of the first half of the head and the two that they are rotated against.
template <class V>
struct Head {
  using S = Shape<V>;
  static constexpr int half = S::head_dim / 2, units = (half / 2 + 31) / 32;
  Role role;
  int row, target;  // row of the step; place in shared memory, -1: none
  uint32_t first[units], second[units];
  uint2 cosine[units], sine[units];

  __device__ __forceinline__ static int element(int unit, int lane) { return 2 * (unit * 32 + lane); }

  __device__ __forceinline__ void load(const bf16* from, const float* rope, int lane) {
    if (role == NOTHING) return;
#pragma unroll
    for (int u = 0; u < units; ++u) {
      const int d = element(u, lane);
      if (d >= half) continue;
      first[u] = load_4(from + d), second[u] = load_4(from + half + d);
      if (role != VALUE) cosine[u] = load_8(rope + int64_t(row) * S::head_dim + d), sine[u] = load_8(rope + int64_t(row) * S::head_dim + half + d);
    }
  }

  // Norm and rotation; then first and second hold the rounded result.
  __device__ __forceinline__ void turn(const float* norm, int lane) {
    if (role == NOTHING || role == VALUE) return;
    float scale = 1.0f;
    if (norm != nullptr) {
      float squares = 0.0f;
#pragma unroll
      for (int u = 0; u < units; ++u)
        if (element(u, lane) < half)
          squares += low(first[u]) * low(first[u]) + high(first[u]) * high(first[u]) + low(second[u]) * low(second[u]) + high(second[u]) * high(second[u]);
      scale = rsqrtf(warp_sum(squares) / float(S::head_dim) + float(V::eps));
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
      const int d = element(u, lane);
      if (d >= half) continue;
      float2 w = {1.0f, 1.0f}, z = {1.0f, 1.0f};
      if (norm != nullptr) w = __ldg(reinterpret_cast<const float2*>(norm + d)), z = __ldg(reinterpret_cast<const float2*>(norm + half + d));
      const float a0 = low(first[u]) * scale * w.x, a1 = high(first[u]) * scale * w.y;
      const float b0 = low(second[u]) * scale * z.x, b1 = high(second[u]) * scale * z.y;
      const float c0 = __uint_as_float(cosine[u].x), c1 = __uint_as_float(cosine[u].y), s0 = __uint_as_float(sine[u].x), s1 = __uint_as_float(sine[u].y);
      first[u] = pack_bf16(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1);
      second[u] = pack_bf16(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1);
    }
  }

  __device__ __forceinline__ static void put(bf16* to, int stride, uint32_t pair) {
    to[0] = bf16{uint16_t(pair)}, to[stride] = bf16{uint16_t(pair >> 16)};
  }

  __device__ __forceinline__ void store(const Memory<V>& memory, bf16* page, int token, int lane) const {
#pragma unroll
    for (int u = 0; u < units; ++u) {
      const int d = element(u, lane);
      if (d >= half) continue;
      if (role == VALUE) {
        bf16* values = page + KV_PAGE_TOKENS * S::head_dim + token;
        put(values + d * KV_PAGE_TOKENS, KV_PAGE_TOKENS, first[u]), put(values + (half + d) * KV_PAGE_TOKENS, KV_PAGE_TOKENS, second[u]);
        if (target < 0) continue;
        bf16* own = memory.new_values() + target;
        put(own + d * S::value_stride, S::value_stride, first[u]), put(own + (half + d) * S::value_stride, S::value_stride, second[u]);
        continue;
      }
      const uint32_t a = role == NOTHING ? 0 : first[u], b = role == NOTHING ? 0 : second[u];
      const auto write = [&](bf16* to) { *reinterpret_cast<uint32_t*>(to + d) = a, *reinterpret_cast<uint32_t*>(to + half + d) = b; };
      if (role == KEY) write(page + token * S::head_dim);
      if (target >= 0) write((role == KEY ? memory.new_keys() : memory.queries()) + target * S::row_stride);
    }
  }
};

}  // namespace mpk::rotary_attention
