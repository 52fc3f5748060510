// The race detector, or nothing: a build without MK_DETECT gets empty functions of the same names.
#pragma once

#if defined(MK_DETECT)
#include "host/detect/events.h"
#include "host/detect/tsan.h"
#else

#include "host/runtime.h"

#define MK_PC 0

namespace mk::host::detect {

MK_PTX void begin(const char*, u64) {}
MK_PTX void end() {}
MK_PTX void sync_warp(Warp&) {}
MK_PTX void sync_warps(Warp&, Warp*) {}
MK_PTX void cluster_arrived(Lane&, bool) {}
MK_PTX void cluster_passed(Lane&) {}
MK_PTX void shared_access(const void*, u32, u32, int) {}
MK_PTX void global_access(const void*, u32, u32, int) {}
template <class V>
MK_PTX V relaxed_load(const V*, V newest, bool, int) {
  return newest;
}
template <class V>
MK_PTX void relaxed_store(const V*, V, bool, int) {}
template <class V>
MK_PTX void exchanged(const V*, V, int) {}
MK_PTX void barrier_initialised(const char*, int) {}
MK_PTX void barrier_arrived(const char*, int) {}
MK_PTX void barrier_completed(const char*) {}
MK_PTX void barrier_passed(const char*, int) {}
MK_PTX void copy_issued(Agent&, int) {}
MK_PTX void copy_landed(const Agent&) {}
MK_PTX void proxy_fence() {}
MK_PTX void barrier_fence() {}
MK_PTX void thread_fence(bool) {}

}  // namespace mk::host::detect

#endif

namespace mk::host::detect {

constexpr u32 kWrite = 1, kStrong = 2, kAsync = 4;

}  // namespace mk::host::detect
