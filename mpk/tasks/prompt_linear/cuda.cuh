// prompt_linear: the products of a prompt step, any number of rows, on tensor cores: 128 rows of weights by up to 256 tokens a tile.
//
// Operands: input in chunks (mpk/tiles.cuh), output, and for `residual` what is added. Output bf16 [rows][n]; swiglu: in chunks;
// logits: float32 to where the host wants the logits of sequences with all_logits. Parameters: Sizes, then the bias if there is one (padded to
// whole panels; swiglu: gate, then up). iargs[0]: place of the matrix in the table of places, rows of a packed tile first. Variant: none, so that a program holds
// one instance of this code whatever the products of its model.
//
// Weights are the A operand, from registers: a warp's 16 rows of a chunk are 4 fragments of 16 bytes a lane, as they were packed for the
// decode path, or are put together from those of two tiles of 8 rows. While the tensor cores compute one chunk, the fragments of the next are loaded.
#pragma once
#include "mpk/block.cuh"
#include "mpk/tiles.cuh"
#include "mpk/wait.cuh"

namespace mpk::prompt_linear {

constexpr bool waits_inside = true;
constexpr int kStore = 0, kResidual = 1, kSwiglu = 2, kLogits = 3;

// What a product is, as the host wrote it before its bias.
struct Sizes {
  float n, k, epilogue, bias, shares, reserved[11];  // shares: tasks of the operator
};

// A product of one task, read from its parameters wherever it is needed: kept across the inner loop it would take registers of the sums.
struct Product {
  int n, epilogue, packed_tiles;  // tiles of 16 rows
  bool biased;
  const float* bias;

  __device__ __forceinline__ Product(const Context& c, const Instruction& i) {
    const float* params = reinterpret_cast<const float*>(c.params + i.params);
    const Sizes& sizes = *reinterpret_cast<const Sizes*>(params);
    n = int(load_float(&sizes.n)), epilogue = int(load_float(&sizes.epilogue)), biased = load_float(&sizes.bias) != 0.0f;
    bias = params + sizeof(Sizes) / sizeof(float), packed_tiles = (n + columns() - 1) / columns();
  }
  __device__ __forceinline__ int columns() const { return epilogue == kSwiglu ? 8 : 16; }  // outputs of a packed tile
};

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// What a warp does with its 16 rows of sums: 32 tokens at a time they go through shared memory, to leave it token by token.
template <int WIDTH>
struct Finish {
  static constexpr int PART = 32, STRIDE = 20, WARP_FLOATS = PART * STRIDE;  // 20: no two of a warp's values share a bank
  static_assert(tiles::STAGE_COUNT * tiles::STAGE + WARPS * WARP_FLOATS * 4 <= POOL_BYTES, "they stand behind the stages");

  // `row`: of the tile's first token; `packed`: the warp's packed tile.
  static __device__ __forceinline__ void run(const Context& c, const Instruction& i, const Block& b, uint32_t halves, const float (&d)[WIDTH / 2], int row, int packed,
                                             int rows) {
    const Product p(c, i);
    const int lane = own_lane();
    float* meeting = reinterpret_cast<float*>(b.pool + tiles::STAGE_COUNT * tiles::STAGE);
    float* mine = meeting + b.warp * WARP_FLOATS + lane % 4 * 2 * STRIDE + lane / 4;
#pragma unroll
    for (int part = 0; part < WIDTH / PART; ++part) {
      const int first = row + part * PART;
      if (first >= rows) break;
#pragma unroll
      for (int j = 0; j < PART / 8; ++j) {
        const float* s = d + (part * PART / 8 + j) * 4;
        float* to = mine + j * 8 * STRIDE;
        to[0] = s[0], to[STRIDE] = s[1], to[8] = s[2], to[STRIDE + 8] = s[3];
      }
      if (p.epilogue == kSwiglu) {
        b.sync_group();
        activate(c, i, b, p, halves, meeting + b.warp / 4 * 4 * WARP_FLOATS, first, packed & ~3, rows);
        b.sync_group();
      } else {
        __syncwarp();
        if (packed < p.packed_tiles) put(c, i, p, meeting + b.warp * WARP_FLOATS, first, packed * 16, rows);
        __syncwarp();
      }
    }
  }

  static __device__ __forceinline__ void read(float (&y)[8], const float* from) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w, y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
  }

