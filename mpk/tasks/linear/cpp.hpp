// linear: 16 output columns a tile of input times packed weights, with an optional RMS norm before and an epilogue after.
//
// Operands: input [rows][k], output [rows][n]. Parameters: norm [k] if V::norm, then bias if V::bias (every matrix's padded
// to whole panels; swiglu: gate, then up). Variant: bf16, n, k, eps, norm, bias, epilogue, gather_logit_rows; for kSend also
// columns, ranks, two_shot_rows, and the output is a peer buffer.
#pragma once
#include <type_traits>

#include "mpk/context.hpp"
#include "mpk/matmul.hpp"
#include "mpk/peer.hpp"
#include "mpk/rows.hpp"

namespace mpk::linear {

constexpr int kStore = 0;     // output = product
constexpr int kResidual = 1;  // output += product
constexpr int kSend = 3;      // this rank's part of a message = product
constexpr int kSwiglu = 2;    // output = silu(gate product) * up product; panels alternate gate, up

// One row of one tile: `sums` holds the tile's panel (two for swiglu), `count` columns are written.
template <class V>
MPK_INLINE void finish_tile(const float* sums, const float* bias, float* out, int count) {
  constexpr int N = kLanes, up_bias = int(round_up(V::n, kPanel));
  float tail[kPanel];
  float* to = count == kPanel ? out : tail;
  for (int j = 0; j < kPanel; j += N) {
    Vec<N> value = load<N>(sums + j);
    if constexpr (V::bias) value = value + load<N>(bias + j);
    if constexpr (V::epilogue == kSwiglu) {
      Vec<N> up = load<N>(sums + kPanel + j);
      if constexpr (V::bias) up = up + load<N>(bias + up_bias + j);
      const Vec<N> one = splat<N>(1.0f);
      value = value / (one + mpk::exp(splat<N>(0.0f) - value)) * up;
    }
    if constexpr (V::epilogue == kResidual) {
      if (count == kPanel) value = load<N>(out + j) + value;
    }
    store(to + j, value);
  }
  if (count == kPanel) return;
  for (int j = 0; j < count; ++j) out[j] = V::epilogue == kResidual ? out[j] + tail[j] : tail[j];
}

// The same of a product that is sent: to all ranks, or to the one that sums the tile.
template <class V>
MPK_INLINE void send_tile(const Context& c, const Instruction& i, int rows, int64_t row, int tile, const float* sums, const float* bias) {
  constexpr int ranks = int(V::ranks), n = int(V::n);
  const PeerBuffer<ranks, int(V::columns)> part(c, i, 1);
  float values[kPanel];
  finish_tile<V>(sums, bias, values, kPanel);
  const int column = tile * kPanel, count = n - column < kPanel ? n - column : kPanel;
  if (rows > int(V::two_shot_rows)) {
    part.send_to(owner_of_tile(tile, divide_up(n, kPanel), ranks), row, column, values, count);
  } else {
    part.send_to_all(row, column, values, count);
  }
}

template <class V>
void run(const Context& c, const Instruction& i, Worker& worker) {
  using W = std::conditional_t<V::bf16, bf16, float>;
  constexpr int n = int(V::n), k = int(V::k), panels_a_tile = V::epilogue == kSwiglu ? 2 : 1, group = kPanelGroup / panels_a_tile;
  constexpr int64_t panel = int64_t(kPanel) * k;
  const int rows = V::gather_logit_rows ? c.step->logit_rows : c.step->rows;
  const float* params = reinterpret_cast<const float*>(c.params + i.params);
  const float* bias = params + (V::norm ? k : 0);
  float* sums = reinterpret_cast<float*>(worker.scratch);
  const float* x = operand<float>(c, i, 0);
  if constexpr (V::norm || V::gather_logit_rows) {
    float* prepared = sums + int64_t(c.max_rows) * kPanelGroup * kPanel;
    prepare_rows<V::norm>(x, V::gather_logit_rows ? c.logit_row : nullptr, rows, params, k, float(V::eps), prepared);
    x = prepared;
  }
  float* out = operand<float>(c, i, 1);
  const W* weights = reinterpret_cast<const W*>(c.weights + i.weights);
  for (int tile = i.tile_begin; tile < i.tile_end; tile += group) {
    const int tiles = i.tile_end - tile < group ? i.tile_end - tile : group, width = tiles * panels_a_tile * kPanel;
    product<W>(weights + tile * panels_a_tile * panel, panel, tiles * panels_a_tile, k, x, k, rows, sums, width);
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < tiles; ++t) {
        const int column = (tile + t) * kPanel;
        const float* tile_sums = sums + int64_t(r) * width + t * panels_a_tile * kPanel;
        if constexpr (V::epilogue == kSend) {
          send_tile<V>(c, i, rows, r, tile + t, tile_sums, bias + column);
          continue;
        }
        finish_tile<V>(tile_sums, bias + column, out + int64_t(r) * n + column,
                       n - column < kPanel ? n - column : kPanel);
      }
  }
}

}  // namespace mpk::linear
