// The Hadamard transform of each head: butterflies of a warp's lanes, neighbours in a lane's registers.
#pragma once
#include "megadsl/custom.h"

template <class Op, class Out>
MK_DEV void fwht(const Op& op, const Out& out) {
  constexpr mk::u32 kDim = Op::head_dim, kEach = kDim / 32;
  const mk::u32 first = out.begin / kDim, heads = (out.end + kDim - 1) / kDim - first;
  const mk::u32 items = out.begin < out.end ? heads * Op::kTokens : 0;
  for (mk::u32 item = op.warp(); item < items; item += Op::kWarps) {
    const mk::u32 token = item % Op::kTokens, feature = (first + item / Op::kTokens) * kDim + op.lane() * kEach;
    float v[kEach];
    for (mk::u32 i = 0; i < kEach; ++i) v[i] = op.x(token, feature + i) * op.signs(op.lane() * kEach + i);
    for (mk::u32 half = 1; half < kEach; half *= 2)
      for (mk::u32 i = 0; i < kEach; ++i)
        if ((i & half) == 0) {
          const float a = v[i], b = v[i + half];
          v[i] = a + b, v[i + half] = a - b;
        }
    for (mk::u32 mask = 1; mask < 32; mask *= 2)
      for (mk::u32 i = 0; i < kEach; ++i) {
        const float other = mk::ptx::shfl_xor(v[i], mask);
        v[i] = (op.lane() & mask) != 0 ? other - v[i] : v[i] + other;
      }
    for (mk::u32 i = 0; i < kEach; ++i)
      if (out.owns(feature + i)) out.put(token, feature + i, v[i] * Op::scale);
  }
}
