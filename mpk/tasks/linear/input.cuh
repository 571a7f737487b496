// How a product gets its input: rows of bf16, in the pieces that lanes multiply, normed on the way. A stage of the input is what goes with a stage
// of weights, or with half of one where tiles have 8 rows (a level of `Shape`).
#pragma once
#include "mpk/flagged.cuh"

namespace mpk::linear {

constexpr int kStore = 0, kResidual = 1, kSwiglu = 2, kSend = 3;
constexpr int kTileRows = 16, kGroup = 8;
// Of the scratch memory, input and sums of warps have this much, and what else wants the outputs the rest.
constexpr int kInputBytes = SCRATCH_BYTES - 1024, kWarpBytes = kInputBytes / WARPS;

constexpr int round_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// What the products of a model have in common where they share one instance of this code (`Linear.body` of task.py says which do): one row of a model's
// hot loop then is some 12 KB of instructions for all of its products, which the instruction caches hold, and not as much for each.
template <class V>
struct Shape {
  static constexpr int tile_rows = int(V::tile_columns) * (V::epilogue == kSwiglu ? 2 : 1), levels_a_stage = kTileRows / tile_rows;
  // Columns of a level of the input, of which a stage of weights has one or two.
  static constexpr int depth = round_to(int(V::k), 512 * levels_a_stage) <= round_to(int(V::k), 256 * levels_a_stage) ? 512 : 256;
  static constexpr int parts = depth / WARPS / 32;  // runs of 32 columns that a warp owns in a level
  static constexpr int warp_bytes = parts * 1024;   // of a warp's weights in a stage
  static constexpr bool wide = V::gather_logit_rows;  // float32 output
  static constexpr bool sends = V::epilogue == kSend;
  static_assert(tile_rows == kTileRows || tile_rows * 2 == kTileRows, "tiles of 16 or 8 rows");
  static_assert(depth * kTileRows * 2 <= STAGE_BYTES, "a stage fits its place in the ring");
};

// What they differ in (mpk/tasks/stages.py cuts the matrix alike).
struct Product {
  int k, n, epilogue, tile_columns, pair_bits;  // 1 << pair_bits pairs of columns in a tile
  int stages, levels;         // of a tile
  int padded, warp_columns;   // columns in memory, and a warp's eighth of them
  float eps;
  bool norm, bias;
};

// The same, asked for now: compilers would load each number again wherever it is used, which when all wait for a task's last sums takes as long as the sums.
__device__ __forceinline__ Product held(Product p) {
  int norm = p.norm, bias = p.bias;
  hold(p.k), hold(p.n), hold(p.epilogue), hold(p.tile_columns), hold(p.pair_bits), hold(p.stages), hold(p.levels), hold(p.padded), hold(p.warp_columns);
  hold(p.eps), hold(norm), hold(bias);
  p.norm = norm != 0, p.bias = bias != 0;
  return p;
}

template <class V>
constexpr Product product_of() {
  using S = Shape<V>;
  static_assert(int(V::k) % 8 == 0, "16-byte pieces of the input");
  static_assert(S::wide || int(V::n) % 2 == 0, "outputs are stored in pairs");
  constexpr int stages = round_to(int(V::k), S::depth * S::levels_a_stage) / (S::depth * S::levels_a_stage), levels = stages * S::levels_a_stage;
  return {int(V::k), int(V::n), int(V::epilogue), int(V::tile_columns), int(V::tile_columns) == 16 ? 3 : int(V::tile_columns) == 8 ? 2 : 1, stages, levels, S::depth * levels, S::depth * levels / WARPS, float(V::eps), bool(V::norm), bool(V::bias)};
}

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

template <int N>
struct Number {
  static constexpr int value = N;
};

// One row of input: every warp brings its whole slice into shared memory at once, normed, and needs no other warp to start.
template <class V>
struct SliceInput {
  using S = Shape<V>;
  static constexpr int kRows = 1, kBlocks = 1;  // rows; mma blocks of 8 rows
  uint32_t at;  // shared address of the warp's slice, at the lane's 16 bytes
  float sum;    // of squares, this lane's part

