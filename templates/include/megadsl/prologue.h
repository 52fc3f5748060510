// From exchanges to the mma operand: gather a linear's inputs, reduce rows, apply the prologue in place.
#pragma once
#include "megadsl/block.h"

namespace mk {

// Eight consecutive bf16 of a vector, as fp32.
MK_DEV void load8(smem_ptr<char> vector, u32 column, float (&v)[8]) {
  const u32x4 x = ptx::ld_shared<u32x4>(vector.template at<u32x4>(column * 2));
  const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) v[2 * i] = ptx::bf16_lo(w[i]), v[2 * i + 1] = ptx::bf16_hi(w[i]);
}

// Eight consecutive columns of a token in an activation buffer, as fp32; `column` is a multiple of 8.
template <u32 kTokens>
MK_DEV void load8(smem_ptr<char> rows, u32 column, u32 token, float (&v)[8]) {
#pragma unroll
  for (u32 range = 0; range < 2; ++range) {
    const u32x2 x = ptx::ld_shared<u32x2>(rows.template at<u32x2>(activation_offset<kTokens>(column + 2 * range, token)));
    v[2 * range] = ptx::bf16_lo(x.x), v[2 * range + 1] = ptx::bf16_hi(x.x);
    v[2 * range + 4] = ptx::bf16_lo(x.y), v[2 * range + 5] = ptx::bf16_hi(x.y);
  }
}
template <u32 kTokens>
MK_DEV void store8(smem_ptr<char> rows, u32 column, u32 token, const float (&v)[8]) {
#pragma unroll
  for (u32 range = 0; range < 2; ++range)
    ptx::st_shared<u32x2>(rows.template at<u32x2>(activation_offset<kTokens>(column + 2 * range, token)),
                          u32x2{ptx::pack_bf16(v[2 * range], v[2 * range + 1]), ptx::pack_bf16(v[2 * range + 4], v[2 * range + 5])});
}

// Gathers features of a value into an activation buffer, columns past them as zeros. `begin` is a multiple of 8.
template <class Wire, class P, class B>
MK_DEV void gather_value(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 features, u32 columns,
                         smem_ptr<char> into) {
  constexpr u32 kTokens = B::kTokens, kRange = kTokens * 32;  // bytes from a unit's first column range to its second
  const Groups wanted = groups_of(begin, features);
  const u32 filled = wanted.count * kGroupRows;
#pragma unroll 1
  for (u32 i = block.thread; i < (columns - filled) * kTokens; i += B::kThreads)
    ptx::st_shared<u16>(into.template at<u16>(activation_offset<kTokens>(filled + i / kTokens, i % kTokens)), u16(0));
  const Groups owners = P::kWhole ? Groups{0, block.cx.blocks.value} : owners_of(block.cx, e, wanted);
  const auto place = [&](u32 group, u32 token) { return into.template at<char>(activation_offset<kTokens>(group * kGroupRows, token)); };
  gather_units<Wire, kTokens, P, 1>(
      block.cx, site, e, exchange_round(block.buffers, e, sequence), {{wanted}, {owners}}, block.thread, B::kThreads,
      [&](u32, u32 group, u32 token, u32x4 x) {
        const smem_ptr<char> at = place(group, token);
        ptx::st_shared<u32x2>(at.template at<u32x2>(0), u32x2{x.x, x.z});
        if (Wire::kWholeUnits) {
          ptx::st_shared<u32x2>(at.template at<u32x2>(kRange), u32x2{x.y, x.w});
        } else {
          ptx::st_shared<u32>(at.template at<u32>(kRange), x.y);
          ptx::st_shared<u16>(at.template at<u16>(kRange + 4), u16(x.w));
        }
      },
      [&](u32, u32 group, u32 token, u16 bits) { ptx::st_shared<u16>(place(group, token).template at<u16>(kRange + 6), bits); });
}

