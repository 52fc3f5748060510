// Copies to shared memory, asynchronous and 16-byte aligned: in bulk, a multiple of 16 bytes, or 16 bytes of a lane. Prefetches into L2.
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

MK_OP void lane_load(smem_ptr<char> dst, const char* src, u64) { host::issue_lane_load(dst.address, src); }

MK_OP void mbar_arrive_loaded(smem_ptr<u64> bar) {
  host::arrive_loaded(bar.address, MK_PC);
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

// 16 bytes, through L2 alone: L1 may have old ones. An access of the lane's own, but at some later time.
MK_PTX void lane_load(smem_ptr<char> dst, const char* src, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst.address), "l"(src), "l"(policy) : "memory");
}

// When all that the lane has begun to load has landed, it arrives at the barrier, whose count has a place for it.
MK_PTX void mbar_arrive_loaded(smem_ptr<u64> bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar.address) : "memory");
}

MK_PTX void bulk_prefetch_l2(const char* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

#endif

}  // namespace mk::ptx
