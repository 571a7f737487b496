// Runs a program outside Python, for race detectors: reads the arrays of every rank's launch from a file, runs all ranks while one more
// thread polls and reads what the host may read of rank 0, and prints the tokens of each of its sequences.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

std::vector<unsigned char*> memory;

template <class T>
T read_one(FILE* file) {
  T value;
  if (std::fread(&value, sizeof value, 1, file) != 1) std::exit(3);
  return value;
}

unsigned char* allocate(int64_t bytes) {
  memory.push_back(static_cast<unsigned char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64)));
  return memory.back();
}

// A Launch, then (offset of an address in it, bytes, contents) until offset -1.
mpk::Launch read_launch(FILE* file) {
  auto launch = read_one<mpk::Launch>(file);
  for (int64_t offset; (offset = read_one<int64_t>(file)) >= 0;) {
    const auto bytes = read_one<int64_t>(file);
    auto* p = allocate(bytes);
    if (bytes != 0 && std::fread(p, bytes, 1, file) != 1) std::exit(3);
    std::memcpy(reinterpret_cast<unsigned char*>(&launch) + offset, &p, sizeof p);
  }
  return launch;
}

}  // namespace

// File: number of ranks and bytes of peer memory (int64), then each rank's launch.
int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "rb");
  if (file == nullptr) return 2;
  const auto ranks = read_one<int64_t>(file), peer_bytes = read_one<int64_t>(file);
  std::vector<mpk::Launch> launches;
  std::vector<uint64_t> peers;
  int32_t group_stop = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    launches.push_back(read_launch(file));
    auto* own = allocate(peer_bytes);
    std::memset(own, 0, peer_bytes);
    peers.push_back(reinterpret_cast<uintptr_t>(own));
  }
  std::fclose(file);
  for (auto& launch : launches)
    if (ranks > 1) launch.peers = reinterpret_cast<uintptr_t>(peers.data()), launch.group_stop = reinterpret_cast<uintptr_t>(&group_stop);

  const mpk::Launch& first = launches[0];
  auto* sequences = mpk::address<mpk::Sequence>(first.sequences);
  auto* tokens = mpk::address<int32_t>(first.tokens);
  std::vector<int32_t> length(first.max_batch), finish(first.max_batch);
  std::atomic<bool> over{false};
  std::thread host([&] {
    int64_t sum = 0;
    while (!over.load()) {
      mpk_poll(sequences, first.max_batch, length.data(), finish.data());
      for (int s = 0; s < first.max_batch; ++s) {
        for (int i = 0; i < length[s]; ++i) sum += tokens[int64_t(s) * first.max_context + i];
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (sum < 0) std::abort();
  });
  std::atomic<int> code{0};
  std::vector<std::thread> others;
  for (int64_t r = 1; r < ranks; ++r)
    others.emplace_back([&code, &launches, r] {
      const int mine = mpk_run(&launches[r]);
      if (mine != 0) code.store(mine);
    });
  const int own = mpk_run(&first);
  for (auto& thread : others) thread.join();
  if (own != 0) code.store(own);
  over.store(true);
  host.join();
  for (int s = 0; s < first.max_batch; ++s) {
    if (!sequences[s].active) continue;
    for (int i = sequences[s].prompt_length; i < sequences[s].length; ++i) std::printf("%d ", tokens[int64_t(s) * first.max_context + i]);
    std::printf("\n");
  }
  for (auto* p : memory) std::free(p);
  return code.load() == mpk::RESULT_DONE ? 0 : 4;
}
