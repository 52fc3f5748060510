// A block's part of a vector in memory: a linear's bias, one element for each packed row, in the rows' order, added to the finished sums;
// or a vector of a map of rows.
#pragma once
#include "megadsl/linear.h"
#include "megadsl/tape.h"

namespace mk {

// A thread reads the pair of rows that finish_batch() or finish_rows() gives it first before the block waits for its input, which hides the trip to
// memory; the pairs of later batches as they come.
template <class B>
class OwnVector {
 public:
  MK_DEV OwnVector(const B& block, const VectorShape& s, RowGroups own) {
    pairs_ = reinterpret_cast<const u32*>(block.buffers.weights + (size_t(u32(s.weights)) + size_t(u32(s.layer_stride)) * block.cx.layer) * 16);
    ahead_ = min_u32(own.begin + block.thread / (4 * B::kTokens), u32(s.bytes) / (kGroupRows * 2) - 1) * 4 + block.thread % 4;
    word_ = ptx::ld_global_nc<u32>(pairs_ + ahead_);
  }
  // The elements of a pair of rows, two bf16.
  MK_DEV u32 word(u32 group, u32 pair) const {
    u32 word = word_;
    if (group * 4 + pair != ahead_) word = ptx::ld_global_nc<u32>(pairs_ + group * 4 + pair);
    return word;
  }

 private:
  const u32* pairs_;  // of bf16
  u32 ahead_, word_;
};

template <class B>
struct Bias : OwnVector<B> {
  using OwnVector<B>::OwnVector;
  MK_DEV void add(u32 group, u32 pair, float& even, float& odd) const {
    const u32 word = this->word(group, pair);
    even += ptx::bf16_lo(word), odd += ptx::bf16_hi(word);
  }
};

}  // namespace mk
