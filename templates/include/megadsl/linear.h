// Linear ops on tensor cores, 1 to 16 tokens: out[row, token] = sum over columns of weight[row, column] * x[column, token].
//
// A weight tile is 8 rows by `tile_columns` columns, in panels of 32 columns: lane (g, q) of a warp finds the 16 bytes of row
// g, columns 8q..8q+7 of a panel. Those four registers are the whole A operand (m = 16) of an mma, read as two column ranges
// of the same eight rows: pairs 0 and 2 are operand row g, pairs 1 and 3 operand row g + 8. The activations of a range are
// the B operand (n = 8 tokens), so half of each product belongs to the other range and is dropped. Up to 4 tokens, tokens of
// range 0 are columns 0..3 and tokens of range 1 columns 4..7: one mma per 512 bytes of weights, no register moved. From 9 tokens on
// the same registers are two B operands (k = 16, n = 8 rows) and the tokens are M: two mma, of which nothing is dropped.
// Rows are shared out in eights, which 132 blocks need; the same packed weights serve 1 to 16 tokens.
// All warps split each tile by panels; their partial sums meet in shared memory once per batch of row groups.
// The columns may be split as well (parts.h): then what is shared out over the blocks are the row groups of part 0, behind
// them those of part 1, and so on, and a block gathers the columns of those parts alone that it has row groups of.
#pragma once
#include "megadsl/dry.h"
#include "megadsl/formats.h"
#include "megadsl/tile_sums.h"

namespace mk {

// One matrix, as data. Offsets in 16-byte units from the start of the weight arena.
struct LinearShape {
  i32 weights;       // first tile, layer 0
  i32 layer_stride;
  i32 groups;        // row groups of 8 packed rows
  i32 fold;          // row groups that make one feature group of 8: 2 where an epilogue folds two rows into one feature
  i32 share_offset;  // of the row groups of all parts of the columns
  i32 rows;          // packed rows that mean something; the rest are zeros
  i32 columns;       // input features
  i32 tile_bytes;
  i32 tile_columns;
  i32 pieces;        // tiles per row group
  i32 ways;          // parts that the columns are split into, each of whole tiles
  i32 chunk_pieces;  // tiles per row group between two gathers of activations; `pieces / ways` when the input fits
  i32 together;      // tiles that lie in one stage of the ring
  i32 l2_bytes;      // bytes of the block's share to prefetch into L2
  i32 pass_groups;   // row groups that each chunk of activations serves, where there are several
};

// Row groups of 8.
using RowGroups = Share;

// Row groups of all parts, those of part p counted from p * groups on.
MK_DEV RowGroups own_groups(const Context& cx, const LinearShape& s) {
  const u32 fold = u32(s.fold);
  const Share own = own_share(cx, u32(s.groups) / fold * u32(s.ways), u32(s.share_offset));
  return {own.begin * fold, own.end * fold};
}

// Visits (part, row groups of it): the loop nest that the loader and the consumers share, with for_each_pass. A block without
// rows still visits once, since it takes part in every gather. `ways` is the shape's, as a constant where it is known.
template <class F>
MK_DEV void for_each_part(const LinearShape& s, u32 ways, RowGroups own, F f) {
  const u32 groups = u32(s.groups);
  if (own.begin == own.end && ptx::skips_zero_trips()) return;
  u32 part = min_u32(own.begin / groups, ways - 1), first = own.begin - part * groups;
#pragma unroll 1
  do {
    f(part, RowGroups{first, ways == 1 ? own.end : min_u32(own.end - part * groups, groups)});
    ++part, first = 0;
  } while (part < ways && part * groups < own.end);
}

// Visits (row groups, chunk) of one part's row groups: all of them in passes, the chunks of the columns in each pass.
template <class F>
MK_DEV void for_each_pass(u32 groups, u32 chunks, RowGroups own, F f) {
  u32 first = own.begin;
  do {
    const u32 last = first + min_u32(groups, own.end - first);
#pragma unroll 1
    for (u32 chunk = 0; chunk < chunks; ++chunk) f(first, last, chunk);
    first = last;
  } while (first < own.end);
}

// Tiles that a warp takes at a time: enough independent loads and products to hide their latencies, so that tiles that wait
// in the ring are consumed faster than HBM fills it.
constexpr u32 kTilesAtOnce = 2;

// Adds the products of kCount tiles to their sums. Tile i meets the activations from byte i * stride on.
template <u32 kCount, class G, class B>
MK_DEV void multiply_tiles(const B& block, const smem_ptr<char> (&tiles)[kTilesAtOnce], smem_ptr<char> activations, u32 stride,
                           TileSums<B::kTokens> (&sums)[kTilesAtOnce]) {
  constexpr u32 kPanelBytes = kPanel * 2 * B::kTokens;
  const u32 g = block.lane() / 4, q = block.lane() % 4;
#pragma unroll
  for (u32 first = 0; first < G::kPanels; first += B::kWarps) {
    const u32 panel = first + block.warp();
    if (first + B::kWarps > G::kPanels && panel >= G::kPanels) break;  // the last round may not have a panel for every warp
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
      sums[i].multiply(typename G::Format(tiles[i], panel, g, q).load(0),
                       activations.template at<char>(i * stride + panel * kPanelBytes), g, q);
  }
}

// Whether a warp has a panel in a round: the last one may not have a panel for every warp.
template <class G, class B>
MK_DEV bool has_panel(u32 warp, u32 round) {
  return (round + 1) * B::kWarps <= G::kPanels || round * B::kWarps + warp < G::kPanels;
}

// The first kTiles tiles of a block's share, taken out of the ring before the op's input is there: each lane keeps the weights that
// it will multiply, so that the loader goes on while the block waits for others. kEverywhere: every block has as many, else what a
// block does not have are zeros. kWhole: no block has more.
template <class G, u32 kTiles_, bool kEverywhere, bool kWhole_, class B>
struct Held {
  static constexpr u32 kTiles = kTiles_, kRounds = (G::kPanels + B::kWarps - 1) / B::kWarps;
  static constexpr bool kWhole = kWhole_;
  u32x4 weights[kTiles][kRounds];

