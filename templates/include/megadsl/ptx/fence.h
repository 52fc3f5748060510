// Fences. On the host they are no-ops: one OS thread runs every fiber, so memory is sequentially consistent there.
#pragma once

#include "megadsl/base.h"

namespace mk::ptx {

#if defined(MK_HOST)
#define MK_FENCE(name, instruction) \
  MK_OP void name() {}
#else
#define MK_FENCE(name, instruction) \
  MK_PTX void name() { asm volatile(instruction ";" ::: "memory"); }
#endif
MK_FENCE(fence_mbarrier_init, "fence.mbarrier_init.release.cluster")
MK_FENCE(fence_proxy_async, "fence.proxy.async")
MK_FENCE(fence_proxy_async_shared, "fence.proxy.async.shared::cta")
MK_FENCE(fence_acq_rel_gpu, "fence.acq_rel.gpu")
MK_FENCE(fence_acq_rel_cta, "fence.acq_rel.cta")
#undef MK_FENCE

}  // namespace mk::ptx
