// Messages between ranks (GPUs): parts of a matrix that every rank sends to all, each word with a flag that says that it has come.
//
// In the peer memory of every rank a buffer holds the parts of all ranks side by side, [rows][ranks][columns] words (see
// mpk/tasks/messages.py). A word is 8 bytes, the flag in the upper half, the float in the lower; two of them travel in one access of 16
// bytes, and each is one scalar of it, so it is never seen in halves. Loads and stores are relaxed and of system scope: a word is a
// message of its own, and nothing else follows from it.
//
// Why nothing is overwritten that is still to be read (mpk.graph.peers has the proof on tasks): a rank sends into a place again only after
// it has seen words that the reader's rank sent after reading. The reader's load has returned by then, since what it returned
// was summed, stored, and waited for by those who computed what was sent; and a load that has returned cannot see a later store.
#pragma once
#include "mpk/block.cuh"

namespace mpk {

constexpr int owner_of_tile(int tile, int tiles, int ranks) { return tile * ranks / tiles; }

// A buffer of messages, for one instruction in one step. COLUMNS: of one rank's part. Columns come in pairs, at even places.
template <int RANKS, int COLUMNS>
class PeerBuffer {
  static_assert(COLUMNS % 2 == 0, "two words an access");

 public:
  __device__ __forceinline__ PeerBuffer(const Context& c, const Instruction& i, int slot, const Block& b)
      : peers_(c.peers), offset_(i.operand[slot]), rank_(c.rank),
        flag_(c.flag_base + uint32_t(b.step->number) * uint32_t(i.iargs[1]) + uint32_t(i.iargs[0])) {}

  // Puts two values of this rank's part into the memory of rank `to`.
  __device__ __forceinline__ void send_to(int to, int row, int column, float first, float second) const {
    store_words(at(to, row, rank_, column), word(first), word(second));
  }
  __device__ __forceinline__ void send_to_all(int row, int column, float first, float second) const {
#pragma unroll
    for (int to = 0; to < RANKS; ++to) send_to(to, row, column, first, second);
  }
  // One value, at an even column.
  __device__ __forceinline__ void send_one_to_all(int row, int column, float value) const {
#pragma unroll
    for (int to = 0; to < RANKS; ++to) store_word(at(to, row, rank_, column), word(value));
  }

  // Two values of the part of `source`, once they have come. If the program is being stopped it returns anything.
  __device__ __forceinline__ float2 receive(const Block& b, int source, int row, int column) const {
    const uint64_t* from = at(rank_, row, source, column);
    ulonglong2 seen = load_words(from);
    for (uint32_t polls = 0; !whole(seen) && b.may_poll_rank(polls, source, flag_, flag_of(seen.x));) seen = load_words(from);
    return values(seen);
  }
  // The sum over all ranks, in their order, whatever comes first.
  __device__ __forceinline__ float2 sum(const Block& b, int row, int column) const {
    ulonglong2 seen[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) seen[r] = load_words(at(rank_, row, r, column));
    for (uint32_t polls = 0;;) {
      int missing = -1;
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (!whole(seen[r])) missing = r;
      if (missing < 0 || !b.may_poll_rank(polls, missing, flag_, flag_of(seen[0].x))) break;
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (!whole(seen[r])) seen[r] = load_words(at(rank_, row, r, column));
    }
    float2 total = values(seen[0]);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) {
      const float2 part = values(seen[r]);
      total.x += part.x, total.y += part.y;
    }
    return total;
  }
  // One value of the part of `source`, at an even column.
  __device__ __forceinline__ float receive_one(const Block& b, int source, int row, int column) const {
    const uint64_t* from = at(rank_, row, source, column);
    uint64_t seen = load_word(from);
    for (uint32_t polls = 0; flag_of(seen) != flag_ && b.may_poll_rank(polls, source, flag_, flag_of(seen));) seen = load_word(from);
    return __uint_as_float(uint32_t(seen));
  }
  __device__ __forceinline__ int rank() const { return rank_; }

 private:
  static __device__ __forceinline__ uint32_t flag_of(uint64_t w) { return uint32_t(w >> 32); }
  __device__ __forceinline__ bool whole(ulonglong2 w) const { return flag_of(w.x) == flag_ && flag_of(w.y) == flag_; }
  __device__ __forceinline__ uint64_t word(float value) const { return uint64_t(flag_) << 32 | __float_as_uint(value); }
  static __device__ __forceinline__ float2 values(ulonglong2 w) { return {__uint_as_float(uint32_t(w.x)), __uint_as_float(uint32_t(w.y))}; }
  __device__ __forceinline__ uint64_t* at(int memory_of, int row, int source, int column) const {
    return reinterpret_cast<uint64_t*>(uintptr_t(peers_[memory_of]) + uintptr_t(offset_)) + int64_t(row * RANKS + source) * COLUMNS + column;
  }

  const uint64_t* peers_;
  int64_t offset_;
  int rank_;
  uint32_t flag_;
};

}  // namespace mpk
