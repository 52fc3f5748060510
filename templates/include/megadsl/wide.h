// Linears of 5 to 16 tokens whose input arrives in registers: a dense exchange, a few thousand columns at a time.
//
// Of a panel, lane (g, q) multiplies columns 8q..8q+7 of tokens g and g + 8. Up to 8 tokens a unit is the B operands of both column
// ranges; two units of a lane are the A operands of both k16 steps.
// All warps split each tile by panels, so that a warp meets the same columns in every row group: the units that its lanes poll
// serve all of them. A block polls its input once, no unit is stored or loaded again, no barrier stands between the last poll and
// the first product, and the products take 16 bytes of weights from shared memory for 2 mma, and no activations. Weights
// and their stages are as in linear.h; what differs is what run_tiles asks of its Input.
#pragma once
#include "megadsl/linear.h"
#include "megadsl/prologue.h"

namespace mk {

// Which of the warps' panels a warp multiplies: in the next block those of the warp beside it. All blocks poll at the same time, and what
// they all want at once comes from one place in L2. Partial sums lie in the order of the panels, so that no bit depends on it.
template <class B>
MK_DEV u32 panel_warp(const B& block) {
  return (block.warp() + block.cx.block) % B::kWarps;
}

constexpr u32 kUnitsAtOnce = 8;  // that a lane has under way: what every SM polls in vain delays what all of them load

// Which units a lane has: of each part kHalves. Part i is round i % kRounds of tile i / kRounds.
template <class G, class B>
struct WideLane {
  static_assert(B::kTokens > 4 && B::kTokens <= 16, "two tokens to a lane");
  static constexpr u32 kHalves = TileSums<B::kTokens>::kHalves;
  static constexpr u32 kRounds = (G::kPanels + B::kWarps - 1) / B::kWarps, kParts = G::kPieces * kRounds;
  u32 warp, token, first;  // first: column of part 0

  MK_DEV explicit WideLane(const B& block)
      : warp(panel_warp(block)), token(block.lane() / 4), first(warp * kPanel + block.lane() % 4 * 8) {}

  // From the turn's first part to another.
  MK_DEV static constexpr u32 offset(u32 part) { return (part / kRounds * G::kPanels + part % kRounds * B::kWarps) * kPanel; }
  // Whether a part, counted from the one at `column`, is one of `columns`: the last round may not have a panel for every warp. kEven: all
  // tiles are full of columns.
  template <bool kEven>
  MK_DEV bool has(u32 part, u32 column, u32 columns) const {
    return has_panel<G, B>(warp, part % kRounds) && (kEven || column + offset(part) < columns);
  }
  MK_DEV bool has_token(u32 half) const { return (half + 1) * 8 <= B::kTokens || half * 8 + token < B::kTokens; }
};

// Tiles whose units are polled together: all of a chunk, or a divisor that a lane can have under way.
template <class G, class B>
MK_DEV constexpr u32 tiles_polled() {
  u32 tiles = G::kPieces;
  while (tiles > 1 && (G::kPieces % tiles != 0 || tiles * WideLane<G, B>::kRounds * WideLane<G, B>::kHalves > kUnitsAtOnce)) --tiles;
  return tiles;
}

// A lane's units of the input, as operands. Two units of a part are the A operands of its two k16 steps (TileSums::multiply_tokens).
template <class G, class B>
struct WideUnits {
  u32x4 at[WideLane<G, B>::kParts][WideLane<G, B>::kHalves] = {};

