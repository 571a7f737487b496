// What mpk/tile_ring.cuh of the CUDA back end offers, in emulation: consumers that wait for a stage fetch it together.
#pragma once
#include "mpk/ptx.cuh"
#include "mpk/tiles.cuh"
#include "mpk/wgmma.cuh"

namespace mpk::tiles {

struct Control {
  Job job;
  int stop;
};

struct Ring {
  Control* control;
  uint32_t stages;
  void prepare() const {}
  void post(const Job& job) const { control->job = job; }
  void announce() const {}
};

struct Reader {
  Ring ring;
  int at;
  int chunk = 0;  // over all tiles
  uint32_t wait() {
    const int stage = chunk % STAGE_COUNT;
    emulation::block_meeting.attend(emulation::THREADS);
    if (emulation::thread == 0) fetch(ring.stages + stage * STAGE);
    emulation::block_meeting.attend(emulation::THREADS);
    return ring.stages + stage * STAGE;
  }
  void advance() { ++chunk; }
  void release(int, int) const {}

 private:
  void fetch(uint32_t to) const {
    const Job& j = ring.control->job;
    const int tile = j.first + chunk / j.chunks * j.step, k = chunk % j.chunks, row = j.row(tile), rows = min(j.width, round_up(j.rows - row, 8));
    unsigned char* stage = emulation::shared_memory + to;
    std::memset(stage, 0x7f, STAGE);  // large numbers: what is not fetched is not used
    const int run_bytes = RUN_BYTES * j.tile_rows;
    for (int p = 0; p < j.packed_a_tile(); ++p)
      for (int half = 0; half < 2; ++half) {
        const int packed = j.weight_tile(tile) * j.packed_a_tile() + p, of_warp = j.stages * j.parts, run = 2 * k + half, rest = run % of_warp;
        if (packed >= j.packed_tiles) continue;
        const int64_t at = j.place[int64_t(packed) * j.stages + rest / j.parts] + (run / of_warp * j.parts + rest % j.parts) * run_bytes;
        std::memcpy(stage + (2 * p + half) * run_bytes, j.weights + at, run_bytes);
      }
    std::memcpy(stage + WEIGHT_BYTES, j.activations + (int64_t(k < j.filled ? k : 0) * j.room + row) * CHUNK_BYTES, rows * CHUNK_BYTES);
  }
};

}  // namespace mpk::tiles