  MK_DEV static u32 count(RowGroups own) { return kEverywhere ? kTiles : min_u32(kTiles, (own.end - own.begin) * G::kPieces); }
};
struct NothingHeld {
  static constexpr u32 kTiles = 0;
  static constexpr bool kWhole = false;
};

// Fills `held` from the ring, as many tiles at once as fit it. The matrix's input comes in one piece, so that a group's tiles follow
// each other. `warp`: whose panels this warp multiplies.
template <class B, class R, class G, u32 kTiles, bool kEverywhere, bool kWhole>
MK_DEV void hold_tiles(const B& block, R& reader, u32 site, const LinearShape& s, Held<G, kTiles, kEverywhere, kWhole, B>& held, u32 warp) {
  const RowGroups own = own_groups(block.cx, s);
  const u32 tiles = held.count(own);
  constexpr u32 kAtOnce = kTiles < R::kStages ? kTiles : R::kStages;
#pragma unroll
  for (u32 first = 0; first < kTiles; first += kAtOnce) {
    const u32 count = kEverywhere ? min_u32(kAtOnce, kTiles - first) : min_u32(kAtOnce, tiles - min_u32(first, tiles));
    reader.wait_stages(site, own.begin * G::kPieces + first, count);
    u32 seen = 0;
#pragma unroll
    for (u32 i = first; i < kTiles && i < first + kAtOnce; ++i) {
      const typename G::Format tile(reader.stage(i - first), warp, block.lane() / 4, block.lane() % 4);
#pragma unroll
      for (u32 round = 0; round < held.kRounds; ++round) {
        u32x4& w = held.weights[i][round];
        w = u32x4{0, 0, 0, 0};
        if ((kEverywhere || i < tiles) && has_panel<G, B>(warp, round)) w = tile.load(round * B::kWarps);
        seen ^= w.w;
      }
    }
    ptx::await(seen);  // products would wait for their weights before the stage is let go of; so does this
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) reader.release();
  }
}

