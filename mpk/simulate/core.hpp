// Discrete-event simulation of persistent workers: every stage of weights, every wait and every signal is an event of its own.
//
// Times are whole picoseconds, kept in one heap ordered by (time, order of insertion), so that the same input gives the same result
// to the last digit. A worker has two roles. Its consumer executes its queue in order: wait for events, fetch the input, use up the
// stages of the task, finish, publish. Its loader streams stages through the ring exactly as mpk/targets/cuda/include/mpk/ring.cuh
// does: at most `stages` unreleased, at most `idle_flight` bytes on their way, or `flight` while a product has its input. While the ring is full and all
// has come, the next stages, up to `prefetch` bytes, are brought to the L2, one a `prefetch_pace`; from there they come without standing in line.
//
// Device memory is one server that serves requests in the order of their issue; since every worker has a bounded number of bytes on
// their way, that shares bandwidth equally among those who ask. SMs do not get equal shares: `share[w]` scales how long worker w stands in
// that line, and each single request stands there up to `spread` longer or shorter (by a generator of the worker's own, always the same).
//
// Events are counters (a release by the producer, which waits for its own copies, then a poller that sees it), or data that is its own flag:
// that is seen without a release, and by other devices once the link has brought it. Devices are alike and run alike, so one is simulated: what
// it would receive from the others is what it sends itself, at the same time.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <queue>
#include <vector>

namespace mpk::simulate {

using Time = int64_t;  // picoseconds
constexpr Time kNever = -1;

enum Flags : int32_t {
  kPrefetches = 1,  // its direct loads begin before its events have come
  kOpens = 2,       // its loader may have `flight` bytes on their way while it runs
};
enum Via : int32_t { kCounter = 0, kCarried = 1, kLink = 2 };  // how an event is seen

struct Task {
  Time earliest;                                  // after the step has begun: when the host has launched it (0: nobody launches it)
  Time before, start, stage, group, end, chunk;   // until it polls; input; a stage; after a group of stages; after the last; a chunk of direct loads
  int64_t link_bytes;                             // sent to other devices at its end
  int32_t stages, stage_bytes, group_stages;      // of weights, through the ring
  int32_t chunks, chunk_bytes;                    // loaded by the consumer itself
  int32_t flags, wait_begin, wait_count, signal_begin, signal_count;
  int32_t source, unused;                         // earlier task of the queue whose message it receives; -1: none
};

struct Machine {
  double memory_ps_per_byte, port_ps_per_byte, load_ps_per_byte, link_ps_per_byte, queue_share, fence_drains, spread;
  Time memory_latency, issue, event, flag, poll, fence, step, link_latency, l2_latency, prefetch_pace;
  int32_t workers, events, waits, tasks, steps, step_event;
  int32_t ring_stages, flight, idle_flight, window, pipelining, prefetch;
};

// What happened to one task in one step; times since the beginning, kNever where there was nothing.
struct Record {
  Time arrived, ready, begun, ended, published;  // reached in its queue; events seen; input there; work done; signals sent
  Time starved, peer;                            // waiting for weights or direct loads; for other devices (the end of the wait)
  Time load_begun, load_ended, sent;             // sent: when its message has come
  int32_t cause, via;                            // task whose signal was the last to come, and how; -1: none was waited for
};

class Simulator {
 public:
  Simulator(const Machine& m, const Task* tasks, const int32_t* begin, const int32_t* waits, const int32_t* signals, const int32_t* threshold,
            const int32_t* via, const double* share, Record* records)
      : m_(m), tasks_(tasks), begin_(begin), waits_(waits), signals_(signals), threshold_(threshold), via_(via), share_(share),
        records_(records), workers_(m.workers), count_(m.events, 0), reached_(m.events, 0), reached_time_(m.events, 0), cause_(m.events, -1), waiting_(m.events) {
    for (int w = 0; w < m.workers; ++w) workers_[w].random = uint32_t(w) * 2654435761u;
    for (int w = 0; w < m.workers; ++w)
      for (int t = begin[w]; t < begin[w + 1]; ++t)
        if (tasks[t].stages > 0) workers_[w].loads.push_back(t);
    if (m.step_event >= 0) count_[m.step_event] = threshold_[m.step_event], reached_[m.step_event] = 1;
  }

