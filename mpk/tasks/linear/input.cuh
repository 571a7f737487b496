// How a product gets its input: rows of bf16, as the B operand of mma, normed on the way.
#pragma once
#include "mpk/flagged.cuh"

namespace mpk::linear {

constexpr int kStore = 0, kResidual = 1, kSwiglu = 2, kSend = 3;
constexpr int kTileRows = 16, kGroup = 8;
// Of the scratch memory, input and sums of warps have this much, and what else wants the outputs the rest.
constexpr int kInputBytes = SCRATCH_BYTES - 1024, kWarpBytes = kInputBytes / WARPS;

constexpr int round_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// How the matrix is cut (mpk/tasks/stages.py says the same).
template <class V>
struct Shape {
  static constexpr int k = int(V::k), n = int(V::n);
  static constexpr int depth = round_to(k, 512) <= round_to(k, 256) ? 512 : 256;  // columns of a stage
  static constexpr int stages = round_to(k, depth) / depth;                         // of a tile
  static constexpr int padded = depth * stages, warp_columns = padded / WARPS;
  static constexpr int parts = depth / WARPS / 32;  // runs of 32 columns that a warp owns in a stage
  static constexpr int warp_bytes = parts * 1024;   // and their bytes
  static constexpr int tile_columns = V::epilogue == kSwiglu ? 8 : 16;
  static constexpr bool wide = V::gather_logit_rows;  // float32 output
  static_assert(k % 8 == 0, "16-byte pieces of the input");
  static_assert(wide || n % 2 == 0, "outputs are stored in pairs");
  static_assert(depth * kTileRows * 2 <= STAGE_BYTES, "a stage fits its place in the ring");
};

__device__ __forceinline__ float squares(uint4 v) {
  float sum = low(v.x) * low(v.x) + high(v.x) * high(v.x);
  sum += low(v.y) * low(v.y) + high(v.y) * high(v.y);
  sum += low(v.z) * low(v.z) + high(v.z) * high(v.z);
  return sum + (low(v.w) * low(v.w) + high(v.w) * high(v.w));
}
__device__ __forceinline__ float4 floats(uint4 v) { return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}; }
__device__ __forceinline__ uint4 scaled(uint4 v, float4 a, float4 b) {
  return {pack_bf16(low(v.x) * a.x, high(v.x) * a.y), pack_bf16(low(v.y) * a.z, high(v.y) * a.w), pack_bf16(low(v.z) * b.x, high(v.z) * b.y),
          pack_bf16(low(v.w) * b.z, high(v.w) * b.w)};
}

// Which row of the input row `r` of the product is; `embeds`: the input is the matrix of embeddings.
template <class V>
__device__ __forceinline__ int input_row(const Block& b, int r, bool embeds) {
  return V::gather_logit_rows ? b.step->logit_row[r] : embeds ? b.step->row_token[r] : r;
}

// One row of input: every warp brings its whole slice into shared memory at once, normed, and needs no other warp to start.
template <class V>
struct SliceInput {
  using S = Shape<V>;
  static constexpr int kRows = 1, kBlocks = 1;  // rows; mma blocks of 8 rows
  static constexpr int kBytes = S::padded * 2;
  uint32_t at;  // shared address of the warp's slice, at the lane's 16 bytes
  float sum;    // of squares, this lane's part