// Behind it the loads have returned, so that their stage may be let go of.
template <u32 kTiles, u32 kRounds>
MK_DEV void await_weights(const u32x4 (&weights)[kTiles][kRounds]) {
  u32 seen = 0;
#pragma unroll
  for (u32 i = 0; i < kTiles * kRounds; ++i) seen ^= weights[i / kRounds][i % kRounds].w;
  ptx::await(seen);
}

// Stores what TileSums::finish gives in `partials` [warp][token][8] fp32; `warp`: whose panels it multiplied.
template <u32 kHalf, class B>
MK_DEV void store_partials(const B& block, smem_ptr<float> partials, const float (&sum)[2], u32 warp) {
  const u32 g = block.lane() / 4, q = block.lane() % 4;
  if constexpr (TileSums<B::kTokens>::kTokensAreM) {
    const u32 token = g + 8 * kHalf, at = (warp * B::kTokens + token) * kGroupRows + 2 * q;
    if (token < B::kTokens) ptx::st_shared<u32x2>((partials + at).template at<u32x2>(0), u32x2{ptx::float_bits(sum[0]), ptx::float_bits(sum[1])});
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const u32 token = 2 * q + i + 8 * kHalf;
    if (token < B::kTokens) ptx::st_shared<float>(partials + ((warp * B::kTokens + token) * kGroupRows + g), sum[i]);
  }
}

// Leaves a warp's sums of one row group.
template <class B>
MK_DEV void leave_partials(const B& block, smem_ptr<float> partials, const TileSums<B::kTokens>& sums, u32 warp) {
  float sum[2];
  sums.finish(0, sum);
  store_partials<0>(block, partials, sum, warp);
  if constexpr (TileSums<B::kTokens>::kHalves == 2) {
    sums.finish(1, sum);
    store_partials<1>(block, partials, sum, warp);
  }
}

// The geometry of a matrix's tiles, known when the kernel is compiled: panels per tile, tiles per row group and chunk, parts
// of the columns, chunks of a part, row groups of a pass (all where there is one chunk), and tiles in one stage of the ring. Format_ is one
// of formats.h. kDry: 0, or
// for a dry run (dry.h) 1 and the stages in front of the first tile.
template <u32 kPanels_, u32 kPieces_, u32 kWays_, u32 kChunks_ = 1, u32 kGroups_ = ~0u, u32 kTogether_ = 1,
          class Format_ = Bf16Weights, u32 kDry_ = 0>
struct Tiles {
  using Format = Format_;
  static constexpr u32 kTileBytes = ceil_div(kPanels_ * Format::kPanelBytes, 16) * 16;
  static constexpr u32 kDry = kDry_;
  static constexpr u32 kTogether = kTogether_;
  static constexpr u32 kPanels = kPanels_;
  static constexpr u32 kPieces = kPieces_;
  static constexpr u32 kWays = kWays_;
  static constexpr u32 kChunks = kChunks_;
  static constexpr u32 kGroups = kGroups_;
};

// Where products with one chunk of the columns wait for those with the next: [row group of the pass][token][8] fp32. Each sum belongs
// to the thread that finishes it, in every chunk.
struct ChunkSums {
  smem_ptr<float> at;  // of the batch's first row group
  bool first, last;    // chunk

  MK_DEV float add(u32 index, float v) const {
    if (!first) v += ptx::ld_shared<float>(at + index);
    if (!last) ptx::st_shared<float>(at + index, v);
    return v;
  }
};

// How far the products of a block's row groups have come: the next tile, and the sums of the group that it belongs to.
template <class B>
struct Progress {
  u32 group, piece = 0;
  TileSums<B::kTokens> sums[kTilesAtOnce] = {};
};