  // A warp's 16 outputs of 32 tokens: a lane has 8 of one token at a time. `column`: the first one.
  static __device__ __forceinline__ void put(const Context& c, const Instruction& i, const Product& p, const float* sums, int first, int column, int rows) {
    const int lane = own_lane(), token = lane / 2, own = column + lane % 2 * 8;
    if (own >= p.n) return;
    // A flag, not a null pointer: ptxas 13.0 compares such a pointer before its zero has arrived in the register (docs/decisions.md).
    const bool residual = p.epilogue == kResidual;
    const bf16* old_rows = operand<bf16>(c, i, 2) + own;
    uint4 old[2] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (residual && first + token + n * 16 < rows) old[n] = load_16(old_rows + int64_t(first + token + n * 16) * p.n);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = first + token + n * 16;
      if (at >= rows) return;
      float y[8], bias[8];
      read(y, sums + (token + n * 16) * STRIDE + lane % 2 * 8);
      if (p.biased) {
        read(bias, p.bias + own);
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] += bias[e];
      }
      if (p.epilogue == kLogits) {
        put_logits(c, p, y, at, own);
      } else {
        y[0] += low(old[n].x), y[1] += high(old[n].x), y[2] += low(old[n].y), y[3] += high(old[n].y);
        y[4] += low(old[n].z), y[5] += high(old[n].z), y[6] += low(old[n].w), y[7] += high(old[n].w);
        *reinterpret_cast<uint4*>(operand<bf16>(c, i, 1) + int64_t(at) * p.n + own) = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
                                                                                        pack_bf16(y[6], y[7])};
      }
    }
  }

  static __device__ __forceinline__ void put_logits(const Context& c, const Product& p, const float (&y)[8], int row, int column) {
    const int slot = load_int(c.row_slot + row), position = load_int(c.row_position + row);
    if (load_int(&c.sequences[slot].all_logits) == 0) return;
    float* to = c.logits_out + (slot * c.logits_out_positions + position) * int64_t(p.n) + column;
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (column + e < p.n) to[e] = y[e];
  }

  // A warp group's 32 outputs of 32 tokens: a thread has a 16-byte unit, columns 8 q + 2 unit, + 1, which come from warp q. `packed`: of the
  // group's first warp.
  static __device__ __forceinline__ void activate(const Context& c, const Instruction& i, const Block& b, const Product& p, uint32_t halves, const float* sums,
                                                  int first, int packed, int rows) {
    const int thread = b.thread % 128, token = thread / 4, unit = thread % 4, at = first + token;
    if (at >= rows) return;
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      // Rows of gate, then of up; of two tiles of 8 rows: 4 of gate, 4 of up, and again.
      const float* from = sums + q * WARP_FLOATS + token * STRIDE + (halves != 0 ? unit / 2 * 8 + unit % 2 * 2 : unit * 2);
      float2 gate = *reinterpret_cast<const float2*>(from), up = *reinterpret_cast<const float2*>(from + (halves != 0 ? 4 : 8));
      const int column = (packed + q) * 8 + unit * 2;
      if (p.biased && column < p.n) {
        const float *gates = p.bias + column, *ups = gates + (p.n + 15) / 16 * 16;
        gate.x += __ldg(gates), gate.y += __ldg(gates + 1), up.x += __ldg(ups), up.y += __ldg(ups + 1);
      }
      out[q] = pack_bf16(gated(gate.x, up.x), gated(gate.y, up.y));
    }
    const int64_t to = tiles::chunk_offset(at, packed * 8 + unit * 2, c.prompt_room);
    *reinterpret_cast<uint4*>(operand<unsigned char>(c, i, 1) + to) = {out[0], out[1], out[2], out[3]};
  }
};

// v where the bits of `mask` are set, else w.
__device__ __forceinline__ uint32_t chosen(uint32_t mask, uint32_t v, uint32_t w) { return (v & mask) | (w & ~mask); }

// Operands A of two steps of 16 columns: of a tile of 16 rows they are as they were packed, one piece each; of two tiles of 8 rows a piece
// has both steps of one tile.
__device__ __forceinline__ void arrange(uint32_t halves, uint4& v, uint4& w) {
  const uint4 first{v.x, chosen(halves, w.x, v.y), chosen(halves, v.y, v.z), chosen(halves, w.y, v.w)};
  w = {chosen(halves, v.z, w.x), chosen(halves, w.z, w.y), chosen(halves, v.w, w.z), w.w};
  v = first;
}

