// The persistent kernel: every block walks through its instructions, once a step, until the step says done.
#pragma once
#include "mpk/block.cuh"
#include "mpk/prompts.cuh"
#include "mpk/step.cuh"

namespace mpk {

__device__ __forceinline__ Context make_context(const Arguments& a) {
  Context c = make_context(a.launch);
  c.peers = a.kernel.peers;
  c.messages = address<void>(a.kernel.messages), c.mirror = address<int64_t>(a.kernel.mirror);
  c.places = address<const int64_t>(a.kernel.places);
  c.prompt_step = address<Step>(a.kernel.prompt_step);
  c.attention_bytes = a.kernel.attention_bytes;
  c.prompt_rows = a.kernel.prompt_rows, c.prompt_room = a.kernel.prompt_room, c.prompt_least = a.kernel.prompt_least;
  return c;
}

// Publishes what all threads of the block wrote before the last barrier.
__device__ __forceinline__ void signal_all(const Arguments& a, const Record& r) {
  const Instruction& in = r.instruction;
  fence_release();
  for (int s = 0; s < in.signal_count; ++s) {
    const Signal signal = s < INLINE_EVENTS ? r.signals[s] : address<const Signal>(a.launch.signals)[in.signal_begin + s];
    add_relaxed(counter(a.kernel, signal.event), signal.amount);
  }
}

// Records a span of this block, if it is traced. Thread 0 only.
__device__ __forceinline__ void trace(const Launch& l, int task, int phase, int64_t begin, int64_t end) {
  BlockMemory& m = block_memory();
  const int used = m.spans_used;
  if (l.spans == 0 || used >= l.span_capacity) return;
  address<Span>(l.spans)[int64_t(own_block()) * l.span_capacity + used] = Span{task, phase, begin, end};
  m.spans_used = used + 1;
}
__device__ __forceinline__ int64_t trace_time(const Launch& l) { return l.spans != 0 ? now_ns() : 0; }

__device__ __forceinline__ void fetch_record(Record* to, const Record* from, int thread) {
  static_assert(sizeof(Record) % 16 == 0 && sizeof(Record) / 16 <= 32, "one warp fetches a record");
  if (thread < int(sizeof(Record) / 16))
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + thread * 16), "l"(reinterpret_cast<const char*>(from) + thread * 16)
                 : "memory");
}
__device__ __forceinline__ void await_records() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same for all threads after a barrier, though thread 0 may be in the next instruction already.
__device__ __forceinline__ bool leaving(const Block& b) {
  const int after = block_memory().leave_after;
  return after != 0 && after <= b.sequence;
}

// Waits for the plan of the next step; false: there is none, or the program stops.
__device__ __forceinline__ bool begin_step(const Arguments& a, const Context& c, Block& b) {
  BlockMemory& m = block_memory();
  ++b.sequence;
  b.sync();  // all threads are done with the step before
  if (leaving(b)) return false;
  if (b.warp == 0) {
    if (b.lane == 0) m.arrived_ns = trace_time(a.launch);
    const int64_t number = m.step.number + 1;
    const int before = m.step.rows;
    __syncwarp();  // before the first lane changes them
    bool goes_on = true;
    for (uint32_t polls = 0; goes_on && !read_step(static_cast<const uint4*>(c.messages), number, b.lane, m.step);) goes_on = __all_sync(ALL_LANES, b.lane != 0 || b.may_poll(polls, true));
    if (b.lane == 0) {
      m.step.number = number, m.step.previous_rows = before, ring_control().spare = m.step.rows == 1;
      trace(a.launch, m.records[b.place].instruction.task, 1, m.arrived_ns, trace_time(a.launch));
    }
  }
  b.sync();
  return !leaving(b) && m.step.rows != 0;
}

// Step 0: no rows, nothing to close.
__device__ __forceinline__ void begin_nothing(StepView& step) {
  step.number = step.rows = step.logit_rows = step.segment_count = step.previous_rows = 0, step.drawn_rows = step.special_rows = 0;
}

// Where a block's instruction number `i` of a step, or of those after it, stands.
__device__ __forceinline__ const Record* record_at(const BlockMemory& m, int i) {
  while (i >= m.count) i -= m.count;
  return m.first + i;
}

// Notes when a task began; a block whose weights do not come leaves. Thread 0 only.
__device__ __forceinline__ void begin_task(const Arguments& a, Block& b) {
  BlockMemory& m = block_memory();
  if (a.launch.spans != 0) m.arrived_ns = m.started_ns = now_ns();
  if (ring_control().stop == STOP_STARVED) b.give_up(STALL_WEIGHTS, m.step.number);
}
__device__ __forceinline__ void end_task(const Arguments& a, const Record& record, int64_t ended) {
  BlockMemory& m = block_memory();
  if (m.started_ns != m.arrived_ns) trace(a.launch, record.instruction.task, 1, m.arrived_ns, m.started_ns);
  trace(a.launch, record.instruction.task, 0, m.started_ns, ended);
}

