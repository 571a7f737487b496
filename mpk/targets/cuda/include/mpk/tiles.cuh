// Large products of a prompt step: how they are cut into tiles, and the ring of stages through which one warp feeds the consumers.
//
// A tile is 128 rows of packed weights (8 tiles of 16, a warp each) times 128 or 256 tokens. It is computed in chunks of 64 columns of
// k; a stage holds one chunk: 16 KB of weights as fragments (2 KB a warp, as linear/cuda.cuh packs them) and up to 32 KB of activations.
// The tiles of a product go round robin over its tasks, all tokens of 128 weight rows next to each other, so that SMs share what they
// read through the L2. Which tiles there are depends on the rows of the step, so a block tells its tile loader about each product (a Job).
//
// Activations that products read stand in global memory in chunks, as the tensor cores take them from shared memory: [chunk][row][64]
// bf16, 16-byte unit u of a row at place u ^ (row % 8). Within each 32 columns, column 8 q + 4 s + 2 j + e stands at 16 s + 8 j + 2 q + e,
// which is the order of k in the packed weights. Columns up to a multiple of 64 are zero.
#pragma once
#include <cstddef>

#include "mpk/layout.hpp"
#include "mpk/ptx.cuh"
#include "mpk/wgmma.cuh"

namespace mpk::tiles {

constexpr int CHUNK = 64, CHUNK_BYTES = CHUNK * 2;  // columns of k; of one row
constexpr int WEIGHT_ROWS = 128, WIDEST = 256, PACKED_ROWS = 16, PACKED_TILES = WEIGHT_ROWS / PACKED_ROWS;
constexpr int WEIGHT_BYTES = WEIGHT_ROWS * CHUNK_BYTES, WARP_BYTES = WEIGHT_BYTES / PACKED_TILES;
constexpr int STAGE = WEIGHT_BYTES + WIDEST * CHUNK_BYTES, STAGE_COUNT = 4;

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// How the columns of a matrix are cut into stages of the decode path (mpk/tasks/stages.py): of a tile, and runs of 32 columns a warp.
struct Cut {
  int stages, parts;
};
constexpr Cut cut_of(int k) {
  return round_up(k, 512) <= round_up(k, 256) ? Cut{round_up(k, 512) / 512, 2} : Cut{round_up(k, 256) / 256, 1};
}

// Chunks of a product: an even number, so that fragments of two chunks can take turns in registers.
constexpr int chunks_of(int k) { return round_up(k, 2 * CHUNK) / CHUNK; }

// Byte of columns (column, column + 1) of a row of activations in chunks; `column` is even, `rows` what the buffer has room for.
__device__ __forceinline__ int64_t chunk_offset(int row, int column, int rows) {
  const int within = column % 32, unit = column % CHUNK / 32 * 4 + within % 8 / 2, word = within / 8;
  return (int64_t(column / CHUNK) * rows + row) * CHUNK_BYTES + ((unit ^ (row & 7)) * 16 + word * 4);
}

// Tokens a tile such that the last round over the SMs wastes least.
__device__ __forceinline__ int choose_width(int rows, int weight_tiles, int tasks) {
  constexpr int COST = 10, COST_WIDEST = 18;  // relative times of a tile
  const int narrow = weight_tiles * ((rows + WIDEST / 2 - 1) / (WIDEST / 2)), wide = weight_tiles * ((rows + WIDEST - 1) / WIDEST);
  return (wide + tasks - 1) / tasks * COST_WIDEST <= (narrow + tasks - 1) / tasks * COST ? WIDEST : WIDEST / 2;
}

// One product of one block. Every block of the product has the same, but for `first`.
struct Job {
  const unsigned char* weights;      // the packed matrix
  const int64_t* place;              // [packed tiles][stages] byte offsets of stages from `weights`
  const unsigned char* activations;  // [chunks][room][64]
  int packed_tiles, stages, parts, chunks, filled;  // chunks: an even number, of which `filled` are not zero in all weights
  int rows, room;                    // of the step; of the buffer
  int width, columns;                // tokens a tile; tiles side by side
  int first, step, count;            // this block's tiles: first, first + step, ... below count
  int begin;                         // stages used before, modulo 2 * STAGE_COUNT

  __device__ __forceinline__ int tiles() const { return first < count ? (count - first + step - 1) / step : 0; }
  __device__ __forceinline__ int weight_tile(int tile) const { return tile / columns; }
  __device__ __forceinline__ int row(int tile) const { return tile % columns * width; }
};

// In shared memory.
struct Control {
  uint64_t full[STAGE_COUNT], empty[STAGE_COUNT], posted;
  Job job;
  int used;   // stages, modulo 2 * STAGE_COUNT; of thread 0
  int jobs;   // posted so far
  volatile int stop;
};

// Where the stages stand and what guards them: shared addresses.
struct Ring {
  Control* control;
  uint32_t stages;
  __device__ __forceinline__ uint32_t full(int stage) const { return shared_address(control) + offsetof(Control, full) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return shared_address(control) + offsetof(Control, empty) + stage * 8; }
  __device__ __forceinline__ uint32_t posted() const { return shared_address(control) + offsetof(Control, posted); }
  __device__ __forceinline__ uint32_t stage(int number) const { return stages + number * STAGE; }