// One chunk: its fragments into `a`, its four products on their way. `halves`: all bits set or none. Selecting by bits rather than by a condition: a
// branch would end the overlap of products, and of a condition the compiler makes one, by having the loop twice.
template <int WIDTH>
__device__ __forceinline__ void multiply(tiles::Reader& reader, const Block& b, bool valid, uint32_t halves, uint4 (&a)[4], float (&d)[WIDTH / 2], int sum) {
  const uint32_t stage = reader.wait(), at = stage + b.warp * tiles::WARP_BYTES + b.lane * 16;
  const uint32_t apart = 512 + (halves & 512);  // of two tiles of 8 rows, one stands behind the other
  a[0] = shared_load_16(at), a[1] = shared_load_16(at + apart), a[2] = shared_load_16(at + 1536 - apart), a[3] = shared_load_16(at + 1536);
  arrange(halves, a[0], a[1]), arrange(halves, a[2], a[3]);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (!valid) a[k] = uint4{};
  const uint64_t rows = wgmma_operand(stage + tiles::WEIGHT_BYTES);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<WIDTH>::mma(d, a[k], rows + 2 * k, k == 0 ? sum : 1);
  wgmma_commit();
}

// `packed_tiles`: of the matrix; `halves`: all bits set if it is packed in tiles of 8 rows, else none.
template <int WIDTH>
__device__ __forceinline__ void compute(const Context& c, const Instruction& i, const Block& b, int packed_tiles, uint32_t halves, const tiles::Job& job) {
  tiles::Reader reader{b.tiles, job.begin};
  const int pairs = job.chunks / 2;
#pragma unroll 1
  for (int tile = job.first; tile < job.count; tile += job.step) {
    const int packed = job.weight_tile(tile) * tiles::PACKED_TILES + b.warp;
    const bool valid = packed < packed_tiles;
    float d[WIDTH / 2];
#pragma unroll
    for (float& sum : d) sum = 0.0f;
    uint4 even[4] = {}, odd[4] = {};  // defined on every path: else registers would hold what they held, all through the program
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      multiply<WIDTH>(reader, b, valid, halves, even, d, 1);
      wgmma_wait<1>();
      if (pair > 0) reader.release(1, b.lane);
      reader.advance();
      multiply<WIDTH>(reader, b, valid, halves, odd, d, 1);
      wgmma_wait<1>();
      reader.release(1, b.lane);
      reader.advance();
    }
    wgmma_wait<0>();
    reader.release(1, b.lane);
    Finish<WIDTH>::run(c, i, b, halves, d, job.row(tile), packed, job.rows);
  }
}

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& i, Block& b) {
  const Product p(c, i);
  wait_inputs(b);
  if (b.thread == 0) {
    const Sizes& sizes = *reinterpret_cast<const Sizes*>(c.params + i.params);
    const int k = int(__ldg(&sizes.k)), shares = int(__ldg(&sizes.shares)), rows = b.step->rows;
    const int weight_tiles = (p.packed_tiles + tiles::PACKED_TILES - 1) / tiles::PACKED_TILES;
    const int64_t* places = c.places + i.iargs[0];
    const int tile_rows = int(__ldg(places));
    tiles::Job job{};
    job.weights = c.weights + i.weights, job.place = places + 1, job.activations = operand<unsigned char>(c, i, 0);
    job.cut((p.n * (tiles::PACKED_ROWS / tile_rows) + p.columns() - 1) / p.columns(), tile_rows, k);
    job.rows = rows, job.room = c.prompt_room;
    job.width = tiles::choose_width(rows, weight_tiles, shares), job.columns = (rows + job.width - 1) / job.width;
    job.first = i.tile_begin, job.step = shares, job.count = weight_tiles * job.columns;
    b.tiles.post(job);
  }
  b.sync();
  b.tiles.announce();
  const tiles::Job& job = b.tiles.control->job;
  const uint32_t halves = job.tile_rows == tiles::PACKED_ROWS ? 0u : ~0u;
  if (job.width == tiles::WIDEST)
    compute<tiles::WIDEST>(c, i, b, p.packed_tiles, halves, job);
  else
    compute<tiles::WIDEST / 2>(c, i, b, p.packed_tiles, halves, job);
}

}  // namespace mpk::prompt_linear
