// Starts the workers of one run and waits for them: the body of `mpk_run`.
#pragma once
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "mpk/context.hpp"
#include "mpk/event.hpp"
#include "mpk/plan.hpp"
#include "mpk/worker.hpp"

namespace mpk {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Makes all workers leave, and those of other ranks.
inline void leave(Run& run) {
  run.stop.store(1, std::memory_order_release);
  if (run.launch->group_stop != 0) __atomic_store_n(address<int32_t>(run.launch->group_stop), 1, __ATOMIC_RELEASE);
}

// Memory of a worker is allocated and first touched by the worker itself.
template <bool Traced, class Dispatch>
void run_worker(Run& run, int index, Dispatch dispatch, std::atomic<int>& result) {
  const size_t bytes = (size_t(run.launch->scratch_bytes) + 63) / 64 * 64 + 64;
  std::unique_ptr<unsigned char, Free> scratch(static_cast<unsigned char*>(std::aligned_alloc(64, bytes)));
  if (!scratch) {
    result.store(RESULT_NO_MEMORY, std::memory_order_relaxed);  // read after the thread was joined
    leave(run);
    return;
  }
  Worker worker{};
  worker.index = index, worker.count = run.launch->workers, worker.scratch = scratch.get();
  work<Traced>(run, worker, dispatch);
}

// Runs steps until no sequence has work left. The calling thread is worker 0. Returns one of RESULT_*.
template <bool Traced, class Dispatch>
int run_all(const Launch& launch, Dispatch dispatch) {
  const Context context = make_context(launch);
  context.step->number = 0;
  plan_step(context);

  std::unique_ptr<Event[]> events(new (std::nothrow) Event[launch.num_events]);
  std::unique_ptr<Progress[]> progress(new (std::nothrow) Progress[launch.workers]);
  Run run{&launch, &context, events.get(), progress.get()};
  if (!events || !progress) {
    leave(run);
    return RESULT_NO_MEMORY;
  }
  std::atomic<int> result{RESULT_DONE};
  events[STEP_EVENT].signal(1);  // step 1 is planned; thread creation orders it before the workers as well

  std::vector<std::thread> threads;
  threads.reserve(launch.workers);
  try {
    for (int w = 1; w < launch.workers; ++w) {
      threads.emplace_back([&run, &result, dispatch, w] { run_worker<Traced>(run, w, dispatch, result); });
    }
    run_worker<Traced>(run, 0, dispatch, result);
  } catch (const std::system_error&) {
    result.store(RESULT_NO_THREAD, std::memory_order_relaxed);
    leave(run);
  }
  for (std::thread& t : threads) t.join();
  if (result.load(std::memory_order_relaxed) != RESULT_DONE) return result.load(std::memory_order_relaxed);
  return run.stop.load(std::memory_order_acquire) ? RESULT_STALLED : RESULT_DONE;
}

template <class Dispatch>
int run_program(const Launch& launch, Dispatch dispatch) {
  return launch.spans != 0 ? run_all<true>(launch, dispatch) : run_all<false>(launch, dispatch);
}

// Copies the state that the host may look at while the program runs. Acquire: tokens below `length` are visible after it.
inline void poll(const Sequence* sequences, int count, int32_t* length, int32_t* finish) {
  for (int s = 0; s < count; ++s) {
    finish[s] = __atomic_load_n(&sequences[s].finish, __ATOMIC_ACQUIRE);
    length[s] = __atomic_load_n(&sequences[s].length, __ATOMIC_ACQUIRE);
  }
}

}  // namespace mpk
