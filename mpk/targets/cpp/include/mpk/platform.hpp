// What headers that both back ends share need of the machine: here, of threads of one process.
#pragma once
#include <cstdint>

#include "mpk/event.hpp"  // now_ns()

namespace mpk {

// Makes a value visible to the host together with everything written before it (release order).
inline void publish(int32_t* to, int32_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

// Reads what another worker may have written in an earlier step.
inline int32_t fresh(const int32_t* from) { return *from; }

}  // namespace mpk
