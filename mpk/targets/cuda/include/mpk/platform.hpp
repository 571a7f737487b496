// What headers that both back ends share need of the machine: here, of one thread of a block.
#pragma once
#include "mpk/ptx.cuh"  // now_ns()

namespace mpk {

// The host sees sequences when the framework shows them to it, which orders them.
__device__ __forceinline__ void publish(int32_t* to, int32_t value) { *to = value; }

// Reads what another SM may have written in an earlier step.
__device__ __forceinline__ int32_t fresh(const int32_t* from) { return load_int(from); }

}  // namespace mpk
