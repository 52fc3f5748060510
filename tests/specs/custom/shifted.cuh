// Rows plus a vector.
#pragma once
#include "megadsl/custom.h"

template <class Op, class Out>
MK_DEV void shifted(const Op& op, const Out& out) {
  const mk::u32 own = out.end - out.begin;
  for (mk::u32 i = op.thread(); i < own * Op::kTokens; i += Op::kThreads)
    out.put(i / own, out.begin + i % own, op.x(i / own, out.begin + i % own) + op.w(out.begin + i % own));
}
