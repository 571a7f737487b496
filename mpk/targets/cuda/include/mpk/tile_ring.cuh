// The ring of stages through which one warp of a block feeds tiles to the consumers.
#pragma once
#include <cstddef>

#include "mpk/ptx.cuh"
#include "mpk/tiles.cuh"
#include "mpk/wgmma.cuh"

namespace mpk::tiles {

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
