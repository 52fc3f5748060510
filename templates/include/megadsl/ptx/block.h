// Barriers between the warps of a block. They cannot time out: only for places where every warp is sure to come.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/collectives.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP void bar_sync(u32 id, u32 threads) { host::bar_sync(id, threads, MK_PC); }
MK_OP void barrier_sync(u32 id, u32 threads) { host::bar_sync(id, threads, MK_PC); }
MK_OP void syncthreads() { host::bar_sync(0, host::rt.num_threads, MK_PC); }

#else

// id 0 is the one that syncthreads() uses; threads is a multiple of 32. All threads of a warp come together.
MK_PTX void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// The same for threads of a warp that may come one by one.
MK_PTX void barrier_sync(u32 id, u32 threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
MK_PTX void syncthreads() { asm volatile("bar.sync 0;" ::: "memory"); }

#endif

}  // namespace mk::ptx
