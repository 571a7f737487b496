// embed: 16 columns a tile of the embeddings of the step's tokens, gathered from the packed matrix.
// Operands: x [rows][hidden]. Variant: bf16, hidden, send; if V::send also vocab (of a rank's share), columns, ranks, two_shot_rows, and x
// is a peer buffer: zeros for the tokens of other ranks, and behind the last column of row 0 whether the host has cancelled.
#pragma once
#include "mpk/context.hpp"
#include "mpk/kv_cache.hpp"
#include "mpk/matmul.hpp"
#include "mpk/peer.hpp"

namespace mpk::embed {

inline float widen(bf16 value) { return bf16_to_float(value); }
inline float widen(float value) { return value; }

template <class V>
void send(const Context& c, const Instruction& i) {
  using W = std::conditional_t<V::bf16, bf16, float>;
  constexpr int hidden = int(V::hidden), ranks = int(V::ranks), tiles = divide_up(hidden, kPanel);
  const PeerBuffer<ranks, int(V::columns)> part(c, i, 0);
  const W* matrix = reinterpret_cast<const W*>(c.weights + i.weights);
  const bool to_owner = c.step->rows > int(V::two_shot_rows);
  for (int r = 0; r < c.step->rows; ++r) {
    const int token = c.row_token[r] - c.rank * int(V::vocab);
    const bool own = token >= 0 && token < int(V::vocab);
    const W* panel = matrix + int64_t(own ? token / kPanel : 0) * kPanel * hidden;
    for (int tile = i.tile_begin; tile < i.tile_end; ++tile) {
      const int column = tile * kPanel, count = hidden - column < kPanel ? hidden - column : kPanel;
      float values[kPanel] = {};
      if (own)
        for (int j = 0; j < count; ++j) values[j] = widen(panel[panel_index<W>(column + j, token % kPanel, kPanel)]);
      if (to_owner) {
        part.send_to(owner_of_tile(tile, tiles, ranks), r, column, values, count);
      } else {
        part.send_to_all(r, column, values, count);
      }
    }
  }
  if (c.rank == 0 && i.tile_end == tiles) {  // rank 0 decides for all, so that all end in the same step
    const float cancelled = __atomic_load_n(c.cancel, __ATOMIC_RELAXED) != 0 ? 1.0f : 0.0f;
    part.send_to_all(0, hidden, &cancelled, 1);
  }
}

template <class V>
void run(const Context& c, const Instruction& i, Worker&) {
  if constexpr (V::send) return send<V>(c, i);
  using W = std::conditional_t<V::bf16, bf16, float>;
  constexpr int hidden = int(V::hidden);
  const W* matrix = reinterpret_cast<const W*>(c.weights + i.weights);
  float* x = operand<float>(c, i, 0);
  const int begin = i.tile_begin * kPanel, end = i.tile_end * kPanel < hidden ? i.tile_end * kPanel : hidden;
  for (int r = 0; r < c.step->rows; ++r) {
    const int token = c.row_token[r];
    const W* panel = matrix + int64_t(token / kPanel) * kPanel * hidden;
    float* row = x + int64_t(r) * hidden;
    for (int k = begin; k < end; ++k) row[k] = widen(panel[panel_index<W>(k, token % kPanel, kPanel)]);
  }
}

}  // namespace mpk::embed