  // `zero` is 0, which the compiler cannot know. A load leaves a unit's words side by side, and the compiler would move them together as
  // operands for each product; what is computed lies where products want it.
  MK_DEV void put(u32 part, const u32x4 (&units)[WideLane<G, B>::kHalves], u32 zero) {
    const u32x4 u = units[0], v = units[WideLane<G, B>::kHalves - 1];
    if (WideLane<G, B>::kHalves == 2) {
      at[part][0] = {u.x ^ zero, v.x ^ zero, u.y ^ zero, v.y ^ zero};
      at[part][WideLane<G, B>::kHalves - 1] = {u.z ^ zero, v.z ^ zero, u.w ^ zero, v.w ^ zero};
    } else {
      at[part][0] = {u.x ^ zero, u.y ^ zero, u.z ^ zero, u.w ^ zero};
    }
  }
};

// A lane's parts of row reductions over the input; like RowParts, but each half is of one token.
template <class B, RowOp... kOps>
struct WideRows {
  static constexpr u32 kCount = sizeof...(kOps), kHalves = TileSums<B::kTokens>::kHalves;
  float parts[kCount][kHalves];

  MK_DEV static float both(u32 i, float a, float b) { return RowParts<B, kOps...>::both(i, a, b); }
  MK_DEV static float neutral(u32 i) { return RowParts<B, kOps...>::op(i) == RowOp::kSum ? 0.0f : -INFINITY; }
  MK_DEV WideRows() {
#pragma unroll
    for (u32 i = 0; i < kCount * kHalves; ++i) parts[i / kHalves][i % kHalves] = neutral(i / kHalves);
  }
  MK_DEV void add(u32 half, const float (&terms)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) parts[i][half] = both(i, parts[i][half], terms[i]);
  }
  // Leaves the warp's parts in `to` [reduction][token][panel_warp]. Needs a sync() before reads.
  MK_DEV void leave(const B& block, smem_ptr<float> to) const {
#pragma unroll
    for (u32 i = 0; i < kCount * kHalves; ++i) {
      float total = parts[i / kHalves][i % kHalves];
      total = both(i / kHalves, total, ptx::shfl_xor(total, 1));
      total = both(i / kHalves, total, ptx::shfl_xor(total, 2));
      const u32 token = block.lane() / 4 + i % kHalves * 8;
      if (block.lane() % 4 == 0 && token < B::kTokens)
        ptx::st_shared<float>(to + ((i / kHalves * B::kTokens + token) * B::kWarps + panel_warp(block)), total);
    }
  }
};

// Polls the lane's units of the features [begin, begin + columns) of a value, some tiles of them at a time, so that code for those serves
// all, and turns each part into operands: `finish(column, has, units)` in place. kPlain: which leaves them as they are.
template <class Wire, bool kEven, bool kPlain, class G, class B, class Finish>
MK_DEV void poll_wide(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 columns, WideUnits<G, B>& x, Finish finish) {
  static_assert(Wire::kDense && !Wire::kFlagged, "a unit's number is its address");
  constexpr u32 kHalves = WideLane<G, B>::kHalves, kParts = WideLane<G, B>::kParts, kTiles = tiles_polled<G, B>();
  constexpr u32 kEach = kTiles * WideLane<G, B>::kRounds, kUnits = kEach * kHalves, kTurns = kParts / kEach;
  static_assert(kUnits <= 32, "a bit for each unit");
  const WideLane<G, B> lane(block);
  u32 column = lane.first;  // of the turn's first part
  const u32 first = (begin + column) / kGroupRows * B::kTokens + lane.token;
  const u32x4* from = exchange_round(block.buffers, e, sequence).vectors + first;
#pragma unroll 1
  for (u32 turn = 0; turn < kTurns; ++turn) {
    u32 pending = 0;
#pragma unroll
    for (u32 i = 0; i < kUnits; ++i)
      if (lane.template has<kEven>(i / kHalves, column, columns) && lane.has_token(i % kHalves)) pending |= 1u << i;
    u32x4 v[kUnits] = {};
    poll_vectors<Wire>(block.cx, site, first, sequence, pending, v,
                       [&](u32 i) { return from + (lane.offset(i / kHalves) / kGroupRows * B::kTokens + i % kHalves * 8); });
#pragma unroll
    for (u32 i = 0; i < (kParts - kEach) * kHalves; ++i) x.at[i / kHalves][i % kHalves] = x.at[i / kHalves + kEach][i % kHalves];
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      u32x4 units[kHalves];
#pragma unroll
      for (u32 half = 0; half < kHalves; ++half) units[half] = v[i * kHalves + half];
      finish(column + lane.offset(i), lane.template has<kEven>(i, column, columns), units);
      x.put(kParts - kEach + i, units, kPlain ? pending : 0);
    }
    column += kTiles * G::kPanels * kPanel, from += kTiles * G::kPanels * kPanel / kGroupRows * B::kTokens;
  }
}