  // Number of tasks executed; less than tasks times steps if the schedule hangs.
  int64_t run() {
    for (int w = 0; w < m_.workers; ++w) {
      if (begin_[w] == begin_[w + 1]) continue;
      workers_[w].task = begin_[w];
      load(w, 0);
      reach(w, 0);
    }
    while (!heap_.empty()) {
      const Event e = heap_.top();
      heap_.pop();
      handle(e);
    }
    return done_;
  }
  int64_t events() const { return order_; }

 private:
  enum Kind : int32_t { kStageArrives, kStageEnds, kIssue, kReady, kBegin, kEnd, kPublish, kChunkArrives, kChunkEnds, kChunkIssue, kPoll, kMessage, kFetchAhead };
  struct Event {
    Time time;
    int64_t order;
    int32_t kind, worker, event;
    bool operator<(const Event& o) const { return time != o.time ? time > o.time : order > o.order; }
  };
  struct Worker {
    int32_t task = -1, step = 0;  // present task (index), step from 0
    // ring
    std::vector<int32_t> loads;
    size_t load = 0;
    int32_t load_step = 0, load_stage = 0;
    int64_t issued = 0, arrived = 0, released = 0, started = 0;
    // what is in the L2 from the next stage on: when each stage has come there; the place behind the last one
    std::deque<Time> ahead;
    size_t ahead_load = 0;
    int32_t ahead_step = 0, ahead_stage = 0;
    bool ahead_pending = false;
    bool shut = true, issue_pending = false;
    Time port_free = 0, last_arrival = 0;
    // the present task
    int32_t used = 0;  // stages or chunks of it used up
    int32_t chunks_issued = 0, chunks_arrived = 0;
    bool begun = false, busy = false, chunk_pending = false;
    Time idle_since = kNever;
    int32_t unseen = 0;  // events that have not come
    Time ready = 0, chunk_last = 0;
    bool polls = false;
    uint32_t random = 0;
  };

  Record& record(const Worker& k) { return records_[int64_t(k.step) * m_.tasks + k.task]; }
  void push(Time time, Kind kind, int worker, int event = -1) { heap_.push({time, order_++, kind, worker, event}); }

  void handle(const Event& e) {
    if (e.kind == kMessage) return signal(e.event, e.worker, e.time);  // of a task, not of a worker
    Worker& k = workers_[e.worker];
    switch (e.kind) {
      case kStageArrives: ++k.arrived; load(e.worker, e.time); use(e.worker, e.time); return;
      case kStageEnds: ++k.released, ++k.used, k.busy = false; load(e.worker, e.time); use(e.worker, e.time); return;
      case kIssue: k.issue_pending = false; load(e.worker, e.time); return;
      case kReady: ready(e.worker, e.time); return;
      case kBegin: begin(e.worker, e.time); return;
      case kEnd: end(e.worker, e.time); return;
      case kPublish: publish(e.worker, e.time); return;
      case kChunkArrives: ++k.chunks_arrived; poll(e.worker, e.time); use(e.worker, e.time); return;
      case kChunkEnds: ++k.used, k.busy = false; fetch(e.worker, e.time); use(e.worker, e.time); return;
      case kChunkIssue: k.chunk_pending = false; fetch(e.worker, e.time); return;
      case kPoll: poll(e.worker, e.time); return;
      case kFetchAhead: k.ahead_pending = false; load(e.worker, e.time); return;
      case kMessage: return;
    }
  }

