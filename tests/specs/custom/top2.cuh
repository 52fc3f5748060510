// A router's gates: the softmax of each token's two greatest logits, zero for all other experts. A warp finds a token's two, the first of
// equal ones, and leaves them in scratch; then all threads write what the block owns.
#pragma once
#include "megadsl/custom.h"

struct Best {
  float value;
  mk::u32 index;
  MK_DEV bool above(const Best& other) const { return value > other.value || (value == other.value && index < other.index); }
};

MK_DEV Best best_of_warp(Best mine) {
  for (mk::u32 mask = 16; mask != 0; mask /= 2) {
    const Best other = {mk::ptx::shfl_xor(mine.value, mask), mk::ptx::shfl_xor(mine.index, mask)};
    if (other.above(mine)) mine = other;
  }
  return mine;
}

template <class Op, class Out>
MK_DEV void top2(const Op& op, const Out& out) {
  constexpr float kLeast = -3.0e38f;
  const mk::smem_ptr<mk::u32x4> chosen = op.scratch.template at<mk::u32x4>(0);
  for (mk::u32 token = op.warp(); token < Op::kTokens; token += Op::kWarps) {
    Best first = {kLeast, ~0u}, second = first;
    for (mk::u32 e = op.lane(); e < op.logits.features; e += 32) {
      const Best now = {op.logits(token, e), e};
      if (now.above(first)) {
        second = first, first = now;
      } else if (now.above(second)) {
        second = now;
      }
    }
    const Best most = best_of_warp(first);
    const Best next = best_of_warp(first.index == most.index ? second : first);
    const float gate = mk::math::sigmoid(most.value - next.value);
    if (op.lane() == 0) mk::ptx::st_shared<mk::u32x4>(chosen + token, mk::u32x4{most.index, next.index, mk::ptx::float_bits(gate), 0});
  }
  op.sync();
  const mk::u32 own = out.end - out.begin;
  for (mk::u32 i = op.thread(); i < own * Op::kTokens; i += Op::kThreads) {
    const mk::u32 token = i / own, expert = out.begin + i % own;
    const mk::u32x4 found = mk::ptx::ld_shared<mk::u32x4>(chosen + token);
    const float gate = mk::ptx::bits_float(found.z);
    out.put(token, expert, expert == found.x ? gate : expert == found.y ? 1.0f - gate : 0.0f);
  }
}
