// Rotary embedding of a pair of packed rows. The packing puts the two members of a pair side by side.
#pragma once
#include "megadsl/steps.h"

namespace mk {

// Copies a step's (cos, sin) from the tables into shared memory, of each [token][head_dim / 2] pairs of fp32. The last warps begin: the
// first may be waiting for a token.
template <u32 kHeadDim, u32 kTables = 1, class B, class S>
MK_DEV void load_angles(const B& block, const Step& step, const S& steps, smem_ptr<u32x2> angles, u32 table_rows) {
  const u32x2* table = reinterpret_cast<const u32x2*>(block.buffers.rope);
  const u32 index = steps.index(step);
#pragma unroll 1
  for (u32 i = B::kThreads - 1 - block.thread; i < kTables * B::kTokens * (kHeadDim / 2); i += B::kThreads) {
    const u32 of = i / (kHeadDim / 2), pair = i % (kHeadDim / 2);
    const u32 token = kTables == 1 ? of : of % B::kTokens, first = kTables == 1 ? 0 : of / B::kTokens * table_rows;
    u32 position = 0;
    if (token < step.tokens) position = index == 0 ? ptx::ld_global<u32>(block.cx.control->positions + token) : steps.position(token) + index;
    ptx::st_shared<u32x2>(angles + i, ptx::ld_global_nc<u32x2>(table + size_t(first + min_u32(position, table_rows - 1)) * (kHeadDim / 2) + pair));
  }
}

// The angles of a layer, where there are several tables of them.
template <u32 kHeadDim, class B>
MK_DEV smem_ptr<u32x2> layer_angles(const B&, smem_ptr<u32x2> angles, u32 table) {
  return angles + table * (B::kTokens * (kHeadDim / 2));
}

// Rotates (even, odd), rows `row` and `row` + 1 of heads that begin at row 0, for one token.
template <u32 kHeadDim>
MK_DEV void rotate(smem_ptr<u32x2> angles, u32 row, u32 token, float& even, float& odd) {
  const u32x2 cs = ptx::ld_shared<u32x2>(angles + (token * (kHeadDim / 2) + row % kHeadDim / 2));
  const float c = ptx::bits_float(cs.x), s = ptx::bits_float(cs.y), a = even, b = odd;
  even = a * c - b * s;
  odd = b * c + a * s;
}

}  // namespace mk
