// Entry points through which tests and benchmarks run one task body on memory of their own; the including source defines kBodies.
#pragma once
#include "mpk/context.hpp"
#include "mpk/simd.hpp"

using TaskBody = void (*)(const mpk::Context&, const mpk::Instruction&, mpk::Worker&);

// In the order in which the test passes them.
struct Memory {
  unsigned char *weights, *params, *arena, *kv;
  mpk::Step* step;
  mpk::Segment* segments;
  int32_t *row_token, *row_slot, *row_position, *logit_row, *page_table;
  unsigned char* scratch;
  int64_t max_rows, max_pages, num_pages;
};

extern const TaskBody kBodies[];

inline mpk::Context context_of(const Memory* m) {
  mpk::Context c{};
  c.weights = m->weights, c.params = m->params, c.arena = m->arena, c.kv = m->kv;
  c.step = m->step, c.segments = m->segments;
  c.row_token = m->row_token, c.row_slot = m->row_slot, c.row_position = m->row_position, c.logit_row = m->logit_row;
  c.page_table = m->page_table;
  c.max_rows = int32_t(m->max_rows), c.max_pages = int32_t(m->max_pages), c.num_pages = int32_t(m->num_pages);
  return c;
}

extern "C" void run_task(int body, const Memory* m, const mpk::Instruction* instruction) {
  mpk::Worker worker{};
  worker.count = 1, worker.scratch = m->scratch;
  kBodies[body](context_of(m), *instruction, worker);
}

// exp() of `n` values, a multiple of the vector width.
extern "C" void run_exp(const float* x, float* out, int n) {
  for (int i = 0; i < n; i += mpk::kLanes) mpk::store(out + i, mpk::exp(mpk::load<mpk::kLanes>(x + i)));
}
