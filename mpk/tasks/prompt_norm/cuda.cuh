// prompt_norm: RMS norm of the rows of a prompt step, into the form that products read.
// Operands: x [rows][hidden] bf16, normed in chunks (mpk/tiles.cuh). Parameters: norm [hidden]. Variant: hidden, eps, shares, all_logits
// (only rows of sequences that want all logits matter). A task takes every `shares`-th run of 8 rows, a row a warp.
#pragma once
#include "mpk/reduce.cuh"
#include "mpk/tiles.cuh"
#include "mpk/wait.cuh"

namespace mpk::prompt_norm {

constexpr bool waits_inside = true;

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& i, Block& b) {
  constexpr int hidden = int(V::hidden), shares = int(V::shares), rounds = (hidden + 255) / 256;  // of 256 columns a warp
  constexpr bool HELD = rounds <= 8;  // a row stands in registers meanwhile; with the norm's weights beside it there is no room for a wider one
  wait_inputs(b);
  for (int row = i.tile_begin * WARPS + b.warp; row < b.step->rows; row += shares * WARPS) {
    if constexpr (V::all_logits)
      if (!load_int(&c.sequences[load_int(c.row_slot + row)].all_logits)) continue;
    // A lane makes 16-byte units: columns 8 q + 2 unit, + 1 of 32, q = 0 to 3. Its number is asked anew, so that weights are not kept.
    // One address and constants apart from it, and no question about a column that a whole round answers: else the offsets fill all registers.
    const int lane = own_lane(), own = lane / 4 * 32 + lane % 4 * 2;
    const auto there = [&](int r, int q) { return (r + 1) * 256 <= hidden || r * 256 + own + q * 8 < hidden; };
    const bf16* from = operand<bf16>(c, i, 0) + int64_t(row) * hidden + own;
    const auto load = [&](int r, uint32_t (&x)[4]) {
#pragma unroll
      for (int q = 0; q < 4; ++q) x[q] = there(r, q) ? load_4(from + (r * 256 + q * 8)) : 0u;
    };
    uint32_t x[rounds][4];
    float sum = 0.0f;
    if constexpr (HELD) {
#pragma unroll
      for (int r = 0; r < rounds; ++r) load(r, x[r]);
    }
#pragma unroll(HELD ? rounds : 4)
    for (int r = 0; r < rounds; ++r) {
      uint32_t again[4];
      if constexpr (!HELD) load(r, again);
      const uint32_t(&v)[4] = HELD ? x[r] : again;
#pragma unroll
      for (int q = 0; q < 4; ++q) sum += low(v[q]) * low(v[q]) + high(v[q]) * high(v[q]);
    }
    const float* norm = reinterpret_cast<const float*>(c.params + i.params) + own;  // here, so that it is not kept
    const float scale = rsqrtf(warp_sum(sum) * (1.0f / hidden) + float(V::eps));
#pragma unroll(HELD ? rounds : 4)
    for (int r = 0; r < rounds; ++r) {
      uint32_t again[4], y[4];
      if constexpr (!HELD) load(r, again);
      const uint32_t(&v)[4] = HELD ? x[r] : again;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float2 g{};
        if (there(r, q)) g = __ldg(reinterpret_cast<const float2*>(norm + (r * 256 + q * 8)));
        y[q] = pack_bf16(low(v[q]) * scale * g.x, high(v[q]) * scale * g.y);
      }
      const int column = r * 256 + own;
      if ((r + 1) * 256 <= hidden || column < (hidden + 63) / 64 * 64)
        *reinterpret_cast<uint4*>(operand<unsigned char>(c, i, 1) + tiles::chunk_offset(row, column, c.prompt_room)) = {y[0], y[1], y[2], y[3]};
    }
  }
}

}  // namespace mpk::prompt_norm
