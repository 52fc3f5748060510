// Queries and keys of length 1, head by head, times a number; values as they are. A warp a head of a token.
#pragma once
#include "megadsl/custom.h"

template <class Op, class Out, class Rows>
MK_DEV void unit_head(const Op& op, const Out& out, const Rows& rows, mk::u32 begin, float scale) {
  constexpr mk::u32 kDim = Op::head_dim;
  for (mk::u32 item = op.warp(); item < rows.features / kDim * Op::kTokens; item += Op::kWarps) {
    const mk::u32 token = item % Op::kTokens, feature = item / Op::kTokens * kDim;
    if (begin + feature >= out.end || begin + feature + kDim <= out.begin) continue;
    float sum = 0.0f;
    for (mk::u32 i = op.lane(); i < kDim; i += 32) sum += rows(token, feature + i) * rows(token, feature + i);
    for (mk::u32 mask = 16; mask != 0; mask /= 2) sum += mk::ptx::shfl_xor(sum, mask);
    const float factor = Op::plain_values && scale == 0.0f ? 1.0f : scale * mk::ptx::rsqrt(sum + 1e-6f);
    for (mk::u32 i = 2 * op.lane(); i < kDim; i += 64) {
      float even, odd;
      rows.load2(token, feature + i, even, odd);
      if (out.owns(begin + feature + i)) out.put2(token, begin + feature + i, even * factor, odd * factor);
    }
  }
}

template <class Op, class Out>
MK_DEV void unit_heads(const Op& op, const Out& out) {
  unit_head(op, out, op.q, 0, float(Op::scale));
  unit_head(op, out, op.k, op.q.features, float(Op::scale));
  unit_head(op, out, op.v, op.q.features + op.k.features, 0.0f);
}