// Tiles that are multiplied at once where the ring holds as many.
template <class R>
constexpr u32 kTogether = kTilesAtOnce < R::kStages ? kTilesAtOnce : R::kStages;

// Multiplies the tiles that are held, in the order in which consume_tiles() would have added them. A group that is held in part
// goes on from the ring, at a pair of tiles.
template <class R, class B, class G, u32 kTiles, bool kEverywhere, bool kWhole>
MK_DEV void consume_held(const B& block, const Held<G, kTiles, kEverywhere, kWhole, B>& held, u32 tiles, smem_ptr<char> activations,
                         smem_ptr<float> partials, Progress<B>& at) {
  constexpr u32 kPanelBytes = kPanel * 2 * B::kTokens;
  const u32 g = block.lane() / 4, q = block.lane() % 4;
  const smem_ptr<char> x = activations.template at<char>(block.warp() * kPanelBytes);
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
    const u32 piece = i % G::kPieces;
#pragma unroll
    for (u32 round = 0; round < held.kRounds; ++round)
      if (has_panel<G, B>(block.warp(), round))
        at.sums[piece % kTogether<R>].multiply(held.weights[i][round],
                                               x.template at<char>((piece * G::kPanels + round * B::kWarps) * kPanelBytes), g, q);
    if (piece + 1 != G::kPieces) continue;
    if (G::kPieces != 1) at.sums[0].add(at.sums[1]);
    if (kEverywhere || i < tiles)
      leave_partials(block, partials + i / G::kPieces * B::kWarps * B::kTokens * kGroupRows, at.sums[0], block.warp());
    at.sums[0] = at.sums[1] = TileSums<B::kTokens>();
  }
  at.group += tiles / G::kPieces, at.piece = tiles % G::kPieces;
}

// Consumes the tiles of row groups [first, last) of one chunk (of all parts' chunks), as far as `at` has not, and leaves each group's
// partial sums. Where a group is one tile, tiles of neighbouring groups go together. `input`: Begun, or a DryRun.
template <class G, class B, class R, class Begins = Begun>
MK_DEV void consume_tiles(const B& block, R& reader, u32 site, const LinearShape& s, u32 first, u32 last, u32 chunk,
                          smem_ptr<char> activations, smem_ptr<float> partials, i32 meeting, bool ends_op, Progress<B>& at, Begins input = {}) {
  constexpr u32 kTileBytes = G::kPanels * kPanel * B::kTokens * 2;  // of activations
  constexpr bool kSingle = G::kPieces == 1, kAlwaysAll = kTogether<R> == kTilesAtOnce && G::kPieces % kTilesAtOnce == 0;
#pragma unroll 1
  while (input.due() || at.group < last) {
    const bool dry = input.due();
    const u32 count = min_u32(kTogether<R>, kSingle ? last - at.group : G::kPieces - at.piece);
    if (!dry && ends_op && at.group + (kSingle ? count : 1) >= last && (kSingle || at.piece + count >= G::kPieces)) block.meeting(meeting, true);
    const u32 tile = at.group * u32(s.pieces) + chunk * G::kPieces + at.piece;
    if (input.runs(block, reader, at.group < last ? count : 0)) {
      smem_ptr<char> tiles[kTilesAtOnce] = {activations, activations};
#pragma unroll
      for (u32 i = 0; i < kTogether<R>; ++i)
        if (kAlwaysAll || i < count) {
          if constexpr (Begins::kDry) tiles[i] = dry ? reader.stage(Begins::kAhead + i) : reader.wait_stage(site, tile + i, i);
          else tiles[i] = reader.wait_stage(site, tile + i, i);
        }
      if (!dry && at.group == first && at.piece == 0) trace(block.cx, Event::kTile, site, tile);
      const smem_ptr<char> x = dry ? tiles[0] : activations.template at<char>(at.piece * kTileBytes);
      if (kAlwaysAll || count == kTilesAtOnce) {
        multiply_tiles<kTilesAtOnce, G>(block, tiles, x, kSingle ? 0 : kTileBytes, at.sums);
        if (!dry) reader.template release<kTilesAtOnce>();
      } else {
        multiply_tiles<1, G>(block, tiles, x, 0, at.sums);
        if (!dry) reader.template release<1>();
      }
    }
    if (dry) {
      at.sums[0] = at.sums[1] = TileSums<B::kTokens>();
      input.bring();
      continue;
    }
    at.piece += count;
    if (!kSingle && at.piece < G::kPieces) continue;
    if (!kSingle) at.sums[0].add(at.sums[1]);
    const u32 groups = kSingle ? count : 1;
#pragma unroll
    for (u32 i = 0; i < kTilesAtOnce; ++i) {
      if (i < groups) leave_partials(block, partials + (at.group - first + i) * B::kWarps * B::kTokens * kGroupRows, at.sums[i], block.warp());
      at.sums[i] = TileSums<B::kTokens>();
    }
    at.group += groups, at.piece = 0;
  }
}

