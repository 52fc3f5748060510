// Adds the splits of an attention: each block takes groups of 8 output features, all tokens.
#pragma once
#include "megadsl/attention.h"

namespace mk {

struct MergeShape {
  i32 groups;        // heads * head_dim / 8
  i32 share_offset;
  i32 lanes;         // lanes that share an item: the power of two that holds all splits, at most 32
};

// One lane's splits of an item: eight output features, weighted relative to a running maximum.
struct MergeState {
  float top = kNoMaximum;
  float sum = 0.0f;
  float out[8] = {};

  MK_DEV void add(float other_top, float other_sum, const float (&other)[8]) {
    const float highest = math::max(top, other_top);
    const float mine = ptx::exp2_approx(top - highest), theirs = ptx::exp2_approx(other_top - highest);
    top = highest;
    sum = sum * mine + other_sum * theirs;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) out[i] = out[i] * mine + other[i] * theirs;
  }
  MK_DEV void add_lane(u32 mask) {
    float other[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) other[i] = ptx::shfl_xor(out[i], mask);
    add(ptx::shfl_xor(top, mask), ptx::shfl_xor(sum, mask), other);
  }
};

// Polls the three vectors of one (unit, query row, feature group): eight values and {maximum, sum}.
template <class Wire, class T>
MK_DEV void poll_part(const Context& cx, u32 site, const ExchangeShape& parts, const Round& round, u32 unit, u32 row, u32 part, MergeState& state) {
  const u32 base = unit * u32(parts.vectors) + row * T::kVectors;
  const u32 at[3] = {base + part * 2, base + part * 2 + 1, base + T::kVectors - 1};
  u32x4 v[3] = {};
  wait(cx, site, at[0], round.sequence, [&](u32& observed) {
    if (Wire::kFlagged) {
      observed = ptx::ld_acquire(round.flags + unit * kFlagStride);
      if (!flag_covers(parts, observed, round.sequence) && !ptx::polls_fewer()) return false;
    }
    bool all = true;
#pragma unroll
    for (u32 j = 0; j < 3; ++j) v[j] = ptx::ld_relaxed(round.vectors + at[j]);
#pragma unroll
    for (u32 j = 0; j < 3; ++j)
      if (!Wire::kFlagged && !(j == 0 && ptx::polls_fewer()) && !Wire::ready_f32(v[j], round.sequence)) observed = Wire::tag_f32(v[j]), all = false;
    return all;
  });
  const float values[8] = {Wire::value_f32(v[0].x), Wire::value_f32(v[0].y), Wire::value_f32(v[0].z), Wire::value_f32(v[0].w),
                           Wire::value_f32(v[1].x), Wire::value_f32(v[1].y), Wire::value_f32(v[1].z), Wire::value_f32(v[1].w)};
  state.add(Wire::value_f32(v[2].x), Wire::value_f32(v[2].y), values);
}

// Merges the splits of this block's (feature group, token) items, `lanes` lanes to an item, in a fixed order, and stages
// the bf16 results. Ends behind a barrier, ready for publish().
template <class Wire, class T, class B>
MK_DEV void run_merge(const B& block, u32 site, const MergeShape& s, const AttentionShape& a, const ExchangeShape& parts, u32 sequence,
                      smem_ptr<char> staged) {
  constexpr u32 kTokens = B::kTokens, kGroupsPerHead = T::kHeadDim / 8;
  const Share own = own_share(block.cx, u32(s.groups), u32(s.share_offset));
  const u32 splits = u32(a.splits), items = (own.end - own.begin) * kTokens, heads_per_kv = u32(a.rows) / kTokens, lanes = u32(s.lanes);
  const Round round = exchange_round(block.buffers, parts, sequence);
  trace(block.cx, Event::kWait, site);
  const u32 rounded = ceil_div(items * lanes, 32) * 32;  // whole warps: lanes without an item still shuffle
#pragma unroll 1
  for (u32 i = block.thread; i < rounded; i += B::kThreads) {
    const u32 item = i / lanes, token = item % kTokens, group = own.begin + item / kTokens;
    const u32 head = group / kGroupsPerHead;
    MergeState state;
#pragma unroll 1
    for (u32 split = i % lanes; item < items && split < splits; split += lanes)
      poll_part<Wire, T>(block.cx, site, parts, round, head / heads_per_kv * splits + split, head % heads_per_kv * kTokens + token,
                         group % kGroupsPerHead, state);
#pragma unroll 1
    for (u32 mask = lanes / 2; mask != 0; mask /= 2) state.add_lane(mask);
    if (item >= items || i % lanes != 0) continue;
    // A token past the launch's count sees no row at all; its result is never used, but must stay finite.
    const float scale = state.sum > 0.0f ? 1.0f / state.sum : 0.0f;
    u32 words[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) words[j] = ptx::pack_bf16(state.out[2 * j] * scale, state.out[2 * j + 1] * scale);
    ptx::st_shared<u32x4>(staged.template at<u32x4>(item * 16), u32x4{words[0], words[1], words[2], words[3]});
  }
  block.sync();
  trace(block.cx, Event::kReady, site);
}

}  // namespace mk