  // One thread, before the others see it.
  __device__ __forceinline__ void prepare() const {
    for (int s = 0; s < STAGE_COUNT; ++s) barrier_init(full(s), 1), barrier_init(empty(s), PACKED_TILES);
    barrier_init(posted(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    control->used = control->jobs = 0, control->stop = 0;
  }
  // Thread 0 of the consumers: hands in a job. What it has acquired, the loader may read.
  __device__ __forceinline__ void post(Job job) const {
    job.begin = control->used;
    control->job = job;
    control->used = (job.begin + job.tiles() * job.chunks) % (2 * STAGE_COUNT);
    if (job.tiles() > 0) barrier_arrive(posted());
  }
};

// A consumer's place in the ring.
struct Reader {
  Ring ring;
  int at;  // modulo 2 * STAGE_COUNT
  __device__ __forceinline__ int stage() const { return at % STAGE_COUNT; }
  __device__ __forceinline__ uint32_t wait() const {
    while (!barrier_try(ring.full(stage()), at / STAGE_COUNT)) {}
    return ring.stage(stage());
  }
  __device__ __forceinline__ void advance() { at = (at + 1) % (2 * STAGE_COUNT); }
  // The warp has read the stage `behind` the present one.
  __device__ __forceinline__ void release(int behind, int lane) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty((at - behind) & (STAGE_COUNT - 1)));
  }
};

// Activations are read by several SMs, weights by all that share a tile: the L2 keeps both as it sees fit.
__device__ __forceinline__ void bulk_load_shared(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// One whole warp: brings the stages of each job that is posted, until told to stop.
class Loader {
 public:
  __device__ Loader(const Ring& ring, int lane) : ring_(ring), lane_(lane) {}

  __device__ void work() {
    for (int job = 0;; ++job) {
      while (!barrier_try(ring_.posted(), job & 1))
        if (ring_.control->stop) return;
      fence_async();  // what other SMs wrote with ordinary stores, and a consumer has acquired, is now read by bulk copies
      const Job& j = ring_.control->job;  // until the last copy is on its way: then the next job may be handed in
      at_ = j.begin;
      const int step = j.step;
      int tile = j.first;
      for (int left = j.tiles(); left > 0; --left, tile += step) load(j, tile);
    }
  }

 private:
  // Where this lane's packed tile has columns 32 * part32 of k.
  static __device__ __forceinline__ const unsigned char* piece(const unsigned char* weights, const int64_t* place, int stages, int parts, int part32) {
    const int of_warp = stages * parts, warp = part32 / of_warp, rest = part32 % of_warp;
    return weights + __ldg(place + rest / parts) + (warp * parts + rest % parts) * 1024;
  }

  __device__ __forceinline__ void load(const Job& j, int tile) {
    const int weight_tile = j.weight_tile(tile), row = j.row(tile), rows = min(j.width, round_up(j.rows - row, 8));
    const int valid = min(PACKED_TILES, j.packed_tiles - weight_tile * PACKED_TILES), mine = weight_tile * PACKED_TILES + lane_;
    const bool loads = lane_ < valid, loads_rows = lane_ == PACKED_TILES;
    const int64_t* place = j.place + int64_t(loads ? mine : 0) * j.stages;
    const unsigned char* from = j.activations + int64_t(row) * CHUNK_BYTES;
    const int64_t stride = int64_t(j.room) * CHUNK_BYTES;
    const int bytes = valid * WARP_BYTES + rows * CHUNK_BYTES, chunks = j.chunks, filled = j.filled, stages = j.stages, parts = j.parts;
    const unsigned char* matrix = j.weights;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const unsigned char* weights = piece(matrix, place, stages, parts, 2 * chunk);
      const unsigned char* second = parts == 1 ? piece(matrix, place, stages, parts, 2 * chunk + 1) : nullptr;
      const int stage = at_ % STAGE_COUNT;
      const uint32_t full = ring_.full(stage), to = ring_.stage(stage);
      while (!barrier_try(ring_.empty(stage), at_ / STAGE_COUNT ^ 1)) {}
      if (lane_ == 0) barrier_expect(full, bytes);
      __syncwarp();
      if (loads) {
        bulk_load_shared(to + lane_ * WARP_BYTES, weights, second != nullptr ? 1024 : WARP_BYTES, full);
        if (second != nullptr) bulk_load_shared(to + lane_ * WARP_BYTES + 1024, second, 1024, full);
      }
      // Weights of a last chunk that only makes the number even are zero: any activations will do.
      if (loads_rows) bulk_load_shared(to + WEIGHT_BYTES, chunk < filled ? from + chunk * stride : from, rows * CHUNK_BYTES, full);
      at_ = (at_ + 1) % (2 * STAGE_COUNT);
    }
  }

  Ring ring_;
  int lane_, at_ = 0;
};

}  // namespace mpk::tiles