// Of programs without a graph that reads prompts. (READS: whether there is one.)
struct NoPrompts {
  static constexpr bool READS = false;
  __device__ __forceinline__ void operator()(const Context&, const Instruction&, Block&) const {}
};

// What the present prompt step computes, into shared memory; false: there is none.
__device__ __forceinline__ bool read_prompt_step(const Context& c, int thread, StepView& out) {
  constexpr int WORDS = sizeof(Segment) / 4;
  const int rows = load_int(&c.prompt_step->rows), segments = load_int(&c.prompt_step->segments);
  if (rows == 0) return false;
  if (thread < segments * WORDS) reinterpret_cast<int32_t*>(out.segments)[thread] = load_int(reinterpret_cast<const int32_t*>(c.segments) + thread);
  if (thread == THREADS - 1) {
    out.rows = rows, out.segment_count = segments;
    out.logit_rows = load_int(&c.prompt_step->logit_rows), out.number = load_long(&c.prompt_step->number);
  }
  return true;
}

// One instruction of a prompt step; false: the program stops.
template <class Dispatch>
__device__ __forceinline__ bool run_prompt_instruction(const Arguments& a, const Context& c, Block& b, const Record& record, Dispatch dispatch) {
  ++b.sequence;
  find_thread(b);
  if (b.thread == 0) begin_task(a, b);
  const bool only_logits = record.instruction.iargs[1] != 0;  // of all positions: nothing else needs the results
  if (only_logits && b.step->logit_rows == 0)
    b.wait();
  else
    dispatch(c, record.instruction, b);
  const int64_t ended = b.thread == 0 ? trace_time(a.launch) : 0;
  fence_async();  // bulk copies read what was written, and overwrite shared memory that was used
  b.sync();
  if (leaving(b)) return false;
  if (b.thread == 0) {
    signal_all(a, record);
    if (a.launch.spans != 0) end_task(a, record, ended);
  }
  return true;
}

// All prompt steps; false: the program stops. `Dispatch` runs the tasks of the prompt graph. What the loops need between tasks stands in shared
// memory, or is asked for again: tasks of prompts need all registers there are. (Thread 0 writes it where the others have met and not gone on.)
template <class Dispatch>
__device__ __forceinline__ bool read_prompts(const Arguments& a, const Context& c, Dispatch dispatch) {
  BlockMemory& m = block_memory();
  const Kernel& k = a.kernel;
  Block b = make_block(a);  // its own: what changes here is not kept in registers afterwards
  if (b.thread == 0) {
    const auto* stream_begin = address<const int32_t>(k.prompt_stream_begin);
    const int block = own_block(), begin = stream_begin[block];
    m.prompt_first = address<const Record>(k.prompt_records) + begin, m.prompt_count = stream_begin[block + 1] - begin;
    m.prompt_number = 1;
  }
  b.sync();
  if (own_block() == k.prompt_planner) {
    prompts::plan(c, b, true);
    b.sync();
    if (b.thread == 0) fence_release(), add_relaxed(counter(k, k.prompt_event), 1);
  }
  while (m.prompt_count > 0) {  // nothing orders the end of a step behind a block without tasks, so it may not read it
    find_thread(b);
    ++b.sequence;
    if (b.thread == 0) {
      const int64_t number = m.prompt_number;
      m.prompt_number = number + 1;
      if (!await_event(a, m.waits, k.prompt_event, number, k.prompt_task, number)) b.leave();
    }
    b.sync();  // and all have seen that the step before is over
    if (leaving(b)) return false;
    if (b.thread == 0) m.prompt_place = -1;
    if (b.warp == 1) fetch_record(&m.records[0], m.prompt_first, b.lane);
    if (!read_prompt_step(c, b.thread, m.step)) break;
    for (;;) {
      find_thread(b);
      if (b.thread == 0) m.prompt_place = m.prompt_place + 1;  // others read it after this barrier, and not after the one behind the task
      if (b.warp == 1) await_records();
      b.sync();
      const int i = m.prompt_place;
      if (i == m.prompt_count) break;
      b.place = i % 2;
      if (b.warp == 1 && i + 1 < m.prompt_count) fetch_record(&m.records[1 - b.place], m.prompt_first + i + 1, b.lane);
      if (!run_prompt_instruction(a, c, b, m.records[b.place], dispatch)) return false;
    }
  }
  find_thread(b);
  if (b.thread == 0) {
    if (own_block() == k.prompt_planner) fence_release(), add_relaxed(counter(k, k.prompt_over), 1);
    if (m.prompt_count == 0 && !await_event(a, m.waits, k.prompt_over, 1, k.prompt_task, 0)) b.leave();
  }
  if (b.warp == 1) await_records();
  fence_async();  // the ring of weights comes where tasks have had their memory
  b.sync();
  return !leaving(b);
}

