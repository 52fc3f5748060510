// Rows times a number.
#pragma once
#include "megadsl/custom.h"

template <class Op, class Out>
MK_DEV void scale(const Op& op, const Out& out) {
  const mk::u32 own = out.end - out.begin;
  for (mk::u32 i = op.thread(); i < own * Op::kTokens; i += Op::kThreads) {
    const mk::u32 token = i / own, feature = out.begin + i % own;
    out.put(token, feature, op.x(token, feature) * Op::factor);
  }
}
