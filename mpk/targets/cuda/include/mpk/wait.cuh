// Where a task body is ready for what other tasks of the step have written.
//
// A body whose namespace says `constexpr bool waits_inside = true` is called before the instruction's events have fired. Until it has
// called wait_inputs() it may read only what is constant during a step (the step itself, segments, sequences, page tables, past
// keys and values, parameters): several dependent loads, which so overlap with the wait.
#pragma once
#include "mpk/block.cuh"

namespace mpk {
namespace detail {
template <class B>
__device__ __forceinline__ auto wait_of(B& b, int) -> decltype(b.wait()) { return b.wait(); }
template <class B>
__device__ __forceinline__ void wait_of(B&, long) {}  // a block that has waited already
}  // namespace detail

template <class B>
__device__ __forceinline__ void wait_inputs(B& b) { detail::wait_of(b, 0); }

}  // namespace mpk
