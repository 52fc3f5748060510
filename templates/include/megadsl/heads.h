// Attention of one new token whose queries arrive in registers: few heads, a dense exchange. See direct.h for why.
//
// Units, splits and partial results are those of attention.h, the products of wide heads those of few_rows.h. Every warp polls the unit's
// queries as operands of its products, takes its first cached chunk out of the ring before that, and one warp polls this step's own key and
// value as a chunk of one row.
#pragma once
#include "megadsl/few_rows.h"
#include "megadsl/head_maps.h"

namespace mk {

// What is made of a unit of one head, in neighbouring lanes with the head's other units.
template <class T, class Heads, class Map>
MK_DEV u32x4 map_unit(const Heads& heads, u32 lane, u32x4 x, Map map) {
  float v[8];
  unpack8(x, v);
  map(v);
#pragma unroll
  for (u32 j = 0; j < 8 && Heads::kTurns; j += 2) rotate<T::kHeadDim>(heads.angles, lane % (T::kHeadDim / 8) * 8 + j, 0, v[j], v[j + 1]);
  return {ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7])};
}

// The unit's queries as operands: lane (g, q) has unit q of each panel of query row g. Where heads are mapped before they are multiplied,
// a head's units are polled by neighbouring lanes, and go from there to where they are operands.
template <class T, u32 kRows, bool kMaps>
struct LaneQueries {
  static constexpr u32 kUnits = T::kHeadDim / 8, kHeads = kWarpSize / kUnits;  // heads of a warp's lanes
  static constexpr u32 kOwn = kMaps ? ceil_div(kRows, kHeads) : T::kPanels, kPolls = kOwn + 1;
  static_assert(2 * kUnits <= kWarpSize && T::kHeadDim % kPanel == 0, "a lane has one unit of this step's row, and of each panel");
  static_assert(!kMaps || kWarpSize % kUnits == 0, "a warp's lanes have whole heads");
  u32x4 at[kPolls] = {};

  // `fresh`: this warp also polls this step's key (lanes 0 to D / 8) and value (the next), a unit a lane, and stages them in `row` as
  // the first row of a chunk.
  template <class Wire, class Heads>
  MK_DEV void poll(const Context& cx, u32 site, const AttentionShape& s, const Round& round, u32 head, u32 lane, bool fresh, smem_ptr<char> row,
                   const Heads& heads) {
    const u32 queries = (u32(s.q_begin) + head * kRows * T::kHeadDim) / kGroupRows;
    const u32 first = queries + (kMaps ? lane : lane / 4 * kUnits + lane % 4), apart = kMaps ? kWarpSize : 4;
    const u32 own = (u32(lane < kUnits ? s.k_begin : s.v_begin) + head * T::kHeadDim) / kGroupRows + lane % kUnits;
    u32 pending = 0;
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i)
      if (kMaps ? i * kWarpSize + lane < kRows * kUnits : lane / 4 < kRows) pending |= 1u << i;
    if (fresh && lane < 2 * kUnits) pending |= 1u << kOwn;
    poll_vectors<Wire>(cx, site, first, round.sequence, pending, at, [&](u32 i) { return round.vectors + (i < kOwn ? first + i * apart : own); });
    if constexpr (kMaps) {
#pragma unroll
      for (u32 i = 0; i < kOwn; ++i) at[i] = map_unit<T>(heads, lane, at[i], heads.query);
    }
    if (fresh) stage(lane, row, heads);
  }
  // The operands of panel `p`: lane (g, q) takes its unit from the lane that has it. All lanes of the warp call it together.
  MK_DEV u32x4 operand(u32 p, u32 lane) const {
    if constexpr (!kMaps) {
      return at[p];
    } else {
      const u32 row = lane / 4, from = row % kHeads * kUnits + p * 4 + lane % 4;
      u32x4 found = {0, 0, 0, 0};
#pragma unroll
      for (u32 i = 0; i < kOwn; ++i) {
        const u32x4 x = {ptx::shfl(at[i].x, from), ptx::shfl(at[i].y, from), ptx::shfl(at[i].z, from), ptx::shfl(at[i].w, from)};
        if (row / kHeads == i) found = x;
      }
      return found;
    }
  }

 private:
  template <class Heads>
  MK_DEV void stage(u32 lane, smem_ptr<char> row, const Heads& heads) const {
    u32x4 x = at[kOwn];
    if constexpr (kMaps) {
      const u32x4 key = map_unit<T>(heads, lane, x, heads.key);
      if (lane < kUnits) x = key;
    }
    const u32 words[4] = {x.x, x.y, x.z, x.w}, dim = lane % kUnits * 8;
    if (lane < kUnits) {
      ptx::st_shared<u32x4>(row.template at<u32x4>(key_offset<T::kHeadDim>(0, dim)), x);
    } else if (lane < 2 * kUnits) {
#pragma unroll
      for (u32 i = 0; i < 8; ++i)
        ptx::st_shared<u16>(row.template at<u16>(T::kKeyBytes + value_offset(0, dim + i)), u16(words[i / 2] >> (i % 2 * 16)));
    }
    ptx::syncwarp();
  }
};