  __device__ __forceinline__ SliceInput(Block& b, const bf16* x, bool embeds, int, const float* norm) {
    constexpr int pieces = S::warp_columns / 8, each = (pieces + 31) / 32;
    const uint32_t slice = shared_address(b.scratch) + b.warp * S::warp_columns * 2;
    const int first = b.warp * S::warp_columns;
    const bf16* row = x + int64_t(input_row<V>(b, 0, embeds)) * S::k;
    const bf16* mine = row + first + b.lane * 8;
    const auto there = [&](int i) { return (pieces % 32 == 0 || i * 32 + b.lane < pieces) && (S::padded == S::k || first + (i * 32 + b.lane) * 8 < S::k); };
    float4 g[V::norm ? each : 1][2];
    if constexpr (V::norm) {  // constant, so it need not wait
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const float4* weights = reinterpret_cast<const float4*>(norm + first + (i * 32 + b.lane) * 8);
        g[i][0] = g[i][1] = float4{};  // on every path: else registers hold what they held, all through the program
        if (there(i)) g[i][0] = __ldg(weights), g[i][1] = __ldg(weights + 1);
      }
    }
    b.wait_events();
    uint4 v[each];
#pragma unroll
    for (int i = 0; i < each; ++i) v[i] = there(i) ? load_16(mine + i * 256) : uint4{};
    settle_16(b, v, [&](int i) { return mine + i * 256; });
    b.arrived();
    sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (i * 32 + b.lane >= pieces) continue;
      if constexpr (V::norm) {
        if (there(i)) {
          sum += squares(v[i]);
          v[i] = scaled(v[i], g[i][0], g[i][1]);
        }
      }
      shared_store_16(slice + (i * 32 + b.lane) * 16, v[i]);
    }
    __syncwarp();
    at = slice + (b.lane & 3) * 16;
  }
  __device__ __forceinline__ void begin(const Block&) {}
  __device__ __forceinline__ void get(Block&, int stage, uint4 (&out)[S::parts][1]) const {
#pragma unroll
    for (int p = 0; p < S::parts; ++p) out[p][0] = shared_load_16(at + (stage * S::parts + p) * 64);
  }
  // Hands in this warp's sums of squares: out[row].
  __device__ __forceinline__ void put_squares(const Block& b, float* out) const {
    float total = sum;
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (b.lane == 0) out[0] = total;
  }
};

// 2 to 16 rows: every lane has the pieces that it will multiply copied to shared memory a few stages ahead, and what it needs of the norm's
// weights beside them. The copies are a lane's own: only the norm's weights are shared by a warp.
//
// A copy may come before its data, and then brings EMPTY. Copies are no atomic accesses, so what makes this right is not the memory model
// but the hardware, which reads aligned pieces of 16 bytes at the L2 whole.
template <class V>
struct RowsInput {
  using S = Shape<V>;
  static constexpr int kRows = 16, kBlocks = 2, kPieces = S::parts * kBlocks;  // piece n: run n / 2 of 32 columns, row n % 2 of the lane's
  static constexpr int kNormBytes = V::norm ? S::parts * 128 : 0, kSlotBytes = kPieces * 512 + kNormBytes;  // of a stage
  static constexpr int kSquaresBytes = kRows * 4, kRoom = kWarpBytes - kSquaresBytes;  // of a warp
  static constexpr int kFit = kRoom / kSlotBytes, kMost = kFit < 6 ? kFit : 6, kSlots = kMost < S::stages ? kMost : S::stages;
  static_assert(kSlots >= 1, "a stage of the input fits");
  const bf16* x;
  const float* norm;  // at the warp's first column
  int64_t row[kBlocks];  // this lane's rows: elements from x; -1: there is no such row
  uint32_t slots;     // shared address
  int slot;           // of the next stage to be read
  float sum[kBlocks];

