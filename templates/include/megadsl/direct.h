// Linears whose input arrives in registers: few columns, 1 to 4 tokens, a dense exchange.
//
// Where a model is small, a step's time is what passes between the last vector polled and the own vectors stored. The other linears
// gather their input into shared memory, meet, and load it from there as operands. Here each lane polls the very units whose
// elements it holds in the products: of a panel, lane (g, q) needs eight columns 8q..8q+7 of token g % 4, of which it takes the pairs of
// its column range, g / 4. All warps still split the columns, so that a block polls the input once (each unit by two lanes
// of a warp), no address depends on a division, and only the partial sums meet in shared memory.
#pragma once
#include "megadsl/linear.h"
#include "megadsl/prologue.h"

namespace mk {

// Which columns a lane has. Part i is round i % kRounds of tile i / kRounds.
template <class G, class B>
struct Lane {
  static_assert(B::kTokens <= 4, "both column ranges of all tokens share the lanes of a warp");
  static constexpr u32 kRounds = (G::kPanels + B::kWarps - 1) / B::kWarps, kParts = G::kPieces * kRounds;
  u32 warp, token, range, first;  // first: column of part 0

  MK_DEV explicit Lane(const B& block)
      : warp(block.warp()), token(block.lane() / 4 % 4), range(block.lane() / 16), first(warp * kPanel + block.lane() % 4 * 8) {}

  MK_DEV u32 column(u32 part) const { return first + (part / kRounds * G::kPanels + part % kRounds * B::kWarps) * kPanel; }
  // Whether the part is one of `columns` and has a token: the last round may not have a panel for every warp.
  MK_DEV bool has(u32 part, u32 columns) const {
    const u32 round = part % kRounds;
    const bool panel = (round + 1) * B::kWarps <= G::kPanels || round * B::kWarps + warp < G::kPanels;
    return panel && token < B::kTokens && column(part) < columns;
  }
  // The pairs of this lane's range, of the four pairs of a unit.
  MK_DEV u32x2 pairs(u32x4 unit) const { return range == 0 ? u32x2{unit.x, unit.z} : u32x2{unit.y, unit.w}; }
  // The element of the unit that is the j-th of those pairs.
  MK_DEV u32 element(u32 j) const { return j / 2 * 4 + 2 * range + j % 2; }
};

MK_DEV void unpack4(u32x2 pairs, float (&v)[4]) {
  v[0] = ptx::bf16_lo(pairs.x), v[1] = ptx::bf16_hi(pairs.x), v[2] = ptx::bf16_lo(pairs.y), v[3] = ptx::bf16_hi(pairs.y);
}

// A lane's parts of a vector weight, or of the input.
template <class G, class B>
struct LaneParts {
  u32x2 at[Lane<G, B>::kParts] = {};
};

// Loads a vector from the stage `ahead` positions further on in the ring. run_direct lets go of it: here the warp would wait for the
// loads to return, and blocks of a small model come to their polls later than what they poll.
template <class G, class B, class R>
MK_DEV void hold_vector(const B& block, const R& reader, u32 site, u32 ahead, u32 columns, LaneParts<G, B>& vector) {
  const Lane<G, B> lane(block);
  const smem_ptr<char> from = reader.wait_stage(site, 0, ahead);
#pragma unroll
  for (u32 i = 0; i < lane.kParts; ++i)
    vector.at[i] = lane.has(i, columns) ? lane.pairs(ptx::ld_shared<u32x4>(from.template at<u32x4>(lane.column(i) * 2))) : u32x2{0, 0};
}

// A lane's parts of row reductions over the input; like RowParts, but all of a lane's elements are of one token.
template <class B, RowOp... kOps>
struct LaneRows {
  static constexpr u32 kCount = sizeof...(kOps);
  float parts[kCount];