// The 256 consumer threads. `Dispatch` is a functor (context, instruction, block) that runs one task.
//
// The program begins with a step 0 of nothing but the planner's last instruction, `advance`, which has nothing to close and plans step 1.
// Warps meet before an instruction only where its record says so, and after it only if something is to be signalled. Records are
// fetched two ahead by one warp: the one of the next instruction has come when the present one begins, and every body has all warps
// meet at least once.
template <class Dispatch, class PromptDispatch>
__device__ __forceinline__ void consume(const Arguments& a, Dispatch dispatch, PromptDispatch prompt_dispatch) {
  BlockMemory& m = block_memory();
  const Context c = make_context(a);
  bool left = false;
  if constexpr (PromptDispatch::READS) left = !read_prompts(a, c, prompt_dispatch);
  Block b = make_block(a);
  const bool plans = own_block() == a.kernel.planner, fetches = b.warp == 1;
  if (b.thread == 0) {
    begin_nothing(m.step);
    ring_control().started = 0;
    b.tiles.control->stop = 1;
  }
  if (MPK_CHECKED || b.thread == 0) barrier_arrive(open_barrier());
  left = left || m.count == 0;
  int i = plans ? m.count - 1 : m.count;
  b.sequence = plans ? -1 : 0;
  if (fetches && !left) fetch_record(&m.records[0], record_at(m, i), b.lane), fetch_record(&m.records[1], record_at(m, i + 1), b.lane), await_records();
  b.sync();
  if (!left) do {
#pragma unroll 1
    for (; i < m.count; ++i) {
      const Record& record = m.records[b.place];
      ++b.sequence;
      if (fetches) await_records(), fetch_record(&m.records[(b.place + 2) % RECORDS], record_at(m, i + 2), b.lane);
      if (b.thread == 0) begin_task(a, b);
      find_thread(b);
      if (record.apart) b.sync();
      dispatch(c, record.instruction, b);
      const int64_t ended = b.thread == 0 ? trace_time(a.launch) : 0;
      if (record.instruction.signal_count != 0) {
        b.sync();
        left = leaving(b);
        if (left) break;
        if (b.thread == 0) signal_all(a, record);
      }
      if (b.thread == 0 && a.launch.spans != 0) end_task(a, record, ended);
      b.place = (b.place + 1) % RECORDS;
    }
    i = 0;
  } while (!left && begin_step(a, c, b));
  if (b.thread == 0) {
    if (m.waits.gave_up) report(a, m.waits);
    if (a.launch.spans != 0) address<int64_t>(a.launch.span_count)[own_block()] = m.spans_used;
    if (ring_control().stop == 0) ring_control().stop = STOP_DONE;
  }
}

template <class Dispatch, class PromptDispatch = NoPrompts>
__device__ __forceinline__ void run_program(const Arguments& a, Dispatch dispatch, PromptDispatch prompt_dispatch = {}) {
  const int thread = own_thread(), block = own_block();
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full_barrier(s), 1);
      barrier_init(empty_barrier(s), WARPS * WARP_ARRIVALS);
    }
    barrier_init(open_barrier(), OPENERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    tile_ring().prepare();
    ring_control().shut = 1, ring_control().stop = 0, ring_control().started = 0, ring_control().spare = 0;
    const auto* stream_begin = address<const int32_t>(a.launch.stream_begin);
    begin_nothing(block_memory().step);
    block_memory().leave_after = 0, block_memory().spans_used = 0, block_memory().waits.gave_up = 0, block_memory().waits.stall.peer = 0;
    block_memory().count = stream_begin[block + 1] - stream_begin[block];
    block_memory().first = address<const Record>(a.kernel.records) + stream_begin[block];
  }
  __syncthreads();
  const int count = block_memory().count;
  if (count == 0 && !PromptDispatch::READS) return;  // nothing orders the end of a step behind a block without tasks, so it may not read the step
  if (thread >= THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    if constexpr (PromptDispatch::READS)
      if (thread / 32 == WARPS + 1) return tiles::Loader(tile_ring(), thread % 32).work();
    if (thread > THREADS) return;
    const auto* load_begin = address<const int32_t>(a.kernel.load_begin);
    const auto* loads = address<const LoadRun>(a.kernel.loads);
    Loader loader(a.kernel, a.launch.weights, loads + load_begin[block], load_begin[block + 1] - load_begin[block]);
    loader.work(count);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  consume(a, dispatch, prompt_dispatch);
}

}  // namespace mpk
