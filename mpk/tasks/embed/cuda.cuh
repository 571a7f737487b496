// embed: 16 columns a tile of the embeddings of the step's tokens. The matrix is row-major bf16 [vocab][hidden].
// Operands: x [rows][hidden] bf16, flagged. Variant: hidden, send; if V::send also vocab (of a rank's share), columns, ranks, two_shot_rows, and x
// is a peer buffer: zeros for the tokens of other ranks, and behind the last column of row 0 whether the host has cancelled.
#pragma once
#include "mpk/flagged.cuh"
#include "mpk/peer.cuh"
#include "mpk/wait.cuh"

namespace mpk::embed {

constexpr bool waits_inside = true;

template <class V>
__device__ __forceinline__ void send(const Context& c, const Instruction& i, Block& b) {
  constexpr int hidden = int(V::hidden), tile = 16, ranks = int(V::ranks), tiles = (hidden + tile - 1) / tile;
  const bf16* matrix = reinterpret_cast<const bf16*>(c.weights + i.weights);
  const int begin = i.tile_begin * tile, end = i.tile_end * tile < hidden ? i.tile_end * tile : hidden;
  const int pieces = (end - begin) / 8, rows = b.step->rows;
  wait_inputs(b);
  const PeerBuffer<ranks, int(V::columns)> part(c, i, 0, b);
  for (int j = b.thread; j < rows * pieces; j += THREADS) {
    const int row = j / pieces, column = begin + j % pieces * 8, token = b.step->row_token[row] - c.rank * int(V::vocab);
    uint4 v{};
    if (token >= 0 && token < int(V::vocab)) v = __ldg(reinterpret_cast<const uint4*>(matrix + int64_t(token) * hidden + column));
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
    const int owner = owner_of_tile(column / tile, tiles, ranks);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (rows > int(V::two_shot_rows)) {
        part.send_to(owner, row, column + 2 * p, low(pair[p]), high(pair[p]));
      } else {
        part.send_to_all(row, column + 2 * p, low(pair[p]), high(pair[p]));
      }
    }
  }
  // Rank 0 decides for all whether to stop after this step.
  if (c.rank == 0 && b.thread == 0 && end == hidden) part.send_one_to_all(0, hidden, load_system(c.cancel) != 0 ? 1.0f : 0.0f);
  b.sync();  // once in every body
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  if constexpr (V::send) return send<V>(c, i, b);
  constexpr int hidden = int(V::hidden), tile = 16;
  static_assert(hidden % 8 == 0, "rows of 16-byte pieces");
  const bf16* matrix = reinterpret_cast<const bf16*>(c.weights + i.weights);
  const int begin = i.tile_begin * tile, end = i.tile_end * tile < hidden ? i.tile_end * tile : hidden;
  const int pieces = (end - begin) / 8, rows = b.step->rows;
  wait_inputs(b);  // if x is not flagged, it is in use by the step before until then
  bf16* x = flagged<bf16>(c, i, 0, b);
  for (int j = b.thread; j < rows * pieces; j += THREADS) {
    const int row = j / pieces, column = begin + j % pieces * 8;
    put_16(x + int64_t(row) * hidden + column, __ldg(reinterpret_cast<const uint4*>(matrix + int64_t(b.step->row_token[row]) * hidden + column)));
  }
  bf16* old = other_copy(c, x, b);
  for (int j = b.thread; j < rows_to_clear(b) * pieces; j += THREADS) clear_16(old + int64_t(j / pieces) * hidden + begin + j % pieces * 8);
}

}  // namespace mpk::embed
