// The race detector, or nothing: a build without MK_DETECT gets empty functions of the same names.
#pragma once

#if defined(MK_DETECT)
#include "host/detect/events.h"
#include "host/detect/tsan.h"
#else

#include "host/runtime.h"

#define MK_PC 0

namespace mk::host::detect {

using Pc = int;

enum Flag : u32 { kWrite = 1, kStrong = 2, kAsync = 4, kPlain = 8 };

MK_PTX void begin(const char*, u64) {}
MK_PTX void end() {}
MK_PTX void sync_warp(Warp&) {}
MK_PTX void sync_warps(Warp&, Warp*) {}
MK_PTX void cluster_arrived(const Lane&) {}
MK_PTX void cluster_completed(const Block&) {}
MK_PTX void cluster_passed(const Lane&) {}
MK_PTX void shared_access(const void*, u32, u32, Pc) {}
MK_PTX void global_access(const void*, u32, u32, Pc) {}
template <class V>
MK_PTX V relaxed_load(const V*, V newest, bool, Pc) {
  return newest;
}
template <class V>
MK_PTX void relaxed_store(const V*, V, bool, Pc) {}
MK_PTX void exchanged(const u32*, u32) {}
MK_PTX void barrier_initialised(const char*, Pc) {}
MK_PTX void barrier_arrived(const char*, Pc) {}
MK_PTX void barrier_completed(const char*) {}
MK_PTX void barrier_passed(const char*, Pc) {}
MK_PTX void copy_issued(const Agent&, Pc) {}
MK_PTX void copy_landed(const Agent&) {}
MK_PTX void proxy_fence() {}
MK_PTX void barrier_fence() {}
MK_PTX void thread_fence(bool) {}
MK_PTX void wait_begun(u32, u32) {}
MK_PTX constexpr Change change_at(Point, Pc) { return Change::kNone; }

}  // namespace mk::host::detect

#endif