  __device__ __forceinline__ SliceInput(Block& b, const Product& p, const bf16* x, bool embeds, int, const float* norm) {
    const int first = b.warp * p.warp_columns, pieces = p.warp_columns / 8, within = (p.k - first) / 8;
    const uint32_t slice = shared_address(b.scratch) + first * 2;
    const bf16* mine = x + int64_t(input_row<V>(b, 0, embeds)) * p.k + first + b.lane * 8;
    const float* weights = norm + first + b.lane * 8;
    sum = 0;
    b.wait_events();
    const int turns = (pieces + 31) / 32;
    const auto count = [&](int all) { return (all - b.lane + 31) / 32; };  // of this lane, of so many pieces of the warp
    const int there = within < pieces ? count(within > 0 ? within : 0) : count(pieces), stored = count(pieces);
    // As many pieces of a lane are on their way at a time as there are, but for very wide inputs: what is polled is looked through again and again.
    int done = 0;
    const auto next = [&](auto number, auto norm_too) {
      constexpr int N = decltype(number)::value;
      bring<N, decltype(norm_too)::value>(b, mine + done * 256, weights + done * 256, slice + (done * 32 + b.lane) * 16, there - done, stored - done);
      done += N;
    };
    if (p.norm) {
      if (turns == 1) next(Number<1>{}, Number<1>{});
      else if (turns == 2) next(Number<2>{}, Number<1>{});
      else
#pragma unroll 1
        while (done < turns) next(Number<4>{}, Number<1>{});
    } else {
      if (turns == 1) next(Number<1>{}, Number<0>{});
      else if (turns == 2) next(Number<2>{}, Number<0>{});
      else if (turns <= 4) next(Number<4>{}, Number<0>{});
      else
#pragma unroll 1
        while (done < turns) next(Number<8>{}, Number<0>{});
    }
    __syncwarp();
    at = slice + (b.lane & 3) * 16;
  }
  // Up to N pieces of a lane: `there` of them are asked for, and zeros follow up to `stored`.
  template <int N, int NORM>
  __device__ __forceinline__ void bring(Block& b, const bf16* mine, const float* norm, uint32_t to, int there, int stored) {
    float4 g[NORM ? N : 1][2];
    uint4 v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (NORM) {
        g[i][0] = g[i][1] = float4{};  // on every path: else registers hold what they held, all through the program
        const float4* weights = reinterpret_cast<const float4*>(norm + i * 256);
        if (i < there) g[i][0] = __ldg(weights), g[i][1] = __ldg(weights + 1);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = uint4{};
      load_16_if(i < there, mine + i * 256, v[i]);
    }
    settle_16(b, v, [&](int i) { return mine + i * 256; });
    b.arrived();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (NORM) {
        sum += squares(v[i]);
        v[i] = scaled(v[i], g[i][0], g[i][1]);
      }
      if (i < stored) shared_store_16(to + i * 512, v[i]);
    }
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
  static constexpr int kNormBytes = S::parts * 128, kSlotBytes = kPieces * 512 + kNormBytes;  // of a stage
  static constexpr int kSquaresBytes = kRows * 4, kRoom = kWarpBytes - kSquaresBytes;  // of a warp
  static constexpr int kFit = kRoom / kSlotBytes, kSlots = kFit < 6 ? kFit : 6;
  static_assert(kSlots >= 1, "a stage of the input fits");
  const Product& p;
  const bf16* x;
  const float* norm;  // at the warp's first column
  int64_t row[kBlocks];  // this lane's rows: elements from x; -1: there is no such row
  uint32_t slots;     // shared address
  int slot;           // of the next stage to be read
  float sum[kBlocks];

  __device__ __forceinline__ RowsInput(Block& b, const Product& product, const bf16* input, bool embeds, int rows, const float* norm_weight) : p(product) {
    x = input + b.warp * p.warp_columns, norm = norm_weight + b.warp * p.warp_columns;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int r = j * 8 + b.lane / 4;
      row[j] = r < rows ? int64_t(input_row<V>(b, r, embeds)) * p.k : -1;
      sum[j] = 0;
    }
    slots = shared_address(b.scratch) + b.warp * kWarpBytes;
    b.wait();
  }
  __device__ __forceinline__ int column_of(const Block& b, int stage, int n) const { return (stage * S::parts + n / kBlocks) * 32 + (b.lane & 3) * 8; }
  __device__ __forceinline__ bool there(const Block& b, int column) const { return b.warp * p.warp_columns + column < p.k; }
  static __device__ __forceinline__ uint32_t place(const Block& b, uint32_t at, int n) { return at + (n * 32 + b.lane) * 16; }
  // Asks for a stage, which goes to `at`; a group of copies in any case.
  __device__ __forceinline__ void fill(const Block& b, int stage, uint32_t at) {
    if (stage < p.levels) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const int column = column_of(b, stage, n);
        const bool wanted = row[n % kBlocks] >= 0 && there(b, column);
        copy_16(place(b, at, n), x + (wanted ? row[n % kBlocks] + column : 0), wanted);
      }
      const int column = stage * S::parts * 32 + b.lane * 4;
      if (p.norm && b.lane < S::parts * 8) copy_16(at + kPieces * 512 + b.lane * 16, norm + (there(b, column) ? column : 0), there(b, column));
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
    if (p.norm) __syncwarp();  // the norm's weights were copied by other lanes
#pragma unroll
    for (int n = 0; n < kPieces; ++n) out[n / kBlocks][n % kBlocks] = v[n];
    if (p.norm) {
#pragma unroll
      for (int part = 0; part < S::parts; ++part) {
        const uint32_t weights = at + kPieces * 512 + part * 128 + (b.lane & 3) * 32;
        const uint4 first = shared_load_16(weights), second = shared_load_16(weights + 16);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          sum[j] += squares(out[part][j]);
          out[part][j] = scaled(out[part][j], floats(first), floats(second));
        }
      }
      __syncwarp();  // all have read them
    }
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
      if (stage + ahead < p.levels) {
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
