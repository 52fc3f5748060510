// bf16 conversions (round to nearest even; stored as u16, or two in a u32) and approximate functions.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/math.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_PTX u32 float_bits(float v) { return host::as_u32(v); }
MK_PTX float bits_float(u32 v) { return host::as_float(v); }
MK_PTX u16 to_bf16(float v) { return host::round_bf16(v); }
MK_PTX u32 pack_bf16(float lo, float hi) { return host::round_bf16(lo) | static_cast<u32>(host::round_bf16(hi)) << 16; }
MK_PTX float bf16_lo(u32 v) { return host::as_float(v << 16); }
MK_PTX float bf16_hi(u32 v) { return host::as_float(v & 0xffff0000u); }
MK_PTX float from_bf16(u16 v) { return host::as_float(static_cast<u32>(v) << 16); }
MK_PTX u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  return host::fma_bf16(bf16_lo(a), bf16_lo(b), bf16_lo(c)) | static_cast<u32>(host::fma_bf16(bf16_hi(a), bf16_hi(b), bf16_hi(c))) << 16;
}
MK_PTX u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 found = 0;
  for (u32 i = 0; i < 4; ++i) found |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
}
MK_PTX float exp2_approx(float v) { return host::exp2_flushed(v); }
MK_PTX float rsqrt(float v) { return host::rsqrt(v); }
MK_PTX float rcp(float v) { return host::rcp(v); }

#else

MK_PTX u32 float_bits(float v) { return __float_as_uint(v); }
MK_PTX float bits_float(u32 v) { return __uint_as_float(v); }

MK_PTX u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

MK_PTX u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

MK_PTX float bf16_lo(u32 v) { return __uint_as_float(v << 16); }
MK_PTX float bf16_hi(u32 v) { return __uint_as_float(v & 0xffff0000u); }
MK_PTX float from_bf16(u16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }

// a * b + c of two pairs of bf16, each rounded once; subnormal numbers count as what they are.
MK_PTX u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// Bytes of {b, a}: nibble i of the selector says which is byte i of the result, 0 to 7.
MK_PTX u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// 2^v; subnormal inputs and results become zero.
MK_PTX float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// 1 / sqrt(v); subnormal inputs count as zero.
MK_PTX float rsqrt(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// 1 / v; subnormal inputs and results become zero.
MK_PTX float rcp(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

#endif

}  // namespace mk::ptx
