// Who owns what, and where it lies. Loader, consumers and readers of an exchange all call the same functions.
#pragma once
#include "megadsl/base.h"

namespace mk {

MK_DEV constexpr u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
MK_DEV constexpr u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
MK_DEV constexpr u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

// Division by a number that is known at launch, as a multiplication: exact while dividend * divisor < 2^32, which
// lowering checks. `inverse` is 2^32 / divisor + 1, rounded down before the 1 (0 for divisor 1).
struct Divisor {
  u32 value;
  u32 inverse;
  MK_DEV static Divisor of(u32 d) { return {d, d == 1 ? 0u : ~0u / d + 1}; }
  MK_DEV u32 divide(u32 n) const { return inverse == 0 ? n : u32(u64(n) * inverse >> 32); }
  // Exact as long as dividend + divisor < 2^32: the product alone may be 1 too large.
  MK_DEV u32 divide_any(u32 n) const {
    const u32 quotient = divide(n);
    return quotient * value > n ? quotient - 1 : quotient;
  }
};

// First of `n` items owned by part `i`. `offset` < number of parts rotates which parts get one item more.
MK_DEV u32 share_begin(u32 n, const Divisor& parts, u32 offset, u32 i) { return parts.divide(n * i + offset); }

// The part that owns item `g`: the largest i with share_begin(i) <= g.
MK_DEV u32 share_owner(const Divisor& n, const Divisor& parts, u32 offset, u32 g) { return n.divide((g + 1) * parts.value - offset - 1); }

constexpr u32 kGroupRows = 8;    // packed weight rows (or value features) per group: n of the mma
constexpr u32 kPanel = 32;       // columns per shared-memory panel: two k16 steps, 64 bytes of bf16
constexpr u32 kChunkRows = 16;   // KV rows per cache chunk

// Activations lie in the order in which lanes load them as mma operands (see linear.h): of the eight columns 8q..8q+7 of a
// panel, pairs 0 and 2 make one 8-byte operand (range 0), pairs 1 and 3 the other (range 1).
// [column / 32][range][token][q][2 pairs][2] bf16.
template <u32 kTokens>
MK_DEV u32 activation_offset(u32 column, u32 token) {
  const u32 panel = column / kPanel, q = column % kPanel / 8, pair = column % 8 / 2;
  return (((panel * 2 + pair % 2) * kTokens + token) * 4 + q) * 8 + pair / 2 * 4 + column % 2 * 2;
}

// Byte offset of (row, dim) in the K half of a cache chunk: [row / 8][dim / 32][row % 8][32] bf16.
template <u32 kHeadDim>
MK_DEV u32 key_offset(u32 row, u32 dim) {
  return (((row / 8) * ceil_div(kHeadDim, kPanel) + dim / kPanel) * 8 + row % 8) * (kPanel * 2) + (dim % kPanel) * 2;
}

// Byte offset of (row, dim) in the V half: mma B fragments of the second product, two 8-dim tiles to a 16-byte vector.
MK_DEV u32 value_offset(u32 row, u32 dim) {
  const u32 pair = dim / 16, jj = (dim / 8) % 2, g = dim % 8;
  const u32 half = row / 8, q = (row % 8) / 2, e = row % 2;
  return ((((pair * 8 + g) * 4 + q) * 2 + jj) * 2 + half) * 4 + e * 2;
}

}  // namespace mk
