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

// Over the lanes of an item, all of which get the result.
template <u32 kLanes>
MK_DEV float lanes_max(float v) {
#pragma unroll
  for (u32 mask = kLanes / 2; mask != 0; mask /= 2) v = math::max(v, ptx::shfl_xor(v, mask));
  return v;
}
template <u32 kLanes>
MK_DEV float lanes_sum(float v) {
#pragma unroll
  for (u32 mask = kLanes / 2; mask != 0; mask /= 2) v += ptx::shfl_xor(v, mask);
  return v;
}

// Adds the eight elements of an item over its lanes, and deals them out: halves change hands, so that a lane sends and keeps half of what it has.
// `v` begins with the lane's elements, kCount of them from `first` on.
template <u32 kLanes>
struct DealtSums {
  static constexpr u32 kCount = kLanes < 8 ? 8 / kLanes : 1;
  static constexpr u32 kCopies = ceil_div(kLanes, 8);  // neighbouring lanes that have the same elements
  float v[8];
  u32 first = 0;

  MK_DEV void add_lanes(u32 lane) {
    u32 count = 8;
#pragma unroll
    for (u32 mask = kLanes / 2; mask != 0; mask /= 2) {
      if (count == 1) {
        v[0] += ptx::shfl_xor(v[0], mask);
        continue;
      }
      count /= 2;
      const bool upper = (lane & mask) != 0;
#pragma unroll
      for (u32 i = 0; i < count; ++i) {
        const float kept = upper ? v[count + i] : v[i], sent = upper ? v[i] : v[count + i];
        v[i] = kept + ptx::shfl_xor(sent, mask);
      }
      if (upper) first += count;
    }
  }
};

// Adds what the lanes of an item have, and stages the bf16 results, or sends them. All lanes of a warp call it together.
template <u32 kLanes, class Out>
MK_DEV void put_merged(const Out& out, u32 item, u32 lane, bool exists, DealtSums<kLanes>& sums, float sum) {
  sum = lanes_sum<kLanes>(sum);
  sums.add_lanes(lane);
  // A token past the launch's count sees no row at all; its result is never used, but must stay finite.
  const float scale = sum > 0.0f ? ptx::rcp(sum) : 0.0f;
  float partner = 0.0f;  // the other element of a word
  if constexpr (Out::kAtOnce && sums.kCount == 1) partner = ptx::shfl_xor(sums.v[0], sums.kCopies);
  if (!exists || lane % sums.kCopies != 0) return;
  if constexpr (Out::kAtOnce && sums.kCount == 1) {
    if (sums.first % 2 == 0) out.put_pair(item, sums.first / 2, ptx::pack_bf16(sums.v[0] * scale, partner * scale));
  } else if constexpr (sums.kCount == 1) {
    out.put_element(item, sums.first, ptx::to_bf16(sums.v[0] * scale));
  } else if constexpr (sums.kCount == 8) {
    u32 words[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) words[j] = ptx::pack_bf16(sums.v[2 * j] * scale, sums.v[2 * j + 1] * scale);
    out.put_unit(item, u32x4{words[0], words[1], words[2], words[3]});
  } else {
#pragma unroll
    for (u32 j = 0; j < sums.kCount; j += 2)
      out.put_pair(item, (sums.first + j) / 2, ptx::pack_bf16(sums.v[j] * scale, sums.v[j + 1] * scale));
  }
}

// Where the parts of an item lie: of its first split's vectors, in the slot, and which unit of the attention wrote them.
struct MergeItem {
  u32 item, lane, unit, data, scale;  // data: eight values in two vectors; scale: {maximum, sum}
};

