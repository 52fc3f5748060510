// Maps of rows: a value that is made of others without a matrix, such as a residual and what a norm makes of an op's results.
//
// Every block gathers the one value that reductions run over, and keeps of it only the terms of the sums: in registers, in the order of its
// units, as a linear's row scale does. Then it makes the features that it owns, of its own rows of all operands.
#pragma once
#include "megadsl/linear.h"
#include "megadsl/prologue.h"

namespace mk {

struct RowMapShape {
  i32 features;
  i32 begin;         // the first that is reduced, in its value
  i32 groups;        // of features, which are shared out over the blocks
  i32 share_offset;
};

// Adds up the terms of a value's row reductions, `terms(x, of)` of each element, and leaves each warp's sums in `to`. The block meets
// behind that, and a finisher also before the first poll. `lasts`: room for last elements that travel apart.
template <class Wire, class P, bool kRagged, class Rows, class B, class Terms>
MK_DEV void reduce_value(const B& block, u32 site, const RowMapShape& s, const ExchangeShape& e, u32 sequence, smem_ptr<u16> lasts,
                         smem_ptr<float> to, Rows& rows, Terms terms) {
  constexpr u32 kTokens = B::kTokens, kInUnit = Wire::kWholeUnits ? 8 : 7;
  const u32 features = u32(s.features), columns = ceil_div(features, kGroupRows) * kGroupRows;
  block.meet();
  trace(block.cx, Event::kWait, site, 0);
  gather_groups<Wire, P>(
      block, site, e, sequence, u32(s.begin), features, columns, block.smem,
      [&](smem_ptr<char>, u32 group, u32 token, u32x4 x) {
        float v[8], sums[Rows::kCount];
        unpack8(x, v);
#pragma unroll
        for (u32 j = 0; j < kInUnit; ++j) {
          if (kRagged && group * kGroupRows + j >= features) continue;
          float of[Rows::kCount];
          terms(v[j], of);
          if (j == 7) Rows::add(rows.lasts, token, of);
#pragma unroll
          for (u32 i = 0; i < Rows::kCount && j < 7; ++i) sums[i] = j == 0 ? of[i] : Rows::both(i, sums[i], of[i]);
        }
        Rows::add(rows.firsts, token, sums);
      },
      [&](u32 group, u32 token, u16 bits) { return [=] { ptx::st_shared<u16>(lasts + (group * kTokens + token), bits); }; }, Idle{});
  if (!Wire::kWholeUnits) block.sync();
  add_lasts<Wire, kRagged>(block, features, lasts, rows, terms);
  rows.leave(block, to);
  block.meet_all();
  trace(block.cx, Event::kReady, site, 0);
}

// `make(group, pair, token)` of each pair of the block's own features; kEnds: behind a barrier then.
template <bool kEnds, class B, class F>
MK_DEV void finish_rows(const B& block, RowGroups own, F make) {
#pragma unroll 1
  for (u32 i = block.thread; i < (own.end - own.begin) * B::kTokens * 4; i += B::kThreads)
    make(own.begin + i / (4 * B::kTokens), i % 4, i / 4 % B::kTokens);
  if (kEnds) block.sync();
}

}  // namespace mk