// The input as it is.
template <class Wire, bool kEven, class G, class B>
MK_DEV void poll_value(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 columns, WideUnits<G, B>& x) {
  poll_wide<Wire, kEven, true>(block, site, e, sequence, begin, columns, x, [](u32, bool, auto&) {});
}

// The input as the finished operand of the products: `apply(args)` of each element (args[0]) and those of the vectors beside it, which
// lie in shared memory. The row reductions' terms of an element, `terms(x, of)`, are added to `rows`. As in gather_operand, the row's
// scale is not in it yet.
template <class Wire, bool kRagged, bool kEven, class G, class B, class Rows, class Terms, class Apply, class... Vectors>
MK_DEV void poll_operand(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 columns, WideUnits<G, B>& x, Rows& rows,
                         Terms terms, Apply apply, const Vectors&... vectors) {
  constexpr u32 kArgs = 1 + sizeof...(Vectors);
  const WideLane<G, B> lane(block);
  poll_wide<Wire, kEven, false>(block, site, e, sequence, begin, columns, x, [&](u32 column, bool has, auto& units) {
    const u32x4 beside[kArgs] = {u32x4{}, (has ? ptx::ld_shared<u32x4>(vectors.template at<u32x4>(column * 2)) : u32x4{})...};
#pragma unroll
    for (u32 half = 0; half < lane.kHalves; ++half) {
      float args[kArgs][8], out[8] = {}, sums[Rows::kCount];
#pragma unroll
      for (u32 a = 0; a < kArgs; ++a) unpack8(a == 0 ? units[half] : beside[a], args[a]);
      const bool counts = has && lane.has_token(half);
#pragma unroll
      for (u32 j = 0; j < 8; ++j) {
        float element[kArgs], of[Rows::kCount];
#pragma unroll
        for (u32 a = 0; a < kArgs; ++a) element[a] = args[a][j];
        const bool inside = counts && (!kRagged || column + j < columns);
        out[j] = inside ? apply(element) : 0.0f;
        terms(element[0], of);
#pragma unroll
        for (u32 r = 0; r < Rows::kCount; ++r) {
          const float term = inside ? of[r] : Rows::neutral(r);
          sums[r] = j == 0 ? term : Rows::both(r, sums[r], term);
        }
      }
      rows.add(half, sums);
      units[half] = {ptx::pack_bf16(out[0], out[1]), ptx::pack_bf16(out[2], out[3]), ptx::pack_bf16(out[4], out[5]), ptx::pack_bf16(out[6], out[7])};
    }
  });
}

// For run_tiles: an input that `poll(first column, columns, units)` brings into registers.
template <class Poll>
struct InRegisters {
  Poll poll;
};
template <class Poll>
InRegisters(Poll) -> InRegisters<Poll>;

template <class G, class B, class Poll>
struct Input<G, B, InRegisters<Poll>> {
  using Lane = WideLane<G, B>;
  using Sums = TileSums<B::kTokens>;
  static constexpr u32 kRounds = Lane::kRounds;

  const B& block;
  InRegisters<Poll> gather;
  WideUnits<G, B> x;

  MK_DEV Input(const B& b, const SmemShape&, InRegisters<Poll> from) : block(b), gather(from) {}
  MK_DEV void bring(u32 begin, u32 columns) { gather.poll(begin, columns, x); }