  MK_DEV static float both(u32 i, float a, float b) { return RowParts<B, kOps...>::both(i, a, b); }
  MK_DEV static float neutral(u32 i) { return RowParts<B, kOps...>::op(i) == RowOp::kSum ? 0.0f : -INFINITY; }
  MK_DEV LaneRows() {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) parts[i] = neutral(i);
  }
  MK_DEV void add(const float (&terms)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) parts[i] = both(i, parts[i], terms[i]);
  }
  // Leaves the warp's parts in `to` [reduction][token][warp]. Needs a sync() before reads.
  MK_DEV void leave(const B& block, smem_ptr<float> to) const {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
      float total = parts[i];
      total = both(i, total, ptx::shfl_xor(total, 1));
      total = both(i, total, ptx::shfl_xor(total, 2));
      total = both(i, total, ptx::shfl_xor(total, 16));
      if (block.lane() % 4 == 0 && block.lane() / 4 < B::kTokens)
        ptx::st_shared<float>(to + ((i * B::kTokens + block.lane() / 4) * B::kWarps + block.warp()), total);
    }
  }
};

// Polls the lane's units of the features [begin, begin + columns) of a value and hands each to `take(part, pairs)`.
template <class Wire, class G, class B, class Take>
MK_DEV void poll_parts_of(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 columns, Take take) {
  static_assert(Wire::kDense && !Wire::kFlagged, "a unit's number is its address");
  constexpr u32 kParts = Lane<G, B>::kParts;
  const Lane<G, B> lane(block);
  const Round round = exchange_round(block.buffers, e, sequence);
  const u32 first = (begin + lane.first) / kGroupRows * B::kTokens + lane.token;
  const u32x4* from = round.vectors + first;
  u32 pending = 0;
#pragma unroll
  for (u32 i = 0; i < kParts; ++i) pending |= lane.has(i, columns) ? 1u << i : 0u;
  u32x4 v[kParts] = {};
  poll_vectors<Wire>(block.cx, site, first, sequence, pending, v, [&](u32 i) { return from + (lane.column(i) - lane.first) / kGroupRows * B::kTokens; });
#pragma unroll
  for (u32 i = 0; i < kParts; ++i) take(i, lane.pairs(v[i]));
}

// The input as it is.
template <class Wire, class G, class B>
MK_DEV void poll_value(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 columns, LaneParts<G, B>& x) {
  poll_parts_of<Wire, G>(block, site, e, sequence, begin, columns, [&](u32 i, u32x2 pairs) { x.at[i] = pairs; });
}

// The input as the finished operand of the products: `apply(args)` of each element (args[0]) and those of the vectors beside it. The row
// reductions' terms of an element, `terms(x, of)`, are added to `rows`. As in gather_operand, the row's scale is not in it yet.
template <class Wire, bool kRagged, class G, class B, class Rows, class Terms, class Apply, class... Vectors>
MK_DEV void poll_operand(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 columns, LaneParts<G, B>& x, Rows& rows,
                         Terms terms, Apply apply, const Vectors&... vectors) {
  constexpr u32 kArgs = 1 + sizeof...(Vectors);
  const Lane<G, B> lane(block);
  poll_parts_of<Wire, G>(block, site, e, sequence, begin, columns, [&](u32 i, u32x2 pairs) {
    const u32x2 packed[kArgs] = {pairs, vectors.at[i]...};
    float args[kArgs][4], out[4] = {}, sums[Rows::kCount];
#pragma unroll
    for (u32 a = 0; a < kArgs; ++a) unpack4(packed[a], args[a]);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      float element[kArgs], of[Rows::kCount];
#pragma unroll
      for (u32 a = 0; a < kArgs; ++a) element[a] = args[a][j];
      out[j] = apply(element);
      terms(element[0], of);
      const bool counts = lane.has(i, columns) && (!kRagged || lane.column(i) + lane.element(j) < columns);
      if (!counts) out[j] = 0.0f;
#pragma unroll
      for (u32 r = 0; r < Rows::kCount; ++r) sums[r] = counts ? of[r] : Rows::neutral(r);
      rows.add(sums);
    }
    x.at[i] = {ptx::pack_bf16(out[0], out[1]), ptx::pack_bf16(out[2], out[3])};
  });
}

