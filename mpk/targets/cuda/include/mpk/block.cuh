// What every task body of the CUDA back end sees: the shared structures, the memory of the program, and its block.
//
// One block runs on every SM and stays. 256 consumer threads (8 warps) execute the block's instructions together, one warp more
// streams packed weights through a ring in shared memory. A kind's body is
//   template <class V> __device__ void run(const Context&, const Instruction&, Block&);
// and is called by all 256 consumer threads. The framework waits for the instruction's events before, so that data written
// by other SMs may be read (with load_* of ptx.cuh), and orders and signals everything that the threads wrote after it returns. A kind
// with `constexpr bool waits_inside = true` is called before and calls Block::wait itself, once, on every path: until then it may read
// what does not change during a step. What stands in flagged buffers (flagged.cuh) is waited for word by word instead, and a body says
// with Block::arrived when all of it is there.
//
// Between two instructions all threads meet, unless both are of a kind that says that its warps need not (`overlaps` of mpk/tasks/base.py).
#pragma once
#include "mpk/context.hpp"
#include "mpk/events.cuh"
#include "mpk/ptx.cuh"
#include "mpk/ring.cuh"
#include "mpk/tile_ring.cuh"

namespace mpk {

constexpr int THREADS = WARPS * 32;          // consumer threads, what `run` is called by
constexpr int BLOCK_THREADS = THREADS + 128;  // and the loader's warp, in a warp group of its own
// Registers move from the loader's warp group to the consumers': 3 * 128 * 168 are 128 * 56 + 256 * 224.
constexpr int CONSUMER_REGISTERS = 224, LOADER_REGISTERS = 56;
constexpr int SCRATCH_BYTES = 64 * 1024;
constexpr int MAX_ROWS = 16;  // of a step
constexpr int CONSUMER_BARRIER = 1;  // id of the named barrier of the consumers; 0 is the whole block's

// What the step computes, in shared memory: made once a step from the messages of `advance` (step.cuh).
struct StepView {
  int rows, logit_rows, segment_count;
  int previous_rows;  // of the step before, 0 in the first one of a launch
  int64_t number;  // from 1
  unsigned drawn_rows, special_rows;  // rows of logits: whose token is drawn; that want more than a draw from all tokens (sampling.cuh)
  int32_t row_token[MAX_ROWS], row_slot[MAX_ROWS], row_position[MAX_ROWS], logit_row[MAX_ROWS];
  Segment segments[MAX_ROWS];
};

constexpr int RECORDS = 4;  // instructions of a block in shared memory: the one before (of slower warps), the present one, the next two

// Shared memory of a block before the ring.
struct alignas(128) BlockMemory {
  Record records[RECORDS];
  StepView step;
  volatile int leave_after;  // sequence number of the instruction after which all threads leave; 0: go on
  // What the loop over instructions needs between tasks: kept here rather than in registers, of which tasks need all there are.
  volatile int count, spans_used;          // instructions of this block in a step; spans recorded
  const Record* volatile first;            // of them
  WaitState waits;
  volatile int64_t arrived_ns, started_ns; // of the present instruction, if traced
  volatile int prompt_count, prompt_place;  // prompt steps: instructions of this block in one; which is the present one
  const Record* volatile prompt_first;      // of them
  volatile int64_t prompt_number;           // of the step, from 1
};
static_assert(BLOCK_MEMORY_OFFSET + sizeof(BlockMemory) <= RING_OFFSET, "what the host allows for it");
constexpr int SCRATCH_OFFSET = RING_END;
__device__ __forceinline__ BlockMemory& block_memory() { return *reinterpret_cast<BlockMemory*>(block_shared + BLOCK_MEMORY_OFFSET); }

// In prompt steps tasks have the ring and the scratch memory behind it as one piece.
constexpr int POOL_BYTES = STAGES * STAGE_BYTES + SCRATCH_BYTES;
static_assert(TILES_OFFSET + sizeof(tiles::Control) <= BLOCK_MEMORY_OFFSET, "control fits");

struct Block {
  const StepView* step;     // in shared memory, complete and constant while a task runs
  int thread, warp, lane;   // among the consumers
  unsigned char* scratch;   // shared memory, SCRATCH_BYTES, 128-byte aligned; free for the task, undefined at its start
  WeightRing ring;          // packed weights of the instruction, for kinds whose weights are streamed
  unsigned char* pool;      // prompt steps: shared memory, POOL_BYTES, 1024-byte aligned; undefined at a task's start
  tiles::Ring tiles;        // prompt steps: tiles of products, in the pool

  // ---- the framework's part
  const Arguments* arguments;  // null: nothing to wait for
  int place;                   // of the present instruction among the records
  int sequence;                // instructions begun; steps count as one
  int round;                   // times that sums of warps met; its parity says where they stand (linear)