  __device__ __forceinline__ RowsInput(Block& b, const bf16* input, bool embeds, int rows, const float* norm_weight) {
    x = input + b.warp * S::warp_columns, norm = norm_weight + b.warp * S::warp_columns;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int r = j * 8 + b.lane / 4;
      row[j] = r < rows ? int64_t(input_row<V>(b, r, embeds)) * S::k : -1;
      sum[j] = 0;
    }
    slots = shared_address(b.scratch) + b.warp * kWarpBytes;
    b.wait();
  }
  __device__ __forceinline__ int column_of(const Block& b, int stage, int n) const { return (stage * S::parts + n / kBlocks) * 32 + (b.lane & 3) * 8; }
  __device__ __forceinline__ bool there(const Block& b, int column) const { return S::padded == S::k || b.warp * S::warp_columns + column < S::k; }
  static __device__ __forceinline__ uint32_t place(const Block& b, uint32_t at, int n) { return at + (n * 32 + b.lane) * 16; }
  // Asks for a stage, which goes to `at`; a group of copies in any case.
  __device__ __forceinline__ void fill(const Block& b, int stage, uint32_t at) {
    if (stage < S::stages) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const int column = column_of(b, stage, n);
        const bool wanted = row[n % kBlocks] >= 0 && there(b, column);
        copy_16(place(b, at, n), x + (wanted ? row[n % kBlocks] + column : 0), wanted);
      }
      const int column = stage * S::parts * 32 + b.lane * 4;
      if (V::norm && b.lane < S::parts * 8) copy_16(at + kPieces * 512 + b.lane * 16, norm + (there(b, column) ? column : 0), there(b, column));
    }
    close_copies();
  }
  // Begins to read from the first stage on: once a group of tiles.
  __device__ __forceinline__ void begin(const Block& b) {
    slot = 0;
#pragma unroll 1
    for (int stage = 0; stage < kSlots; ++stage) fill(b, stage, slots + stage * kSlotBytes);
  }
  // What of stage `stage` is multiplied; stages come in their order.
  __device__ __forceinline__ void get(Block& b, int stage, uint4 (&out)[S::parts][kBlocks]) {
    const uint32_t at = slots + slot * kSlotBytes;
    uint4 v[kPieces];
    await_copies<kSlots - 1>();
#pragma unroll
    for (int n = 0; n < kPieces; ++n) v[n] = shared_load_16(place(b, at, n));
    if constexpr (FLAGGED) {
      bool whole = true;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) whole = whole && complete(v[n]);
      if (!__all_sync(~0u, whole)) settle(b, stage, v), copy_again(b, stage);
    }
    if constexpr (V::norm) __syncwarp();  // the norm's weights were copied by other lanes
#pragma unroll
    for (int p = 0; p < S::parts; ++p) {
      uint4 g[2];
      if constexpr (V::norm) g[0] = shared_load_16(at + kPieces * 512 + p * 128 + (b.lane & 3) * 32), g[1] = shared_load_16(at + kPieces * 512 + p * 128 + (b.lane & 3) * 32 + 16);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        out[p][j] = v[p * kBlocks + j];
        if constexpr (V::norm) {
          sum[j] += squares(out[p][j]);
          out[p][j] = scaled(out[p][j], floats(g[0]), floats(g[1]));
        }
      }
    }
    if constexpr (V::norm) __syncwarp();  // all have read them
    fill(b, stage + kSlots, at);
    if (++slot == kSlots) slot = 0;
  }
  // Waits for what copies were too early for. Both rows of a lane come from the same SMs at about the same time, so the first one is asked for
  // when the second has come: with up to 8 rows all that is missing is, with more half of it.
  __device__ __forceinline__ void settle(Block& b, int stage, uint4 (&v)[kPieces]) const {
#pragma unroll 1
    for (uint32_t polls = 0;;) {
      bool whole = true;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) whole = whole && complete(v[n]);
      if (!__any_sync(~0u, !whole)) return;
      if (__any_sync(~0u, !b.may_poll(polls))) return;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const bool wanted = !complete(v[n]) && (n % 2 != 0 || complete(v[n + 1]));
        load_16_if(wanted, x + (wanted ? row[n % kBlocks] + column_of(b, stage, n) : 0), v[n]);
      }
    }
  }
  // Of the stages behind `stage` that have been asked for, asks again for what was copied too early.
  __device__ __forceinline__ void copy_again(const Block& b, int stage) const {
    await_copies<0>();
#pragma unroll 1
    for (int ahead = 1; ahead < kSlots; ++ahead) {
      const uint32_t at = slots + (slot + ahead < kSlots ? slot + ahead : slot + ahead - kSlots) * kSlotBytes;
      if (stage + ahead < S::stages) {
#pragma unroll
        for (int n = 0; n < kPieces; ++n)
          if (!complete(shared_load_16(place(b, at, n)))) copy_16(place(b, at, n), x + row[n % kBlocks] + column_of(b, stage + ahead, n), true);
      }
      close_copies();
    }
  }
  // Hands in this warp's sums of squares: out[row].
  __device__ __forceinline__ void put_squares(const Block& b, float* out) const {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float total = sum[j] + __shfl_xor_sync(~0u, sum[j], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if ((b.lane & 3) == 0) out[j * 8 + b.lane / 4] = total;
    }
  }
};

}  // namespace mpk::linear
