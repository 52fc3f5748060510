// Host meanings of conversions and approximate functions.
#pragma once

#include <cmath>
#include <cstring>

#include "megadsl/base.h"

namespace mk::host {

MK_FN u32 as_u32(float v) {
  u32 r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}

MK_FN float as_float(u32 v) {
  float r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}

MK_FN u16 round_bf16(float v) {
  const u32 bits = as_u32(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// a * b + c of bf16 numbers, rounded once: by way of a float whose last bit says that something was cut off (rounding to odd).
MK_FN u16 fma_bf16(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c;
  if (!std::isfinite(sum)) return round_bf16(static_cast<float>(sum));
  const double back = sum - product, error = (product - (sum - back)) + (c - back);
  const float near = static_cast<float>(sum);
  if (std::isinf(near)) return round_bf16(near);
  const double rest = (sum - near) + error;
  u32 bits = as_u32(near);
  if (rest != 0 && (bits & 1) == 0) bits = near == 0 ? (rest > 0 ? 1u : 0x80000001u) : bits + ((rest > 0) == (near > 0) ? 1u : ~0u);
  return round_bf16(as_float(bits));
}

MK_FN float flush_subnormal(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }

// The device has one NaN.
MK_FN float canonical(float v) { return std::isnan(v) ? as_float(0x7fffffffu) : v; }

MK_FN float exp2_flushed(float v) { return canonical(flush_subnormal(std::exp2(flush_subnormal(v)))); }

MK_FN float rsqrt(float v) { return canonical(1.0f / std::sqrt(flush_subnormal(v))); }

MK_FN float rcp(float v) { return canonical(flush_subnormal(1.0f / flush_subnormal(v))); }

}  // namespace mk::host
