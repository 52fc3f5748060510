// Linear ops on tensor cores, 1 to 16 tokens: out[row, token] = sum over columns of weight[row, column] * x[column, token].
//
// A weight tile is 8 rows by `tile_columns` columns, in panels of 32 columns: lane (g, q) of a warp finds its operand of two
// mma steps as the 16 bytes of row g, columns 8q..8q+7 of a panel, and the activations lie in the same order. The mma sees
// columns in a permuted order, the same for both operands. Weights are the n = 8 operand (tokens are m = 16), so rows are
// shared out in eights and the loop is the same for 1 and for 16 tokens.
// All warps split each tile by panels; their partial sums meet in shared memory once per batch of row groups.
#pragma once
#include "megadsl/block.h"

namespace mk {

// One matrix, as data. Offsets in 16-byte units from the start of the weight arena.
struct LinearShape {
  i32 weights;       // first tile, layer 0
  i32 layer_stride;
  i32 groups;        // row groups of 8 packed rows
  i32 share_offset;
  i32 rows;          // packed rows that mean something; the rest are zeros
  i32 columns;       // input features
  i32 columns_padded;
  i32 tile_columns;
  i32 pieces;        // tiles per row group
  i32 chunk_pieces;  // tiles per row group between two gathers of activations; `pieces` when the whole input fits
  i32 l2_bytes;      // bytes of the block's share to prefetch into L2
};

struct RowGroups {
  u32 begin, end;
};

MK_DEV RowGroups own_groups(const Context& cx, i32 groups, i32 share_offset) {
  return {share_begin(u32(groups), cx.blocks, u32(share_offset), cx.block),
          share_begin(u32(groups), cx.blocks, u32(share_offset), cx.block + 1)};
}

// Visits (batch, chunk): the loop nest that the loader and the consumers share. A block without rows still visits once,
// since it takes part in every gather.
template <u32 kBatch, class F>
MK_DEV void for_each_pass(const LinearShape& s, RowGroups own, F f) {
  const u32 chunks = u32(s.pieces) / u32(s.chunk_pieces);
  u32 first = own.begin;
  do {
    const u32 last = min_u32(first + kBatch, own.end);
#pragma unroll 1
    for (u32 chunk = 0; chunk < chunks; ++chunk) f(first, last, chunk, chunks);
    first += kBatch;
  } while (first < own.end);
}

// Tiles that a warp takes at a time: enough independent loads and products to hide their latencies, so that tiles that wait
// in the ring are consumed faster than HBM fills it.
constexpr u32 kTilesAtOnce = 2;

// A warp's sums of one tile: (token lane / 4 [+ 8], rows 2q and 2q + 1), q = lane % 4, in two chains of products.
struct TileSums {
  float chain[2][4] = {};
  MK_DEV void add(const TileSums& other) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) chain[i / 4][i % 4] += other.chain[i / 4][i % 4];
  }
};

// Adds the products of `count` tiles to their sums. Tile i meets the activations from byte i * stride on.
template <class B>
MK_DEV void multiply_tiles(const B& block, const smem_ptr<char> (&tiles)[kTilesAtOnce], u32 count, smem_ptr<char> activations, u32 stride,
                           u32 panels, TileSums (&sums)[kTilesAtOnce]) {
  constexpr u32 kTokens = B::kTokens;
  const u32 g = block.lane() / 4, q = block.lane() % 4;
#pragma unroll 2
  for (u32 panel = block.warp(); panel < panels; panel += B::kWarps) {
    u32x4 w[kTilesAtOnce] = {}, lo[kTilesAtOnce] = {}, hi[kTilesAtOnce] = {};
#pragma unroll
    for (u32 i = 0; i < kTilesAtOnce; ++i) {
      if (i >= count) continue;
      const smem_ptr<char> x = activations.template at<char>(i * stride + (panel * kTokens + g) * 64 + q * 16);
      w[i] = ptx::ld_shared<u32x4>(tiles[i].template at<u32x4>((panel * kGroupRows + g) * 64 + q * 16));
      if (g < kTokens) lo[i] = ptx::ld_shared<u32x4>(x.template at<u32x4>(0));
      if (kTokens > 8 && g + 8 < kTokens) hi[i] = ptx::ld_shared<u32x4>(x.template at<u32x4>(8 * 64));
    }
#pragma unroll
    for (u32 i = 0; i < kTilesAtOnce; ++i) {
      if (i >= count) continue;
      ptx::mma_m16n8k16(sums[i].chain[0], lo[i].x, hi[i].x, lo[i].y, hi[i].y, w[i].x, w[i].y);
      ptx::mma_m16n8k16(sums[i].chain[1], lo[i].z, hi[i].z, lo[i].w, hi[i].w, w[i].z, w[i].w);
    }
  }
}

