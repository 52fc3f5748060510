// Adds the splits of an attention: each block takes groups of 8 output features, all tokens.
#pragma once
#include "megadsl/attention.h"

namespace mk {

struct MergeShape {
  i32 groups;        // heads * head_dim / 8
  i32 share_offset;
  i32 scratch;       // shared memory: [item][split][10] fp32
};

// Polls the three vectors (eight values, {max, sum}) of each of this block's (feature group, token, split), merges the
// splits in order and stages the bf16 results. Ends behind a barrier, ready for publish_share().
template <class Wire, class T, class B>
MK_DEV void run_merge(const B& block, u32 site, const MergeShape& s, const AttentionShape& a, const ExchangeShape& parts, u32 sequence,
                      smem_ptr<u16> staged) {
  constexpr u32 kTokens = B::kTokens, kFloats = 10, kGroupsPerHead = T::kHeadDim / 8;
  const u32 begin = share_begin(u32(s.groups), block.cx.blocks, u32(s.share_offset), block.cx.block);
  const u32 end = share_begin(u32(s.groups), block.cx.blocks, u32(s.share_offset), block.cx.block + 1);
  const u32 splits = u32(a.splits), items = (end - begin) * kTokens, heads_per_kv = u32(a.rows) / kTokens;
  const Round round = exchange_round(block.buffers, parts, sequence);
  const smem_ptr<float> scratch = block.template at<float>(s.scratch);
#pragma unroll 1
  for (u32 i = block.thread; i < items * splits; i += B::kThreads) {
    const u32 split = i % splits, item = i / splits, token = item % kTokens, group = begin + item / kTokens;
    const u32 head = group / kGroupsPerHead, part = group % kGroupsPerHead;
    const u32 unit = head / heads_per_kv * splits + split, row = head % heads_per_kv * kTokens + token;
    const u32 base = unit * u32(parts.vectors) + row * T::kVectors;
    const smem_ptr<float> into = scratch + i * kFloats;
    const u32 at[3] = {base + part * 2, base + part * 2 + 1, base + T::kVectors - 1};
    u32x4 v[3] = {};
    wait(block.cx, site, at[0], sequence, [&](u32& observed) {
      if (Wire::kFlagged) {
        observed = ptx::ld_acquire(round.flags + unit * kFlagStride);
        if (observed != sequence) return false;
      }
      bool all = true;
#pragma unroll
      for (u32 j = 0; j < 3; ++j) v[j] = ptx::ld_relaxed(round.vectors + at[j]);
#pragma unroll
      for (u32 j = 0; j < 3; ++j) {
        if (!Wire::kFlagged && !Wire::ready_f32(v[j], sequence)) observed = Wire::tag_f32(v[j]), all = false;
      }
      return all;
    });
    const u32 words[kFloats] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w, v[2].x, v[2].y};
#pragma unroll
    for (u32 j = 0; j < kFloats; ++j) ptx::st_shared<float>(into + j, Wire::value_f32(words[j]));
  }
  block.sync();
#pragma unroll 1
  for (u32 i = block.thread; i < items * 8; i += B::kThreads) {
    const u32 feature = i % 8, item = i / 8, token = item % kTokens, group = item / kTokens;
    const smem_ptr<float> row = scratch + item * splits * kFloats;
    float top = kNoMaximum, sum = 0.0f, out = 0.0f;
#pragma unroll 1
    for (u32 split = 0; split < splits; ++split) top = math::max(top, ptx::ld_shared<float>(row + (split * kFloats + 8)));
#pragma unroll 1
    for (u32 split = 0; split < splits; ++split) {
      const float weight = ptx::exp2_approx(ptx::ld_shared<float>(row + (split * kFloats + 8)) - top);
      sum += weight * ptx::ld_shared<float>(row + (split * kFloats + 9));
      out += weight * ptx::ld_shared<float>(row + (split * kFloats + feature));
    }
    // A token past the launch's count sees no row at all; its result is never used, but must stay finite.
    ptx::st_shared<u16>(staged + ((group * 8 + feature) * kTokens + token), ptx::to_bf16(sum > 0.0f ? out / sum : 0.0f));
  }
  block.sync();
}

}  // namespace mk
