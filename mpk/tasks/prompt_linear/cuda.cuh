// prompt_linear: the products of a prompt step, any number of rows, on tensor cores: 128 rows of weights by up to 256 tokens a tile.
//
// Operands: input in chunks (mpk/tiles.cuh), output, and for `residual` what is added. Output bf16 [rows][n]; swiglu: in chunks;
// logits: float32 to where the host wants the logits of sequences with all_logits. Parameters: Sizes, then the bias if there is one (padded to
// whole panels; swiglu: gate, then up). iargs[0]: place of the matrix in the table of stages. Variant: none, so that a program holds
// one instance of this code whatever the products of its model.
//
// Weights are the A operand, from registers: a warp's 16 rows of a chunk are 4 fragments of 16 bytes a lane, as they were packed for the
// decode path. While the tensor cores compute one chunk, the fragments of the next are loaded.
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

// A product of one task.
struct Product {
  int n, epilogue, packed_tiles;
  const float* bias;  // null: none
  __device__ __forceinline__ int columns() const { return epilogue == kSwiglu ? 8 : 16; }  // outputs of a packed tile
};

// One 8 x 8 block of sums, its rows weights and its columns tokens, turned: this lane gets two neighbouring outputs of one token.
__device__ __forceinline__ float2 turned(float first, float second) {
  const uint32_t a = __float_as_uint(first), b = __float_as_uint(second);
  const uint32_t lower = transpose_8x8(a & 0xffffu | b << 16), upper = transpose_8x8(a >> 16 | b & 0xffff0000u);
  return {__uint_as_float(lower & 0xffffu | upper << 16), __uint_as_float(lower >> 16 | upper & 0xffff0000u)};
}

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// What a warp does with its 16 rows of sums.
template <int WIDTH>
struct Finish {
  // `row`: of the tile's first token; `packed`: the warp's packed tile.
  static __device__ __forceinline__ void run(const Context& c, const Instruction& i, const Block& b, const Product& p, float (&d)[WIDTH / 2], int row,
                                             int packed, int rows) {
    const int lane = own_lane(), of = packed * p.columns() + lane / 4;  // this lane's output before the blocks are turned
    float low_bias = 0, high_bias = 0;
    if (p.bias != nullptr) {
      const int other = p.epilogue == kSwiglu ? (p.n + 15) / 16 * 16 + of : of + 8;
      if (of < p.n) low_bias = __ldg(p.bias + of);
      if (p.epilogue == kSwiglu ? of < p.n : other < p.n) high_bias = __ldg(p.bias + other);
    }
    if (p.epilogue == kSwiglu) return swiglu(c, i, b, d, row, packed, rows, low_bias, high_bias);
    const int column = packed * 16 + lane % 4 * 2;
    constexpr int BATCH = 8;  // blocks of 8 tokens whose old values are on their way at a time
#pragma unroll
    for (int begin = 0; begin < WIDTH / 8; begin += BATCH) {
      if (row + begin * 8 >= rows) break;
      uint32_t old[BATCH][2] = {};
      if (p.epilogue == kResidual) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          const int token = row + (begin + j) * 8 + lane / 4;
          const bf16* from = operand<bf16>(c, i, 2) + int64_t(token) * p.n + column;
          if (token < rows && column < p.n) old[j][0] = load_4(from);
          if (token < rows && column + 8 < p.n) old[j][1] = load_4(from + 8);
        }
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const float* s = d + 4 * (begin + j);
        const float2 first = turned(s[0] + low_bias, s[1] + low_bias), second = turned(s[2] + high_bias, s[3] + high_bias);
        const int token = row + (begin + j) * 8 + lane / 4;
        if (token >= rows) continue;
        put(c, i, p, token, column, first, old[j][0]), put(c, i, p, token, column + 8, second, old[j][1]);
      }
    }
  }

  // Outputs `column`, `column` + 1 of a token; `old`: what they are added to.
  static __device__ __forceinline__ void put(const Context& c, const Instruction& i, const Product& p, int token, int column, float2 y, uint32_t old) {
    if (column >= p.n) return;
    if (p.epilogue == kLogits) {
      const int slot = load_int(c.row_slot + token), position = load_int(c.row_position + token);
      if (!load_int(&c.sequences[slot].all_logits)) return;
      float* to = c.logits_out + (slot * c.logits_out_positions + position) * int64_t(p.n) + column;
      to[0] = y.x;
      if (column + 1 < p.n) to[1] = y.y;
      return;
    }
    const int64_t place = int64_t(token) * p.n + column;
    *reinterpret_cast<uint32_t*>(operand<bf16>(c, i, 1) + place) = pack_bf16(y.x + low(old), y.y + high(old));
  }

  // A warp group has 32 outputs of 64 tokens at a time, which meet in shared memory: its 4 warps have a word each of every 16-byte unit.
  static __device__ __forceinline__ void swiglu(const Context& c, const Instruction& i, const Block& b, float (&d)[WIDTH / 2], int row, int packed, int rows,
                                                float gate_bias, float up_bias) {
    const int lane = own_lane(), group = b.warp / 4, word = b.warp % 4, thread = b.thread % 128;
    uint32_t* meeting = reinterpret_cast<uint32_t*>(b.pool + tiles::STAGE_COUNT * tiles::STAGE) + group * (64 * 16);
    unsigned char* out = operand<unsigned char>(c, i, 1);
    const int column = packed / tiles::PACKED_TILES * tiles::CHUNK + group * 32;  // the group's first output
#pragma unroll
    for (int part = 0; part < WIDTH / 64; ++part) {
      if (row + part * 64 >= rows) break;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float* s = d + part * 32 + j * 4;
        const uint32_t pair = transpose_8x8(pack_bf16(gated(s[0] + gate_bias, s[2] + up_bias), gated(s[1] + gate_bias, s[3] + up_bias)));
        const int token = j * 8 + lane / 4;
        meeting[token * 16 + lane % 4 * 4 + (word ^ (token >> 1 & 3))] = pair;  // so that no two lanes share a bank
      }
      b.sync_group();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int token = n * 32 + thread / 4, unit = thread % 4, turn = token >> 1 & 3;
        uint4 v = *reinterpret_cast<const uint4*>(meeting + token * 16 + unit * 4);
        if (turn & 1) v = {v.y, v.x, v.w, v.z};
        if (turn & 2) v = {v.z, v.w, v.x, v.y};
        const int at = row + part * 64 + token;
        if (at < rows) *reinterpret_cast<uint4*>(out + tiles::chunk_offset(at, column + unit * 2, c.prompt_room)) = v;
      }
      b.sync_group();
    }
  }
};

