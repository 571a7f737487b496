// Large products of a prompt step: how they are cut into tiles, and where their operands stand.
//
// A tile is 128 rows of packed weights (8 tiles of 16, a warp each) times 128 or 256 tokens. It is computed in chunks of 64 columns of
// k; a stage holds one chunk: 16 KB of weights as fragments (2 KB a warp, as linear/tiles.cuh has them: of a tile of 16 rows, or of two of 8
// rows one behind the other) and up to 32 KB of activations.
// The tiles of a product go round robin over its tasks, all tokens of 128 weight rows next to each other, so that SMs share what they
// read through the L2. Which tiles there are depends on the rows of the step, so a block tells its tile loader about each product (a Job).
//
// Activations that products read stand in global memory in chunks, as the tensor cores take them from shared memory: [chunk][row][64]
// bf16, 16-byte unit u of a row at place u ^ (row % 8). Within each 32 columns, column 8 q + 4 s + 2 j + e stands at 16 s + 8 j + 2 q + e,
// which is the order of k in the packed weights. Columns up to a multiple of 64 are zero.
#pragma once
#include "mpk/layout.hpp"

namespace mpk::tiles {

constexpr int CHUNK = 64, CHUNK_BYTES = CHUNK * 2;  // columns of k; of one row
constexpr int WEIGHT_ROWS = 128, WIDEST = 256, PACKED_ROWS = 16, PACKED_TILES = WEIGHT_ROWS / PACKED_ROWS;
constexpr int WEIGHT_BYTES = WEIGHT_ROWS * CHUNK_BYTES, WARP_BYTES = WEIGHT_BYTES / PACKED_TILES;
constexpr int RUN_COLUMNS = 32, RUN_BYTES = RUN_COLUMNS * 2;  // what a tile's rows have side by side; of one row
constexpr int STAGE = WEIGHT_BYTES + WIDEST * CHUNK_BYTES, STAGE_COUNT = 4;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// How the columns of a matrix are cut into stages of the decode path (mpk/tasks/stages.py), in tiles of so many rows: stages of a tile, and
// runs of 32 columns a warp.
struct Cut {
  int stages, parts;
};
constexpr Cut cut_of(int k, int tile_rows) {
  const int parts = PACKED_ROWS / tile_rows, columns = parts * 256;
  return round_up(k, 2 * columns) <= round_up(k, columns) ? Cut{round_up(k, 2 * columns) / (2 * columns), 2 * parts} : Cut{round_up(k, columns) / columns, parts};
}

// Chunks of a product: an even number, so that fragments of two chunks can take turns in registers.
constexpr int chunks_of(int k) { return round_up(k, 2 * CHUNK) / CHUNK; }

// Byte of columns (column, column + 1) of a row of activations in chunks; `column` is even, `rows` what the buffer has room for.
__device__ __forceinline__ int64_t chunk_offset(int row, int column, int rows) {
  const int within = column % 32, unit = column % CHUNK / 32 * 4 + within % 8 / 2, word = within / 8;
  return (int64_t(column / CHUNK) * rows + row) * CHUNK_BYTES + ((unit ^ (row & 7)) * 16 + word * 4);
}

// Tokens a tile such that the last round over the SMs wastes least.
__device__ __forceinline__ int choose_width(int rows, int weight_tiles, int tasks) {
  constexpr int COST = 9, COST_WIDEST = 10;  // relative times of a tile, measured on an H200: narrow ones wait for their weights
  const int narrow = weight_tiles * ((rows + WIDEST / 2 - 1) / (WIDEST / 2)), wide = weight_tiles * ((rows + WIDEST - 1) / WIDEST);
  return (wide + tasks - 1) / tasks * COST_WIDEST <= (narrow + tasks - 1) / tasks * COST ? WIDEST : WIDEST / 2;
}

// One product of one block. Every block of the product has the same, but for `first`.
struct Job {
  const unsigned char* weights;      // the packed matrix
  const int64_t* place;              // [packed tiles][stages] byte offsets of stages from `weights`
  const unsigned char* activations;  // [chunks][room][64]
  int packed_tiles, tile_rows;       // 16 or 8 rows each
  int chunk_bytes, copy_bytes, warp_bytes;  // of a packed tile: of a chunk; of one copy, all or half of that; of a warp's columns in a stage
  int stages, parts, chunks, filled; // chunks: an even number, of which `filled` are not zero in all weights
  int rows, room;                    // of the step; of the buffer
  int width, columns;                // tokens a tile; tiles side by side
  int first, step, count;            // this block's tiles: first, first + step, ... below count
  int begin;                         // stages used before, modulo 2 * STAGE_COUNT

  // How the matrix of `count` packed tiles of `rows` rows and `k` columns is cut.
  __device__ __forceinline__ void cut(int count, int rows, int k) {
    const Cut cut = cut_of(k, rows);
    packed_tiles = count, tile_rows = rows, stages = cut.stages, parts = cut.parts, chunks = chunks_of(k), filled = (k + CHUNK - 1) / CHUNK;
    warp_bytes = RUN_BYTES * rows * parts, chunk_bytes = CHUNK_BYTES * rows, copy_bytes = warp_bytes < chunk_bytes ? warp_bytes : chunk_bytes;
  }
  __device__ __forceinline__ int packed_a_tile() const { return WEIGHT_ROWS / tile_rows; }
  __device__ __forceinline__ int tiles() const { return first < count ? (count - first + step - 1) / step : 0; }
  __device__ __forceinline__ int weight_tile(int tile) const { return tile / columns; }
  __device__ __forceinline__ int row(int tile) const { return tile % columns * width; }
};

}  // namespace mpk::tiles
