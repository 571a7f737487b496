// Times task bodies on threads of their own; the variants and `kBodies` come from cpp_kernels.py, which compiles this with them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "mpk/matmul.hpp"
#include "task_kinds.hpp"

namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Median over `repeats` of the time that `threads` threads take for work(thread), started together.
template <class Work>
double median_time(int threads, int repeats, const Work& work) {
  std::vector<double> times;
  for (int r = 0; r < repeats; ++r) {
    std::atomic<int> ready{0}, done{0};
    std::atomic<double> begin{0}, end{0};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
      pool.emplace_back([&, t] {
        if (++ready == threads) begin = seconds();
        while (ready < threads) {
        }
        work(t);
        if (++done == threads) end = seconds();
      });
    for (auto& thread : pool) thread.join();
    times.push_back(end - begin);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

// GB/s of `threads` threads that read `bytes` of memory once, each its own contiguous part.
extern "C" double read_bandwidth(const unsigned char* memory, int64_t bytes, int threads, int repeats) {
  static std::atomic<float> sink;
  const double time = median_time(threads, repeats, [&](int t) {
    const int64_t begin = bytes / threads * t, end = bytes / threads * (t + 1);
    mpk::Vec<mpk::kLanes> sums[8] = {};
    const int step = 8 * sizeof(sums[0]);
    for (int64_t i = begin; i + step <= end; i += step) {
      const float* at = reinterpret_cast<const float*>(memory + i);
      MPK_UNROLL
      for (int j = 0; j < 8; ++j) sums[j] = sums[j] + mpk::load<mpk::kLanes>(at + j * mpk::kLanes);
    }
    MPK_UNROLL
    for (int j = 1; j < 8; ++j) sums[0] = sums[0] + sums[j];
    sink = mpk::sum_lanes(sums[0]);
  });
  return double(bytes) / time * 1e-9;
}

// GFLOP/s of multiply-adds on registers alone.
extern "C" double peak_rate(int threads, int repeats) {
  static std::atomic<float> sink;
  constexpr int chains = 12, count = 2'000'000;
  const double time = median_time(threads, repeats, [&](int t) {
    mpk::Vec<mpk::kLanes> acc[chains];
    MPK_UNROLL
    for (int j = 0; j < chains; ++j) acc[j] = mpk::splat<mpk::kLanes>(float(t + j));
    const auto factor = mpk::splat<mpk::kLanes>(0.999f), term = mpk::splat<mpk::kLanes>(0.1f);
    for (int i = 0; i < count; ++i) {
      MPK_UNROLL
      for (int j = 0; j < chains; ++j) acc[j] = mpk::fma(acc[j], factor, term);
    }
    MPK_UNROLL
    for (int j = 1; j < chains; ++j) acc[0] = acc[0] + acc[j];
    sink = mpk::sum_lanes(acc[0]);
  });
  return 2.0 * mpk::kLanes * chains * count * threads / time * 1e-9;
}

// Seconds per pass of a body over all tiles, shared among threads; pass p uses the weights at (p % copies) * weight_stride and
// the layer p % layers, so that nothing comes from a cache that would not in a model.
extern "C" double time_body(int body, const Memory* memory, const mpk::Instruction* instruction, int tiles, int threads, int passes,
                            int copies, int64_t weight_stride, int layers, int64_t scratch_bytes, int repeats) {
  const mpk::Context context = context_of(memory);
  std::vector<unsigned char*> scratch;
  for (int t = 0; t < threads; ++t) scratch.push_back(static_cast<unsigned char*>(std::aligned_alloc(64, (scratch_bytes + 127) / 64 * 64)));
  const double time = median_time(threads, repeats, [&](int t) {
    mpk::Worker worker{};
    worker.index = t, worker.count = threads, worker.scratch = scratch[t];
    mpk::Instruction i = *instruction;
    for (int p = 0; p < passes; ++p) {
      i.weights = int64_t(p % copies) * weight_stride;
      i.layer = p % layers;
      i.tile_begin = tiles * t / threads, i.tile_end = tiles * (t + 1) / threads;
      kBodies[body](context, i, worker);
    }
  });
  for (auto* own : scratch) std::free(own);
  return time / passes;
}