  // Multiplies a part's weights of lane (g, q).
  MK_DEV void multiply(u32x4 w, u32 part, Sums& sums) const {
    const u32x4 u = x.at[part][0];
    if (Sums::kTokensAreM) {
      sums.multiply_tokens(w, u, x.at[part][Lane::kHalves - 1]);
    } else {
      ptx::mma_m16n8k16(sums.part[0], w.x, w.y, w.z, w.w, u.x, u.z);
      ptx::mma_m16n8k16(sums.part[Sums::kParts - 1], w.x, w.y, w.z, w.w, u.y, u.w);
    }
  }

  // Whole row groups are held.
  template <class R, class H>
  MK_DEV void consume_held(const H& held, u32 tiles, smem_ptr<float> partials, Progress<B>& at) const {
    static_assert(H::kTiles % G::kPieces == 0, "whole row groups are held");
#pragma unroll
    for (u32 group = 0; group < H::kTiles / G::kPieces; ++group) {
      Sums sums;
#pragma unroll
      for (u32 part = 0; part < Lane::kParts; ++part) multiply(held.weights[group * G::kPieces + part / kRounds][part % kRounds], part, sums);
      if (group * G::kPieces < tiles) leave_partials(block, partials + group * B::kWarps * B::kTokens * kGroupRows, sums, panel_warp(block));
    }
    at.group += tiles / G::kPieces;
  }

  // Consumes the tiles of row groups [at.group, last) of one chunk of the columns, a pair at a time: of one group, or where a group
  // is one tile of neighbouring groups.
  template <class R>
  MK_DEV void consume(R& reader, u32 site, const LinearShape& s, u32 first, u32 last, u32 chunk, smem_ptr<float> partials, i32 meeting, bool ends_op,
                      Progress<B>& at) const {
    constexpr bool kSingle = G::kPieces == 1;
    constexpr u32 kPair = kTogether<R>, kGroups = kSingle ? kPair : 1, kSums = B::kWarps * B::kTokens * kGroupRows;
    const u32 warp = panel_warp(block);
#pragma unroll 1
    for (u32 group = at.group; group < last; group += kGroups) {
      const u32 groups = min_u32(kGroups, last - group), tile = group * u32(s.pieces) + chunk * G::kPieces;
      if (ends_op && group + groups >= last) block.meeting(meeting, true);
      Sums sums[kGroups];
#pragma unroll
      for (u32 piece = 0; piece < G::kPieces; piece += kPair) {
        const u32 count = kSingle ? groups : min_u32(kPair, G::kPieces - piece);
        u32x4 weights[kPair][kRounds] = {};
#pragma unroll
        for (u32 i = 0; i < kPair; ++i) {
          if (i >= count) continue;
          const typename G::Format stage(reader.wait_stage(site, tile + piece + i, i), warp, block.lane() / 4, block.lane() % 4);
          if (group == first && piece + i == 0) trace(block.cx, Event::kTile, site, tile);
#pragma unroll
          for (u32 round = 0; round < kRounds; ++round)
            if (has_panel<G, B>(warp, round)) weights[i][round] = stage.load(round * B::kWarps);
        }
#pragma unroll
        for (u32 i = 0; i < kPair; ++i)
#pragma unroll
          for (u32 round = 0; round < kRounds; ++round)
            if (kSingle || piece + i < G::kPieces)
              multiply(weights[i][round], kSingle ? round : (piece + i) * kRounds + round, sums[kSingle ? i : 0]);
        await_weights(weights);  // products alone would not do: the compiler may put them behind the release
        if (count == kPair) reader.template release<kPair>();
        else reader.template release<1>();
      }
#pragma unroll
      for (u32 i = 0; i < kGroups; ++i)
        if (i < groups) leave_partials(block, partials + (group - first + i) * kSums, sums[i], warp);
    }
    at.group = max_u32(at.group, last);
  }
};

}  // namespace mk
