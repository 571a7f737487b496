// A kernel that runs one task body on every block, over and over, with memory of the test's own; `run_body` is generated before it.
#pragma once

// What the test passes, in this order; addresses of device memory.
struct TestLaunch {
  uint64_t weights, params, arena, kv, step, segments, row_token, row_slot, row_position, logit_row, sequences, tokens, page_table;
  uint64_t free_pages, free_page_count, chosen_logprob, top_logprob, top_token, logits_out, token_ns, cancel, messages;
  int64_t logits_out_positions, flagged_stride;
  uint64_t instructions;  // Instruction [blocks]
  uint64_t times;         // int64 [repeats][blocks] nanoseconds, or 0
  uint64_t arrivals;      // uint64, zeroed: the barrier between repetitions
  uint64_t places;        // of kinds of prompt steps
  uint64_t stages;        // int64 [blocks]: in emulation, where each block's stages begin among the weights; 0: where its instruction says
  uint64_t peers;         // uint64 [ranks]: addresses of peer memory
  int32_t max_batch, max_rows, max_context, max_pages, num_pages, opcode, repeats, layers, previous_rows, drawn_rows, special_rows, rank, prompt_room;
  uint32_t flag_base;
};

template <class T>
__device__ T* at(uint64_t address) { return reinterpret_cast<T*>(address); }

__device__ mpk::Context context_of(const TestLaunch& t) {
  mpk::Context c{};
  c.weights = at<unsigned char>(t.weights), c.params = at<unsigned char>(t.params), c.arena = at<unsigned char>(t.arena), c.kv = at<unsigned char>(t.kv);
  c.step = at<mpk::Step>(t.step), c.segments = at<mpk::Segment>(t.segments);
  c.row_token = at<int32_t>(t.row_token), c.row_slot = at<int32_t>(t.row_slot), c.row_position = at<int32_t>(t.row_position);
  c.logit_row = at<int32_t>(t.logit_row), c.sequences = at<mpk::Sequence>(t.sequences), c.tokens = at<int32_t>(t.tokens);
  c.page_table = at<int32_t>(t.page_table), c.free_pages = at<int32_t>(t.free_pages), c.free_page_count = at<int32_t>(t.free_page_count);
  c.chosen_logprob = at<float>(t.chosen_logprob), c.top_logprob = at<float>(t.top_logprob), c.top_token = at<int32_t>(t.top_token);
  c.logits_out = at<float>(t.logits_out), c.logits_out_positions = t.logits_out_positions, c.flagged_stride = t.flagged_stride;
  c.token_ns = at<int64_t>(t.token_ns), c.cancel = at<int32_t>(t.cancel);
  c.places = at<int64_t>(t.places), c.prompt_room = t.prompt_room;
  c.max_batch = t.max_batch, c.max_rows = t.max_rows, c.max_context = t.max_context, c.max_pages = t.max_pages, c.num_pages = t.num_pages;
  c.messages = at<void>(t.messages);
  c.peers = at<const uint64_t>(t.peers), c.rank = t.rank, c.flag_base = t.flag_base;
  return c;
}

__device__ void read_step(const mpk::Context& c, mpk::StepView& v) {
  v.rows = c.step->rows, v.logit_rows = c.step->logit_rows, v.segment_count = c.step->segments, v.number = c.step->number;
  for (int r = 0; r < mpk::MAX_ROWS; ++r)
    v.row_token[r] = c.row_token[r], v.row_slot[r] = c.row_slot[r], v.row_position[r] = c.row_position[r], v.logit_row[r] = c.logit_row[r], v.segments[r] = c.segments[r];
}

#ifdef MPK_PROMPT_KIND
constexpr int TEST_THREADS = mpk::BLOCK_THREADS;  // with the loaders, whose registers go to the others
#else
constexpr int TEST_THREADS = mpk::THREADS;
#endif

#ifndef TEST_LIMIT
#define TEST_LIMIT __launch_bounds__(TEST_THREADS, 1)
#endif
extern "C" __global__ void TEST_LIMIT run_kind(const TestLaunch t) {
  extern __shared__ __align__(128) unsigned char scratch[];
  __shared__ mpk::StepView step;
  const int thread = int(threadIdx.x);
  mpk::Block b{};
#ifdef MPK_PROMPT_KIND
  __shared__ mpk::tiles::Control control;
  b.pool = scratch + (1024 - mpk::shared_address(scratch) % 1024) % 1024;
  b.tiles = {&control, mpk::shared_address(b.pool)};
  if (thread == 0) b.tiles.prepare();
  __syncthreads();
  if (thread >= mpk::THREADS) return mpk::serve_tiles(b.tiles, thread);
  mpk::take_registers();
#endif
  b.thread = thread, b.warp = thread / 32, b.lane = thread % 32, b.scratch = scratch, b.step = &step;
  __shared__ mpk::Context c;
  __shared__ mpk::Instruction i;
  if (thread == 0) c = context_of(t), read_step(c, step), step.previous_rows = t.previous_rows, step.drawn_rows = t.drawn_rows, step.special_rows = t.special_rows;
  for (int r = 0; r < t.repeats; ++r) {
    if (thread == 0) {
      i = at<mpk::Instruction>(t.instructions)[blockIdx.x];
      i.layer += r % t.layers;  // so that repetitions do not find their keys and values in the L2
    }
    if (thread == 0 && t.repeats > 1) {
      mpk::add_release(at<uint64_t>(t.arrivals), 1);
      while (mpk::load_acquire(at<uint64_t>(t.arrivals)) < uint64_t(r + 1) * gridDim.x) {}
    }
    b.sync();
    const int64_t begin = mpk::now_ns();
    if (i.tile_begin < i.tile_end) run_body(t.opcode, c, i, b);
    b.sync();
    if (thread == 0 && t.times != 0) at<int64_t>(t.times)[int64_t(r) * gridDim.x + blockIdx.x] = mpk::now_ns() - begin;
  }
#ifdef MPK_PROMPT_KIND
  if (thread == 0) control.stop = 1;
#endif
}