// One warp's running softmax for at most 8 query rows: lane (g, q) holds row g. Of narrow heads half a product in vain costs less than the
// shuffles of few_rows.h.
template <class T>
struct LaneSoftmax {
  float maximum = kNoMaximum, sum = 0.0f;
  float out[T::kHeadDim / 8][4] = {};  // of row g + 8, which does not exist, the last two
  u32x4 queries[T::kPanels];

  // Takes a chunk of which the rows of `seen` exist and are attended to.
  MK_DEV void take(const HeldChunk<T>& chunk, u32 lane, float scale_log2, const u32 (&rows)[2], u32) {
    const u32 seen = rows[0];
    const u32 q = lane % 4;
    float score[2][4] = {}, other[2][4] = {};  // two chains of products for each half of the rows
#pragma unroll
    for (u32 p = 0; p < T::kPanels; ++p) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32x4 k = chunk.keys(half, p), x = queries[p];
        ptx::mma_m16n8k16(score[half], x.x, 0, x.y, 0, k.x, k.y);
        ptx::mma_m16n8k16(other[half], x.z, 0, x.w, 0, k.z, k.w);
      }
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) score[i / 2][i % 2] += other[i / 2][i % 2];
    float top = kNoMaximum;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      float& s = score[i / 2][i % 2];
      s = (seen >> (i / 2 * 8 + 2 * q + i % 2) & 1) != 0 ? T::Score::of(s, scale_log2) : kNoMaximum;
      top = math::max(top, s);
    }
    top = math::max(top, ptx::shfl_xor(top, 1));
    top = math::max(top, ptx::shfl_xor(top, 2));
    const float before = maximum;
    maximum = math::max(before, top);
    const float fade = ptx::exp2_approx(before - maximum);
    float w[4], added = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float s = score[i / 2][i % 2];
      w[i] = s == kNoMaximum ? 0.0f : ptx::exp2_approx(s - maximum);
      added += w[i];
    }
    sum = sum * fade + added;  // of this lane's rows: all four lanes of a row are added at the end
#pragma unroll
    for (u32 n = 0; n < T::kHeadDim / 8; ++n) out[n][0] *= fade, out[n][1] *= fade;
    const u32 p0 = ptx::pack_bf16(w[0], w[1]), p1 = ptx::pack_bf16(w[2], w[3]);
    // Rows that do not exist hold anything, NaN included, and 0 * NaN would spoil the sum.
    const u32 keep0 = row_bits(seen >> (2 * q)), keep1 = row_bits(seen >> (8 + 2 * q));
