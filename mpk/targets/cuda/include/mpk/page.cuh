// Where the keys and values of one head stand in a page of the cache, as rotary_attention/attend.cuh (`Page`) reads them: blocks of 16 or 32
// positions; in a block 16-byte pieces in the order in which the lanes of a warp load them.
#pragma once
#include "mpk/attention.cuh"

namespace mpk {

template <int HEAD_DIM>
struct PagePlace {
  static constexpr int BLOCK = kv_block(HEAD_DIM), OWN = BLOCK / 4, LANE_DIMS = HEAD_DIM / 8;  // OWN: positions of a lane
  static constexpr int VALUES = KV_PAGE_TOKENS * HEAD_DIM, BLOCK_ELEMENTS = BLOCK * HEAD_DIM;
  static constexpr int PIECES = VALUES / 8, BLOCK_PIECES = BLOCK_ELEMENTS / 8, PAIRED_PIECES = LANE_DIMS / 2 * 32;

  // Element of column d of a key; columns of one multiple of 8 follow each other.
  static __device__ __forceinline__ int key(int token, int d) {
    const int at = token % BLOCK, row = at / OWN * 2 + at % 2, part = at % OWN / 2, piece = d / 32;  // part: fragment * 2 + half
    const int pairs = piece * 32 + 32 <= HEAD_DIM ? 4 : HEAD_DIM % 32 / 8;
    return token / BLOCK * BLOCK_ELEMENTS + part * 8 * HEAD_DIM + piece * 256 + (row * pairs + d % 32 / 8) * 8 + d % 8;
  }
  // Element of column d of a value; tokens of one multiple of 4 follow each other.
  static __device__ __forceinline__ int value(int token, int d) {
    const int at = token % BLOCK, j = d % LANE_DIMS, lane = d / LANE_DIMS * 4 + at / OWN, own = at % OWN, base = VALUES + token / BLOCK * BLOCK_ELEMENTS;
    if (OWN == 8) return base + (j * 32 + lane) * 8 + own;
    if (j / 2 * 2 + 1 < LANE_DIMS) return base + (j / 2 * 32 + lane) * 8 + j % 2 * 4 + own;
    return base + j / 2 * 256 + lane * 4 + own;
  }

  // The two halves of a 16-byte piece of values, 4 tokens of a column each.
  struct Half {
    int d, token;
  };
  static __device__ __forceinline__ Half half(int piece, int n) {
    const int block = piece / BLOCK_PIECES, in_block = piece % BLOCK_PIECES, j = in_block / 32, lane = in_block % 32, first = block * BLOCK;
    if (OWN == 8) return {lane / 4 * LANE_DIMS + j, first + lane % 4 * 8 + n * 4};
    if (LANE_DIMS % 2 == 0 || in_block < PAIRED_PIECES) return {lane / 4 * LANE_DIMS + 2 * j + n, first + lane % 4 * 4};
    const int two = (in_block - PAIRED_PIECES) * 2 + n;
    return {two / 4 * LANE_DIMS + LANE_DIMS - 1, first + two % 4 * 4};
  }
};

}  // namespace mpk
