// Linears whose columns are split: tensor parallelism inside the GPU.
//
// A block multiplies its row groups by one part of the columns (rarely two), so that it gathers a part of the input alone, and
// publishes the fp32 sums. The blocks that own the rows as features of the value add the parts in a fixed order, which makes
// results bit-identical from run to run, and go on as if they had computed them: epilogue, rounding, publication.
#pragma once
#include "megadsl/linear.h"

namespace mk {

// Sums of four rows of a token in one vector: a row group of a part is [token][2] vectors.
template <class B>
constexpr u32 kSumVectors = 2 * B::kTokens;

// Adds the warps' parts of `count` row groups in a fixed order and, with the last chunk, publishes them; `first` counts from the block's
// first.
template <class Wire, bool kChunks, class B>
MK_DEV void publish_parts(const B& block, const ExchangeShape& e, u32 sequence, smem_ptr<float> partials, u32 first, u32 count,
                          ChunkSums chunks) {
  constexpr u32 kVectors = kSumVectors<B>;
  const Round round = exchange_round(block.buffers, e, sequence);
  const u32 begin = block.cx.block * u32(e.vectors) + first * kVectors;
#pragma unroll 1
  for (u32 i = block.thread; i < count * kVectors; i += B::kThreads) {
    const smem_ptr<float> at = partials + (i / kVectors * B::kWarps * kVectors + i % kVectors) * 4;
    float sum[4] = {};
#pragma unroll
    for (u32 w = 0; w < B::kWarps; ++w) {
      const u32x4 v = ptx::ld_shared<u32x4>((at + w * kVectors * 4).template at<u32x4>(0));
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (u32 j = 0; j < 4; ++j) sum[j] += ptx::bits_float(words[j]);
    }
    if (kChunks) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) sum[j] = chunks.add(i * 4 + j, sum[j]);
      if (!chunks.last) continue;
    }
    chaos(block.cx, Place::kSignal, u32(e.offset), i / kWarpSize);
    ptx::st_relaxed(round.vectors + begin + i, Wire::pack_f32(sum, sequence));
    if (Wire::kResets) {
      const Round ahead = exchange_round(block.buffers, e, sequence + u32(e.slots) / 2);
      ptx::st_relaxed(ahead.vectors + begin + i, u32x4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
    }
  }
}

// run_matrix for one part (or several) of the columns.
template <class Wire, u32 kBatch, class G, class B, class R, class Gather>
MK_DEV void run_matrix_parts(const B& block, R& reader, u32 site, const LinearShape& s, const SmemShape& smem, const ExchangeShape& e,
                             u32 sequence, Gather gather) {
  const auto settle = [] {};
  run_tiles<kBatch, G, Wire::kFlagged>(block, reader, site, s, smem, gather, settle, [&](smem_ptr<float> partials, u32 first, u32 count, ChunkSums chunks) {
    publish_parts<Wire, (G::kChunks > 1)>(block, e, sequence, partials, first, count, chunks);
  });
  if (Wire::kFlagged && block.thread == 0) {
    chaos(block.cx, Place::kSignal, u32(e.flags), 0);
    ptx::st_release(exchange_round(block.buffers, e, sequence).flags + block.cx.block * kFlagStride, sequence);
  }
  trace(block.cx, Event::kEnd, site);
}

// Row groups that a block owns as features of the value.
MK_DEV RowGroups value_groups(const Context& cx, const ExchangeShape& value, u32 fold) {
  const Share own = own_share(cx, u32(value.groups), u32(value.share_offset));
  return {own.begin * fold, own.end * fold};
}

// Polls `kCount` parts of four rows, from `first` on, and adds them to `sum` in order. `group` and `vector` say which rows, if `wanted`; all
// lanes of a warp call it together.
template <class Wire, u32 kCount, u32 kWays, u32 kFold, class B>
MK_DEV void add_some(const B& block, u32 site, const ExchangeShape& e, const Round& round, u32 first, u32 group, u32 vector, bool wanted,
                     float (&sum)[4]) {
  const Context& cx = block.cx;
  const Divisor items = {u32(e.groups), u32(e.groups_inverse)};
  u32 at[kCount] = {}, owners[kCount] = {}, pending = 0;
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    if (first + i >= kWays || !wanted) continue;
    const u32 item = (first + i) * (u32(e.groups) / kWays) + group / kFold;
    owners[i] = items.divide_any((item + 1) * cx.blocks.value - u32(e.share_offset) - 1);  // share_owner
    const u32 local = (item - share_begin(u32(e.groups), cx.blocks, u32(e.share_offset), owners[i])) * kFold + group % kFold;
    at[i] = owners[i] * u32(e.vectors) + local * kSumVectors<B> + vector;
    pending |= 1u << i;
  }
  u32x4 v[kCount] = {};
  poll_vectors<Floats<Wire>>(cx, site, at[0], round.sequence, pending, v, [&](u32 i) { return round.vectors + at[i]; },
                             [&](u32 i, u32& observed) { return raised(e, round, owners[i], observed); });
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    if (first + i >= kWays) continue;
    sum[0] += Wire::value_f32(v[i].x), sum[1] += Wire::value_f32(v[i].y);
    sum[2] += Wire::value_f32(v[i].z), sum[3] += Wire::value_f32(v[i].w);
  }
}

// Adds the parts of the rows that this block owns as features of `value` and hands each pair of rows to the epilogue (as in
// finish_batch), which stages it. kMeets: it ends behind a barrier; else the first warp has all rows and goes on alone.
template <class Wire, u32 kWays, u32 kFold, bool kMeets, class B, class Epilogue>
MK_DEV void add_parts(const B& block, u32 site, const ExchangeShape& value, const ExchangeShape& e, u32 sequence, Epilogue epilogue) {
  constexpr u32 kVectors = kSumVectors<B>, kMost = 8, kTurns = ceil_div(kWays, kMost), kAtOnce = ceil_div(kWays, kTurns);
  const RowGroups own = value_groups(block.cx, value, kFold);
  const Round round = exchange_round(block.buffers, e, sequence);
  const u32 items = (own.end - own.begin) * kVectors;
  trace(block.cx, Event::kWait, site);
#pragma unroll 1
  for (u32 i = block.thread; i < ceil_div(items, kWarpSize) * kWarpSize; i += B::kThreads) {  // whole warps: they poll as one
    const u32 group = own.begin + i / kVectors, vector = i % kVectors;
    float sum[4] = {};
#pragma unroll 1
    for (u32 turn = 0; turn < kTurns; ++turn) add_some<Wire, kAtOnce, kWays, kFold>(block, site, e, round, turn * kAtOnce, group, vector, i < items, sum);
    if (i >= items) continue;
    epilogue(group, vector % 2 * 2, vector / 2, sum[0], sum[1]);
    epilogue(group, vector % 2 * 2 + 1, vector / 2, sum[2], sum[3]);
  }
  if (kMeets) block.sync();
  trace(block.cx, Event::kReady, site);
}

}  // namespace mk
