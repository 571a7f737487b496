// head: the product that makes the logits, of one slice of the vocabulary, and what sampling needs to know of the slice.
// Operands: input, logits, tops, parts, values. Variant: that of `linear`, and vocab, parts, slice.
#pragma once
#include "head/slices.cuh"
#include "linear/cuda.cuh"

namespace mpk::head {

constexpr bool waits_inside = true;

template <class V>
__device__ __forceinline__ int part_of(const Instruction& in) { return in.tile_begin * linear::kTileRows / int(V::slice); }  // a task is one slice

template <class V>
struct Sink {
  static constexpr int BYTES = sizeof(TopMemory);
  Top<V> top;

  static __device__ __forceinline__ TopMemory& at(unsigned char* memory) { return *reinterpret_cast<TopMemory*>(memory); }
  __device__ __forceinline__ void begin(const Context& c, const Block& b, unsigned char* memory) { top.begin(c, b, at(memory)); }
  template <int N>
  __device__ __forceinline__ void take(const Block& b, unsigned char* memory, int row, int column, const float (&y)[N]) {
    top.take(b, at(memory), row, column, y);
  }
  template <int STRIDE>
  __device__ __forceinline__ void finish(const Context& c, const Instruction& in, Block& b, unsigned char* memory) {
    top.template put<STRIDE>(b, at(memory), operand<uint4>(c, in, TOPS), part_of<V>(in));
  }
};

template <class V>
__device__ __forceinline__ void run(const Context& c, const Instruction& in, Block& b) {
  static_assert(sizeof(Memory) <= SCRATCH_BYTES, "scratch");
  linear::run<V>(c, in, b, linear::product_of<V>(), Sink<V>{});
  if (b.step->special_rows != 0) {
    b.sync();
    run_special<V>(c, in, b, *reinterpret_cast<Memory*>(b.scratch), part_of<V>(in));
  }
}

}  // namespace mpk::head
