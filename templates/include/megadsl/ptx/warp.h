// Warp collectives. All lanes of the warp that have not exited must call them together.
#pragma once

#include "megadsl/ptx/identity.h"

#if defined(MK_HOST)
#include "host/collectives.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP u32 shfl_xor(u32 v, u32 mask) { return host::shuffle_xor(v, mask); }
MK_OP u32 shfl(u32 v, u32 lane) { return host::shuffle(v, lane); }
MK_OP float shfl_xor(float v, u32 mask) { return host::as_float(host::shuffle_xor(host::as_u32(v), mask)); }
MK_OP float shfl(float v, u32 lane) { return host::as_float(host::shuffle(host::as_u32(v), lane)); }
MK_OP u32 ballot(bool p) { return host::ballot(p); }
MK_OP bool any(bool p) { return host::ballot(p) != 0; }
MK_OP bool all(bool p) { return host::ballot(!p) == 0; }
MK_OP void syncwarp() { host::sync_warp(MK_PC); }
// Brings a warp's lanes together and orders nothing: collectives of lanes that come one by one take ten times as long. Host: no code.
MK_OP void converge() {}
// A warp's matrix of 8 by 8 16-bit elements, two to a lane: lane 4i + j holds row i, columns 2j and 2j + 1. Gives its transpose.
MK_OP u32 transpose_8x8(u32 v) {
  const u32 lane = lane_id(), row = lane / 4, from = lane % 4 * 8 + row / 2;
  const u32 even = host::shuffle(v, from), odd = host::shuffle(v, from + 4);
  return row % 2 == 0 ? (even & 0xffffu) | odd << 16 : even >> 16 | (odd & 0xffff0000u);
}

#else

MK_PTX u32 shfl_xor(u32 v, u32 mask) {
  u32 r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(r) : "r"(v), "r"(mask));
  return r;
}

MK_PTX u32 shfl(u32 v, u32 lane) {
  u32 r;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(r) : "r"(v), "r"(lane));
  return r;
}

MK_PTX float shfl_xor(float v, u32 mask) { return __uint_as_float(shfl_xor(__float_as_uint(v), mask)); }
MK_PTX float shfl(float v, u32 lane) { return __uint_as_float(shfl(__float_as_uint(v), lane)); }

MK_PTX u32 ballot(bool p) {
  u32 r;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\tvote.sync.ballot.b32 %0, p, 0xffffffff;\n\t}"
               : "=r"(r)
               : "r"(static_cast<u32>(p)));
  return r;
}

// By the compiler's own functions, which take a predicate as it is; they are vote.sync.any.pred and vote.sync.all.pred.
MK_PTX bool any(bool p) { return __any_sync(~0u, p); }
MK_PTX bool all(bool p) { return __all_sync(~0u, p); }

MK_PTX u32 transpose_8x8(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

MK_PTX void syncwarp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
MK_PTX void converge() { asm volatile("bar.warp.sync 0xffffffff;"); }

#endif

}  // namespace mk::ptx