// Where run_tiles finds its input: where all warps meet, in shared memory, which `gather(first column, columns)` fills. wide.h has the other.
template <class G, class B, class Gather>
struct Input {
  const B& block;
  Gather gather;
  smem_ptr<char> activations;

  MK_DEV Input(const B& b, const SmemShape& smem, Gather from) : block(b), gather(from), activations(b.template at<char>(smem.activations)) {}
  MK_DEV void bring(u32 begin, u32 columns) {
    gather(begin, columns);
    block.sync();
  }
  template <class R, class H>
  MK_DEV void consume_held(const H& held, u32 tiles, smem_ptr<float> partials, Progress<B>& at) const {
    mk::consume_held<R>(block, held, tiles, activations, partials, at);
  }
  template <class R>
  MK_DEV void consume(R& reader, u32 site, const LinearShape& s, u32 first, u32 last, u32 chunk, smem_ptr<float> partials, i32 meeting, bool ends_op,
                      Progress<B>& at) const {
    consume_tiles<G>(block, reader, site, s, first, last, chunk, activations, partials, meeting, ends_op, at);
  }
  template <class R, class Begins>
  MK_DEV void consume_dry(R& reader, u32 site, const LinearShape& s, u32 first, u32 last, u32 chunk, smem_ptr<float> partials, i32 meeting, bool ends_op,
                          Begins begins) const {
    static_assert(B::kTokens * kPanel * 2 * kTilesAtOnce <= kGroupRows * kPanel * 2, "a tile stands for the activations of two");
    Progress<B> at = {first};
    consume_tiles<G>(block, reader, site, s, first, last, chunk, activations, partials, meeting, ends_op, at, begins);
  }
};

// What a row's sums are multiplied by. `settle()` is called once behind the barrier after which the input is there, and before
// the next one; `factor(token)` behind that.
struct Unscaled {
  MK_DEV void settle() const {}
  MK_DEV float factor(u32) const { return 1.0f; }
};
template <class Settle, class Factor>
struct RowScale {
  Settle settle;
  Factor factor;
};
template <class Settle, class Factor>
RowScale(Settle, Factor) -> RowScale<Settle, Factor>;

// The token whose sums a thread finishes, in every group.
template <class B>
MK_DEV u32 own_token(const B& block) {
  return block.thread / 4 % B::kTokens;
}

