// all_reduce: 16 columns a tile of the sum of all ranks' parts of a message, in the order of ranks, added to the residual stream.
//
// Operands: part (peer buffer), x [rows][n], agreed int32 [1] if V::control, what the sum is added to [rows][n] if V::residual. Variant: n, columns, ranks, two_shot_rows, residual, control.
// Up to two_shot_rows rows every rank sums all tiles. Beyond that each sums the tiles it owns and sends the sums to the others, in
// the place of its own part; owned tiles come first, since they wait for nothing that this kind sends: so no ranks wait for each other.
#pragma once
#include "mpk/matmul.hpp"
#include "mpk/peer.hpp"

namespace mpk::all_reduce {

template <class V>
using Part = PeerBuffer<int(V::ranks), int(V::columns)>;

struct Output {
  float* x;
  const float* residual;  // may be x
};

constexpr int columns_of(int n, int tile) { return n - tile * kPanel < kPanel ? n - tile * kPanel : kPanel; }

// Sums one tile of one row over the parts of all ranks.
template <class V>
inline void sum_tile(const Part<V>& part, Worker& worker, int64_t row, int tile, float* sums) {
  for (int j = 0; j < columns_of(int(V::n), tile); ++j) {
    float sum = part.receive(worker, 0, row, tile * kPanel + j);
    for (int rank = 1; rank < int(V::ranks); ++rank) sum += part.receive(worker, rank, row, tile * kPanel + j);
    sums[j] = sum;
  }
}

template <class V>
inline void add_tile(const Output& out, int64_t row, int tile, const float* sums) {
  const int64_t at = row * int(V::n) + tile * kPanel;
  for (int j = 0; j < columns_of(int(V::n), tile); ++j) out.x[at + j] = V::residual ? out.residual[at + j] + sums[j] : sums[j];
}

template <class V>
inline void one_shot(const Context& c, const Instruction& i, Worker& worker, const Part<V>& part, const Output& x) {
  float sums[kPanel];
  for (int64_t row = 0; row < c.step->rows; ++row)
    for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
      sum_tile<V>(part, worker, row, tile, sums);
      if (worker.gave_up) return;
      add_tile<V>(x, row, tile, sums);
    }
}

template <class V>
inline void two_shots(const Context& c, const Instruction& i, Worker& worker, const Part<V>& part, const Output& x) {
  constexpr int ranks = int(V::ranks), tiles = divide_up(int(V::n), kPanel);
  float sums[kPanel];
  for (const bool owned : {true, false})
    for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
      const int owner = owner_of_tile(tile, tiles, ranks), count = columns_of(int(V::n), tile);
      if ((owner == c.rank) != owned) continue;
      for (int64_t row = 0; row < c.step->rows; ++row) {
        if (owned) {
          sum_tile<V>(part, worker, row, tile, sums);
          for (int to = 0; to < ranks && !worker.gave_up; ++to)
            if (to != c.rank) part.send_to(to, row, tile * kPanel, sums, count);
        } else {
          for (int j = 0; j < count; ++j) sums[j] = part.receive(worker, owner, row, tile * kPanel + j);
        }
        if (worker.gave_up) return;
        add_tile<V>(x, row, tile, sums);
      }
    }
}

template <class V>
void run(const Context& c, const Instruction& i, Worker& worker) {
  const Part<V> part(c, i, 0);
  const Output x{operand<float>(c, i, 1), V::residual ? operand<const float>(c, i, 3) : nullptr};
  if constexpr (V::control) {
    constexpr int n = int(V::n);
    if (i.tile_end == divide_up(n, kPanel)) *operand<int32_t>(c, i, 2) = part.receive(worker, 0, 0, n) != 0.0f;
  }
  if (worker.gave_up) return;
  c.step->rows > int(V::two_shot_rows) ? two_shots<V>(c, i, worker, part, x) : one_shot<V>(c, i, worker, part, x);
}

}  // namespace mpk::all_reduce
