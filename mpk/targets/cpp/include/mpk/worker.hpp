// One worker of the persistent program: walks through its instruction stream, once a step, until the step says done.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "mpk/context.hpp"
#include "mpk/event.hpp"

namespace mpk {

constexpr int STEP_EVENT = 0;  // its value is the number of steps planned so far

// Instructions finished by one worker; read by others only to tell a slow program from a stuck one.
struct alignas(EVENT_STRIDE) Progress {
  std::atomic<int64_t> finished{0};
};

// What all workers of one run share.
struct Run {
  const Launch* launch;
  const Context* context;
  Event* events;
  Progress* progress;
  std::atomic<int> stop{0};  // somebody gave up: leave
  std::atomic_flag reporting = ATOMIC_FLAG_INIT;  // held while a worker writes the Stall
};

// Decides whether a wait has lasted too long: no instruction finished anywhere for `stall_limit_ns`.
// Time is counted in pieces of at most PIECE_NS, so that a process that was suspended does not look stuck when it resumes.
class Watchdog {
 public:
  explicit Watchdog(const Run& run) : run_(&run) {}

  bool expired() {
    const int64_t now = now_ns(), finished = total();
    if (last_ns_ == 0 || finished != finished_) {
      waited_ns_ = 0;
    } else {
      waited_ns_ += std::min(now - last_ns_, PIECE_NS);
    }
    last_ns_ = now;
    finished_ = finished;
    return waited_ns_ > run_->launch->stall_limit_ns;
  }

 private:
  static constexpr int64_t PIECE_NS = 50'000'000;

  int64_t total() const {
    int64_t sum = 0;
    for (int w = 0; w < run_->launch->workers; ++w) {
      sum += run_->progress[w].finished.load(std::memory_order_relaxed);  // a statistic: carries no payload
    }
    return sum;
  }

  const Run* run_;
  int64_t last_ns_ = 0, waited_ns_ = 0, finished_ = 0;
};

// Fetches the first bytes of an instruction's weights into this core's cache, a little at each call.
class WeightPrefetch {
 public:
  WeightPrefetch(const Launch& launch, int64_t instruction) {
    if (launch.prefetch == 0) return;
    const Prefetch& p = address<const Prefetch>(launch.prefetch)[instruction];
    next_ = address<const char>(launch.weights) + p.offset;
    end_ = next_ + p.bytes;
  }

  void advance() {
    for (int i = 0; i < LINES_A_CALL && next_ < end_; ++i, next_ += 64) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int LINES_A_CALL = 4;
  const char* next_ = nullptr;
  const char* end_ = nullptr;
};

inline bool others_stopped(const Run& run) {
  return run.launch->group_stop != 0 && __atomic_load_n(address<int32_t>(run.launch->group_stop), __ATOMIC_ACQUIRE) != 0;
}

// Gives up, or leaves because others did: of what the workers of a rank waited for the earliest task is reported, since the other
// waits follow from it. The other ranks leave too.
inline void give_up(Run& run, const Stall& why) {
  while (run.reporting.test_and_set(std::memory_order_acquire)) pause();
  Stall& known = *address<Stall>(run.launch->stall);
  if (known.step == 0 || why.step < known.step || (why.step == known.step && why.task < known.task)) known = why;
  run.reporting.clear(std::memory_order_release);
  run.stop.store(1, std::memory_order_release);
  if (run.launch->group_stop != 0) __atomic_store_n(address<int32_t>(run.launch->group_stop), 1, __ATOMIC_RELEASE);
}

// Waits until `event` has reached `expected`; false: the run stops. Polls with pause first (an event between two running
// cores takes about 100 ns), then yields, so that workers that outnumber the cores let each other run.
inline bool wait_for(Run& run, int worker, int task, int event, int64_t expected, int64_t step, WeightPrefetch& prefetch) {
  Event& e = run.events[event];
  if (e.seen() >= expected) return true;
  for (int i = 0; i < run.launch->spin_limit; ++i) {
    pause();
    if (e.seen() >= expected) return true;
    prefetch.advance();
  }
  Watchdog watchdog(run);
  for (int64_t round = 0;; ++round) {
    std::this_thread::yield();
    prefetch.advance();
    const int64_t seen = e.seen();
    if (seen >= expected) return true;
    if (run.stop.load(std::memory_order_acquire) != 0 || others_stopped(run) || (round % 64 == 0 && watchdog.expired())) {
      give_up(run, Stall{worker, task, event, 0, expected, seen, step});
      return false;
    }
  }
}

// What a task that waits for another rank needs of the loop that runs it.
struct PeerWait {
  explicit PeerWait(Run& of) : run(of), watchdog(of) {}
  Run& run;
  Watchdog watchdog;
  int32_t task = 0;
  int64_t step = 0;
};

// Worker::keep_waiting: polls with pause first, then yields, as wait_for() does.
inline bool keep_waiting(Worker& worker, int64_t tries, int source, uint32_t expected, uint32_t seen) {
  PeerWait& wait = *static_cast<PeerWait*>(worker.loop);
  const int64_t round = tries - wait.run.launch->spin_limit;
  if (round <= 0) {
    pause();
    return true;
  }
  if (round == 1) wait.watchdog = Watchdog(wait.run);
  std::this_thread::yield();
  if (wait.run.stop.load(std::memory_order_acquire) != 0 || others_stopped(wait.run) || (round % 64 == 1 && wait.watchdog.expired())) {
    give_up(wait.run, Stall{worker.index, wait.task, -1, 1 + source, expected, seen, wait.step});
    return false;
  }
  return true;
}

// Stands still until all are told to stop, as a rank that hangs would. For tests.
inline void halt(Run& run) {
  while (run.stop.load(std::memory_order_acquire) == 0 && !others_stopped(run)) std::this_thread::yield();
}

// Records spans of one worker; does nothing (and costs nothing) unless Traced.
template <bool Traced>
class Tracer {
 public:
  Tracer(const Launch& launch, int worker) {
    if constexpr (Traced) {
      capacity_ = launch.span_capacity;
      spans_ = address<Span>(launch.spans) + worker * capacity_;
      count_ = address<int64_t>(launch.span_count) + worker;
    }
  }
  int64_t now() const {
    if constexpr (Traced) return now_ns();
    return 0;
  }
  void record(int task, int phase, int64_t begin, int64_t end) {
    if constexpr (Traced) {
      if (*count_ < capacity_) spans_[(*count_)++] = Span{task, phase, begin, end};
    }
  }