  // ---- device memory
  Time request(int w, Time t, int bytes) {
    memory_free_ = std::max(memory_free_, t) + Time(bytes * m_.memory_ps_per_byte + 0.5);
    uint32_t& state = workers_[w].random;
    state = state * 1664525u + 1013904223u;  // the linear congruential generator of Numerical Recipes
    const double share = share_[w] * (1 + m_.spread * (double(state >> 8) / (1 << 23) - 1));
    return t + m_.memory_latency + Time(double(memory_free_ - t) * std::max(0.0, share));
  }
  // How much later a small message arrives because it stands behind bulk copies.
  Time queueing(Time t) const { return memory_free_ > t ? Time(double(memory_free_ - t) * m_.queue_share) : 0; }
  Time port(int bytes) const { return m_.issue + Time(bytes * m_.port_ps_per_byte + 0.5); }

  // ---- loader
  void load(int w, Time t) {
    Worker& k = workers_[w];
    while (!k.loads.empty() && k.load_step <= m_.steps) {  // one step further than is consumed: the last step ends as those before
      const int32_t index = k.loads[k.load];
      const Task& task = tasks_[index];
      if (!m_.pipelining && k.started <= int64_t(k.load_step) * (begin_[w + 1] - begin_[w]) + index - begin_[w]) return;
      if (k.issued - k.released >= m_.ring_stages) return fetch_ahead(w, t);
      const int64_t flying = k.issued - k.arrived;
      if (flying >= std::max(1, m_.idle_flight / task.stage_bytes) && (k.shut || flying >= std::max(1, m_.flight / task.stage_bytes))) return;
      if (t < k.port_free) {
        if (!k.issue_pending) k.issue_pending = true, push(k.port_free, kIssue, w);
        return;
      }
      k.last_arrival = std::max(k.last_arrival, k.ahead.empty() ? request(w, t, task.stage_bytes) : std::max(k.ahead.front(), t) + m_.l2_latency);
      if (!k.ahead.empty()) k.ahead.pop_front();
      k.port_free = t + port(task.stage_bytes);
      push(k.last_arrival, kStageArrives, w);
      if (k.load_step < m_.steps) {
        Record& r = records_[int64_t(k.load_step) * m_.tasks + index];
        if (r.load_begun == kNever) r.load_begun = t;
        r.load_ended = k.last_arrival;
      }
      ++k.issued;
      if (++k.load_stage < task.stages) continue;
      k.load_stage = 0;
      if (++k.load == k.loads.size()) k.load = 0, ++k.load_step;
    }
  }

  // One more stage to the L2, if nothing is on its way; the next one a pace later, if the ring is still full.
  void fetch_ahead(int w, Time t) {
    Worker& k = workers_[w];
    if (k.issued > k.arrived || k.ahead_pending) return;
    if (k.ahead.empty()) k.ahead_load = k.load, k.ahead_step = k.load_step, k.ahead_stage = k.load_stage;
    const Task& task = tasks_[k.loads[k.ahead_load]];
    if (int64_t(k.ahead.size() + 1) * task.stage_bytes > m_.prefetch || k.ahead_step > m_.steps) return;
    k.ahead.push_back(request(w, t, task.stage_bytes));
    if (k.ahead_stage == 0 && k.ahead_step < m_.steps) records_[int64_t(k.ahead_step) * m_.tasks + k.loads[k.ahead_load]].load_begun = t;
    if (++k.ahead_stage == task.stages) {
      k.ahead_stage = 0;
      if (++k.ahead_load == k.loads.size()) k.ahead_load = 0, ++k.ahead_step;
    }
    k.ahead_pending = true;
    push(t + m_.prefetch_pace, kFetchAhead, w);
  }

