// Packs a block of rows of a matrix on the device: row-major bf16 in, fragments in the order in which blocks stream them out.
#pragma once
#include "mpk/layout.hpp"
#include "mpk/ptx.cuh"

// Thread: one 16-byte fragment. `rows` holds the 16 or 8 rows of every tile, one after the other; `place` where each stage of the tiles goes.
// A fragment of 16 rows is of two rows and 4 columns of each, of two steps of 32 columns; one of 8 rows is 8 columns of one row.
extern "C" __global__ void mpk_pack(const __grid_constant__ mpk::Pack p) {
  const auto* rows = reinterpret_cast<const uint32_t*>(p.rows);
  const auto* place = reinterpret_cast<const int64_t*>(p.place);
  const bool halves = p.tile_rows == 8;
  const int steps = halves ? 1 : 2, fragments = p.depth * steps, parts = p.depth / 256;  // of a stage; runs of 32 columns of a warp in it
  const int64_t total = int64_t(p.tiles) * p.stages * fragments;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += int64_t(gridDim.x) * blockDim.x) {
    const int fragment = int(i % fragments);
    const int64_t at = i / fragments;  // tile * stages + stage
    const int stage = int(at % p.stages);
    const int lane = fragment % 32, step = fragment / 32 % steps, run = fragment / 32 / steps, part = run % parts, warp = run / parts;
    const int column = (warp * p.stages + stage) * parts * 32 + part * 32 + lane % 4 * 8 + step * 4;
    uint32_t out[4] = {};
    for (int j = 0; j < 4; ++j) {
      const int64_t row = at / p.stages * p.tile_rows + lane / 4 + (halves ? 0 : j % 2 * 8);
      if (column < p.columns) out[j] = rows[(row * p.columns + column) / 2 + (halves ? j : j / 2)];
    }
    *reinterpret_cast<uint4*>(p.out + place[at] + int64_t(fragment) * 16) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
