// The tensor-core multiply: products in fp32, added one by one in order of k, the same bits on every CPU.
#pragma once

#include "host/collectives.h"

// Wider vectors where the CPU has them. Without contraction (-ffp-contract=off) the results do not depend on the width.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define MK_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MK_CLONES
#endif

namespace mk::host {

typedef float Float8 __attribute__((vector_size(32)));
typedef u32 Word8 __attribute__((vector_size(32)));

MK_PTX bool all_zero(const Word8& w) {
  u64 part[4];
  std::memcpy(part, &w, sizeof part);
  return (part[0] | part[1] | part[2] | part[3]) == 0;
}

MK_CLONES MK_RAW static void multiply(MmaOperands& s) {
  Float8 b[16];
  Word8 infinite = {};
  for (int p = 0; p < 8; ++p) {
    Word8 w;
    std::memcpy(&w, s.b + 8 * p, sizeof w);
    b[2 * p] = reinterpret_cast<Float8>(w << 16);  // two bf16 in a word, the lower one the lower k
    b[2 * p + 1] = reinterpret_cast<Float8>(w & 0xffff0000u);
    infinite |= reinterpret_cast<Word8>((w & 0x7f80u) == 0x7f80u) | reinterpret_cast<Word8>((w & 0x7f800000u) == 0x7f800000u);
  }
  // Rows of padding: +0 plus zeros is +0, unless the zeros meet an infinity or a NaN in b.
  u32 rows = all_zero(infinite) ? s.rows : 0xffffu;
  for (; rows != 0; rows &= rows - 1) {
    const int row = __builtin_ctz(rows);
    Word8 a;
    Float8 c;
    std::memcpy(&a, s.a + 8 * row, sizeof a);
    std::memcpy(&c, s.c + 8 * row, sizeof c);
    float even[8], odd[8];
    const Word8 lo = a << 16, hi = a & 0xffff0000u;
    std::memcpy(even, &lo, sizeof even);
    std::memcpy(odd, &hi, sizeof odd);
    for (int p = 0; p < 8; ++p) {
      c += even[p] * b[2 * p];
      c += odd[p] * b[2 * p + 1];
    }
    c += Float8{};  // the device never gives -0
    std::memcpy(s.c + 8 * row, &c, sizeof c);
  }
  s.rows = 0;
}

MK_FN bool perform_mma(Warp& w) {
  multiply(w.mma);
  return true;
}

MK_PTX void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const Lane& me = *rt.lane;
  MmaOperands& s = rt.warp->mma;
  u32* const sa = s.a + me.mma_a;
  u32* const sb = s.b + me.mma_b;
  float* const sc = s.c + me.mma_c;
  u64 upper, lower;
  std::memcpy(&upper, &c[0], 8);
  std::memcpy(&lower, &c[2], 8);
  sa[0] = a0;
  sa[8 * 8] = a1;
  sa[4] = a2;
  sa[8 * 8 + 4] = a3;
  sb[0] = b0;
  sb[4 * 8] = b1;
  std::memcpy(sc, &upper, 8);
  std::memcpy(sc + 8 * 8, &lower, 8);
  const u32 g = me.index / 4;
  if ((a0 | a2 | upper) != 0) s.rows |= 1u << g;
  if ((a1 | a3 | lower) != 0) s.rows |= 256u << g;
  rendezvous<perform_mma>(Collective::kMma);
  std::memcpy(&c[0], sc, 8);
  std::memcpy(&c[2], sc + 8 * 8, 8);
}

}  // namespace mk::host
