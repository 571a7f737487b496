// all_gather: 16 columns a tile of every rank's share of the logits, put side by side.
// Operands: part (peer buffer), out [logit rows][n]. Variant: n, columns, ranks.
#pragma once
#include "mpk/matmul.hpp"
#include "mpk/peer.hpp"

namespace mpk::all_gather {

template <class V>
void run(const Context& c, const Instruction& i, Worker& worker) {
  constexpr int n = int(V::n), columns = int(V::columns);
  const PeerBuffer<int(V::ranks), columns> part(c, i, 0);
  float* out = operand<float>(c, i, 1);
  const int begin = i.tile_begin * kPanel, end = i.tile_end * kPanel < columns ? i.tile_end * kPanel : columns;
  for (int64_t row = 0; row < c.step->logit_rows; ++row)
    for (int rank = 0; rank < int(V::ranks); ++rank)
      for (int j = begin; j < end && rank * columns + j < n; ++j) {
        out[row * n + rank * columns + j] = part.receive(worker, rank, row, j);
        if (worker.gave_up) return;
      }
}

}  // namespace mpk::all_gather
