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

// On its way from now on; completes behind what is due at `earliest`, and returns when.
MK_FN u64 launch_agent(Agent a, u64 earliest) {
  a.due = std::max(earliest, rt.result->steps + agent_delay());
  a.order = rt.agents_issued++;
  rt.agents.push_back(a);
  std::push_heap(rt.agents.begin(), rt.agents.end(), later);
  return a.due;
}

MK_FN void issue(const Agent& a, detect::Pc pc) {
  detect::copy_issued(a, pc);
  rt.warp->loads = true;
  std::memset(a.dst, kPoison, a.bytes);
  launch_agent(a, 0);
}

MK_FN void issue_bulk_load(char* dst, const char* src, u32 bytes, char* barrier, detect::Pc pc) {
  if (bytes == 0 || bytes % 16 != 0) fault("bulk copy of %u bytes: must be a positive multiple of 16", bytes);
  check_shared(dst, bytes, 16);
  check_shared(barrier, 8, 8);
  check_global(src, bytes, 16);
  issue({0, 0, dst, src, bytes, barrier, {}, Counts::kBytes}, pc);
}

// 16 bytes of the running lane's. They stay on their way at least until it arrives at a barrier for them.
MK_FN void issue_lane_load(char* dst, const char* src) {
  check_shared(dst, 16, 16);
  check_global(src, 16, 16);
  rt.warp->loads = true;
  std::memset(dst, kPoison, 16);
  rt.uncounted.push_back({rt.lane, dst, src});
}

// The barrier gets an arrival when all loads of the lane have landed.
MK_FN void arrive_loaded(char* barrier, detect::Pc pc) {
  check_shared(barrier, 8, 8);
  detect::shared_access(barrier, 8, detect::kStrong | detect::kWrite, pc);
  u64 due = 0;
  const auto mine = [](const LaneLoad& l) { return l.by == rt.lane; };
  for (const LaneLoad& l : rt.uncounted) {
    if (!mine(l)) continue;
    const Agent a{0, 0, l.dst, l.src, 16, barrier, {}, Counts::kNothing};
    detect::copy_issued(a, pc);
    due = std::max(due, launch_agent(a, 0));
  }
  rt.uncounted.erase(std::remove_if(rt.uncounted.begin(), rt.uncounted.end(), mine), rt.uncounted.end());
  const Change change = detect::change_at(Point::kArrive, pc);
  if (change == Change::kDrop) return;
  const Agent arrival{0, 0, nullptr, nullptr, 0, barrier, {}, Counts::kArrival};
  if (change == Change::kTwice) launch_agent(arrival, due);
  launch_agent(arrival, due);
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
  if (detect::change_at(Point::kSend, pc) == Change::kDrop) return;
  Agent a{0, 0, dst, nullptr, bytes, barrier, {}, Counts::kBytes};
  std::memcpy(a.payload, value, bytes);
  issue(a, pc);
}

MK_FN void complete_earliest_agent() {
  std::pop_heap(rt.agents.begin(), rt.agents.end(), later);
  const Agent a = rt.agents.back();
  rt.agents.pop_back();
  if (a.counts == Counts::kArrival) return mbar_arrive_landed(a.barrier);
  ++rt.result->copies;
  std::memcpy(a.dst, a.src != nullptr ? a.src : a.payload, a.bytes);
  if (a.src == nullptr) changed(a.dst, a.bytes);
  detect::copy_landed(a);
  if (a.counts == Counts::kBytes) mbar_complete_tx(a.barrier, a.bytes);
}

}  // namespace mk::host
