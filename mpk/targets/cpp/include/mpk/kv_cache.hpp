// Where keys and values stand in a page of the cache (see kv_page() in context.hpp).
//
// Both halves of a page are packed panels, so that attention is two products of matmul.hpp. Keys: 16 tokens are the lanes of
// a panel, k is the head dimension. Values: 16 columns of the head are the lanes (8 in the last panel where head_dim is no
// multiple of 16), k is the token. bf16 keeps two k side by side, so the pair of an even token holds 0 until the odd token
// comes: a product over whole pairs reads nothing undefined.
#pragma once
#include <cstdint>

#include "mpk/context.hpp"
#include "mpk/matmul.hpp"
#include "mpk/simd.hpp"

namespace mpk {

inline void convert(float value, float* to) { *to = value; }
inline void convert(float value, bf16* to) { *to = float_to_bf16(value); }

// Element (k, lane) of a panel with `lanes` lanes.
template <class T>
constexpr int panel_index(int k, int lane, int lanes) {
  return sizeof(T) == 2 ? (k / 2 * lanes + lane) * 2 + (k & 1) : k * lanes + lane;
}

// Write the key (head_dim values) of token `t` of the page.
template <class T>
inline void store_key(T* keys, int t, int head_dim, const float* values) {
  T* panel = keys + t / kPanel * kPanel * head_dim;
  for (int d = 0; d < head_dim; ++d) convert(values[d], panel + panel_index<T>(d, t % kPanel, kPanel));
}

// Write the value of token `t` of the page; `values` is the page's second half.
template <class T>
inline void store_value(T* values, int t, int head_dim, const float* from) {
  for (int begin = 0; begin < head_dim; begin += kPanel) {
    const int lanes = head_dim - begin < kPanel ? head_dim - begin : kPanel;
    T* panel = values + begin * KV_PAGE_TOKENS;
    for (int lane = 0; lane < lanes; ++lane) {
      convert(from[begin + lane], panel + panel_index<T>(t, lane, lanes));
      if (t % 2 == 0) convert(0.0f, panel + panel_index<T>(t + 1, lane, lanes));
    }
  }
}

}  // namespace mpk