// Leaves a warp's sums of one row group in `partials` [warp][token][8] fp32, or adds them to what an earlier chunk left.
template <class B>
MK_DEV void leave_partials(const B& block, smem_ptr<float> partials, const TileSums& sums, bool add) {
  const u32 g = block.lane() / 4, q = block.lane() % 4;
#pragma unroll
  for (u32 half = 0; half < (B::kTokens > 8 ? 2u : 1u); ++half) {
    const u32 token = g + 8 * half;
    if (token >= B::kTokens) continue;
    const smem_ptr<float> at = partials + (block.warp() * B::kTokens + token) * kGroupRows + 2 * q;
    float a = sums.chain[0][2 * half] + sums.chain[1][2 * half], b = sums.chain[0][2 * half + 1] + sums.chain[1][2 * half + 1];
    if (add) a += ptx::ld_shared<float>(at), b += ptx::ld_shared<float>(at + 1);
    ptx::st_shared<u32x2>(at.template at<u32x2>(0), u32x2{ptx::float_bits(a), ptx::float_bits(b)});
  }
}

// Consumes the tiles of row groups [first, last), `pieces` to a group, and leaves each group's partial sums. Where a group
// is one tile, tiles of neighbouring groups go together.
template <class B, class R>
MK_DEV void consume_tiles(const B& block, R& reader, u32 site, const LinearShape& s, u32 first, u32 last, u32 chunk,
                          smem_ptr<char> activations, smem_ptr<float> partials) {
  constexpr u32 kAtOnce = kTilesAtOnce < R::kStages ? kTilesAtOnce : R::kStages;
  const u32 pieces = u32(s.chunk_pieces), panels = u32(s.tile_columns) / kPanel, tile_bytes = u32(s.tile_columns) * B::kTokens * 2;
  const bool single = pieces == 1;
  u32 group = first, piece = 0;
  TileSums sums[kTilesAtOnce];
#pragma unroll 1
  while (group < last) {
    const u32 count = min_u32(kAtOnce, single ? last - group : pieces - piece);
    const u32 tile = group * u32(s.pieces) + chunk * pieces + piece;
    smem_ptr<char> tiles[kTilesAtOnce] = {activations, activations};
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i)
      if (i < count) tiles[i] = reader.wait_stage(site, tile + i, i);
    multiply_tiles(block, tiles, count, activations.template at<char>(piece * tile_bytes), single ? 0 : tile_bytes, panels, sums);
    reader.release(count);
    piece += count;
    if (!single && piece < pieces) continue;
    if (!single) sums[0].add(sums[1]);
    const u32 groups = single ? count : 1;
#pragma unroll
    for (u32 i = 0; i < kTilesAtOnce; ++i) {
      if (i < groups) leave_partials(block, partials + (group - first + i) * B::kWarps * B::kTokens * kGroupRows, sums[i], chunk != 0);
      sums[i] = TileSums();
    }
    group += groups, piece = 0;
  }
}

// Adds the warps' parts in a fixed order and hands each pair of rows to `epilogue(group, pair, token, even, odd)`.
// A thread keeps its token and pair over all groups, so an epilogue may keep per-token state in registers.
template <class B, class Epilogue>
MK_DEV void finish_batch(const B& block, smem_ptr<float> partials, u32 first, u32 last, Epilogue epilogue) {
  constexpr u32 kItems = 4 * B::kTokens, kAtOnce = B::kThreads / kItems;
  const u32 pair = block.thread % 4, token = block.thread / 4 % B::kTokens, sub = block.thread / kItems;
  if (sub >= kAtOnce) return;
#pragma unroll 1
  for (u32 group = first + sub; group < last; group += kAtOnce) {
    const smem_ptr<float> at = partials + ((group - first) * B::kWarps * B::kTokens + token) * kGroupRows + 2 * pair;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (u32 w = 0; w < B::kWarps; ++w) {
      const u32x2 v = ptx::ld_shared<u32x2>((at + w * B::kTokens * kGroupRows).template at<u32x2>(0));
      even += ptx::bits_float(v.x), odd += ptx::bits_float(v.y);
    }
    epilogue(group, pair, token, even, odd);
  }
}

// Consumer side. `gather(first_column, columns)` brings activations (it is called by all threads, between two barriers of
// its own where a buffer is reused); `epilogue` as in finish_batch. Ends with a barrier behind the last epilogue.
template <u32 kBatch, class B, class R, class Gather, class Epilogue>
MK_DEV void run_matrix(const B& block, R& reader, u32 site, const LinearShape& s, const SmemShape& smem, Gather gather, Epilogue epilogue) {
  const RowGroups own = own_groups(block.cx, s.groups, s.share_offset);
  const u32 chunk_columns = u32(s.chunk_pieces) * u32(s.tile_columns);
  const smem_ptr<char> activations = block.template at<char>(smem.activations);
  constexpr u32 kBatchFloats = kBatch * B::kWarps * B::kTokens * kGroupRows;
  u32 turn = 0;
  for_each_pass<kBatch>(s, own, [&](u32 first, u32 last, u32 chunk, u32 chunks) {
    const smem_ptr<float> partials = block.template at<float>(smem.partials) + turn * kBatchFloats;
    if (chunks > 1 || first == own.begin) {
      if (chunk != 0 || first != own.begin) block.sync();  // everybody is done with the activations before
      gather(chunk * chunk_columns, min_u32(chunk_columns, u32(s.columns_padded) - chunk * chunk_columns));
      block.sync();
    }
    consume_tiles(block, reader, site, s, first, last, chunk, activations, partials);
    if (chunk + 1 == chunks) {
      block.sync();
      finish_batch(block, partials, first, last, epilogue);
      turn ^= 1;
    }
  });
  block.sync();
}

}  // namespace mk
