// Attention of a batch: what attention.h does with one sequence, with the stretch of several that a unit has.
//
// A unit is (KV head, split) as ever, and gathers the queries, keys and values of all new tokens at once. Then it takes its sequences in turn.
// Query rows of one sequence are tiles of eight (few_rows.h), since most often it brings one token; a warp owns a tile and a class of
// chunks. Rows of tokens whose sequence the unit has no part of are published as what changes no sum, so that readers of the parts need
// know nothing of sequences. This step's own rows are one chunk, in which each sequence sees its own.
#pragma once
#include "megadsl/few_rows.h"
#include "megadsl/head_maps.h"
#include "megadsl/sequences.h"

namespace mk {

// Publishes query rows outside [begin, end) of a unit: no maximum, no sum.
template <class Wire, class T, class B>
MK_DEV void publish_others(const B& block, const ExchangeShape& e, u32 sequence, u32 unit, u32 rows, u32 begin, u32 end) {
  const Round round = exchange_round(block.buffers, e, sequence);
#pragma unroll 1
  for (u32 i = block.thread; i < (rows - (end - begin)) * T::kVectors; i += B::kThreads) {
    const u32 row = i / T::kVectors, vector = i % T::kVectors;
    const float v[4] = {vector + 1 == T::kVectors ? kNoMaximum : 0.0f, 0.0f, 0.0f, 0.0f};
    const u32 index = unit * u32(e.vectors) + (row < begin ? row : row + end - begin) * T::kVectors + vector;
    chaos(block.cx, Place::kSignal, u32(e.offset), i / kWarpSize);
    ptx::st_relaxed(round.vectors + index, Wire::pack_f32(v, sequence));
    if (Wire::kResets) {
      const Round ahead = exchange_round(block.buffers, e, sequence + u32(e.slots) / 2);
      ptx::st_relaxed(ahead.vectors + index, u32x4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
    }
  }
}

// A lane's panels of eight query rows from `row` on, of which those up to `last` exist.
template <class T>
MK_DEV FewRows<T> few_rows_at(smem_ptr<char> queries, u32 row, u32 last, u32 lane) {
  const u32 own = min_u32(row + lane / 4, last);
  FewRows<T> state;
#pragma unroll
  for (u32 p = 0; p < T::kPanels; ++p)
    state.queries[p] = T::load_panel(queries.template at<char>(query_offset<T>(own, p * kPanel) + lane % 4 * 16), p, lane);
  return state;
}

// What one warp takes of a segment: every `classes`-th of its chunks from `next` on (~0: none), counted from its first; the step's own
// chunk comes last. `ancestors`: of the lane's two query rows, which of the step's rows they attend to, the sequence's own alone.
template <class T, class B, class R>
MK_DEV void take_segment(const B& block, R& reader, u32 site, const AttentionShape& s, const Segment& segment, u32 next, u32 classes,
                         const u32 (&ancestors)[2], i32 meeting, FewRows<T>& state) {
  constexpr u32 kPerStage = R::kStageBytes / T::kChunkBytes;
  const u32 cached = segment.end - segment.begin, stages = ceil_div(cached, kPerStage);
  const float scale_log2 = ptx::bits_float(u32(s.scale_log2));
  u32 from_row[2];  // the first row that a query row sees
#pragma unroll
  for (u32 r = 0; r < 2; ++r) from_row[r] = T::kWindow == 0 ? 0 : window_begin(segment.kv_len, T::kWindow, chain_depth(ancestors[r]));
  const bool streams = stages > R::kStages;
  if (streams) block.meeting(meeting, false);
#pragma unroll 1
  for (u32 stage = 0; stage < stages + (segment.fresh ? 1u : 0u); ++stage) {
    const bool lies = stage < stages;
    const u32 first = min_u32(stage * kPerStage, cached), end = lies ? min_u32(first + kPerStage, cached) : cached + 1;
    const smem_ptr<char> from = lies ? reader.wait_stage(site, segment.begin + first) : block.template at<char>(s.fresh);
    if (first == 0 && cached != 0) trace(block.cx, Event::kTile, site, segment.begin);
    if (streams && stage + 1 == stages) block.meeting(meeting, true);
#pragma unroll 1
    for (; next < end; next += classes) {
      const u32 row = (segment.begin + next) * kChunkRows;
      RowRange exist = {segment.first, segment.first + segment.tokens};
      if (next < cached) exist = {0, min_u32(kChunkRows, segment.kv_len - row)};
      u32 seen[2];
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        seen[r] = next < cached ? (1u << exist.end) - 1 : ancestors[r];
        if (T::kWindow != 0 && next < cached) seen[r] &= rows_from(row, from_row[r]);
      }
      state.take(LyingChunk<T>{from.template at<char>((next - first) * T::kChunkBytes), block.lane()}, block.lane(), scale_log2, seen, exist);
    }
    if (lies) reader.release();
  }
}

// Writes the new rows of a segment's sequence behind its cached ones; see append_rows.
template <class T, class B, class Rows>
MK_DEV void append_segment(const B& block, const AttentionShape& s, const Sequences& sequences, const Segment& segment, u32 layer, u32 head,
                           const Rows& rows) {
  if (given_up(block.cx)) return;  // what was gathered may be garbage
  const smem_ptr<char> fresh = block.template at<char>(s.fresh);
#pragma unroll 1
  for (u32 i = B::kThreads - 1 - block.thread; i < segment.tokens * T::kHeadDim; i += B::kThreads) {
    const u32 token = i / T::kHeadDim, dim = i % T::kHeadDim, row = segment.kv_len + token, from = segment.first + token;
    if (row >= u32(s.max_rows)) continue;
    char* chunk = nullptr;
    if constexpr (Rows::kPaged) {
      if (!rows.find(chunk, block.buffers, s, layer, head, segment.sequence, row / kChunkRows, T::kChunkBytes)) continue;
    } else {
      chunk = sequences.arena(cache_chunk(block.buffers, s, layer, head, row / kChunkRows, T::kChunkBytes), segment.sequence);
    }
    const u32 r = row % kChunkRows;
    ptx::st_global<u16>(reinterpret_cast<u16*>(chunk + key_offset<T::kHeadDim>(r, dim)),
                        ptx::ld_shared<u16>(fresh.template at<u16>(key_offset<T::kHeadDim>(from, dim))));
    ptx::st_global<u16>(reinterpret_cast<u16*>(chunk + T::kKeyBytes + value_offset(r, dim)),
                        ptx::ld_shared<u16>(fresh.template at<u16>(T::kKeyBytes + value_offset(from, dim))));
  }
}

// Consumer side of attention for all units of this block. `heads_of`: divides by the query heads of a KV head. `later`: steps of the launch
// before this one. The rest as run_attention.
template <class QkvWire, class PartWire, class T, class P, class B, class R, class H = AsGathered, class Rows = Stretches>
MK_DEV void run_batch(const B& block, R& reader, u32 gather_site, u32 ring_site, const AttentionShape& s, const Divisor& heads_of,
                      const Sequences& sequences, u32 later, u32 layer, const ExchangeShape& qkv, u32 qkv_sequence, const ExchangeShape& parts,
                      u32 parts_sequence, i32 meeting, u32 pause, const H& heads = {}, const Rows& cached_rows = {}) {
  static_assert(T::kByToken, "rows of one sequence follow each other");
  const Divisor splits = s.divisor();
  const u32 units = u32(s.kv_heads) * u32(s.splits);
#pragma unroll 1
  for (u32 u = block.cx.block; u < units; u += block.cx.blocks.value) {
    const u32 head = splits.divide_any(u), split = u - head * splits.value;
    const Covered covered = sequences.covered(splits, split, later, T::kWindow);
    if (u != block.cx.block) block.sync();  // everybody is done with the unit before
    if (u == block.cx.block) block.meet_paused(pause);
    gather_unit<QkvWire, T, P>(block, gather_site, s, qkv, qkv_sequence, {head, split, 0, 0, true});
    block.sync();
    if constexpr (H::kMaps) {
      heads.apply(block, s, true);
      block.sync();
    }
    trace(block.cx, Event::kReady, ring_site, u);
    publish_others<PartWire, T>(block, parts, parts_sequence, u, u32(s.rows), covered.begin * heads_of.value, covered.end * heads_of.value);
    bool again = false;
    sequences.for_each_segment(splits, split, later, T::kWindow, [&](const Segment& segment) {
      const u32 rows = segment.tokens * heads_of.value, row0 = segment.first * heads_of.value, all_tiles = ceil_div(rows, kFewRows);
      const u32 part_rows = min_u32(kFewRows, rows), own = ((1u << segment.tokens) - 1) << segment.first;
      const u32 chunks = segment.end - segment.begin + (segment.fresh ? 1 : 0);
#pragma unroll 1
      for (u32 first_tile = 0; first_tile < all_tiles; first_tile += B::kWarps) {
        if (again) block.sync();  // the parts of the pass before have been read
        again = true;
        const u32 tiles = min_u32(B::kWarps, all_tiles - first_tile), classes = min_u32(B::kWarps / tiles, chunks);
        const u32 tile = block.warp() % tiles, mine = block.warp() / tiles, row = (first_tile + tile) * kFewRows;
        u32 ancestors[2] = {};
#pragma unroll
        for (u32 r = 0; r < 2 && (segment.fresh || T::kWindow != 0); ++r) {
          const u32 token = segment.first + heads_of.divide(min_u32(row + FewRows<T>::row(block.lane(), r), rows - 1));
          ancestors[r] = ptx::ld_global<u32>(block.cx.control->ancestors + token) & own;
        }
        FewRows<T> state = few_rows_at<T>(block.template at<char>(s.queries), row0 + row, row0 + rows - 1, block.lane());
        take_segment<T>(block, reader, ring_site, s, segment, mine < classes ? mine : ~0u, classes, ancestors, meeting, state);
        if (mine < classes)
          state.leave(block.template at<float>(s.scratch) + (mine * tiles + tile) * part_rows * T::kPartFloats, block.lane(), min_u32(part_rows, rows - row));
        trace(block.cx, Event::kTaken, ring_site, reader.taken.now());
        block.sync();
        trace(block.cx, Event::kParts, ring_site, u);
        publish_unit<PartWire, T, kFewRows>(block, s, parts, parts_sequence, u, row0 + first_tile * kFewRows,
                                            min_u32(tiles * kFewRows, rows - first_tile * kFewRows), tiles, classes, part_rows);
      }
      if (segment.fresh) append_segment<T>(block, s, sequences, segment, layer, head, cached_rows);
    });
    if (PartWire::kFlagged) block.sync();  // all of the unit's parts are stored
    end_unit<PartWire>(block, ring_site, parts, parts_sequence, u);
  }
  if (block.cx.block >= units) block.sync();  // see run_attention
}

}  // namespace mk