// Gathers the rows of another value that this block's own results are combined with (a residual), as units.
template <class Wire, class B>
MK_DEV void gather_kept(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 first, u32 end, smem_ptr<char> into) {
  constexpr u32 kTokens = B::kTokens;
  if (first >= end) return;
  const Groups wanted = groups_of(first, end - first);
  const auto place = [&](u32 group, u32 token) { return into.template at<char>(unit_offset<kTokens>(group, token, 0)); };
  gather_units<Wire, kTokens, Poll<1, 1, false>, 1>(
      block.cx, site, e, exchange_round(block.buffers, e, sequence), {{wanted}, {owners_of(block.cx, e, wanted)}}, block.thread, B::kThreads,
      [&](u32, u32 group, u32 token, u32x4 x) { store_unit<Wire>(place(group, token), x); },
      [&](u32, u32 group, u32 token, u16 bits) { store_last(place(group, token), bits); });
}

// How the warps share the tokens of a row reduction: `kPerToken` warps work on one token at a time.
template <class B>
struct RowShare {
  static constexpr u32 kTokensAtOnce = B::kTokens < B::kWarps ? B::kTokens : B::kWarps;
  static constexpr u32 kPerToken = B::kWarps / kTokensAtOnce;
};

enum class RowOp { kSum, kMax };

// Per-warp parts of one row reduction into `parts` [token][RowShare::kPerToken] fp32. `load(column, token, values)` gives
// the operand's eight values from a column on. Columns from `columns` on do not count. Needs a sync() before reads.
template <RowOp kOp, class B, class Load>
MK_DEV void reduce_rows(const B& block, u32 columns, smem_ptr<float> parts, Load load) {
  using Share = RowShare<B>;
  const u32 part = block.warp() / Share::kTokensAtOnce;
  if (part >= Share::kPerToken) return;
#pragma unroll 1
  for (u32 token = block.warp() % Share::kTokensAtOnce; token < B::kTokens; token += Share::kTokensAtOnce) {
    float total = kOp == RowOp::kSum ? 0.0f : -INFINITY;
#pragma unroll 1
    for (u32 column = (part * 32 + block.lane()) * 8; column < columns; column += Share::kPerToken * 256) {
      float v[8];
      load(column, token, v);
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        if (column + i >= columns) continue;
        total = kOp == RowOp::kSum ? total + v[i] : math::max(total, v[i]);
      }
    }
#pragma unroll
    for (u32 mask = 16; mask != 0; mask /= 2) {
      const float other = ptx::shfl_xor(total, mask);
      total = kOp == RowOp::kSum ? total + other : math::max(total, other);
    }
    if (block.lane() == 0) ptx::st_shared<float>(parts + (token * Share::kPerToken + part), total);
  }
}

// The finished reduction of one token, added up in a fixed order.
template <RowOp kOp, class B>
MK_DEV float row_total(smem_ptr<float> parts, u32 token) {
  float total = ptx::ld_shared<float>(parts + token * RowShare<B>::kPerToken);
#pragma unroll
  for (u32 i = 1; i < RowShare<B>::kPerToken; ++i) {
    const float other = ptx::ld_shared<float>(parts + (token * RowShare<B>::kPerToken + i));
    total = kOp == RowOp::kSum ? total + other : math::max(total, other);
  }
  return total;
}

// Rewrites an activation buffer in place, eight columns at a time: `f(column, token, values)` fills the new values.
template <class B, class F>
MK_DEV void apply_rows(const B& block, u32 columns, u32 columns_padded, smem_ptr<char> rows, F f) {
#pragma unroll 1
  for (u32 i = block.thread; i < columns_padded / 8 * B::kTokens; i += B::kThreads) {
    const u32 quarter = i % 4, token = i / 4 % B::kTokens, panel = i / (4 * B::kTokens);
    const u32 column = panel * kPanel + quarter * 8;
    float v[8];
    f(column, token, v);
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (column + j >= columns) v[j] = 0.0f;
    store8<B::kTokens>(rows, column, token, v);
  }
}

}  // namespace mk