// The products of kGroups row groups: `weight(group, part)` gives a lane's weights. Two sums of a group take turns, and groups do, so that
// products wait less for each other. Leaves the sums of the first `count` groups in `partials`: no branch stands between the groups.
template <class G, u32 kGroups, class B, class Weight>
MK_DEV void multiply_groups(const B& block, const LaneParts<G, B>& x, Weight weight, u32 count, smem_ptr<float> partials) {
  constexpr u32 kParts = Lane<G, B>::kParts, kSums = B::kWarps * B::kTokens * kGroupRows;
  TileSums<B::kTokens> sums[kGroups], others[kGroups];
#pragma unroll
  for (u32 i = 0; i < kParts; ++i)
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      const u32x4 w = weight(group, i);
      ptx::mma_m16n8k16((i % 2 == 0 ? sums : others)[group].part[0], w.x, w.y, w.z, w.w, x.at[i].x, x.at[i].y);
    }
#pragma unroll
  for (u32 group = 0; group < kGroups && kParts > 1; ++group) sums[group].add(others[group]);
  float rows[kGroups][2];
#pragma unroll
  for (u32 group = 0; group < kGroups; ++group) sums[group].finish(0, rows[group]);
#pragma unroll
  for (u32 group = 0; group < kGroups; ++group)
    if (group < count) store_partials<0>(block, partials + group * kSums, rows[group], block.warp());
}

// A lane's weights of the first `count` tiles of a stage; zeros for the others.
template <class G, u32 kTiles, class B>
MK_DEV void load_weights(const B& block, smem_ptr<char> stage, u32 count, u32x4 (&weights)[kTiles][Lane<G, B>::kRounds]) {
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
    const typename G::Format from(stage.template at<char>(i * G::kTileBytes), block.warp(), block.lane() / 4, block.lane() % 4);
#pragma unroll
    for (u32 round = 0; round < Lane<G, B>::kRounds; ++round) {
      const bool panel = (round + 1) * B::kWarps <= G::kPanels || round * B::kWarps + block.warp() < G::kPanels;
      weights[i][round] = u32x4{0, 0, 0, 0};
      if (i < count && panel) weights[i][round] = from.load(round * B::kWarps);
    }
  }
}

// Like hold_tiles, stage by stage, of which each holds as many tiles as the block has left, up to G::kTogether. The first lies `ahead`
// positions further on in the ring; run_direct lets go of them.
template <class B, class R, class G, u32 kTiles, bool kEverywhere, bool kWhole>
MK_DEV void hold_stages(const B& block, const R& reader, u32 site, u32 ahead, const LinearShape& s, Held<G, kTiles, kEverywhere, kWhole, B>& held) {
  constexpr u32 kEach = G::kTogether;
  const RowGroups own = own_groups(block.cx, s);
  const u32 tiles = held.count(own);
#pragma unroll
  for (u32 first = 0; first < kTiles; first += kEach) {
    u32x4 weights[kEach][held.kRounds] = {};
    if (kEverywhere || first < tiles)
      load_weights<G, kEach>(block, reader.wait_stage(site, own.begin * G::kPieces + first, ahead + first / kEach),
                             kEverywhere ? kTiles - first : tiles - first, weights);
#pragma unroll
    for (u32 i = 0; i < kEach * held.kRounds && first + i / held.kRounds < kTiles; ++i)
      held.weights[first + i / held.kRounds][i % held.kRounds] = weights[i / held.kRounds][i % held.kRounds];
  }
}

// Multiplies row groups [first, last), whose tiles come from the ring, and leaves their sums.
template <class G, class B, class R>
MK_DEV void multiply_from_ring(const B& block, R& reader, u32 site, u32 first, u32 last, const LaneParts<G, B>& x, smem_ptr<float> partials) {
  constexpr u32 kRounds = Lane<G, B>::kRounds, kSums = B::kWarps * B::kTokens * kGroupRows;
  constexpr bool kWhole = G::kTogether >= G::kPieces;  // a stage holds whole groups, else one tile
  constexpr u32 kGroups = kWhole ? G::kTogether / G::kPieces : 1, kTiles = kGroups * G::kPieces;
#pragma unroll 1
  for (u32 group = first; group < last; group += kGroups) {
    const u32 groups = min_u32(kGroups, last - group), tile = group * G::kPieces;
    u32x4 weights[kTiles][kRounds];
    if constexpr (kWhole) {
      load_weights<G, kTiles>(block, reader.wait_stage(site, tile), groups * G::kPieces, weights);
    } else {
#pragma unroll
      for (u32 piece = 0; piece < G::kPieces; ++piece) {
        u32x4 one[1][kRounds];
        load_weights<G, 1>(block, reader.wait_stage(site, tile + piece), 1, one);
        await_weights(one);
        reader.release();
#pragma unroll
        for (u32 round = 0; round < kRounds; ++round) weights[piece][round] = one[0][round];
      }
    }
    multiply_groups<G, kGroups>(
        block, x, [&](u32 i, u32 part) { return weights[i * G::kPieces + part / kRounds][part % kRounds]; }, groups,
        partials + (group - first) * kSums);
    if (kWhole) reader.release();
  }
}