 private:
  Span* spans_ = nullptr;
  int64_t* count_ = nullptr;
  int64_t capacity_ = 0;
};

// `Dispatch` is a functor (context, instruction, worker) that runs one task.
template <bool Traced, class Dispatch>
void work(Run& run, Worker& worker, Dispatch dispatch) {
  const Launch& launch = *run.launch;
  const Context& context = *run.context;
  const auto* instructions = address<const Instruction>(launch.instructions);
  const auto* stream_begin = address<const int32_t>(launch.stream_begin);
  const auto* waits = address<const Wait>(launch.waits);
  const auto* signals = address<const Signal>(launch.signals);
  const int64_t begin = stream_begin[worker.index], end = stream_begin[worker.index + 1];
  if (begin == end) return;  // nothing orders the end of a step behind a worker without tasks, so it may not read the step
  Tracer<Traced> tracer(launch, worker.index);
  PeerWait peer_wait(run);
  worker.keep_waiting = keep_waiting, worker.loop = &peer_wait;
  auto& finished = run.progress[worker.index].finished;
  int64_t done = 0;

  for (int64_t step = 1;; ++step) {
    const int64_t idle = tracer.now();
    WeightPrefetch first(launch, begin);
    if (!wait_for(run, worker.index, instructions[begin].task, STEP_EVENT, step, step, first)) return;
    if (context.step->done) return;
    if (step == launch.halt_step && worker.index == 0) return halt(run);
    tracer.record(instructions[begin].task, 1, idle, tracer.now());
    for (int64_t i = begin; i < end; ++i) {
      const Instruction& in = instructions[i];
      const int64_t arrived = tracer.now();
      if (in.wait_count != 0) {
        WeightPrefetch prefetch(launch, i);
        for (int w = in.wait_begin; w < in.wait_begin + in.wait_count; ++w) {
          if (!wait_for(run, worker.index, in.task, waits[w].event, int64_t(waits[w].count) * step, step, prefetch)) return;
        }
      }
      const int64_t started = tracer.now();
      peer_wait.task = in.task, peer_wait.step = step;
      dispatch(context, in, worker);
      if (worker.gave_up) return;
      const int64_t ended = tracer.now();
      if (in.wait_count != 0) tracer.record(in.task, 1, arrived, started);
      tracer.record(in.task, 0, started, ended);
      for (int s = in.signal_begin; s < in.signal_begin + in.signal_count; ++s) run.events[signals[s].event].signal(signals[s].amount);
      finished.store(++done, std::memory_order_relaxed);
    }
  }
}

}  // namespace mpk
