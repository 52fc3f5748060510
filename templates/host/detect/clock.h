// Clocks: what each thread knows of the others.
//
// Every thread of the launch and every mbarrier has a component; an entry is the first time of that component which is not
// known. There are three orders, each a clock of its own:
//   kOrdered  happens-before: warp and block barriers, mbarrier phases, release and acquire;
//   kProxy    what happens before, with a proxy fence on the way: what an asynchronous copy may rely on;
//   kSeen     happens-before, and also "a value was observed": a relaxed load that returns a relaxed store. PTX orders nothing by
//             that; kernels rely on it for writes after reads alone (docs/ptx-notes.md, Reuse of a slot).
// The lanes of a warp share one clock; a lane that learns something gets its own until the warp next meets in bar.warp.sync. Mostly all lanes
// learn the same, that a phase is complete: those share what comes of it.
#pragma once

#include "host/detect/containers.h"

namespace mk::host::detect {

enum View : u32 { kOrdered, kProxy, kSeen, kViews };

typedef u32 Word8 __attribute__((vector_size(32)));

constexpr u32 kBarriersPerBlock = 96;
constexpr u32 kMostLearned = 4;  // clocks that lanes of a warp share, one made of the other, before each has its own

struct LaneState {
  u32* clock;           // null: the warp's
  const u32* copied;    // an immutable copy of `clock`, null when there is none or it is out of date
  const u32* released;  // clock at the last fence.acq_rel, null before any
  u32 released_time;
  bool released_gpu;
  u32* pending;  // what relaxed loads observed and a fence will make ordered; null: nothing
  u32* owned;    // room for `clock`, once needed
  u32 context;  // node of the call tree
  u16 site, layer;  // of the last wait begun
};

// What lanes of a warp that knew `base` (null: the warp's clock) came to know by learning `what`. Never changed.
struct Learned {
  const u32* base;
  u64 what;
  u32* clock;
};

struct WarpState {
  u32 time;    // of all 32 lanes
  u32 synced;  // time of the last bar.warp.sync
  u32 private_lanes;
  u32* clock;
  const u32* copied;
  Learned learned[kMostLearned];  // since the warp last met
  u32 learned_count;
};

struct Clocks {
  u32 lanes, warps_per_block, words;  // words per view, a multiple of 8
  Array<LaneState> lane;
  Array<WarpState> warp;

