// What the head does with its slice of the logits (slices.cuh), with logits that stand in memory instead of a product.
#include "head/slices.cuh"

namespace mpk::head {

// Hands in the logits as the product does: groups of 8 threads, each two columns of a tile of 16, have rows 0 to STRIDE - 1 in turn.
template <class V, int STRIDE>
__device__ void hand_in(const Context& c, const Instruction& i, Block& b, TopMemory& memory, int part) {
  Top<V> top;
  top.begin(c, b, memory);
  b.sync();
  const int group = b.thread / 8, row = group % STRIDE, end = (part + 1) * V::slice < V::vocab ? (part + 1) * V::slice : V::vocab;
  if (row < b.step->logit_rows)
    for (int column = part * V::slice + group / STRIDE * 16 + b.thread % 8 * 2; column < end; column += 16 * (THREADS / 8 / STRIDE)) {
      const float* from = operand<const float>(c, i, LOGITS) + int64_t(row) * V::vocab + column;
      const float both[2] = {load_float(from), column + 1 < V::vocab ? load_float(from + 1) : minus_infinity()};
      top.take(b, memory, row, column, both);
    }
  top.template put<STRIDE>(b, memory, operand<uint4>(c, i, TOPS), part);
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  TopMemory& memory = *reinterpret_cast<TopMemory*>(b.scratch + SCRATCH_BYTES - sizeof(TopMemory));
  for (int part = i.tile_begin; part < i.tile_end; ++part) {
    if (b.step->logit_rows == 1) hand_in<V, 1>(c, i, b, memory, part);
    else hand_in<V, 16>(c, i, b, memory, part);
    b.sync();
    if (b.step->special_rows != 0) run_special<V>(c, i, b, *reinterpret_cast<Memory*>(b.scratch), part);
    b.sync();
  }
}

}  // namespace mpk::head
