// Bulk copies and L2 prefetches: asynchronous, 16-byte aligned, a multiple of 16 bytes.
#pragma once

#include "megadsl/ptx/smem.h"

#if defined(MK_HOST)
#include "host/agents.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP u64 policy_evict_first() { return 0; }
MK_OP u64 policy_evict_normal() { return 0; }
MK_OP u64 policy_evict_last() { return 0; }

MK_OP void bulk_load(smem_ptr<char> dst, const char* src, u32 bytes, smem_ptr<u64> bar, u64) {
  host::issue_bulk_load(dst.address, src, bytes, bar.address, MK_PC);
  host::maybe_preempt();
}

MK_OP void bulk_prefetch_l2(const char* src, u32 bytes) { host::check_prefetch(src, bytes); }

#else

#define MK_POLICY(name, priority)                                                          \
  MK_PTX u64 name() {                                                                      \
    u64 p;                                                                                 \
    asm("createpolicy.fractional.L2::" priority ".b64 %0, 1.0;" : "=l"(p));                \
    return p;                                                                              \
  }
MK_POLICY(policy_evict_first, "evict_first")
MK_POLICY(policy_evict_normal, "evict_normal")
MK_POLICY(policy_evict_last, "evict_last")
#undef MK_POLICY

// When the bytes have landed, complete_tx(bytes) on the barrier.
MK_PTX void bulk_load(smem_ptr<char> dst, const char* src, u32 bytes, smem_ptr<u64> bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst.address),
      "l"(src), "r"(bytes), "r"(bar.address), "l"(policy)
      : "memory");
}

MK_PTX void bulk_prefetch_l2(const char* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

#endif

}  // namespace mk::ptx