  MK_FN u32* take_clock() { return pool.take<u32>(u64{kViews} * words); }
};

static Clocks clocks;

MK_FN u32 id_of(const Lane& l) { return l.warp->block->index * rt.num_threads + l.thread; }
MK_FN u32 id_of(const Warp& w) { return w.block->index * clocks.warps_per_block + w.index; }
MK_FN LaneState& state_of(const Lane& l) { return clocks.lane[id_of(l)]; }
MK_FN WarpState& state_of(const Warp& w) { return clocks.warp[id_of(w)]; }

MK_FN void join(u32* to, const u32* from, u32 words) {
  for (u32 i = 0; i < words; i += 8) {
    Word8 a, b;
    std::memcpy(&a, to + i, sizeof a);
    std::memcpy(&b, from + i, sizeof b);
    a = a > b ? a : b;
    std::memcpy(to + i, &a, sizeof a);
  }
}

MK_FN void copy_clock(u32* to, const u32* from) { std::memcpy(to, from, u64{kViews} * clocks.words * 4); }

MK_FN const u32* clock_of(const Lane& l) {
  const LaneState& s = state_of(l);
  return s.clock != nullptr ? s.clock : state_of(*l.warp).clock;
}

MK_FN const u32* view_of(const Lane& l, View v) { return clock_of(l) + v * clocks.words; }

// The lane's own clock, to be changed.
MK_FN u32* private_clock(const Lane& l) {
  LaneState& s = state_of(l);
  s.copied = nullptr;
  if (s.clock != nullptr && s.clock == s.owned) return s.clock;
  if (s.owned == nullptr) s.owned = clocks.take_clock();
  copy_clock(s.owned, clock_of(l));
  s.clock = s.owned;
  state_of(*l.warp).private_lanes |= l.bit;
  return s.clock;
}

// Whether what `who` did at `time` comes before what the lane does now.
MK_FN bool covered(const Lane& l, View v, u32 who, u32 time) {
  if (v != kProxy && who == id_of(l)) return true;
  return time < view_of(l, v)[who];
}

// What others can learn from the lane: a clock that will not change, beside the lane's own time.
MK_FN const u32* publishable(const Lane& l) {
  LaneState& s = state_of(l);
  WarpState& w = state_of(*l.warp);
  const u32*& cached = s.clock != nullptr ? s.copied : w.copied;
  if (cached == nullptr) {
    u32* copy = clocks.take_clock();
    copy_clock(copy, clock_of(l));
    cached = copy;
  }
  return cached;
}

// A new point in time; returns the one that ends now.
MK_FN u32 tick(const Lane& l) { return state_of(*l.warp).time++; }

// Adds a lane's knowledge, its own past included, to a clock that stands for a rendezvous.
MK_FN void contribute(u32* to, const Lane& l) {
  join(to, clock_of(l), kViews * clocks.words);
  const u32 own = id_of(l), time = tick(l) + 1;
  for (const View v : {kOrdered, kSeen}) {
    u32& entry = to[v * clocks.words + own];
    entry = entry > time ? entry : time;
  }
}

MK_FN void learn(const Lane& l, const u32* from) { join(private_clock(l), from, kViews * clocks.words); }

// The lane learns `from`, which is the same whoever learns `what` (not 0).
MK_FN void learn_shared(const Lane& l, const u32* from, u64 what) {
  LaneState& s = state_of(l);
  WarpState& w = state_of(*l.warp);
  Learned* found = w.learned;
  Learned* end = w.learned + w.learned_count;
  while (found != end && (found->base != s.clock || found->what != what)) ++found;
  if (found == w.learned + kMostLearned || (s.clock != nullptr && s.clock == s.owned)) return learn(l, from);
  if (found == end) {
    if (found->clock == nullptr) found->clock = clocks.take_clock();
    copy_clock(found->clock, clock_of(l));
    join(found->clock, from, kViews * clocks.words);
    found->base = s.clock, found->what = what;
    ++w.learned_count;
  }
  s.clock = found->clock;
  s.copied = nullptr;
  w.private_lanes |= l.bit;
}

// Lanes' private knowledge becomes the warp's, and the past of all its lanes is known.
MK_FN void settle_warp(Warp& warp) {
  WarpState& w = state_of(warp);
  const u32* joined = nullptr;
  for (u32 rest = w.private_lanes; rest != 0; rest &= rest - 1) {
    LaneState& s = state_of(warp.lanes[__builtin_ctz(rest)]);
    if (s.clock != joined) join(w.clock, s.clock, kViews * clocks.words);
    joined = s.clock;
    s.clock = nullptr;
    s.copied = nullptr;
  }
  w.private_lanes = 0;
  w.learned_count = 0;
  w.copied = nullptr;
  w.synced = ++w.time;
  const u32 first = id_of(warp.lanes[0]);
  for (const View v : {kOrdered, kSeen}) {
    for (u32 i = 0; i < kWarpSize; ++i) w.clock[v * clocks.words + first + i] = w.synced;
  }
}

MK_FN bool active() { return !rt.aborted && !rt.failed; }

// bar.warp.sync, and nothing else inside a warp: shfl, vote and mma make lanes meet but order no memory.
MK_FN void sync_warp(Warp& w) {
  if (active()) settle_warp(w);
}

// bar.sync: `first` completes it, the others are in the list that begins with `waiting`.
MK_FN void sync_warps(Warp& first, Warp* waiting) {
  if (!active()) return;
  settle_warp(first);
  u32* all = state_of(first).clock;
  for (Warp* w = waiting; w != nullptr; w = w->barrier_next) {
    settle_warp(*w);
    join(all, state_of(*w).clock, kViews * clocks.words);
  }
  for (Warp* w = waiting; w != nullptr; w = w->barrier_next) copy_clock(state_of(*w).clock, all);
}

MK_FN void begin_clocks() {
  clocks.lanes = rt.num_blocks * rt.num_threads;
  clocks.warps_per_block = rt.num_threads / kWarpSize;
  clocks.words = (clocks.lanes + rt.num_blocks * kBarriersPerBlock + 7) / 8 * 8;
  clocks.lane.reset(clocks.lanes);
  for (u32 i = 0; i < clocks.lanes; ++i) clocks.lane[i].site = kNoSite;
  clocks.warp.reset(clocks.lanes / kWarpSize);
  for (u32 i = 0; i < clocks.warp.size; ++i) {
    WarpState& w = clocks.warp[i];
    w.time = w.synced = 1;  // time 0 is before the launch
    w.clock = clocks.take_clock();
  }
  for (u32 i = 0; i < clocks.lanes; ++i) {
    for (const View v : {kOrdered, kSeen}) clocks.warp[i / kWarpSize].clock[v * clocks.words + i] = 1;
  }
}

}  // namespace mk::host::detect
