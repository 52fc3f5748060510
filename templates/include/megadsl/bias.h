// A block's part of a vector in memory: a linear's bias, one element for each packed row, in the rows' order, added to the finished sums;
// the scales of its weights' rows, fp32, by which those are multiplied first; or a vector of a map of rows.
#pragma once
#include "megadsl/linear.h"
#include "megadsl/tape.h"

namespace mk {

// A thread reads the pair of rows that finish_batch() or finish_rows() gives it first before the block waits for its input, which hides the trip to
// memory; the pairs of later batches as they come.
template <class B, class Pair = u32>
class OwnVector {
 public:
  MK_DEV OwnVector(const B& block, const VectorShape& s, RowGroups own) {
    pairs_ = reinterpret_cast<const Pair*>(block.buffers.weights + (size_t(u32(s.weights)) + size_t(u32(s.layer_stride)) * block.cx.layer) * 16);
    ahead_ = min_u32(own.begin + block.thread / (4 * B::kTokens), u32(s.bytes) / (4 * sizeof(Pair)) - 1) * 4 + block.thread % 4;
    pair_ = ptx::ld_global_nc<Pair>(pairs_ + ahead_);
  }
  // The elements of a pair of rows: two bf16 in a word, or two words.
  MK_DEV Pair elements(u32 group, u32 pair) const {
    Pair found = pair_;
    if (group * 4 + pair != ahead_) found = ptx::ld_global_nc<Pair>(pairs_ + group * 4 + pair);
    return found;
  }

 private:
  const Pair* pairs_;
  u32 ahead_;
  Pair pair_;
};

template <class B>
struct Bias : OwnVector<B> {
  using OwnVector<B>::OwnVector;
  MK_DEV void add(u32 group, u32 pair, float& even, float& odd) const {
    const u32 word = this->elements(group, pair);
    even += ptx::bf16_lo(word), odd += ptx::bf16_hi(word);
  }
};

template <class B>
struct RowScales : OwnVector<B, u32x2> {
  using OwnVector<B, u32x2>::OwnVector;
  MK_DEV void multiply(u32 group, u32 pair, float& even, float& odd) const {
    const u32x2 scales = this->elements(group, pair);
    even *= ptx::bits_float(scales.x), odd *= ptx::bits_float(scales.y);
  }
};

}  // namespace mk
