// all_gather: so many columns a tile of every rank's share of the logits, put side by side.
// Operands: part (peer buffer), out [logit rows][n] float32. Variant: n, columns, ranks, tile_columns.
#pragma once
#include "mpk/peer.cuh"
#include "mpk/wait.cuh"

namespace mpk::all_gather {

constexpr bool waits_inside = true;

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int n = int(V::n), columns = int(V::columns), ranks = int(V::ranks), tile = int(V::tile_columns);
  const int begin = i.tile_begin * tile, end = i.tile_end * tile < columns ? i.tile_end * tile : columns, pairs = (end - begin) / 2;
  wait_inputs(b);
  const PeerBuffer<ranks, columns> part(c, i, 0, b);
  float* out = operand<float>(c, i, 1);
  for (int j = b.thread; j < b.step->logit_rows * ranks * pairs; j += THREADS) {
    const int row = j / (ranks * pairs), rank = j / pairs % ranks, column = begin + j % pairs * 2, to = rank * columns + column;
    if (to >= n) continue;
    const float2 v = part.receive(b, rank, row, column);
    out[int64_t(row) * n + to] = v.x;
    if (to + 1 < n) out[int64_t(row) * n + to + 1] = v.y;
  }
  b.arrived();
  b.sync();  // once in every body
}

}  // namespace mpk::all_gather
