// What the emulator and the PTX wrappers tell the detector. MK_PC, in a wrapper, is the place in the kernel that called it.
#pragma once

#include "host/detect/words.h"

#define MK_PC __builtin_return_address(0)

namespace mk::host::detect {

using Pc = const void*;

// An mbarrier: the clocks of the phase that is being gathered and of the last complete one.
struct BarrierState {
  u32 component, phase, initialiser;
  bool fenced;  // the asynchronous proxy may know of the initialisation
  Access initialised;
  u32 *gathering, *done;
};

struct Rendezvous {
  u32 *gathering, *done;
};

struct Events {
  Table<BarrierState*> barrier_at;
  Array<BarrierState*> barriers;
  Array<u32> barriers_of;  // per block: components given out
  Array<Rendezvous> clusters;
};

static Events events;

MK_FN void begin(const char* arenas, u64 arena_bytes) {
  LaunchResult& r = *rt.result;
  r.race_count = 0;
  r.races_found = r.observed = r.refilled = r.stale = 0;
  pool.open();
  if (rt.failed) return;
  begin_clocks();
  begin_shadow(arenas, arena_bytes);
  begin_words();
  events.barrier_at.reset();
  events.barriers = {};
  events.barriers_of.reset(rt.num_blocks);
  events.clusters.reset(rt.num_blocks / rt.cluster_size);
  for (u32 i = 0; i < events.clusters.size; ++i) events.clusters[i] = {clocks.take_clock(), clocks.take_clock()};
}

MK_FN void end() {
  pool.close();
  end_shadow();
}

MK_FN void shared_access(const void* p, u32 bytes, u32 flags, const void* pc) {
  if (!active()) return;
  access(*rt.lane, shadow.regions[kBufferCount], reinterpret_cast<u64>(p), bytes, access_by(*rt.lane, flags, bytes, offset_of(pc)));
}

MK_FN void global_access(const void* p, u32 bytes, u32 flags, const void* pc) {
  if (!active()) return;
  const u64 address = reinterpret_cast<u64>(p);
  if (Region* r = region_of(address)) access(*rt.lane, *r, address, bytes, access_by(*rt.lane, flags, bytes, offset_of(pc)));
}

MK_FN BarrierState* barrier_at(const char* p) { return events.barrier_at.find(reinterpret_cast<u64>(p)); }

MK_FN void barrier_initialised(const char* p, const void* pc) {
  if (!active()) return;
  shared_access(p, 8, kWrite, pc);
  BarrierState*& known = events.barrier_at.at(reinterpret_cast<u64>(p));
  const u32 block = rt.block->index;
  if (known == nullptr) {
    if (events.barriers_of[block] == kBarriersPerBlock) fault("the race detector knows %u mbarriers of a block", kBarriersPerBlock);
    known = pool.take<BarrierState>(1);
    events.barriers.push(known);
    known->component = block * kBarriersPerBlock + events.barriers_of[block]++;
    known->gathering = clocks.take_clock();
    known->done = clocks.take_clock();
  }
  BarrierState& b = *known;
  b.initialiser = id_of(*rt.lane);
  b.fenced = false;
  b.initialised = access_by(*rt.lane, kWrite, 8, offset_of(pc));
}

MK_FN void barrier_arrived(const char* p, const void* pc) {
  if (!active()) return;
  shared_access(p, 8, kStrong | kWrite, pc);
  if (BarrierState* b = barrier_at(p)) contribute(b->gathering, *rt.lane);
}

// Phases count from 0; the component's time is the number of complete ones.
MK_FN void barrier_completed(const char* p) {
  if (!active()) return;
  BarrierState* b = barrier_at(p);
  if (b == nullptr) return;
  u32* complete = b->gathering;
  b->gathering = b->done;
  b->done = complete;
  std::memset(b->gathering, 0, u64{kViews} * clocks.words * 4);
  ++b->phase;
  for (const View v : {kOrdered, kProxy, kSeen}) b->done[v * clocks.words + clocks.lanes + b->component] = b->phase;
}

MK_FN void barrier_passed(const char* p, const void* pc) {
  if (!active()) return;
  shared_access(p, 8, kStrong, pc);
  BarrierState* b = barrier_at(p);
  if (b == nullptr || b->phase == 0 || view_of(*rt.lane, kOrdered)[clocks.lanes + b->component] >= b->phase) return;
  learn_shared(*rt.lane, b->done, u64{b->component + 1} << 32 | b->phase);
}

MK_FN void cluster_arrived(const Lane& l) {
  if (active()) contribute(events.clusters[l.warp->block->index / rt.cluster_size].gathering, l);
}

MK_FN void cluster_completed(const Block& b) {
  if (!active()) return;
  Rendezvous& c = events.clusters[b.index / rt.cluster_size];
  c = {c.done, c.gathering};
  std::memset(c.gathering, 0, u64{kViews} * clocks.words * 4);
}

MK_FN void cluster_passed(const Lane& l) {
  if (active()) learn(l, events.clusters[l.warp->block->index / rt.cluster_size].done);
}

// The copy reads its source and writes its destination at some time from now until its bytes are counted.
MK_FN void copy_issued(const Agent& a, const void* pc) {
  if (!active()) return;
  const Lane& l = *rt.lane;
  BarrierState* b = barrier_at(a.barrier);
  if (b == nullptr) return;
  Region& arenas = shadow.regions[kBufferCount];
  const u8 proxy = a.counts == Counts::kBytes ? kAsync : 0;  // a lane's loads are of the generic proxy
  Access now = access_by(l, kStrong | kWrite, 8, offset_of(pc));
  if (proxy != 0) access(l, arenas, reinterpret_cast<u64>(a.barrier), 8, now);
  now = {kInFlight, 0, now.pc, now.context, static_cast<u16>(b->component), proxy, 16, now.site, now.layer};
  if (proxy != 0 && !b->fenced) report_race(kUnfencedBarrier, arenas, reinterpret_cast<u64>(a.barrier), now, b->initialised, b->initialiser % kWarpSize);
  if (proxy != 0) b->fenced = true;
  if (a.src != nullptr) {
    const u64 source = reinterpret_cast<u64>(a.src);
    if (Region* r = region_of(source)) access(l, *r, source, a.bytes, now);
  }
  now.flags = proxy | kWrite;
  access(l, arenas, reinterpret_cast<u64>(a.dst), a.bytes, now);
}

MK_FN void land(Access& a, const BarrierState& b) {
  if (a.width != 0 && a.time == kInFlight && a.who == b.component) a.time = b.phase;
}

// Call before the bytes are counted on the mbarrier.
MK_FN void copy_landed(const Agent& a) {
  if (!active()) return;
  const BarrierState* b = barrier_at(a.barrier);
  if (b == nullptr) return;
  Region* r = &shadow.regions[kBufferCount];
  u64 address = reinterpret_cast<u64>(a.dst);
  for (u64 i = (address - r->base) >> r->shift; i <= (address - r->base + a.bytes - 1) >> r->shift; ++i) land(r->cells[i].write, *b);
  address = reinterpret_cast<u64>(a.src);
  r = a.src != nullptr ? region_of(address) : nullptr;
  if (r == nullptr) return;
  for (u64 i = (address - r->base) >> r->shift; i <= (address - r->base + a.bytes - 1) >> r->shift; ++i) {
    for (u32 at = r->cells[i].reads; at != 0; at = shadow.reads[at].next) land(shadow.reads[at].access, *b);
  }
}

MK_FN void barrier_fence() {
  if (!active()) return;
  for (u32 i = 0; i < events.barriers.size; ++i) {
    if (events.barriers[i]->initialiser == id_of(*rt.lane)) events.barriers[i]->fenced = true;
  }
}

// All that comes before the lane's next action is from here on ordered before asynchronous copies, too.
MK_FN void proxy_fence() {
  if (!active()) return;
  barrier_fence();
  const Lane& l = *rt.lane;
  u32* c = private_clock(l);
  const u32 own = id_of(l), time = tick(l) + 1;
  std::memcpy(c + kProxy * clocks.words, c + kOrdered * clocks.words, u64{clocks.words} * 4);
  c[kProxy * clocks.words + own] = time;
}

// fence.acq_rel: relaxed stores after it release what came before it, relaxed loads before it acquire.
MK_FN void thread_fence(bool gpu) {
  if (!active()) return;
  const Lane& l = *rt.lane;
  LaneState& s = state_of(l);
  if (s.pending != nullptr) {
    learn(l, s.pending);
    std::memset(s.pending, 0, u64{kViews} * clocks.words * 4);
  }
  s.released = publishable(l);
  s.released_time = tick(l);
  s.released_gpu = gpu;
}

MK_FN void wait_begun(u32 site, u32 layer) {
  if (!active()) return;
  LaneState& s = state_of(*rt.lane);
  s.site = static_cast<u16>(site);
  s.layer = static_cast<u16>(layer);
}

}  // namespace mk::host::detect
