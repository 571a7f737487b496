// Messages between ranks: parts of a matrix that every rank sends to all, each word with a flag that says that it has come.
//
// In the peer memory of every rank a buffer holds the parts of all ranks side by side, [rows][ranks][columns] words (see
// mpk/tasks/messages.py). A word is 8 bytes, the flag in the upper half, the float in the lower; it is stored and loaded whole.
// The store releases and the load acquires: what a rank has read of an earlier message, it read before a later part of its own can be
// seen anywhere, so nobody who has seen that part overwrites what is still to be read.
#pragma once
#include <cstdint>
#include <cstring>

#include "mpk/context.hpp"

namespace mpk {

// Flag of the instruction's message in this step; the same number never comes twice in a run.
inline uint32_t message_flag(const Context& c, const Instruction& i) {
  return c.flag_base + uint32_t(c.step->number) * uint32_t(i.iargs[1]) + uint32_t(i.iargs[0]);
}

constexpr int owner_of_tile(int tile, int tiles, int ranks) { return int(int64_t(tile) * ranks / tiles); }

// A buffer of messages. COLUMNS: of one rank's part.
template <int RANKS, int COLUMNS>
class PeerBuffer {
 public:
  PeerBuffer(const Context& c, const Instruction& i, int slot) : c_(c), offset_(i.operand[slot]), flag_(message_flag(c, i)) {}

  // Puts `count` values of this rank's part into the memory of rank `to`.
  void send_to(int to, int64_t row, int column, const float* values, int count) const {
    uint64_t* words = at(to, row, c_.rank, column);
    for (int j = 0; j < count; ++j) {
      uint32_t bits;
      std::memcpy(&bits, values + j, 4);
      __atomic_store_n(words + j, uint64_t(flag_) << 32 | bits, __ATOMIC_RELEASE);
    }
  }
  void send_to_all(int64_t row, int column, const float* values, int count) const {
    for (int step = 0; step < RANKS; ++step) send_to((c_.rank + step) % RANKS, row, column, values, count);
  }
  // A value of rank `source`'s part, once it has come; if the worker gives up it is 0, and `worker.gave_up` is set.
  float receive(Worker& worker, int source, int64_t row, int column) const {
    const uint64_t* word = at(c_.rank, row, source, column);
    uint64_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    for (int64_t tries = 1; uint32_t(seen >> 32) != flag_; ++tries) {
      if (worker.gave_up || worker.keep_waiting == nullptr || !worker.keep_waiting(worker, tries, source, flag_, uint32_t(seen >> 32))) {
        worker.gave_up = true;
        return 0.0f;
      }
      seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
    const uint32_t bits = uint32_t(seen);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

 private:
  uint64_t* at(int memory_of, int64_t row, int source, int column) const {
    return reinterpret_cast<uint64_t*>(static_cast<uintptr_t>(c_.peers[memory_of]) + offset_) + (row * RANKS + source) * COLUMNS + column;
  }

  const Context& c_;
  int64_t offset_;
  uint32_t flag_;
};

}  // namespace mpk