#pragma unroll
    for (u32 i = 0; i < T::kHeadDim / 16; ++i) {
      const u32x4 v = chunk.values(i);
      ptx::mma_m16n8k16(out[2 * i], p0, 0, p1, 0, v.x & keep0, v.y & keep1);
      ptx::mma_m16n8k16(out[2 * i + 1], p0, 0, p1, 0, v.z & keep0, v.w & keep1);
    }
  }
  // The words of a V operand whose rows count.
  MK_DEV static u32 row_bits(u32 seen) { return ((seen & 1) != 0 ? 0xffffu : 0u) | ((seen & 2) != 0 ? 0xffff0000u : 0u); }

  // Leaves {out, maximum, sum} of the rows that exist in this warp's part of the scratch: [row][D + 4] fp32.
  MK_DEV void leave(smem_ptr<float> part, u32 lane, u32 rows) const {
    const u32 g = lane / 4, q = lane % 4;
    float total = sum;
    total += ptx::shfl_xor(total, 1);
    total += ptx::shfl_xor(total, 2);
    if (g >= rows) return;
    const smem_ptr<float> row = part + g * T::kPartFloats;
#pragma unroll
    for (u32 n = 0; n < T::kHeadDim / 8; ++n)
      ptx::st_shared<u32x2>((row + (n * 8 + 2 * q)).template at<u32x2>(0), u32x2{ptx::float_bits(out[n][0]), ptx::float_bits(out[n][1])});
    if (q == 0)
      ptx::st_shared<u32x2>((row + T::kHeadDim).template at<u32x2>(0), u32x2{ptx::float_bits(maximum), ptx::float_bits(total)});
  }
};

constexpr u32 kNarrowHead = 64;
template <class T, bool kNarrow = (T::kHeadDim <= kNarrowHead)>
struct LaneState : LaneSoftmax<T> {};
template <class T>
struct LaneState<T, false> : FewRows<T> {};

// Takes a unit's cached chunks out of the ring, at most one for each warp.
template <class T, class B, class R>
MK_DEV void hold_unit(const B& block, R& reader, u32 site, const Unit& unit, HeldChunk<T>& chunk) {
  constexpr u32 kPerStage = R::kStageBytes / T::kChunkBytes;
  const u32 cached = unit.end - unit.begin, warp = block.warp();
#pragma unroll 1
  for (u32 stage = 0; stage * kPerStage < cached; ++stage) {
    const smem_ptr<char> from = reader.wait_stage(site, unit.begin + stage * kPerStage);
    if (warp / kPerStage == stage && warp < cached) chunk.load({from.template at<char>(warp % kPerStage * T::kChunkBytes), block.lane()});
    chunk.await();
    reader.release();
  }
}

