// Adds the splits of an attention: each block takes groups of 8 output features, all tokens.
#pragma once
#include "megadsl/attention.h"

namespace mk {

struct MergeShape {
  i32 groups;        // heads * head_dim / 8
  i32 share_offset;
  i32 heads;         // query heads per KV head
  i32 heads_inverse;  // Divisor::inverse of it
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
  // With the state of the lane that differs in `mask`. Whole states: halves of them would need fewer shuffles, but cost a microsecond more
  // (docs/performance.md).
  MK_DEV void add_lane(u32 mask) {
    float other[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) other[i] = ptx::shfl_xor(out[i], mask);
    add(ptx::shfl_xor(top, mask), ptx::shfl_xor(sum, mask), other);
  }
};

// Polls the three vectors of (unit, query row, feature group), eight values and {maximum, sum}, of `kCount` units at once, `stride`
// apart and as long as they are less than `left` away.
template <class Wire, class T, u32 kCount>
MK_DEV void poll_parts(const Context& cx, u32 site, const ExchangeShape& parts, const Round& round, u32 unit, u32 stride, u32 left, u32 row,
                       u32 part, MergeState& state) {
  const auto wanted = [&](u32 i) { return i == 0 || i * stride < left; };
  u32 at[kCount][3];
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    const u32 base = (unit + i * stride) * u32(parts.vectors) + row * T::kVectors;
    at[i][0] = base + part * 2, at[i][1] = base + part * 2 + 1, at[i][2] = base + T::kVectors - 1;
  }
  u32x4 v[kCount][3] = {};
  wait<ptx::kPollsAtOnce>(cx, site, at[0][0], round.sequence, [&](u32& observed) {
    if (Wire::kFlagged) {
#pragma unroll
      for (u32 i = 0; i < kCount; ++i) {
        if (!wanted(i)) continue;
        observed = ptx::ld_acquire(round.flags + (unit + i * stride) * kFlagStride);
        if (!flag_covers(parts, observed, round.sequence) && !(i == 0 && ptx::polls_fewer())) return false;
      }
    }
    bool all = true;
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
#pragma unroll
      for (u32 j = 0; j < 3; ++j)
        if (wanted(i)) v[i][j] = ptx::ld_relaxed(round.vectors + at[i][j]);
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
#pragma unroll
      for (u32 j = 0; j < 3; ++j)
        if (wanted(i) && !Wire::kFlagged && !(i + j == 0 && ptx::polls_fewer()) && !Wire::ready_f32(v[i][j], round.sequence))
          observed = Wire::tag_f32(v[i][j]), all = false;
    return all;
  });
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    if (!wanted(i)) continue;
    const u32x4(&x)[3] = v[i];
    const float values[8] = {Wire::value_f32(x[0].x), Wire::value_f32(x[0].y), Wire::value_f32(x[0].z), Wire::value_f32(x[0].w),
                             Wire::value_f32(x[1].x), Wire::value_f32(x[1].y), Wire::value_f32(x[1].z), Wire::value_f32(x[1].w)};
    state.add(Wire::value_f32(x[2].x), Wire::value_f32(x[2].y), values);
  }
}

// Merges the splits of this block's (feature group, token) items, kLanes lanes to an item, in a fixed order, and stages
// the bf16 results. A lane polls kAtOnce splits together. kMeets: it ends behind a barrier; else the first warp has all items and
// goes on alone.
template <class Wire, class T, u32 kLanes, u32 kAtOnce, bool kMeets, class B, class Out>
MK_DEV void run_merge(const B& block, u32 site, const MergeShape& s, const AttentionShape& a, const ExchangeShape& parts, u32 sequence,
                      const Out& out) {
  constexpr u32 kTokens = B::kTokens, kGroupsPerHead = T::kHeadDim / 8;
  const Share own = own_share(block.cx, u32(s.groups), u32(s.share_offset));
  const u32 splits = u32(a.splits), items = (own.end - own.begin) * kTokens;
  const Divisor heads = {u32(s.heads), u32(s.heads_inverse)};
  const Round round = exchange_round(block.buffers, parts, sequence);
  block.meet();
  trace(block.cx, Event::kWait, site);
  const u32 rounded = ceil_div(items * kLanes, 32) * 32;  // whole warps: lanes without an item still shuffle
#pragma unroll 1
  for (u32 i = block.thread; i < rounded; i += B::kThreads) {
    const u32 item = i / kLanes, lane = i % kLanes, token = item % kTokens, group = own.begin + item / kTokens;
    const u32 head = group / kGroupsPerHead, kv_head = heads.divide(head);
    MergeState state;
#pragma unroll 1
    for (u32 split = lane; item < items && split < splits; split += kLanes * kAtOnce)
      poll_parts<Wire, T, kAtOnce>(block.cx, site, parts, round, kv_head * splits + split, kLanes, splits - split,
                                   (head - kv_head * heads.value) * kTokens + token, group % kGroupsPerHead, state);
#pragma unroll 1
    for (u32 mask = kLanes / 2; mask != 0; mask /= 2) state.add_lane(mask);
    if (item >= items || lane != 0) continue;
    // A token past the launch's count sees no row at all; its result is never used, but must stay finite.
    const float scale = state.sum > 0.0f ? ptx::rcp(state.sum) : 0.0f;
    u32 words[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) words[j] = ptx::pack_bf16(state.out[2 * j] * scale, state.out[2 * j + 1] * scale);
    out.put_unit(item, u32x4{words[0], words[1], words[2], words[3]});
  }
  if (kMeets) block.sync();
  trace(block.cx, Event::kReady, site);
}

}  // namespace mk