  // Waits until the instruction's events have come; costs next to nothing if there are none. All 256 threads. If the program is being
  // stopped it returns all the same: what is computed from then on is thrown away.
  __device__ __forceinline__ void wait() { wait_from(0); }
  // Waits for the last of them only.
  __device__ __forceinline__ void wait_last() { wait_from(arguments == nullptr ? 0 : block_memory().records[place].instruction.wait_count - 1); }
  __device__ __forceinline__ void wait_from(int first) {
    wait_events(first);
    arrived();
  }
  // Without a word about inputs having come, for bodies that wait for data and say so themselves.
  __device__ __forceinline__ void wait_events(int first = 0) {
    if (arguments == nullptr) return;
    const Record& record = block_memory().records[place];
    if (record.instruction.wait_count != 0) {
      if (thread == 0 && !await_all(*arguments, block_memory().waits, record, first, step->number)) leave();
      sync();
    }
  }
  // Marks the moment at which the inputs are there (the last call counts). Any thread may call it, the first one's counts.
  __device__ __forceinline__ void arrived() const {
    if (arguments == nullptr || thread != 0) return;
    ring_control().started = sequence;
    if (arguments->launch.spans != 0) block_memory().started_ns = now_ns();
  }
  // Whether to poll once more for what has not come: data of this step, or the next step's plan. `polls` counts from 0. Any thread.
  __device__ __forceinline__ bool may_poll(uint32_t& polls, bool next_step = false) const {
    constexpr uint32_t PATIENCE = 1024;  // polls between looks at the clock
    if (arguments == nullptr) return true;
    if (ring_control().stop) return false;
    if (++polls % PATIENCE != 0 || !gives_up(*arguments, block_memory().waits, polls == PATIENCE)) return true;
    next_step ? give_up(STEP_EVENT, step->number + 1) : give_up(STALL_DATA, step->number);
    return false;
  }
  // The same for a part of a message from rank `source`.
  __device__ __forceinline__ bool may_poll_rank(uint32_t& polls, int source, uint32_t expected, uint32_t seen) const {
    constexpr uint32_t PATIENCE = 1024;
    if (arguments == nullptr) return true;
    if (ring_control().stop) return false;
    if (++polls % PATIENCE != 0 || !gives_up(*arguments, block_memory().waits, polls == PATIENCE)) return true;
    give_up(STALL_DATA, step->number, 1 + source, expected, seen);
    return false;
  }
  // Leaves after this instruction, having waited in vain for `event` (or STALL_*), for the rank `peer` - 1 if that is not 0. Any thread.
  __device__ __forceinline__ void give_up(int event, int64_t in_step, int peer = 0, int64_t expected = 0, int64_t seen = 0) const {
    BlockMemory& m = block_memory();
    if (peer == 0) expected = in_step, seen = in_step - 1;
    if (leave()) m.waits.stall = Stall{0, m.records[place].instruction.task, event, peer, expected, seen, in_step}, m.waits.gave_up = 1;
  }
  // Whether some thread of this block said so; the same in all threads after a barrier.
  __device__ __forceinline__ bool stopping() const { return arguments != nullptr && block_memory().leave_after != 0; }
  // Leaves at the next moment at which threads meet after an instruction, and waits for nothing until then; whether this thread is the
  // first one to say so.
  __device__ __forceinline__ bool leave() const {
    ring_control().stop = STOP_STALLED;
    return atomicCAS(const_cast<int*>(&block_memory().leave_after), 0, sequence) == 0;
  }
  // Barrier of the 256 consumer threads; orders their accesses to shared memory.
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, %1;" ::"n"(CONSUMER_BARRIER), "n"(THREADS) : "memory"); }
  // Of the 4 warps of this thread's warp group.
  __device__ __forceinline__ void sync_group() const { asm volatile("bar.sync %0, 128;" ::"r"(CONSUMER_BARRIER + 1 + warp / 4) : "memory"); }
};

// Which thread this is, asked of the hardware anew for every task: what follows from it (addresses of fragments, above all) would otherwise
// be computed once, ahead of the loop over all tasks, and kept in some 50 registers that the tasks do not have.
__device__ __forceinline__ void find_thread(Block& b) { b.thread = own_thread(), b.warp = b.thread / 32, b.lane = b.thread % 32; }

__device__ __forceinline__ tiles::Ring tile_ring() {
  return {reinterpret_cast<tiles::Control*>(block_shared + TILES_OFFSET), shared_address(block_shared + RING_OFFSET)};
}

// What the threads behind the consumers do for tiles: their second warp stays to load them until told to stop.
__device__ __forceinline__ void serve_tiles(const tiles::Ring& ring, int thread) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
  if (thread / 32 == WARPS + 1) tiles::Loader(ring, thread % 32).work();
}
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS)); }

__device__ __forceinline__ Block make_block(const Arguments& a) {
  Block b{};
  b.step = &block_memory().step;
  b.thread = int(threadIdx.x), b.warp = b.thread / 32, b.lane = b.thread % 32;
  b.scratch = block_shared + SCRATCH_OFFSET;
  b.pool = block_shared + RING_OFFSET;
  b.tiles = tile_ring();
  b.arguments = &a;
  return b;
}

}  // namespace mpk