  // ---- consumer
  void reach(int w, Time t) {
    Worker& k = workers_[w];
    const Task& task = tasks_[k.task];
    Record& r = record(k);
    r.arrived = t, r.cause = -1;
    k.used = k.chunks_issued = k.chunks_arrived = 0, k.begun = k.busy = false, k.unseen = 0;
    k.idle_since = kNever, k.ready = t, k.chunk_last = 0, k.polls = false;
    if (task.flags & kPrefetches) fetch(w, t);
    if (task.before > 0) return push(t + task.before, kPoll, w);
    poll(w, t);
  }
  // Begins to look for the task's events, once what it fetches before has come.
  void poll(int w, Time t) {
    Worker& k = workers_[w];
    if (k.step >= m_.steps || k.polls) return;
    const Task& task = tasks_[k.task];
    Record& r = record(k);
    if (t < r.arrived + task.before) return;
    if ((task.flags & kPrefetches) && k.chunks_arrived < std::min(task.chunks, window(task))) return;
    k.polls = true, k.ready = t;
    for (int i = task.wait_begin; i < task.wait_begin + task.wait_count; ++i) {
      const int e = waits_[i];
      if (reached_[e] > k.step)
        see(k, r, e, t);
      else
        ++k.unseen, waiting_[e].push_back(w);
    }
    if (task.source >= 0) hear(k, r, task.source);
    if (k.unseen == 0) launch(w);
  }
  // A message comes over the link when the other devices' task that sends it has ended, which is when this device's has.
  void hear(Worker& k, Record& r, int source) {
    const Time come = records_[int64_t(k.step) * m_.tasks + source].sent;
    if (come > k.ready) r.peer = come - k.ready, k.ready = come, r.cause = source, r.via = kLink;
  }
  void launch(int w) {
    Worker& k = workers_[w];
    const Task& task = tasks_[k.task];
    push(task.earliest > 0 ? std::max(k.ready, step_begun_ + task.earliest) : k.ready, kReady, w);
  }
  void see(Worker& k, Record& r, int e, Time t) {
    const Time hop = via_[e] == kCounter ? m_.event : via_[e] == kCarried ? m_.flag : 0;
    Time visible = reached_time_[e] + (e == m_.step_event ? hop + m_.step : hop);
    if (e == m_.step_event && k.step == 0) visible = m_.step;
    if (e == m_.step_event) step_begun_ = visible;
    if (visible > k.ready) {
      r.peer = via_[e] == kLink ? visible - k.ready : 0;
      k.ready = visible, r.cause = cause_[e], r.via = via_[e];
    }
    k.ready = std::max(k.ready, t + m_.poll);
  }
  void ready(int w, Time t) {
    Worker& k = workers_[w];
    const Task& task = tasks_[k.task];
    record(k).ready = t;
    ++k.started;
    if (!m_.pipelining) load(w, t);
    if (!(task.flags & kPrefetches)) fetch(w, t);
    push(t + task.start + (task.start > 0 ? queueing(t) : 0), kBegin, w);
  }
  void begin(int w, Time t) {
    Worker& k = workers_[w];
    record(k).begun = t;
    k.begun = true;
    if (tasks_[k.task].flags & kOpens) k.shut = false, load(w, t);
    use(w, t);
  }
  // Takes the next stage or chunk if the consumer is free and it is there.
  void use(int w, Time t) {
    Worker& k = workers_[w];
    if (!k.begun || k.busy) return;
    const Task& task = tasks_[k.task];
    const bool ring = k.used < task.stages;
    if (!ring && k.used >= task.stages + task.chunks) {
      k.begun = false, k.shut = true;
      push(t + task.end, kEnd, w);
      return;
    }
    const bool there = ring ? k.arrived > k.released : k.chunks_arrived > k.used - task.stages;
    if (!there) {
      if (k.idle_since == kNever) k.idle_since = t;
      return;
    }
    if (k.idle_since != kNever) record(k).starved += t - k.idle_since, k.idle_since = kNever;
    k.busy = true;
    if (!ring) return push(t + task.chunk, kChunkEnds, w);
    const bool group = task.group_stages > 0 && (k.used + 1) % task.group_stages == 0 && k.used + 1 < task.stages;
    push(t + task.stage + (group ? task.group : 0), kStageEnds, w);
  }
  int32_t window(const Task& task) const { return std::max(1, m_.window / std::max(1, task.chunk_bytes)); }
  // Direct loads of the consumer.
  void fetch(int w, Time t) {
    Worker& k = workers_[w];
    const Task& task = tasks_[k.task];
    while (k.chunks_issued < task.chunks && k.chunks_issued - std::max(0, k.used - task.stages) < window(task)) {
      if (t < k.port_free) {
        if (!k.chunk_pending) k.chunk_pending = true, push(k.port_free, kChunkIssue, w);
        return;
      }
      k.chunk_last = std::max(k.chunk_last, request(w, t, task.chunk_bytes));
      k.port_free = t + Time(task.chunk_bytes * m_.load_ps_per_byte + 0.5);
      push(k.chunk_last, kChunkArrives, w);
      Record& r = record(k);
      if (k.chunks_issued++ == 0) r.load_begun = t;
      r.load_ended = k.chunk_last;
    }
  }
  // Data that is its own flag is out when the task ends; counters need a release, which waits for the worker's own copies on their way.
  void end(int w, Time t) {
    Worker& k = workers_[w];
    const Task& task = tasks_[k.task];
    Record& r = record(k);
    r.ended = t;
    if (task.link_bytes > 0) {
      link_free_ = std::max(link_free_, t) + Time(double(task.link_bytes) * m_.link_ps_per_byte + 0.5);
      r.sent = link_free_ + m_.link_latency;
    }
    bool counts = false;
    for (int i = task.signal_begin; i < task.signal_begin + task.signal_count; ++i) {
      const int e = signals_[i];
      if (via_[e] == kCounter)
        counts = true;
      else
        push(via_[e] == kLink && task.link_bytes > 0 ? r.sent : t, kMessage, k.task, e);
    }
    Time published = t;
    if (counts) {
      published += m_.fence;
      if (k.issued > k.arrived) published = std::max(published, t + Time(double(k.last_arrival - t) * m_.fence_drains));
    }
    push(published, kPublish, w);
  }
  void publish(int w, Time t) {
    Worker& k = workers_[w];
    const Task& task = tasks_[k.task];
    record(k).published = t;
    ++done_;
    for (int i = task.signal_begin; i < task.signal_begin + task.signal_count; ++i)
      if (via_[signals_[i]] == kCounter) signal(signals_[i], k.task, t);
    if (++k.task == begin_[w + 1]) {
      k.task = begin_[w];
      if (++k.step >= m_.steps) return;
    }
    reach(w, t);
  }
  void signal(int e, int32_t task, Time t) {
    if (++count_[e] % threshold_[e] != 0) return;
    reached_[e] = int32_t(count_[e] / threshold_[e]), reached_time_[e] = t, cause_[e] = task;
    auto& waiting = waiting_[e];
    size_t kept = 0;
    for (const int w : waiting) {
      Worker& k = workers_[w];
      if (reached_[e] <= k.step) {
        waiting[kept++] = w;
        continue;
      }
      see(k, record(k), e, t);
      if (--k.unseen == 0) launch(w);
    }
    waiting.resize(kept);
  }

  Machine m_;
  const Task* tasks_;
  const int32_t *begin_, *waits_, *signals_, *threshold_, *via_;
  const double* share_;
  Record* records_;
  std::vector<Worker> workers_;
  std::vector<int64_t> count_;
  std::vector<int32_t> reached_;  // steps for which the event has come
  std::vector<Time> reached_time_;
  std::vector<int32_t> cause_;
  std::vector<std::vector<int32_t>> waiting_;
  std::priority_queue<Event> heap_;
  Time memory_free_ = 0, link_free_ = 0, step_begun_ = 0;
  int64_t order_ = 0, done_ = 0;
};

}  // namespace mpk::simulate
