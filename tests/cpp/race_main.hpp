// Runs a program outside Python, for race detectors: reads the arrays of a launch from a file, runs while a second thread
// polls and reads what the host may read, and prints the tokens of each sequence.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class T>
T read_one(FILE* file) {
  T value;
  if (std::fread(&value, sizeof value, 1, file) != 1) std::exit(3);
  return value;
}

}  // namespace

// File: the Launch, then (offset of an address in the Launch, bytes, contents) until offset -1.
int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "rb");
  if (file == nullptr) return 2;
  auto launch = read_one<mpk::Launch>(file);
  std::vector<unsigned char*> memory;
  for (int64_t offset; (offset = read_one<int64_t>(file)) >= 0;) {
    const auto bytes = read_one<int64_t>(file);
    auto* p = static_cast<unsigned char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (bytes != 0 && std::fread(p, bytes, 1, file) != 1) return 3;
    std::memcpy(reinterpret_cast<unsigned char*>(&launch) + offset, &p, sizeof p);
    memory.push_back(p);
  }
  std::fclose(file);

  auto* sequences = mpk::address<mpk::Sequence>(launch.sequences);
  auto* tokens = mpk::address<int32_t>(launch.tokens);
  std::vector<int32_t> length(launch.max_batch), finish(launch.max_batch);
  std::atomic<bool> over{false};
  std::thread host([&] {
    int64_t sum = 0;
    while (!over.load()) {
      mpk_poll(sequences, launch.max_batch, length.data(), finish.data());
      for (int s = 0; s < launch.max_batch; ++s) {
        for (int i = 0; i < length[s]; ++i) sum += tokens[int64_t(s) * launch.max_context + i];
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (sum < 0) std::abort();
  });
  const int code = mpk_run(&launch);
  over.store(true);
  host.join();
  for (int s = 0; s < launch.max_batch; ++s) {
    if (!sequences[s].active) continue;
    for (int i = sequences[s].prompt_length; i < sequences[s].length; ++i) std::printf("%d ", tokens[int64_t(s) * launch.max_context + i]);
    std::printf("\n");
  }
  for (auto* p : memory) std::free(p);
  return code == mpk::RESULT_DONE ? 0 : 4;
}