// Adds the warps' parts of at most kBatch groups in a fixed order and, with the last chunk, hands each pair of rows, times `scale()`,
// to `epilogue(group, pair, token, even, odd)`. A thread keeps its token and pair over all groups, so an epilogue may keep per-token
// state in registers.
template <u32 kBatch, bool kChunks, class B, class Scale, class Epilogue>
MK_DEV void finish_batch(const B& block, smem_ptr<float> partials, u32 first, u32 last, ChunkSums chunks, Scale scale, Epilogue epilogue) {
  constexpr u32 kItems = 4 * B::kTokens, kAtOnce = B::kThreads / kItems;
  const u32 pair = block.thread % 4, token = own_token(block), sub = block.thread / kItems;
  if (sub >= kAtOnce) return;
#pragma unroll 1
  for (u32 group = first + sub; group < last; group += kAtOnce) {
    const smem_ptr<float> at = partials + ((group - first) * B::kWarps * B::kTokens + token) * kGroupRows + 2 * pair;
    u32x2 parts[B::kWarps];
#pragma unroll
    for (u32 w = 0; w < B::kWarps; ++w) parts[w] = ptx::ld_shared<u32x2>((at + w * B::kTokens * kGroupRows).template at<u32x2>(0));
    const float factor = !kChunks || chunks.last ? scale() : 0.0f;  // while the parts are on their way
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (u32 w = 0; w < B::kWarps; ++w) even += ptx::bits_float(parts[w].x), odd += ptx::bits_float(parts[w].y);
    if (kChunks) {
      const u32 index = ((group - first) * B::kTokens + token) * kGroupRows + 2 * pair;
      even = chunks.add(index, even), odd = chunks.add(index + 1, odd);
    }
    if (!kChunks || chunks.last) epilogue(group, pair, token, even * factor, odd * factor);
    if (kBatch <= kAtOnce) return;
  }
}

// Where the partial sums of a batch lie; two batches take turns.
template <u32 kBatch, class B>
MK_DEV smem_ptr<float> partials_of(const B& block, const SmemShape& smem, u32 turn) {
  return block.template at<float>(smem.partials) + turn * kBatch * B::kWarps * B::kTokens * kGroupRows;
}

// Consumer side. `gather` brings activations, see Input (it is called by all threads, when nobody reads those before any more); `finish(partials, first, count, chunks)` takes the warps' sums of row groups, counted from the block's first; `settle()` is
// called once, before the barrier that the first of them with all columns follows. kEnds: the block meets behind the last finish.
// Until the first batch's partial sums meet, the second batch's place is free: gather_operand leaves last elements there.
// `held`: what hold_tiles() has taken of the first batch, of a matrix whose input comes in one piece.
template <u32 kBatch, class G, bool kEnds, class B, class R, class Gather, class Settle, class Finish, class H = NothingHeld>
MK_DEV void run_tiles(const B& block, R& reader, u32 site, const LinearShape& s, const SmemShape& smem, Gather gather, Settle settle,
                      Finish finish, const H& held = {}) {
  const RowGroups own = own_groups(block.cx, s);
  constexpr u32 kChunkColumns = G::kPieces * G::kPanels * kPanel;
  Input<G, B, Gather> input(block, smem, gather);
  u32 turn = 0;
  Progress<B> ahead = {own.begin};
  [[maybe_unused]] bool waits = false, fresh = true;  // of dry runs
  const auto gather_chunk = [&](u32 column) {
    block.meet();
    trace(block.cx, Event::kWait, site, column);
    input.bring(column * kChunkColumns, kChunkColumns);
    trace(block.cx, Event::kReady, site, column);
  };
  if constexpr (H::kTiles != 0) {  // before the loop: else the held weights would live as long as it
    static_assert(H::kTiles <= kBatch * G::kPieces && G::kWays == 1 && G::kChunks == 1, "held tiles belong to the first batch");
    const u32 tiles = held.count(own);
    gather_chunk(0);
    block.meeting(smem.meeting, tiles == (own.end - own.begin) * G::kPieces);
    input.template consume_held<R>(held, tiles, partials_of<kBatch>(block, smem, 0), ahead);
  }
  const auto batches = [&](u32 part, RowGroups pass, u32 chunk) {
    for_each_pass(kBatch, 1, pass, [&](u32 first, u32 last, u32) {
      const smem_ptr<float> partials = partials_of<kBatch>(block, smem, turn);
      const u32 item = part * u32(s.groups) + first;
      const ChunkSums chunks = {block.template at<float>(smem.sums) + (first - pass.begin) * B::kTokens * kGroupRows, chunk == 0,
                                chunk + 1 == G::kChunks};
      Progress<B> begun = {first};
      if constexpr (G::kDry != 0) {
        const auto bring = [&] { gather_chunk(part * G::kChunks + chunk), block.meeting(smem.meeting, false); };
        input.consume_dry(reader, site, s, first, last, part * G::kChunks + chunk, partials, smem.meeting, chunks.last && item + (last - first) == own.end,
                          DryRun<G::kDry - 1, decltype(bring)>{waits, fresh, bring});
      } else if (!H::kWhole)
        input.consume(reader, site, s, first, last, part * G::kChunks + chunk, partials, smem.meeting,
                      chunks.last && item + (last - first) == own.end, H::kTiles == 0 ? begun : ahead);
      trace(block.cx, Event::kTaken, site, reader.taken.now());
      if (chunks.last && item == own.begin) settle();
      if constexpr (B::kFinishes) {
        block.meet();
      } else {
        block.sync();
        finish(partials, item - own.begin, last - first, chunks);
      }
      turn ^= 1;
    });
  };
  for_each_part(s, G::kWays, own, [&](u32 part, RowGroups groups) {
    for_each_pass(G::kGroups, G::kChunks, groups, [&](u32 first, u32 last, u32 chunk) {
      if (G::kDry != 0) {
        waits = ptx::opaque(1u) != 0;  // the first batch brings it; opaque: or the compiler would make a copy of the loop's first iteration
      } else if (H::kTiles == 0) {
        gather_chunk(part * G::kChunks + chunk);
        block.meeting(smem.meeting, false);
      }
      batches(part, {first, last}, chunk);
    });
  });
  if (kEnds) block.sync();
  if constexpr (B::kFinishes) trace(block.cx, Event::kEnd, site);
}

