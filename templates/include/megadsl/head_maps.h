// Queries and keys between their gather and the products: a map over each head (an expression whose row is the head, such as a norm),
// then the rotation.
//
// A head's units of 8 features are dealt out to as many neighbouring lanes, so that a reduction over the head is a few shuffles. All in
// place: each lane reads and writes one unit where the gather has left it.
#pragma once
#include "megadsl/attention.h"
#include "megadsl/prologue.h"
#include "megadsl/rope.h"
#include "megadsl/tape.h"

namespace mk {

// A lane's elements of a vector that all heads share. Loaded before the gather, whose wait hides the trip to memory; unpacked behind it.
// kPaired: so many first features of a head are in the order of a "half" rotation's pairs, i and i + kPaired / 2 side by side; the
// vector is not.
template <u32 kHeadDim, u32 kPaired>
struct HeadVector {
  u32x2 first, second;
  bool in_pairs;

  template <class B>
  MK_DEV HeadVector(const B& block, const VectorShape& s, u32 layer) {
    const u32 unit = block.thread % (kHeadDim / kGroupRows);
    const char* vector = block.buffers.weights + (size_t(u32(s.weights)) + size_t(u32(s.layer_stride)) * layer) * 16;
    const u32x2* at = reinterpret_cast<const u32x2*>(vector) + (pairs(unit) ? unit : 2 * unit);
    first = ptx::ld_global<u32x2>(at), second = ptx::ld_global<u32x2>(at + (pairs(unit) ? kPaired / 8 : 1));
    in_pairs = pairs(unit);
  }
  MK_DEV static bool pairs(u32 unit) { return kPaired == kHeadDim || unit < kPaired / kGroupRows; }
  MK_DEV static float half_of(const u32 (&words)[4], u32 i) { return i % 2 == 0 ? ptx::bf16_lo(words[i / 2]) : ptx::bf16_hi(words[i / 2]); }
  MK_DEV void unpack(float (&v)[8]) const {
    const u32 words[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const u32 paired = i % 2 * 4 + i / 2;
      v[i] = in_pairs ? half_of(words, paired) : half_of(words, i);
    }
  }
};

// A reduction over the head: `term(j)` of each of the lane's eight features. All lanes of the warp call it together.
template <RowOp kOp, u32 kHeadDim, class F>
MK_DEV float head_total(F term) {
  float part[8];
#pragma unroll
  for (u32 j = 0; j < 8; ++j) part[j] = term(j);
  const auto both = [](float a, float b) { return kOp == RowOp::kSum ? a + b : math::max(a, b); };
#pragma unroll
  for (u32 apart = 4; apart != 0; apart /= 2)
#pragma unroll
    for (u32 j = 0; j < apart; ++j) part[j] = both(part[j], part[j + apart]);
#pragma unroll
  for (u32 mask = kHeadDim / kGroupRows / 2; mask != 0; mask /= 2) part[0] = both(part[0], ptx::shfl_xor(part[0], mask));
  return part[0];
}

// Maps rows [0, rows), rotates them (kTurns) by the angles of `token(row)` and rounds them once. `place(row, dim)` is where a unit lies,
// `map(v)` makes of a lane's eight features what it is to be. `warp` is the warp's number in the order of the rows.
template <u32 kHeadDim, bool kTurns, class B, class Token, class Place, class Map>
MK_DEV void map_heads(const B& block, u32 rows, u32 warp, smem_ptr<u32x2> angles, Token token, Place place, Map map) {
  static_assert((kHeadDim & (kHeadDim - 1)) == 0 && kHeadDim / kGroupRows <= kWarpSize, "a head's lanes reduce among themselves");
  constexpr u32 kLanes = kHeadDim / kGroupRows, kAtOnce = kWarpSize / kLanes;
  const u32 unit = block.lane() % kLanes;
#pragma unroll 1
  for (u32 first = warp * kAtOnce; first < rows; first += B::kWarps * kAtOnce) {
    const u32 row = first + block.lane() / kLanes;
    const smem_ptr<u32x4> at = place(row, unit * kGroupRows).template at<u32x4>(0);
    u32x4 x = {0, 0, 0, 0};
    if (row < rows) x = ptx::ld_shared<u32x4>(at);
    float v[8];
    unpack8(x, v);
    map(v);
#pragma unroll
    for (u32 j = 0; j < 8 && kTurns; j += 2) rotate<kHeadDim>(angles, unit * kGroupRows + j, token(row), v[j], v[j + 1]);
    x = {ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7])};
    if (row < rows) ptx::st_shared<u32x4>(at, x);
  }
}

// What run_attention does to a unit's queries and fresh keys, behind a barrier and before another.
template <class T, bool kTurns_, class Q, class K>
struct HeadMaps {
  static constexpr bool kMaps = true;
  static constexpr bool kTurns = kTurns_;
  smem_ptr<u32x2> angles;
  Q query;
  K key;

  // The keys' rows begin with the last warp: with few tokens it has no row of the queries.
  template <class B>
  MK_DEV void apply(const B& block, const AttentionShape& s, bool fresh) const {
    const smem_ptr<char> queries = block.template at<char>(s.queries), keys = block.template at<char>(s.fresh);
    const u32 heads = u32(s.rows) / B::kTokens;
    map_heads<T::kHeadDim, kTurns>(
        block, u32(s.rows), block.warp(), angles, [&](u32 row) { return T::kByToken ? row / heads : row % B::kTokens; }, [&](u32 row, u32 dim) { return queries.template at<char>(query_offset<T>(row, dim)); }, query);
    if (fresh)
      map_heads<T::kHeadDim, kTurns>(
          block, B::kTokens, B::kWarps - 1 - block.warp(), angles, [&](u32 row) { return row % B::kTokens; },
          [&](u32 row, u32 dim) { return keys.template at<char>(key_offset<T::kHeadDim>(row, dim)); }, key);
  }
};

template <class T, bool kTurns, class Q, class K>
MK_DEV HeadMaps<T, kTurns, Q, K> head_maps(smem_ptr<u32x2> angles, Q query, K key) {
  return {angles, query, key};
}

}  // namespace mk
