// Who is running: lane, warp, thread, block, rank in the cluster.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/runtime.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP u32 thread_id() { return host::rt.lane->thread; }
MK_OP u32 lane_id() { return host::rt.lane->index; }
MK_OP u32 warp_id() { return host::rt.lane->thread / kWarpSize; }
MK_OP u32 block_id() { return host::rt.block->index; }
MK_OP u32 sm_id() { return host::rt.block->index; }
MK_OP u32 num_blocks() { return host::rt.num_blocks; }
MK_OP u32 cluster_rank() { return host::rt.block->index % host::rt.cluster_size; }
MK_OP u32 cluster_size() { return host::rt.cluster_size; }

MK_PTX u32 opaque(u32 v) { return v; }
MK_PTX void await(u32) {}

#else

// Not volatile: the value never changes, so the compiler may keep it or read it again.
#define MK_SPECIAL(name, reg) \
  MK_PTX u32 name() {         \
    u32 v;                    \
    asm("mov.u32 %0, " reg ";" : "=r"(v)); \
    return v;                 \
  }
MK_SPECIAL(thread_id, "%%tid.x")
MK_SPECIAL(lane_id, "%%laneid")
MK_SPECIAL(block_id, "%%ctaid.x")
MK_SPECIAL(sm_id, "%%smid")
MK_SPECIAL(num_blocks, "%%nctaid.x")
MK_SPECIAL(cluster_rank, "%%cluster_ctarank")
MK_SPECIAL(cluster_size, "%%cluster_nctarank")
#undef MK_SPECIAL

MK_PTX u32 warp_id() { return thread_id() / kWarpSize; }

// The same value, but the compiler may not know: keeps it from holding derived values in registers across a whole kernel.
MK_PTX u32 opaque(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

// What follows begins when the value is there, so that a load has returned.
MK_PTX void await(u32 v) { asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7fc1e355; @p nanosleep.u32 0; }" ::"r"(v) : "memory"); }

#endif

}  // namespace mk::ptx