// Row groups of a matrix, `first` and on from the block's first, `begin`. `factor(token)` is asked for once, into `scale`, for no thread has a
// group in a later batch, but none in the first; a finisher asks each time, since a branch would put that behind its sums.
template <u32 kBatch, class G, class B, class Factor, class Epilogue>
MK_DEV void finish_groups(const B& block, smem_ptr<float> partials, u32 begin, u32 first, u32 count, ChunkSums chunks, Factor factor, float& scale,
                          Epilogue epilogue) {
  const auto scaled = [&] {
    if (B::kThreads == kWarpSize || first == 0) scale = factor(own_token(block));
    return scale;
  };
  finish_batch<kBatch, (G::kChunks > 1)>(block, partials, begin + first, begin + first + count, chunks, scaled, epilogue);
}

// A matrix whose columns are not split: `epilogue` as in finish_batch, `scale` as Unscaled. kMeets: all warps' results are there at
// the end; else they are known within the warp.
template <u32 kBatch, class G, bool kMeets, class B, class R, class Gather, class Epilogue, class Scale = Unscaled, class H = NothingHeld>
MK_DEV void run_matrix(const B& block, R& reader, u32 site, const LinearShape& s, const SmemShape& smem, Gather gather, Epilogue epilogue,
                       Scale scale = {}, const H& held = {}) {
  const u32 begin = own_groups(block.cx, s).begin;
  float factor = 1.0f;
  const auto settle = [&] { scale.settle(); };
  const auto finish = [&](smem_ptr<float> partials, u32 first, u32 count, ChunkSums chunks) {
    finish_groups<kBatch, G>(block, partials, begin, first, count, chunks, [&](u32 token) { return scale.factor(token); }, factor, epilogue);
  };
  run_tiles<kBatch, G, kMeets>(block, reader, site, s, smem, gather, settle, finish, held);
}

}  // namespace mk
