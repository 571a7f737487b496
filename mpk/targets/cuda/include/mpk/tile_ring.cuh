// The ring of stages through which one warp of a block feeds tiles to the consumers.
#pragma once
#include <cstddef>

#include "mpk/ptx.cuh"
#include "mpk/ring.cuh"
#include "mpk/tiles.cuh"
#include "mpk/wgmma.cuh"

namespace mpk::tiles {

// In shared memory.
struct Control {
  uint64_t full[STAGE_COUNT], empty[STAGE_COUNT], posted;
  Job job;
  int used;   // stages, modulo 2 * STAGE_COUNT; of thread 0
  int jobs;   // posted so far
  Flag stop;
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
    for (int s = 0; s < STAGE_COUNT; ++s) barrier_init(full(s), 1), barrier_init(empty(s), PACKED_TILES * WARP_ARRIVALS);
    barrier_init(posted(), MPK_CHECKED ? WARPS * 32 : 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    control->used = control->jobs = 0, control->stop = 0;
    ring_control().stop = 0;  // looked at by waits
  }
  // Thread 0 of the consumers: hands in a job. What it has acquired, the loader may read.
  __device__ __forceinline__ void post(Job job) const {
    job.begin = control->used;
    control->job = job;
    control->used = (job.begin + job.tiles() * job.chunks) % (2 * STAGE_COUNT);
    if (!MPK_CHECKED && job.tiles() > 0) barrier_arrive(posted());
  }
  // All consumers, once they have met behind post(). Race detectors do not follow what is ordered by one thread's arrival behind a barrier of the others (the
  // stages were their scratch memory before), so in checked builds every thread arrives.
  __device__ __forceinline__ void announce() const {
    if (MPK_CHECKED && control->job.tiles() > 0) barrier_arrive(posted());
  }
};

// A consumer's place in the ring.
struct Reader {
  Ring ring;
  int at;  // modulo 2 * STAGE_COUNT
  __device__ __forceinline__ int stage() const { return at % STAGE_COUNT; }
  // A stage that does not come at all means a wrong plan: as in ring.cuh, the warp goes on, so that the block leaves at the next barrier.
  __device__ __forceinline__ uint32_t wait() const {
    for (uint32_t i = 0; !barrier_try(ring.full(stage()), at / STAGE_COUNT) && ring_control().stop != STOP_STARVED;)
      if (++i == STARVED_TRIES) ring_control().stop = STOP_STARVED;
    return ring.stage(stage());
  }
  __device__ __forceinline__ void advance() { at = (at + 1) % (2 * STAGE_COUNT); }
  // The warp has read the stage `behind` the present one.
  __device__ __forceinline__ void release(int behind, int lane) const {
    warp_arrive(ring.empty((at - behind) & (STAGE_COUNT - 1)), lane);
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
      for (int left = j.tiles(); left > 0; --left, tile += step)
        if (!load(j, tile)) return;
    }
  }

 private:
  static constexpr int LAST_LANE = 31;  // brings the activations
  // Each warp's columns are a contiguous eighth of the matrix, `parts` runs of 32 in each stage of a tile: chunks go through the stages of the
  // first warp's columns, then of the second's, and so on. Two runs of one stage are one copy, of a lane's own packed tile.
  // false: the consumers have given up on a stage.
  __device__ __forceinline__ bool load(const Job& j, int tile) {
    const int weight_tile = j.weight_tile(tile), row = j.row(tile), rows = min(j.width, round_up(j.rows - row, 8));
    const int packed = j.packed_a_tile(), valid = min(packed, j.packed_tiles - weight_tile * packed);
    const bool loads = lane_ < valid;
    const int bytes = valid * j.chunk_bytes + rows * CHUNK_BYTES;
    const int64_t* place = j.place + int64_t(weight_tile * packed + (loads ? lane_ : 0)) * j.stages;
    const unsigned char* weights = j.weights;  // at the present warp's columns
    const unsigned char* from = j.activations + int64_t(row) * CHUNK_BYTES;
    int in_tile = 0, in_stage = 0;  // stage; bytes used of the warp's part of it. The rest is read from the job each time: the warp has few registers
#pragma unroll 1
    for (int left = j.chunks, filled = j.filled; left > 0; --left) {
      const int stage = at_ % STAGE_COUNT;
      const uint32_t full = ring_.full(stage);
      uint32_t to = ring_.stage(stage) + lane_ * j.chunk_bytes;
      while (!barrier_try(ring_.empty(stage), at_ / STAGE_COUNT ^ 1))
        if (ring_control().stop == STOP_STARVED) return false;
      if (lane_ == 0) barrier_expect(full, bytes);
      __syncwarp();
      if (lane_ == LAST_LANE) bulk_load_shared(ring_.stage(stage) + WEIGHT_BYTES, from, rows * CHUNK_BYTES, full);
#pragma unroll 1
      for (int missing = j.chunk_bytes; missing > 0;) {
        const unsigned char* piece = weights + __ldg(place + in_tile) + in_stage;
        const int bytes = j.copy_bytes;
        in_stage += bytes, missing -= bytes;
        if (in_stage == j.warp_bytes) {
          in_stage = 0;
          if (++in_tile == j.stages) in_tile = 0, weights += j.warp_bytes;
        }
        if (loads) bulk_load_shared(to, piece, bytes, full);  // when all are on their way, the job may be another
        to += bytes;
      }
      // Weights of a last chunk that only makes the number even are zero: any activations will do, here those of the chunk before.
      if (--filled > 0) from += int64_t(j.room) * CHUNK_BYTES;
      at_ = (at_ + 1) % (2 * STAGE_COUNT);
    }
    return true;
  }

  Ring ring_;
  int lane_, at_ = 0;
};

}  // namespace mpk::tiles
