// Attention where a KV head has at most eight query rows: cached rows are the M = 16 of the products, queries their N = 8, so that no
// half of an mma is spent on rows that do not exist.
//
// Scores are K * Q^T, 16 rows by 8 queries: lane (g, q) finds rows g and g + 8 of queries 2q and 2q + 1. Transposed by two movmatrix,
// their exponentials are the right operand of out^T += V^T * P^T, whose left operand is a chunk's V half as it lies. So lane (g, q)
// holds dims g and g + 8 of each 16 of those two queries.
#pragma once
#include "megadsl/attention.h"

namespace mk {

template <class T>
struct FewRows {
  static constexpr bool kOneTile = true;  // query rows of a KV head are never more
  float maximum[2] = {kNoMaximum, kNoMaximum};
  float sum[2] = {0.0f, 0.0f};  // over this lane's rows of the chunks
  float out[T::kHeadDim / 16][4] = {};
  u32x4 queries[T::kPanels];

  MK_DEV static u32 row(u32 lane, u32 r) { return lane % 4 * 2 + r; }

  MK_DEV FewRows() = default;  // whose queries are still to come
  MK_DEV FewRows(smem_ptr<char> tile, u32 lane) {
#pragma unroll
    for (u32 p = 0; p < T::kPanels; ++p) queries[p] = T::load_panel(tile.template at<char>((p * 16 + lane / 4) * 64 + lane % 4 * 16), p, lane);
  }

  // Takes one chunk whose first `rows` rows exist, or those of a range. Bit i of seen[r]: query row(lane, r) attends to row i of the chunk.
  template <class Chunk, class Rows>
  MK_DEV void take(const Chunk& chunk, u32 lane, float scale_log2, const u32 (&seen)[2], const Rows& rows) {
    const u32 g = lane / 4, q = lane % 4;
    float score[2][4] = {};  // two chains of products, added up: [row g or g + 8][query]
#pragma unroll
    for (u32 p = 0; p < T::kPanels; ++p) {
      const u32x4 k[2] = {chunk.keys(0, p), chunk.keys(1, p)};
      ptx::mma_m16n8k16(score[0], k[0].x, k[1].x, k[0].y, k[1].y, queries[p].x, queries[p].y);
      ptx::mma_m16n8k16(score[1], k[0].z, k[1].z, k[0].w, k[1].w, queries[p].z, queries[p].w);
    }
    float s[2][2], top[2];  // [row g or g + 8][query]
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
        s[half][r] = (seen[r] >> (half * 8 + g) & 1) != 0 ? T::Score::of(score[0][2 * half + r] + score[1][2 * half + r], scale_log2) : kNoMaximum;
      top[r] = math::max(s[0][r], s[1][r]);
    }
#pragma unroll
    for (u32 mask = 4; mask < kWarpSize; mask *= 2)
#pragma unroll
      for (u32 r = 0; r < 2; ++r) top[r] = math::max(top[r], ptx::shfl_xor(top[r], mask));
    float fade[2], w[2][2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const float highest = math::max(maximum[r], top[r]);
      fade[r] = ptx::exp2_approx(maximum[r] - highest);
      maximum[r] = highest;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) w[half][r] = s[half][r] == kNoMaximum ? 0.0f : ptx::exp2_approx(s[half][r] - highest);
      sum[r] = sum[r] * fade[r] + (w[0][r] + w[1][r]);
    }
    const u32 p0 = ptx::transpose_8x8(ptx::pack_bf16(w[0][0], w[0][1])), p1 = ptx::transpose_8x8(ptx::pack_bf16(w[1][0], w[1][1]));
    // Rows that do not exist hold anything, NaN included, and 0 * NaN would spoil the sum.
    const u32 keep0 = row_mask(0, q, rows), keep1 = row_mask(1, q, rows);
#pragma unroll
    for (u32 pair = 0; pair < T::kHeadDim / 16; ++pair) {
      const u32x4 v = chunk.values(pair);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) out[pair][i] *= fade[i % 2];
      ptx::mma_m16n8k16(out[pair], v.x & keep0, v.z & keep0, v.y & keep1, v.w & keep1, p0, p1);
    }
  }

  // Leaves {out, maximum, sum} of the rows that exist in this warp's part of the scratch: [row][D + 4] fp32.
  MK_DEV void leave(smem_ptr<float> part, u32 lane, u32 rows) {
#pragma unroll
    for (u32 mask = 4; mask < kWarpSize; mask *= 2)
#pragma unroll
      for (u32 r = 0; r < 2; ++r) sum[r] += ptx::shfl_xor(sum[r], mask);
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      if (row(lane, r) >= rows) continue;
      const smem_ptr<float> to = part + row(lane, r) * T::kPartFloats;
#pragma unroll
      for (u32 pair = 0; pair < T::kHeadDim / 16; ++pair)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) ptx::st_shared<float>(to + (pair * 16 + half * 8 + lane / 4), out[pair][2 * half + r]);
      if (lane / 4 == 0) ptx::st_shared<float>(to + T::kHeadDim, maximum[r]), ptx::st_shared<float>(to + (T::kHeadDim + 1), sum[r]);
    }
  }
};

}  // namespace mk
