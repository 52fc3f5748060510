// A mixture: the outputs of all experts, one behind the other in a row, weighted by their gates and added.
#pragma once
#include "megadsl/custom.h"

template <class Op, class Out>
MK_DEV void blend(const Op& op, const Out& out) {
  const mk::u32 experts = op.gates.features, each = op.streams.features / experts, groups = (out.end - out.begin) / 8;
  for (mk::u32 i = op.thread(); i < groups * Op::kTokens; i += Op::kThreads) {
    const mk::u32 token = i / groups, feature = out.begin + i % groups * 8;
    float sum[8] = {};
    for (mk::u32 e = 0; e < experts; ++e) {
      const float gate = op.gates(token, e);
      float v[8];
      op.streams.load8(token, e * each + feature, v);
      for (mk::u32 j = 0; j < 8; ++j) sum[j] += gate * v[j];
    }
    if (Op::residual)
      for (mk::u32 j = 0; j < 8; ++j) sum[j] += op.gain(feature + j) * op.gain(each + feature + j);
    out.put8(token, feature, sum);
  }
}
