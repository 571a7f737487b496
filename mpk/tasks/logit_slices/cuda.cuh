// logit_slices: what `head` leaves of a slice of the vocabulary, from logits that ranks have put together.
// Operands: none, logits, tops, parts, values: see head/slices.cuh. Variant: vocab, parts, slice.
#pragma once
#include "head/slices.cuh"
#include "mpk/wait.cuh"

namespace mpk::logit_slices {

constexpr bool waits_inside = true;

struct Tops {
  float sharp[MAX_ROWS];
  Summary summary[MAX_ROWS][WARPS];  // of each row, what its warps found
};

// Sends the messages of slice `part`. Few rows: several warps share one. The whole block.
template <class V>
__device__ __forceinline__ void put_tops(const Context& c, const Instruction& i, Block& b, Tops& m, int part) {
  const int begin = part * int(V::slice), end = begin + int(V::slice) < int(V::vocab) ? begin + int(V::slice) : int(V::vocab);
  const int rows = b.step->logit_rows, each = rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 ? 4 : 8;  // warps a row
  const float* logits = operand<const float>(c, i, head::LOGITS);
#pragma unroll 1
  for (int row = b.warp / each; row < rows; row += WARPS / each) {
    const Summary found = head::summarise<V>(logits + int64_t(row) * int(V::vocab), begin, end, b.warp % each, each, m.sharp[row], b.lane);
    if (b.lane == 0) m.summary[row][b.warp % each] = found;
  }
  b.sync();
  if (b.thread >= rows) return;
  Summary best = m.summary[b.thread][0];
  for (int w = 1; w < each; ++w) best.merge(m.summary[b.thread][w], m.sharp[b.thread]);
  store_message(operand<uint4>(c, i, head::TOPS) + int64_t(b.thread) * int(V::parts) + part,
                uint4{__float_as_uint(best.max), uint32_t(best.token), __float_as_uint(best.sum), uint32_t(b.step->number)});
}

template <class V>
__device__ void run(const Context& c, const Instruction& i, Block& b) {
  static_assert(sizeof(head::Memory) <= SCRATCH_BYTES && sizeof(Tops) <= SCRATCH_BYTES, "scratch");
  Tops& tops = *reinterpret_cast<Tops*>(b.scratch);
  if (b.thread < b.step->logit_rows) {
    float temperature = 0.0f;
    if (b.step->drawn_rows >> b.thread & 1) temperature = load_float(&c.sequences[b.step->row_slot[b.step->logit_row[b.thread]]].temperature);
    tops.sharp[b.thread] = sharpness(temperature);
  }
  wait_inputs(b);
  b.sync();
#pragma unroll 1
  for (int part = i.tile_begin; part < i.tile_end; ++part) {
    put_tops<V>(c, i, b, tops, part);
    b.sync();
  }
  if (b.step->special_rows == 0) return;
#pragma unroll 1
  for (int part = i.tile_begin; part < i.tile_end; ++part) {
    head::run_special<V>(c, i, b, *reinterpret_cast<head::Memory*>(b.scratch), part);
    b.sync();
  }
}

}  // namespace mpk::logit_slices
