// Distributed shared memory: addresses of the peers, asynchronous remote stores, the cluster's barrier.
#pragma once

#include "megadsl/ptx/smem.h"

#if defined(MK_HOST)
#include "host/agents.h"
#include "host/collectives.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

template <class T>
MK_OP cluster_ptr<T> mapa(smem_ptr<T> p, u32 rank) {
  return {host::map_to_rank(p.address, rank)};
}

template <class V>
MK_OP void st_async(cluster_ptr<V> dst, V v, cluster_ptr<u64> bar) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "st.async stores 4, 8 or 16 bytes");
  host::issue_store_async(dst.address, &v, sizeof(V), bar.address, MK_PC);
  host::maybe_preempt();
}

MK_OP void cluster_arrive() { host::cluster_arrive(MK_PC); }
MK_OP void cluster_wait() { host::cluster_wait(); }

#else

template <class T>
MK_PTX cluster_ptr<T> mapa(smem_ptr<T> p, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(p.address), "r"(rank));
  return {r};
}

// When the value has landed, complete_tx(sizeof(V)) on the barrier, which lies in the same block as dst.
template <class V>
MK_PTX void st_async(cluster_ptr<V> dst, V v, cluster_ptr<u64> bar);

#define MK_ASYNC "st.async.shared::cluster.mbarrier::complete_tx::bytes."
template <>
MK_PTX void st_async<u32>(cluster_ptr<u32> dst, u32 v, cluster_ptr<u64> bar) {
  asm volatile(MK_ASYNC "b32 [%0], %1, [%2];" ::"r"(dst.address), "r"(v), "r"(bar.address) : "memory");
}

template <>
MK_PTX void st_async<u64>(cluster_ptr<u64> dst, u64 v, cluster_ptr<u64> bar) {
  asm volatile(MK_ASYNC "b64 [%0], %1, [%2];" ::"r"(dst.address), "l"(v), "r"(bar.address) : "memory");
}

template <>
MK_PTX void st_async<u32x2>(cluster_ptr<u32x2> dst, u32x2 v, cluster_ptr<u64> bar) {
  asm volatile(MK_ASYNC "v2.b32 [%0], {%1, %2}, [%3];" ::"r"(dst.address), "r"(v.x), "r"(v.y), "r"(bar.address) : "memory");
}

template <>
MK_PTX void st_async<u32x4>(cluster_ptr<u32x4> dst, u32x4 v, cluster_ptr<u64> bar) {
  asm volatile(MK_ASYNC "v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(dst.address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "r"(bar.address)
               : "memory");
}
#undef MK_ASYNC

// Every thread of every block of the cluster arrives and waits; what was written before arriving is visible after waiting.
MK_PTX void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
MK_PTX void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

#endif

}  // namespace mk::ptx
