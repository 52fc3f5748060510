// Agents: asynchronous operations that complete when the scheduler says. Source and destination are touched only then;
// the destination is poisoned at once, so that whoever reads early or reuses a slot too soon gets garbage.
#pragma once

#include <algorithm>

#include "host/mbarrier.h"

namespace mk::host {

constexpr int kPoison = 0xff;  // NaN as bf16 and as fp32

MK_FN bool later(const Agent& a, const Agent& b) { return a.due != b.due ? a.due > b.due : a.order > b.order; }

MK_FN u64 agent_delay() {
  if (!rt.seeded) return 2;
  const u64 r = random_u64();
  const u64 delay = r % 8 == 0 ? r / 8 % 1024 : r / 8 % 32;
  return rt.args->policy == Policy::kLateCopies ? delay * 32 : delay;
}

MK_FN void issue(Agent a, detect::Pc pc) {
  detect::copy_issued(a, pc);
  a.due = rt.result->steps + agent_delay();
  a.order = rt.agents_issued++;
  rt.warp->loads = true;
  std::memset(a.dst, kPoison, a.bytes);
  rt.agents.push_back(a);
  std::push_heap(rt.agents.begin(), rt.agents.end(), later);
}

MK_FN void issue_bulk_load(char* dst, const char* src, u32 bytes, char* barrier, detect::Pc pc) {
  if (bytes == 0 || bytes % 16 != 0) fault("bulk copy of %u bytes: must be a positive multiple of 16", bytes);
  check_shared(dst, bytes, 16);
  check_shared(barrier, 8, 8);
  check_global(src, bytes, 16);
  issue({0, 0, dst, src, bytes, barrier, {}}, pc);
}

MK_FN void check_prefetch(const char* src, u32 bytes) {
  if (bytes == 0 || bytes % 16 != 0) fault("L2 prefetch of %u bytes: must be a positive multiple of 16", bytes);
  check_global(src, bytes, 16);
}

MK_FN Block& block_at_rank(u32 rank) {
  if (rank >= rt.cluster_size) fault("rank %u in a cluster of %u blocks", rank, rt.cluster_size);
  return rt.block[static_cast<i32>(rank) - static_cast<i32>(rt.block->index % rt.cluster_size)];
}

MK_FN char* map_to_rank(char* p, u32 rank) { return block_at_rank(rank).arena + (p - rt.block->arena); }

MK_FN void check_cluster(const char* p, u32 bytes, u32 alignment) {
  for (u32 r = 0; r < rt.cluster_size; ++r) {
    const u64 offset = static_cast<u64>(p - block_at_rank(r).arena);
    if (offset < rt.smem_bytes && bytes <= rt.smem_bytes - offset && offset % alignment == 0) return;
  }
  fault("st.async of %u bytes is misaligned or outside the cluster's shared memory", bytes);
}

MK_FN void issue_store_async(char* dst, const void* value, u32 bytes, char* barrier, detect::Pc pc) {
  check_cluster(dst, bytes, bytes);
  check_cluster(barrier, 8, 8);
  Agent a{0, 0, dst, nullptr, bytes, barrier, {}};
  std::memcpy(a.payload, value, bytes);
  issue(a, pc);
}

MK_FN void complete_earliest_agent() {
  std::pop_heap(rt.agents.begin(), rt.agents.end(), later);
  const Agent a = rt.agents.back();
  rt.agents.pop_back();
  ++rt.result->copies;
  std::memcpy(a.dst, a.src != nullptr ? a.src : a.payload, a.bytes);
  if (a.src == nullptr) changed(a.dst, a.bytes);
  detect::copy_landed(a);
  mbar_complete_tx(a.barrier, a.bytes);
}

}  // namespace mk::host
