// Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// A draw is a pure function of (seed, position): it depends neither on the batch, nor on the worker, nor on earlier draws.
#pragma once
#include <cstdint>

namespace mpk {

template <int N>
struct Words {
  uint32_t word[N];
  uint32_t operator[](int i) const { return word[i]; }
};

inline Words<4> philox4x32(Words<4> counter, Words<2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter[0], b = uint64_t(0xCD9E8D57u) * counter[2];
    counter = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key[1], uint32_t(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

// Uniform in [0, 1), 53 bits.
inline double philox_uniform(uint64_t seed, uint64_t position) {
  const Words<4> r = philox4x32({uint32_t(position), uint32_t(position >> 32), 0, 0}, {uint32_t(seed), uint32_t(seed >> 32)});
  const uint64_t bits = (uint64_t(r[0]) << 32 | r[1]) >> 11;
  return double(bits) * (1.0 / 9007199254740992.0);  // 2^-53
}

}  // namespace mpk
