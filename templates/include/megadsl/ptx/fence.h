// Fences. On the host they are no-ops but for the race detector: one OS thread runs every fiber.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/detect.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)
#define MK_FENCE(name, instruction, event) \
  MK_OP void name() { \
    if (host::detect::change_at(host::Point::kFence, MK_PC) != host::Change::kDrop) host::detect::event; \
  }
#else
#define MK_FENCE(name, instruction, event) \
  MK_PTX void name() { asm volatile(instruction ";" ::: "memory"); }
#endif
MK_FENCE(fence_mbarrier_init, "fence.mbarrier_init.release.cluster", barrier_fence())
MK_FENCE(fence_proxy_async, "fence.proxy.async", proxy_fence())
MK_FENCE(fence_proxy_async_shared, "fence.proxy.async.shared::cta", proxy_fence())
MK_FENCE(fence_acq_rel_gpu, "fence.acq_rel.gpu", thread_fence(true))
MK_FENCE(fence_acq_rel_cta, "fence.acq_rel.cta", thread_fence(false))
#undef MK_FENCE

}  // namespace mk::ptx
