// The sums of a warp's products of one tile, on tensor cores; linear.h says what a tile is.
#pragma once
#include "megadsl/block.h"

namespace mk {

// A warp's products of one tile. Up to 4 tokens both ranges share one accumulator, up to 8 each has one. More tokens are the mma's M and
// the weights its N, so that no half of it is dropped; the two k16 steps of a panel have an accumulator each.
template <u32 kTokens>
struct TileSums {
  static constexpr bool kShared = kTokens <= 4;
  static constexpr bool kTokensAreM = kTokens > 8;
  static constexpr u32 kHalves = kTokensAreM ? 2 : 1;
  static constexpr u32 kParts = kShared ? 1 : 2;
  float part[kParts][4] = {};

  MK_DEV void add(const TileSums& other) {
#pragma unroll
    for (u32 i = 0; i < kParts * 4; ++i) part[i / 4][i % 4] += other.part[i / 4][i % 4];
  }
  // Multiplies the panel's weights of lane (g, q) by the activations of that panel.
  MK_DEV void multiply(u32x4 w, smem_ptr<char> panel, u32 g, u32 q) {
    if (kShared) {
      u32x2 x = {0, 0};
      if (g % 4 < kTokens) x = ptx::ld_shared<u32x2>(panel.template at<u32x2>(((g / 4 * kTokens + g % 4) * 4 + q) * 8));
      ptx::mma_m16n8k16(part[0], w.x, w.y, w.z, w.w, x.x, x.y);
      return;
    }
    u32x2 x[kHalves][2] = {};  // of tokens g + 8 * half: what lane q has of each range
#pragma unroll
    for (u32 i = 0; i < kHalves * 2; ++i) {
      const u32 token = g + 8 * (i / 2);
      if (token < kTokens) x[i / 2][i % 2] = ptx::ld_shared<u32x2>(panel.template at<u32x2>(((i % 2 * kTokens + token) * 4 + q) * 8));
    }
    const u32x2(&other)[2] = x[kHalves - 1];
    if (kTokensAreM) {
      multiply_tokens(w, {x[0][0].x, other[0].x, x[0][1].x, other[1].x}, {x[0][0].y, other[0].y, x[0][1].y, other[1].y});
    } else {
      ptx::mma_m16n8k16(part[0], w.x, w.y, w.z, w.w, x[0][0].x, x[0][0].y);
      ptx::mma_m16n8k16(part[kParts - 1], w.x, w.y, w.z, w.w, x[0][1].x, x[0][1].y);
    }
  }
  // The same with both k16 steps' A operands: {token g, token g + 8, g, g + 8} of the pairs 0 and 1, and of the pairs 2 and 3.
  MK_DEV void multiply_tokens(u32x4 w, u32x4 low, u32x4 high) {
    ptx::mma_m16n8k16(part[0], low.x, low.y, low.z, low.w, w.x, w.y);
    ptx::mma_m16n8k16(part[kParts - 1], high.x, high.y, high.z, high.w, w.z, w.w);
  }
  // Two finished sums. Up to 8 tokens, of row g: tokens 2q and 2q + 1; with a shared accumulator lanes q < 2 hold them. Else of token
  // g + 8 * half: rows 2q and 2q + 1.
  MK_DEV void finish(u32 half, float (&sum)[2]) const {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (kTokensAreM) sum[i] = part[0][2 * half + i] + part[kParts - 1][2 * half + i];
      else sum[i] = part[0][i] + (kShared ? ptx::shfl_xor(part[0][2 + i], 2) : part[kParts - 1][2 + i]);
    }
  }
};

}  // namespace mk
