// The persistent kernel: every block walks through its instructions, once a step, until the step says done.
#pragma once
#include "mpk/block.cuh"
#include "mpk/plan.hpp"
#include "mpk/prompts.cuh"

namespace mpk {

__device__ __forceinline__ Context make_context(const Launch& l) {
  Context c{};
  c.weights = address<const unsigned char>(l.weights);
  c.params = address<const unsigned char>(l.params);
  c.arena = address<unsigned char>(l.arena);
  c.kv = address<unsigned char>(l.kv);
  c.step = address<Step>(l.step);
  c.segments = address<Segment>(l.segments);
  c.row_token = address<int32_t>(l.row_token);
  c.row_slot = address<int32_t>(l.row_slot);
  c.row_position = address<int32_t>(l.row_position);
  c.logit_row = address<int32_t>(l.logit_row);
  c.sequences = address<Sequence>(l.sequences);
  c.tokens = address<int32_t>(l.tokens);
  c.page_table = address<int32_t>(l.page_table);
  c.free_pages = address<int32_t>(l.free_pages);
  c.free_page_count = address<int32_t>(l.free_page_count);
  c.chosen_logprob = address<float>(l.chosen_logprob);
  c.top_logprob = address<float>(l.top_logprob);
  c.top_token = address<int32_t>(l.top_token);
  c.logits_out = address<float>(l.logits_out);
  c.logits_out_positions = l.logits_out_positions;
  c.flagged_stride = l.flagged_stride;
  c.token_ns = address<int64_t>(l.token_ns);
  c.cancel = address<const int32_t>(l.cancel);
  c.max_batch = l.max_batch;
  c.max_rows = l.max_rows;
  c.max_context = l.max_context;
  c.max_pages = l.max_pages;
  c.num_pages = l.num_pages;
  c.rank = l.rank;
  c.ranks = l.ranks;
  c.peers = address<const uint64_t>(l.peers);
  c.flag_base = l.flag_base;
  return c;
}

__device__ __forceinline__ Context make_context(const Arguments& a) {
  Context c = make_context(a.launch);
  c.peers = a.kernel.peers;
  c.places = address<const int64_t>(a.kernel.places);
  c.prompt_step = address<Step>(a.kernel.prompt_step);
  c.prompt_rows = a.kernel.prompt_rows, c.prompt_room = a.kernel.prompt_room, c.prompt_least = a.kernel.prompt_least;
  return c;
}

// Publishes what all threads of the block wrote before the last barrier.
__device__ __forceinline__ void signal_all(const Arguments& a, const Record& r) {
  const Instruction& in = r.instruction;
  if (in.signal_count == 0) return;
  fence_release();
  for (int s = 0; s < in.signal_count; ++s) {
    const Signal signal = s < INLINE_EVENTS ? r.signals[s] : address<const Signal>(a.launch.signals)[in.signal_begin + s];
    add_relaxed(counter(a.kernel, signal.event), signal.amount);
  }
}

// Copies the step that was just planned into shared memory. Every thread loads at most one word, all at the same time.
__device__ __forceinline__ void read_step(const Context& c, int thread, StepView& out) {
  constexpr int WORDS = sizeof(Segment) / 4 * MAX_ROWS, AT_SEGMENTS = 4 * MAX_ROWS, AT_STEP = AT_SEGMENTS + WORDS;
  static_assert(AT_STEP + 4 <= THREADS, "a thread for every word");
  const int rows = c.max_rows < MAX_ROWS ? c.max_rows : MAX_ROWS;
  if (thread < AT_SEGMENTS) {
    const int array = thread / MAX_ROWS, row = thread % MAX_ROWS;
    const int32_t* from = array == 0 ? c.row_token : array == 1 ? c.row_slot : array == 2 ? c.row_position : c.logit_row;
    int32_t* to = array == 0 ? out.row_token : array == 1 ? out.row_slot : array == 2 ? out.row_position : out.logit_row;
    if (row < rows) to[row] = load_int(from + row);
  } else if (thread < AT_STEP) {
    const int word = thread - AT_SEGMENTS;
    if (word < rows * int(sizeof(Segment) / 4)) reinterpret_cast<int32_t*>(out.segments)[word] = load_int(reinterpret_cast<const int32_t*>(c.segments) + word);
  } else if (thread == AT_STEP) {
    out.previous_rows = out.rows;
    out.rows = load_int(&c.step->rows);
  } else if (thread == AT_STEP + 1) {
    out.logit_rows = load_int(&c.step->logit_rows);
  } else if (thread == AT_STEP + 2) {
    out.segment_count = load_int(&c.step->segments);
  } else if (thread == AT_STEP + 3) {
    out.number = load_long(&c.step->number);
  }
}

// Records a span of this block, if it is traced. Thread 0 only.
__device__ __forceinline__ void trace(const Launch& l, int task, int phase, int64_t begin, int64_t end) {
  BlockMemory& m = block_memory();
  const int used = m.spans_used;
  if (l.spans == 0 || used >= l.span_capacity) return;
  address<Span>(l.spans)[blockIdx.x * l.span_capacity + used] = Span{task, phase, begin, end};
  m.spans_used = used + 1;
}
__device__ __forceinline__ int64_t trace_time(const Launch& l) { return l.spans != 0 ? now_ns() : 0; }

// Shows the host tokens as they come: one word each, so that it needs no fence to be seen whole.
__device__ __forceinline__ void mirror_tokens(const Context& c, const Kernel& k, int thread) {
  if (k.mirror == 0 || thread >= c.max_batch) return;
  const Sequence* s = c.sequences + thread;
  const int length = load_int(&s->length);
  if (load_int(&s->active) == 0 || length <= load_int(&s->prompt_length)) return;
  const int64_t place = int64_t(thread) * c.max_context + length - 1;
  asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(address<int64_t>(k.mirror) + place), "l"(int64_t(load_int(c.tokens + place)) + 1) : "memory");
}

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