// Consumer side of attention for all units of this block; as run_attention, a block without a unit meets as well. kRows: query rows of a
// KV head. `pause`: ns before the first poll. `window`: the layer's.
template <class QkvWire, class PartWire, class T, u32 kRows, class B, class R, class E, class Heads = AsGathered, class Rows = Stretches>
MK_DEV void run_heads(const B& block, R& reader, u32 gather_site, u32 ring_site, const AttentionShape& s, const Step& step, u32 layer,
                      const ExchangeShape& qkv, u32 qkv_sequence, const E& parts, u32 parts_sequence, u32 pause, const Heads& heads = {},
                      u32 window = T::kWindow, const Rows& cached_rows = {}) {
  static_assert(B::kTokens == 1 && QkvWire::kDense, "a unit's number is its address");
  constexpr u32 kPerStage = R::kStageBytes / T::kChunkBytes;
  const u32 warp = block.warp(), lane = block.lane();
  const float scale_log2 = ptx::bits_float(u32(s.scale_log2));
  if (block.cx.block >= u32(s.kv_heads) * u32(s.splits)) block.meet();
#pragma unroll 1
  for (u32 u = block.cx.block; u < u32(s.kv_heads) * u32(s.splits); u += block.cx.blocks.value) {
    const Unit unit = attention_unit(s.divisor(), u, step.kv_len, window);
    const u32 cached = unit.end - unit.begin, chunks = cached + (unit.fresh ? 1 : 0), stages = ceil_div(cached, kPerStage);
    const u32 classes = min_u32(B::kWarps, max_u32(chunks, 1));  // no more than there is work for: each leaves a part to add
    const bool fresh = unit.fresh && cached % B::kWarps == warp;  // this warp takes this step's row: the last of the chunks, in turn
    const u32 ancestors = fresh ? ptx::ld_global<u32>(block.cx.control->ancestors) : 0;
    if (u != block.cx.block) block.sync();  // everybody is done with the unit before
    const bool early = cached <= classes;  // then the unit is taken out of the ring before its queries are there
    const smem_ptr<char> row = block.template at<char>(s.fresh);
    HeldChunk<T> chunk = {};
    if (early) hold_unit(block, reader, ring_site, unit, chunk);
    LaneQueries<T, kRows, Heads::kMaps> queries;
    LaneState<T> state;
    trace(block.cx, Event::kWait, gather_site, unit.split);
    const Round round = exchange_round(block.buffers, qkv, qkv_sequence);
    if (u == block.cx.block) block.meet_paused(pause);
    if (warp < classes) queries.template poll<QkvWire>(block.cx, gather_site, s, round, unit.head, lane, fresh, row, heads);
#pragma unroll
    for (u32 p = 0; p < T::kPanels; ++p) state.queries[p] = queries.operand(p, lane);
    trace(block.cx, Event::kReady, ring_site, u);
    u32 next = warp < classes ? warp : ~0u;  // the warp's next chunk, counted from the unit's first
    // Stages of cached rows, then what is in registers or this step's own row: one loop, so that the arithmetic exists once.
#pragma unroll 1
    for (u32 stage = early ? stages : 0;; ++stage) {
      const bool lies = stage < stages;
      const u32 first = stage * kPerStage, end = lies ? min_u32(first + kPerStage, cached) : chunks;
      const smem_ptr<char> from = lies ? reader.wait_stage(ring_site, unit.begin + first) : row;
      if (stage == 0) trace(block.cx, Event::kTile, ring_site, unit.begin);
#pragma unroll 1
      for (; next < end; next += classes) {
        const bool old = next < cached;
        if (lies || !old) chunk.load({from.template at<char>(lies ? (next - first) * T::kChunkBytes : 0), lane});
        const u32 exist = old ? min_u32(kChunkRows, step.kv_len - (unit.begin + next) * kChunkRows) : step.tokens;
        u32 seen = ((1u << exist) - 1) & (old ? ~0u : ancestors);
        if (T::kWindow != 0 && old) seen &= rows_from((unit.begin + next) * kChunkRows, window_begin(step.kv_len, window, 1));
        state.take(chunk, lane, scale_log2, {seen, seen}, exist);
      }
      if (!lies) break;
      chunk.await();
      reader.release();
    }
    if (warp < classes) state.leave(block.template at<float>(s.scratch) + warp * kRows * T::kPartFloats, lane, kRows);
    trace(block.cx, Event::kTaken, ring_site, reader.taken.now());
    block.sync();
    trace(block.cx, Event::kParts, ring_site, u);
    publish_unit<PartWire, T>(block, s, parts, parts_sequence, u, 0, min_u32(16, u32(s.rows)), 1, classes, kRows);
    if (PartWire::kFlagged) block.sync();  // all of the unit's parts are stored
    end_unit<PartWire>(block, ring_site, parts, parts_sequence, u);
    if (unit.fresh) append_rows<T>(block, s, step, layer, unit.head, cached_rows);
  }
  if (!B::kFinishes && block.cx.block >= u32(s.kv_heads) * u32(s.splits)) block.sync();
  block.meet();
}

}  // namespace mk
