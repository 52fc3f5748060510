// The scheduler: picks warps, completes agents, and finds out when nobody can run any more.
#pragma once

#include <memory>
#include <mutex>

#include "host/agents.h"
#include "host/collectives.h"

namespace mk::host {

constexpr u64 kStepNs = 16;
constexpr u64 kStepsAfterAbort = 1u << 20;

// Everything a launch owns.
struct Machine {
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<ClusterBarrier> clusters;
  std::unique_ptr<Poll[]> polls;
  std::vector<Warp*> queue;
  char* arenas = nullptr;
  u64 arena_bytes = 0;

  ~Machine() {
    if (arenas != nullptr) munmap(arenas, arena_bytes);
  }
};

MK_FN void lane_main() {
  rt.entry();
  const u64 fiber = static_cast<u64>(rt.block->index) * rt.num_threads + rt.lane->thread;
  if (!rt.stacks.intact(fiber)) fault("stack overflow: the kernel's locals need more than %llu bytes", StackPool::kStackBytes);
  exit_lane();
}

MK_FN void build_warp(Machine& m, Block& block, u32 index) {
  Warp& w = m.warps[static_cast<u64>(block.index) * (rt.num_threads / kWarpSize) + index];
  w.block = &block;
  w.index = index;
  w.alive = w.ready = ~0u;
  for (u32 i = 0; i < kWarpSize; ++i) {
    const u32 thread = index * kWarpSize + i;
    const u64 fiber = static_cast<u64>(block.index) * rt.num_threads + thread;
    Lane& l = w.lanes[i];
    l.warp = &w;
    l.poll = &m.polls[fiber];
    l.poll->restart();
    for (WatchRecord& r : l.poll->records) r.link = nullptr;
    l.next = &w.lanes[(i + 1) % kWarpSize];
    l.index = i;
    l.bit = 1u << i;
    l.next_bit = 1u << (i + 1) % kWarpSize;
    l.mma_a = i / 4 * 8 + i % 4;
    l.mma_b = i % 4 * 8 + i / 4;
    l.mma_c = i / 4 * 8 + i % 4 * 2;
    l.thread = thread;
    l.state = State::kReady;
    l.cluster_phase = 0;
    rt.stacks.prepare(l.context, fiber, lane_main);
  }
  enqueue(w);
}

MK_FN bool build(Machine& m, const LaunchArgs& a) {
  const u64 warps = a.threads / kWarpSize;
  const u64 lanes = static_cast<u64>(a.blocks) * a.threads;
  const u64 stride = (a.smem_bytes + 1023ull) / 1024 * 1024;
  m.arena_bytes = stride * a.blocks + 1024;
  void* arenas = mmap(nullptr, m.arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (arenas == MAP_FAILED || !rt.stacks.reserve(lanes)) return false;
  m.arenas = static_cast<char*>(arenas);
  std::memset(m.arenas, kPoison, m.arena_bytes);
  m.warps.resize(warps * a.blocks);
  m.blocks.resize(a.blocks);
  m.clusters.assign(a.blocks / a.cluster, {a.cluster * a.threads, 0, 0});
  m.polls.reset(new Poll[lanes]);
  u64 slots = 1;
  while (slots < m.warps.size()) slots *= 2;
  m.queue.resize(slots);
  rt.queue = m.queue.data();
  rt.queue_mask = slots - 1;
  for (u32 b = 0; b < a.blocks; ++b) {
    Block& block = m.blocks[b];
    block.arena = m.arenas + stride * b;
    block.index = b;
    block.warps = &m.warps[warps * b];
    block.cluster = &m.clusters[b / a.cluster];
    for (u32 w = 0; w < warps; ++w) build_warp(m, block, w);
  }
  return true;
}

MK_FN void reset_runtime(const LaunchArgs& a, void (*entry)()) {
  rt.lane = nullptr;
  rt.warp = nullptr;
  rt.block = nullptr;
  rt.num_blocks = a.blocks;
  rt.num_threads = a.threads;
  rt.cluster_size = a.cluster;
  rt.smem_bytes = a.smem_bytes;
  rt.now_ns = 0;
  rt.seeded = a.seed != 0;
  rt.aborted = rt.failed = false;
  rt.random_state = a.seed * 0x9e3779b97f4a7c15ull | 1;
  rt.victim = a.seed * 0x9e3779b97f4a7c15ull >> 32;
  rt.victim %= u64{a.blocks} * (a.threads / kWarpSize);
  rt.changes = 0;
  rt.live_lanes = static_cast<u64>(a.blocks) * a.threads;
  rt.global_base = 0;
  rt.global_span = ~0ull;
  for (const u64 bytes : a.buffer_bytes) {
    if (bytes != 0) rt.global_span = 0;
  }
  rt.queue_head = rt.queue_tail = 0;
  std::memset(rt.watchers, 0, sizeof rt.watchers);
  rt.args = &a;
  rt.result = a.result;
  rt.entry = entry;
  rt.agents.clear();
  rt.agents_issued = 0;
  rt.uncounted.clear();
  rt.code_lines.clear();
  LaunchResult& r = *a.result;
  r.hang_count = 0;
  r.changes = r.point_count = 0;
  r.steps = r.collectives = r.parks = r.copies = 0;
  r.fingerprint = 0xcbf29ce484222325ull;
  r.message[0] = 0;
}

// Whether the policy withholds this turn from the warp.
MK_FN bool withheld(const Warp& w) {
  switch (rt.args->policy) {
    case Policy::kSlowLoader: return w.loads && random_u64() % 16 != 0;
    case Policy::kStarvedWarp: return w.block->index == rt.victim % rt.num_blocks && w.index == rt.victim / rt.num_blocks && random_u64() % 64 != 0;
    case Policy::kFrozenBlock: return w.block->index == rt.victim % rt.num_blocks && random_u64() % 4096 != 0;
    default: return false;
  }
}

// The warp at the head of the queue, or one behind it where the policy says so.
MK_FN void withhold() {
  const u64 runnable = rt.queue_tail - rt.queue_head;
  for (u64 i = 0; i < runnable && withheld(*rt.queue[rt.queue_head & rt.queue_mask]); ++i) {
    Warp* later = rt.queue[rt.queue_head++ & rt.queue_mask];
    rt.queue[rt.queue_tail++ & rt.queue_mask] = later;
  }
}

MK_FN Warp* next_warp() {
  const u64 runnable = rt.queue_tail - rt.queue_head;
  if (runnable == 0) return nullptr;
  if (rt.seeded) {
    std::swap(rt.queue[rt.queue_head & rt.queue_mask], rt.queue[(rt.queue_head + random_u64() % runnable) & rt.queue_mask]);
    if (rt.args->policy != Policy::kEven) withhold();
  }
  Warp* w = rt.queue[rt.queue_head++ & rt.queue_mask];
  w->queued = false;
  return w;
}

MK_FN void resume(Warp& w) {
  LaunchResult& r = *rt.result;
  ++r.steps;
  rt.now_ns += kStepNs;
  r.fingerprint = (r.fingerprint ^ (static_cast<u64>(w.block->index) << 8 | w.index)) * 0x100000001b3ull;
  rt.warp = &w;
  rt.block = w.block;
  rt.lane = &w.lanes[__builtin_ctz(w.ready)];
  switch_context(rt.scheduler, rt.lane->context);
  rt.lane = nullptr;
  rt.warp = nullptr;
}

MK_FN void report(const Warp& w, u32 lane, const WaitInfo& i) {
  LaunchResult& r = *rt.result;
  if (r.hang_count == r.hang_capacity) return;
  r.hangs[r.hang_count++] = {i.site, w.block->index, w.index, lane, i.layer, i.tile, i.expected, i.observed};
}

// One record per warp and distinct wait, for the lowest lane that is in it.
MK_FN void report_warp(const Warp& w) {
  std::vector<WaitInfo> seen;
  for (const Lane& l : w.lanes) {
    WaitInfo i;
    if (l.state == State::kPolling) {
      i = l.poll->info;
    } else if (l.state == State::kCluster) {
      i = {kSiteCluster, 0, 0, w.block->cluster->alive, w.block->cluster->arrived};
    } else {
      continue;
    }
    const auto same = [&](const WaitInfo& s) { return s.site == i.site && s.layer == i.layer && s.tile == i.tile; };
    if (std::none_of(seen.begin(), seen.end(), same)) {
      seen.push_back(i);
      report(w, l.index, i);
    }
  }
  if (w.alive != 0 && w.arrived == w.alive && w.collective == Collective::kBarrier) {
    const Barrier& b = w.block->barriers[w.barrier_id];
    report(w, static_cast<u32>(__builtin_ctz(w.alive)), {kSiteBarrier, 0, w.barrier_id, b.threads, b.arrived});
  }
}

// From now on every pause answers "leave"; the kernel's own code runs to its end.
MK_FN void abort_launch(Machine& m) {
  for (const Warp& w : m.warps) report_warp(w);
  rt.aborted = true;
  for (Warp& w : m.warps) {
    for (Lane& l : w.lanes) {
      if (l.state == State::kPolling) wake(l);
    }
  }
}

// Lanes that any change may wake are looked at only when nobody else can run.
MK_FN bool wake_unspecific(Machine& m) {
  bool woken = false;
  for (Warp& w : m.warps) {
    for (Lane& l : w.lanes) {
      if (l.state != State::kPolling || !l.poll->any || l.poll->since == rt.changes) continue;
      wake(l);
      woken = true;
    }
  }
  return woken;
}

MK_FN int schedule(Machine& m) {
  LaunchResult& r = *rt.result;
  u64 limit = rt.args->step_limit != 0 ? rt.args->step_limit : ~0ull;
  while (rt.live_lanes != 0 && !rt.failed) {
    while (!rt.agents.empty() && rt.agents.front().due <= r.steps) complete_earliest_agent();
    if (r.steps >= limit) {
      if (rt.aborted) break;
      abort_launch(m);
      limit = r.steps + kStepsAfterAbort;
    }
    if (Warp* w = next_warp()) {
      resume(*w);
    } else if (!rt.agents.empty()) {
      complete_earliest_agent();
    } else if (!wake_unspecific(m)) {
      if (rt.aborted) break;  // what still waits cannot be told to leave; its stacks are dropped
      abort_launch(m);
      limit = r.steps + kStepsAfterAbort;
    }
    if (rt.args->change != Change::kNone && (rt.aborted || r.races_found != 0)) {
      rt.aborted = true;  // a mutant has been noticed: what else would happen is of no interest
      break;
    }
  }
  while (!rt.agents.empty() && !rt.failed) complete_earliest_agent();
  if (rt.aborted) return kHung;  // a fault after that is a consequence: data that was given up
  return rt.failed ? kFault : kOk;
}

MK_FN int run(const LaunchArgs* a, u32 shape_bytes, void (*entry)()) {
  static std::mutex one_launch;
  const std::lock_guard<std::mutex> lock(one_launch);
  if (a->blocks == 0 || a->threads == 0 || a->threads % kWarpSize != 0 || a->threads > 1024 || a->cluster == 0 ||
      a->blocks % a->cluster != 0 || a->shape_words * 4 != shape_bytes) {
    return kBadArgs;
  }
  Machine m;
  reset_runtime(*a, entry);
  if (!build(m, *a)) return kBadArgs;
  detect::begin(m.arenas, m.arena_bytes);
  const int status = schedule(m);
  detect::end();
  return status;
}

}  // namespace mk::host
