// Formats of weights: what lies in a tile, and how a lane turns it into operands of the products.
//
// A panel is 8 rows by 32 columns; lane (g, q) has columns 8q..8q+7 of row g, in every format the same, so that inputs do not depend on it.
// In memory a panel is its codes, row by row, and behind them the scales of its blocks, row by row. Codes become bf16 numbers exactly: their bits are
// put where bf16 has exponent and mantissa, and multiplied by the power of two that the exponents' biases differ by, which subnormal codes need too.
// A word's even columns are in its low half, the odd ones in the high half, at the same places (runtime/pack.py): so one shift serves a pair, to the
// left where that can be, since multiplications do those, beside the logical operations that are the bottleneck. Row scales are not the products'
// matter (bias.h).
#pragma once
#include "megadsl/layout.h"

namespace mk {

// x * y of two pairs of bf16 numbers. Not x * y + 0, which would lose the sign of zeros.
MK_DEV u32 multiply_pair(u32 x, u32 y) { return ptx::fma_bf16x2(x, y, 0x80008000u); }

constexpr u32 kTwoTo119 = 0x7b007b00u, kTwoTo120 = 0x7b807b80u, kTwoTo126 = 0x7e807e80u;  // pairs of bf16

struct Bf16Weights {
  static constexpr u32 kPanelBytes = kGroupRows * kPanel * 2;
  smem_ptr<char> at;

  MK_DEV Bf16Weights(smem_ptr<char> tile, u32 panel, u32 g, u32 q) : at(tile.template at<char>((panel * kGroupRows + g) * 64 + q * 16)) {}
  MK_DEV u32x4 load(u32 panels) const { return ptx::ld_shared<u32x4>(at.template at<u32x4>(panels * kPanelBytes)); }
};

// `Codes` turns four codes, a word, into two pairs.
template <class Codes>
struct ByteWeights {
  static constexpr u32 kPanelBytes = kGroupRows * kPanel;
  smem_ptr<char> at;

  MK_DEV ByteWeights(smem_ptr<char> tile, u32 panel, u32 g, u32 q) : at(tile.template at<char>((panel * kGroupRows + g) * 32 + q * 8)) {}
  MK_DEV u32x4 load(u32 panels) const {
    const u32x2 codes = ptx::ld_shared<u32x2>(at.template at<u32x2>(panels * kPanelBytes));
    return {Codes::low(codes.x), Codes::high(codes.x), Codes::low(codes.y), Codes::high(codes.y)};
  }
};

// E4M3: a sign, four bits of exponent with bias 7, three of mantissa.
struct E4m3Codes {
  // Of a half the first pair's code is the bits 15 and 6 to 0, the second's 14 and 13 to 7.
  MK_DEV static u32 low(u32 w) { return multiply_pair((w & 0x80008000u) | (w << 4 & 0x07f007f0u), kTwoTo120); }
  MK_DEV static u32 high(u32 w) { return multiply_pair((w << 1 & 0x80008000u) | (w >> 3 & 0x07f007f0u), kTwoTo120); }
};
using Fp8Weights = ByteWeights<E4m3Codes>;

// 128 + the code's lower seven bits, less 128, or 256 for negative ones: the last place of bf16 numbers from 128 to 256 is 1.
struct Int8Codes {
  MK_DEV static u32 low(u32 w) {
    return ptx::fma_bf16x2((w & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (w & 0x007f007fu) | 0x43004300u);
  }
  MK_DEV static u32 high(u32 w) { return low(w >> 8); }
};
using Int8Weights = ByteWeights<Int8Codes>;

// `Scaled` has the bytes of scales that a row has in a panel, a lane's scale from them as a pair, and pair p of codes times that.
template <class Scaled>
struct NibbleWeights {
  static constexpr u32 kCodeBytes = kGroupRows * kPanel / 2, kPanelBytes = kCodeBytes + kGroupRows * Scaled::kRowBytes;
  using Stored = typename Scaled::Stored;
  smem_ptr<char> codes, scales;

  MK_DEV NibbleWeights(smem_ptr<char> tile, u32 panel, u32 g, u32 q)
      : codes(tile.template at<char>(panel * kPanelBytes + g * 16 + q * 4)),
        scales(tile.template at<char>(panel * kPanelBytes + kCodeBytes + Scaled::offset(g, q))) {}
  MK_DEV u32x4 load(u32 panels) const {
    const u32 w = ptx::ld_shared<u32>(codes.template at<u32>(panels * kPanelBytes));
    const u32 scale = Scaled::scale(ptx::ld_shared<Stored>(scales.template at<Stored>(panels * kPanelBytes)));
    return {Scaled::template pair<0>(w, scale), Scaled::template pair<1>(w, scale), Scaled::template pair<2>(w, scale), Scaled::template pair<3>(w, scale)};
  }
};

// Pair kPair of E2M1 codes, a sign, two bits of exponent with bias 1, one of mantissa, as bf16 numbers 2^-126 as large.
template <u32 kPair>
MK_DEV u32 small_e2m1(u32 w) {
  if (kPair < 2) return (kPair == 0 ? w : w << 3) & 0x81c081c0u;  // bits 15 and 8 to 6; 12 and 5 to 3
  return (w << (kPair - 1) & 0x80008000u) | ((kPair == 2 ? w >> 3 : w << 6) & 0x01c001c0u);  // 14 and 11 to 9; 13 and 2 to 0
}

// Blocks of 16 with scales in E4M3. The scale times 2^126 would be too large for bf16: weights are 1 / 128 of what they are, and row scales 128 times.
struct Nvfp4 {
  using Stored = u8;
  static constexpr u32 kRowBytes = 2;
  MK_DEV static u32 offset(u32 g, u32 q) { return g * 2 + q / 2; }
  MK_DEV static u32 scale(u8 bits) { return multiply_pair(multiply_pair(bits * 0x00100010u, kTwoTo120), kTwoTo119); }
  template <u32 kPair>
  MK_DEV static u32 pair(u32 w, u32 scale) { return multiply_pair(small_e2m1<kPair>(w), scale); }
};
using Nvfp4Weights = NibbleWeights<Nvfp4>;

// Blocks of 32 with powers of two: exponents with bias 127, as bf16 has them.
struct Mxfp4 {
  using Stored = u8;
  static constexpr u32 kRowBytes = 1;
  MK_DEV static u32 offset(u32 g, u32) { return g; }
  MK_DEV static u32 scale(u8 exponent) { return exponent == 0 ? 0x00400040u : exponent * 0x00800080u; }
  template <u32 kPair>
  MK_DEV static u32 pair(u32 w, u32 scale) { return multiply_pair(multiply_pair(small_e2m1<kPair>(w), kTwoTo126), scale); }
};
using Mxfp4Weights = NibbleWeights<Mxfp4>;

// Blocks of 32 with scales in bf16; the code's sign bit inverted is an offset of 8, so that 136 is what is too much.
struct Int4 {
  using Stored = u16;
  static constexpr u32 kRowBytes = 2;
  MK_DEV static u32 offset(u32 g, u32) { return g * 2; }
  MK_DEV static u32 scale(u16 bits) { return bits * 0x00010001u; }
  template <u32 kPair>
  MK_DEV static u32 pair(u32 w, u32 scale) {
    return multiply_pair(ptx::fma_bf16x2((w >> 4 * kPair & 0x000f000fu) ^ 0x43084308u, 0x3f803f80u, 0xc308c308u), scale);
  }
};
using Int4Weights = NibbleWeights<Int4>;

}  // namespace mk
