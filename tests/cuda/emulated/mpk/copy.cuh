// What mpk/copy.cuh of the CUDA back end offers, in emulation: copies arrive when their thread waits for them.
#pragma once
#include <vector>

#include "mpk/ptx.cuh"

namespace mpk {

struct PendingCopy {
  uint32_t to;
  const void* from;
};
inline std::vector<std::vector<PendingCopy>> pending_copies[emulation::THREADS];  // groups of each thread, the last one open

template <class T>
inline void shared_store(uint32_t p, T v) {
  emulation::shared_load<T>(p);  // checks the place
  std::memcpy(emulation::shared_memory + p, &v, sizeof v);
}
inline void copy_async_16(uint32_t to, const void* from) {
  auto& groups = pending_copies[emulation::thread];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from});
}
inline void copy_async_commit() { pending_copies[emulation::thread].emplace_back(); }
template <int N>
inline void copy_async_wait() {
  auto& groups = pending_copies[emulation::thread];
  for (int left = int(groups.size()) - 1; left > N; --left) {
    for (const PendingCopy& c : groups.front()) shared_store(c.to, emulation::load<uint4>(c.from));
    groups.erase(groups.begin());
  }
}
inline void shared_store_4(uint32_t p, uint32_t v) { shared_store(p, v); }
inline void shared_store_8(uint32_t p, uint2 v) { shared_store(p, v); }

}  // namespace mpk