// Prepares the next step; false: there is none, or the program stops.
__device__ __forceinline__ bool begin_step(const Arguments& a, const Context& c, Block& b) {
  BlockMemory& m = block_memory();
  const int task = m.records[b.place].instruction.task;
  const int64_t step = b.sequence == 0 ? 1 : m.step.number + 1;
  ++b.sequence;
  if (b.thread == 0) {
    m.arrived_ns = trace_time(a.launch);
    if (!await_event(a, m.waits, STEP_EVENT, step, task, step)) b.leave();
  }
  b.sync();
  if (leaving(b)) return false;
  const int done = load_int(&c.step->done);  // the same for all threads: nobody plans again before this block has run its tasks
  read_step(c, b.thread, m.step);
  b.sync();
  if (b.thread == 0) trace(a.launch, task, 1, m.arrived_ns, trace_time(a.launch));
  return done == 0;
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
  if (ring_control().stop == STOP_STARVED) b.give_up(STALL_WEIGHTS);
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
  b.thread = own_thread(), b.warp = b.thread / 32, b.lane = b.thread % 32;  // anew, so that nothing is kept that follows from them
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

// All prompt steps; false: the program stops. `Dispatch` runs the tasks of the prompt graph.
template <class Dispatch>
__device__ __forceinline__ bool read_prompts(const Arguments& a, const Context& c, Dispatch dispatch) {
  BlockMemory& m = block_memory();
  Block b = make_block(a);  // its own: what changes here is not kept in registers afterwards
  const Kernel& k = a.kernel;
  const auto* stream_begin = address<const int32_t>(k.prompt_stream_begin);
  const Record* first = address<const Record>(k.prompt_records) + stream_begin[b.sm];
  const int count = stream_begin[b.sm + 1] - stream_begin[b.sm];
  if (b.sm == k.prompt_planner) {
    prompts::plan(c, b, true);
    b.sync();
    if (b.thread == 0) fence_release(), add_relaxed(counter(k, k.prompt_event), 1);
  }
  const bool fetches = b.warp == 1;
  for (int64_t number = 1; count > 0; ++number) {  // nothing orders the end of a step behind a block without tasks, so it may not read it
    ++b.sequence;
    if (b.thread == 0 && !await_event(a, m.waits, k.prompt_event, number, k.prompt_task, number)) b.leave();
    b.sync();
    if (leaving(b)) return false;
    if (fetches) fetch_record(&m.records[0], first, b.lane);
    if (!read_prompt_step(c, b.thread, m.step)) break;
    for (int i = 0; i < count; ++i) {
      b.place = i % 2;
      if (fetches) await_records();
      b.sync();
      if (fetches && i + 1 < count) fetch_record(&m.records[1 - b.place], first + i + 1, b.lane);
      if (!run_prompt_instruction(a, c, b, m.records[b.place], dispatch)) return false;
    }
  }
  if (b.thread == 0) {
    if (b.sm == k.prompt_planner) fence_release(), add_relaxed(counter(k, k.prompt_over), 1);
    if (count == 0 && !await_event(a, m.waits, k.prompt_over, 1, k.prompt_task, 0)) b.leave();
  }
  if (fetches) await_records();
  fence_async();  // the ring of weights comes where tasks have had their memory
  b.sync();
  return !leaving(b);
}

// The 256 consumer threads. `Dispatch` is a functor (context, instruction, block) that runs one task; its PUBLISHES is the opcode after
// which tokens are shown to the host.
//
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
  if (b.thread == 0) {
    m.step.rows = 0;  // of the step before the first one
    ring_control().started = 0, ring_control().open = 1;
    b.tiles.control->stop = 1;
  }
  left = left || m.count == 0;
  if (b.thread == 0 && b.sm == a.kernel.planner && !left) {
    plan_step(c);
    fence_release();
    add_relaxed(counter(a.kernel, STEP_EVENT), 1);
  }
  const bool fetches = b.warp == 1;
  if (fetches) fetch_record(&m.records[0], record_at(m, 0), b.lane), fetch_record(&m.records[1], record_at(m, 1), b.lane), await_records();
  b.sync();
  while (!left && begin_step(a, c, b)) {
#pragma unroll 1
    for (int i = 0; i < m.count; ++i) {
      const Record& record = m.records[b.place];
      ++b.sequence;
      if (fetches) await_records(), fetch_record(&m.records[(b.place + 2) % RECORDS], record_at(m, i + 2), b.lane);
      if (b.thread == 0) begin_task(a, b);
      if (record.apart) b.sync();
      dispatch(c, record.instruction, b);
      const int64_t ended = b.thread == 0 ? trace_time(a.launch) : 0;
      if (record.instruction.signal_count != 0) {
        b.sync();
        left = leaving(b);
        if (left) break;
        if (b.thread == 0) signal_all(a, record);
        if (record.instruction.opcode == Dispatch::PUBLISHES) mirror_tokens(c, a.kernel, b.thread);
      }
      if (b.thread == 0 && a.launch.spans != 0) end_task(a, record, ended);
      b.place = (b.place + 1) % RECORDS;
    }
  }
  if (b.thread == 0) {
    if (m.waits.gave_up) report(a, m.waits);
    if (a.launch.spans != 0) address<int64_t>(a.launch.span_count)[b.sm] = m.spans_used;
    if (ring_control().stop == 0) ring_control().stop = STOP_DONE;
  }
}

template <class Dispatch, class PromptDispatch = NoPrompts>
__device__ __forceinline__ void run_program(const Arguments& a, Dispatch dispatch, PromptDispatch prompt_dispatch = {}) {
  const int thread = int(threadIdx.x), block = int(blockIdx.x);
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full_barrier(s), 1);
      barrier_init(empty_barrier(s), WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    tile_ring().prepare();
    ring_control().shut = 1, ring_control().stop = 0, ring_control().started = 0, ring_control().open = 0;
    const auto* stream_begin = address<const int32_t>(a.launch.stream_begin);
    block_memory().step.rows = 0;  // of the step before the first one
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
    Loader loader(a.kernel);
    loader.work(address<const unsigned char>(a.launch.weights), loads + load_begin[block], loads + load_begin[block + 1], count);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  consume(a, dispatch, prompt_dispatch);
}

}  // namespace mpk