// Polls the three vectors of `kCount` splits of each lane's item at once, kLanes units apart, and adds those that exist. All lanes of a
// warp call it together; those of an item agree on its maximum. `splits`: that the item has from the lane's first on.
template <class Wire, u32 kLanes, u32 kCount>
MK_DEV void add_parts_of(const Context& cx, u32 site, const ExchangeShape& parts, const Round& round, const MergeItem& at, u32 splits, bool more,
                         float& top, float& sum, float (&out)[8]) {
  const u32 stride = kLanes * u32(parts.vectors);
  u32x4 v[3 * kCount] = {};
  u32 pending = 0;
#pragma unroll
  for (u32 i = 0; i < kCount; ++i)
    if (i * kLanes < splits) pending |= 7u << 3 * i;
  const u32 exists = pending;
  poll_vectors<Floats<Wire>>(
      cx, site, at.data, round.sequence, pending, v,
      [&](u32 i) { return round.vectors + ((i % 3 < 2 ? at.data + i % 3 : at.scale) + i / 3 * stride); },
      [&](u32 i, u32& observed) { return i % 3 != 0 || raised(parts, round, at.unit + i / 3 * kLanes, observed); });
  const auto maximum = [&](u32 i) { return exists >> 3 * i & 1 ? Wire::value_f32(v[3 * i + 2].x) : kNoMaximum; };
  const float before = top;
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) top = math::max(top, maximum(i));
  top = lanes_max<kLanes>(top);
  if (more) {  // not the first splits
    const float fade = ptx::exp2_approx(before - top);
    sum *= fade;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) out[j] *= fade;
  }
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    const u32x4* const x = v + 3 * i;
    const float weight = ptx::exp2_approx(maximum(i) - top);  // of a split that does not exist it meets zeros
    sum += weight * Wire::value_f32(x[2].y);
    const u32 words[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
    for (u32 j = 0; j < 8; ++j) out[j] += weight * Wire::value_f32(words[j]);
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
  const auto locate = [&](u32 i) {
    const u32 item = i / kLanes, lane = i % kLanes, token = item % kTokens, group = own.begin + item / kTokens;
    const u32 head = group / kGroupsPerHead, kv_head = heads.divide(head), unit = kv_head * splits + lane;
    const u32 inside = head - kv_head * heads.value, query_row = T::kByToken ? token * heads.value + inside : inside * kTokens + token;
    const u32 row = unit * u32(parts.vectors) + query_row * T::kVectors;
    return MergeItem{item, lane, unit, ptx::opaque(row + group % kGroupsPerHead * 2), row + T::kVectors - 1};  // opaque: worked out before the wait
  };
  MergeItem at = locate(block.thread);
  block.meet();
  trace(block.cx, Event::kWait, site);
  const u32 rounded = ceil_div(items * kLanes, 32) * 32;  // whole warps: lanes without an item still shuffle
#pragma unroll 1
  for (u32 i = block.thread; i < rounded;) {
    const bool exists = at.item < items;
    DealtSums<kLanes> sums = {};
    float top = kNoMaximum, sum = 0.0f;
#pragma unroll 1
    for (u32 split = 0; split < splits; split += kLanes * kAtOnce) {
      add_parts_of<Wire, kLanes, kAtOnce>(block.cx, site, parts, round, at, exists && split + at.lane < splits ? splits - split - at.lane : 0,
                                          split != 0, top, sum, sums.v);
      at.unit += kLanes * kAtOnce, at.data += kLanes * kAtOnce * u32(parts.vectors), at.scale += kLanes * kAtOnce * u32(parts.vectors);
    }
    put_merged<kLanes>(out, at.item, at.lane, exists, sums, sum);
    i += B::kThreads;
    if (i < rounded) at = locate(i);
  }
  if (kMeets) block.sync();
  trace(block.cx, Event::kReady, site);
}

// The same of splits that the blocks of a cluster send each other, kSplits lanes to an item. A block without a unit has nothing to add.
template <class T, u32 kSplits, bool kMeets, class B, class Out>
MK_DEV void merge_cluster(const B& block, u32 site, const AttentionShape& a, const ClusterShape& s, Landings& landings, const Out& out) {
  const Share own = cluster_share(block.cx, a, s);
  const u32 items = (own.end - own.begin) * B::kTokens, rounded = ceil_div(items * kSplits, kWarpSize) * kWarpSize;
  block.meet();
  trace(block.cx, Event::kWait, site);
  if (items != 0) landings.await(block, site, a, s);
#pragma unroll 1
  for (u32 i = block.thread; i < rounded; i += B::kThreads) {
    const u32 item = i / kSplits, lane = i % kSplits;
    const bool exists = item < items;
    const smem_ptr<u32x4> part = block.template at<u32x4>(s.received) + min_u32(i, items * kSplits - 1) * kPartVectors;
    const u32x4 lo = ptx::ld_shared<u32x4>(part), hi = ptx::ld_shared<u32x4>(part + 1), scale = ptx::ld_shared<u32x4>(part + 2);
    const float maximum = ptx::bits_float(scale.x), weight = ptx::exp2_approx(maximum - lanes_max<kSplits>(maximum));
    const u32 words[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
    DealtSums<kSplits> sums = {};
#pragma unroll
    for (u32 j = 0; j < 8; ++j) sums.v[j] = weight * ptx::bits_float(words[j]);
    put_merged<kSplits>(out, item, lane, exists, sums, weight * ptx::bits_float(scale.y));
  }
  if (kMeets) block.sync();
  trace(block.cx, Event::kReady, site);
}

}  // namespace mk