// One chunk: its fragments into `a`, its four products on their way.
template <int WIDTH>
__device__ __forceinline__ void multiply(tiles::Reader& reader, const Block& b, bool valid, uint4 (&a)[4], float (&d)[WIDTH / 2], int sum) {
  const uint32_t stage = reader.wait(), at = stage + b.warp * tiles::WARP_BYTES + b.lane * 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    a[k] = shared_load_16(at + k * 512);
    if (!valid) a[k] = uint4{};
  }
  const uint64_t rows = wgmma_operand(stage + tiles::WEIGHT_BYTES);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<WIDTH>::mma(d, a[k], rows + 2 * k, k == 0 ? sum : 1);
  wgmma_commit();
}

template <int WIDTH>
__device__ __forceinline__ void compute(const Context& c, const Instruction& i, const Block& b, const Product& p, const tiles::Job& job) {
  tiles::Reader reader{b.tiles, job.begin};
  const int pairs = job.chunks / 2;
#pragma unroll 1
  for (int tile = job.first; tile < job.count; tile += job.step) {
    const int packed = job.weight_tile(tile) * tiles::PACKED_TILES + b.warp;
    const bool valid = packed < p.packed_tiles;
    float d[WIDTH / 2];
#pragma unroll
    for (float& sum : d) sum = 0.0f;
    uint4 even[4], odd[4];
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      multiply<WIDTH>(reader, b, valid, even, d, 1);
      wgmma_wait<1>();
      if (pair > 0) reader.release(1, b.lane);
      reader.advance();
      multiply<WIDTH>(reader, b, valid, odd, d, 1);
      wgmma_wait<1>();
      reader.release(1, b.lane);
      reader.advance();
    }
    wgmma_wait<0>();
    reader.release(1, b.lane);
    Finish<WIDTH>::run(c, i, b, p, d, job.row(tile), packed, job.rows);
  }
}

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& i, Block& b) {
  const float* params = reinterpret_cast<const float*>(c.params + i.params);
  const Sizes& sizes = *reinterpret_cast<const Sizes*>(params);
  Product p{};
  p.n = int(__ldg(&sizes.n)), p.epilogue = int(__ldg(&sizes.epilogue));
  p.packed_tiles = (p.n + p.columns() - 1) / p.columns();
  p.bias = __ldg(&sizes.bias) != 0.0f ? params + sizeof(Sizes) / sizeof(float) : nullptr;
  wait_inputs(b);
  if (b.thread == 0) {
    const int k = int(__ldg(&sizes.k)), shares = int(__ldg(&sizes.shares)), rows = b.step->rows;
    const int weight_tiles = (p.packed_tiles + tiles::PACKED_TILES - 1) / tiles::PACKED_TILES;
    const tiles::Cut cut = tiles::cut_of(k);
    tiles::Job job{};
    job.weights = c.weights + i.weights, job.place = c.places + i.iargs[0], job.activations = operand<unsigned char>(c, i, 0);
    job.packed_tiles = p.packed_tiles, job.stages = cut.stages, job.parts = cut.parts, job.chunks = tiles::chunks_of(k),
    job.filled = (k + tiles::CHUNK - 1) / tiles::CHUNK;
    job.rows = rows, job.room = c.prompt_room;
    job.width = tiles::choose_width(rows, weight_tiles, shares), job.columns = (rows + job.width - 1) / job.width;
    job.first = i.tile_begin, job.step = shares, job.count = weight_tiles * job.columns;
    b.tiles.post(job);
  }
  b.sync();
  const tiles::Job& job = b.tiles.control->job;
  if (job.width == tiles::WIDEST)
    compute<tiles::WIDEST>(c, i, b, p, job);
  else
    compute<tiles::WIDEST / 2>(c, i, b, p, job);
}

}  // namespace mpk::prompt_linear