// Multiplies all of a block's row groups. `poll(x)` brings the input; `held` as in run_matrix. kVectors: how many stages of vectors lie in the
// ring before the tiles. `settle()` comes behind it; each batch's sums are handed to `meet(partials, first, last)`.
template <u32 kBatch, class G, u32 kVectors, class B, class R, class Poll, class Settle, class Meet, class H>
MK_DEV void multiply_direct(const B& block, R& reader, u32 site, const LinearShape& s, const SmemShape& smem, Poll poll, Settle settle, Meet meet,
                            const H& held) {
  constexpr u32 kSums = B::kWarps * B::kTokens * kGroupRows, kHeldGroups = H::kTiles / G::kPieces;
  static_assert(H::kTiles % G::kPieces == 0 && kHeldGroups <= kBatch, "whole row groups of the first batch are held");
  const RowGroups own = own_groups(block.cx, s);
  LaneParts<G, B> x;
  block.meet();
  trace(block.cx, Event::kWait, site);
  poll(x);
  trace(block.cx, Event::kReady, site);
  block.meeting(smem.meeting, false);
  settle();  // beside the products
  u32 first = own.begin, taken = 0, turn = 0;
  if constexpr (kHeldGroups != 0) {
    taken = held.count(own) / G::kPieces;
    multiply_groups<G, kHeldGroups>(
        block, x, [&](u32 i, u32 part) { return held.weights[i * G::kPieces + part / held.kRounds][part % held.kRounds]; }, taken,
        partials_of<kBatch>(block, smem, 0));
  }
  const auto let_go = [&](u32 groups) {
#pragma unroll 1
    for (u32 i = 0; i < kVectors + ceil_div(groups * G::kPieces, G::kTogether); ++i) reader.release();
  };
  if (!H::kWhole) let_go(taken);
#pragma unroll 1
  do {
    const u32 last = first + min_u32(kBatch, own.end - first);
    const smem_ptr<float> partials = partials_of<kBatch>(block, smem, turn);
    if (last == own.end) block.meeting(smem.meeting, true);
    if (!H::kWhole) multiply_from_ring<G>(block, reader, site, first + taken, last, x, partials + taken * kSums);
    trace(block.cx, Event::kTaken, site, reader.taken.now());
    meet(partials, first, last);
    if (H::kWhole) let_go(taken);
    first = last, taken = 0, turn ^= 1;
  } while (!(H::kWhole) && first < own.end);
  if constexpr (B::kFinishes) trace(block.cx, Event::kEnd, site);
}

// Consumer side; `epilogue` and `scale` as in run_matrix, kMeets too.
template <u32 kBatch, class G, bool kMeets, u32 kVectors, class B, class R, class Poll, class Epilogue, class Scale = Unscaled, class H = NothingHeld>
MK_DEV void run_direct(const B& block, R& reader, u32 site, const LinearShape& s, const SmemShape& smem, Poll poll, Epilogue epilogue,
                       Scale scale = {}, const H& held = {}) {
  const u32 begin = own_groups(block.cx, s).begin;
  float factor = 1.0f;
  const auto finish = [&](smem_ptr<float> partials, u32 first, u32 last) {
    block.sync();
    const auto factor_of = [&](u32 token) { return scale.factor(token); };
    finish_groups<kBatch, G>(block, partials, begin, first - begin, last - first, ChunkSums{}, factor_of, factor, epilogue);
  };
  multiply_direct<kBatch, G, kVectors>(block, reader, site, s, smem, poll, [&] { scale.settle(); }, finish, held);
  if (kMeets) block.sync();
}

}  // namespace mk
