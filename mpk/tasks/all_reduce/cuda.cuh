// all_reduce: so many columns a tile of the sum of all ranks' parts of a message, in the order of ranks, added to the residual stream.
//
// Operands: part (peer buffer), x [rows][n] bf16, flagged, agreed int32 [1], flagged, if V::control, what the sum is added to [rows][n] bf16, flagged,
// if V::residual. Variant: n, columns, ranks, two_shot_rows, tile_columns, residual, control.
// Up to two_shot_rows rows every rank sums all tiles. Beyond that each sums the tiles it owns and sends the sums to the others, in
// the place of its own part; owned tiles come first, since they wait for nothing that this kind sends: so no ranks wait for each other.
#pragma once
#include "mpk/flagged.cuh"
#include "mpk/peer.cuh"
#include "mpk/wait.cuh"

namespace mpk::all_reduce {

constexpr bool waits_inside = true;
constexpr int kOwned = 16;  // columns that have one owner, whatever the columns of a tile

template <class V>
struct Tiles {
  using Part = PeerBuffer<int(V::ranks), int(V::columns)>;
  static constexpr int n = int(V::n), ranks = int(V::ranks), tiles = (n + kOwned - 1) / kOwned;
  static_assert(n % 2 == 0, "columns come in pairs");
  Block& b;
  Part part;
  bf16* x;
  const bf16* before;

  __device__ __forceinline__ uint32_t ask(int64_t place) const {
    if constexpr (V::residual) return load_4(before + place);
    return 0;
  }
  __device__ __forceinline__ void finish(int64_t place, float2 sum, uint32_t old) const {
    if constexpr (V::residual) {
      old = settled_4(b, before + place, old);
      sum.x += low(old), sum.y += high(old);
    }
    put_4(x + place, pack_bf16(sum.x, sum.y));
  }
  __device__ __forceinline__ void one_shot(int begin, int end, int rows) const {
    const int pairs = (end - begin) / 2;
    for (int j = b.thread; j < rows * pairs; j += THREADS) {
      const int row = j / pairs, column = begin + j % pairs * 2;
      const int64_t place = int64_t(row) * n + column;
      const uint32_t old = ask(place);
      finish(place, part.sum(b, row, column), old);
    }
  }
  __device__ __forceinline__ void two_shots(int begin, int end, int rows) const {
    const int pairs = (end - begin) / 2;
#pragma unroll 1
    for (int owned = 1; owned >= 0; --owned)
      for (int j = b.thread; j < rows * pairs; j += THREADS) {
        const int row = j / pairs, column = begin + j % pairs * 2, owner = owner_of_tile(column / kOwned, tiles, ranks);
        if ((owner == part.rank()) != (owned != 0)) continue;
        const int64_t place = int64_t(row) * n + column;
        const uint32_t old = ask(place);
        float2 sum;
        if (owned) {
          sum = part.sum(b, row, column);
          for (int to = 0; to < ranks; ++to)
            if (to != part.rank()) part.send_to(to, row, column, sum.x, sum.y);
        } else {
          sum = part.receive(b, owner, row, column);
        }
        finish(place, sum, old);
      }
  }
};

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  using T = Tiles<V>;
  constexpr int tile = int(V::tile_columns);
  const int begin = i.tile_begin * tile, end = i.tile_end * tile < T::n ? i.tile_end * tile : T::n, rows = b.step->rows;
  bf16* x = flagged<bf16>(c, i, 1, b);
  bf16* left = other_copy(c, x, b);
  wait_inputs(b);
  const T tiles{b, typename T::Part(c, i, 0, b), x, V::residual ? flagged<const bf16>(c, i, 3, b) : nullptr};
  if constexpr (V::control) {
    if (end == T::n && b.thread == 0) {
      int32_t* agreed = flagged<int32_t>(c, i, 2, b);
      put_4(agreed, tiles.part.receive_one(b, 0, 0, T::n) != 0.0f ? 1u : 0u);
      clear_4(other_copy(c, agreed, b));
    }
  }
  if (rows > int(V::two_shot_rows)) {
    tiles.two_shots(begin, end, rows);
  } else {
    tiles.one_shot(begin, end, rows);
  }
  b.arrived();
  for (int row = b.warp; row < rows_to_clear(b); row += WARPS)
    for (int column = begin + b.lane * 2; column < end; column += 64) clear_4(left + int64_t(row) * T::n + column);
  b.sync();  // once in every body
}

}  // namespace mpk::all_reduce
