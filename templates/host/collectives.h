// Collectives: lanes of a warp meet, the last to arrive performs the operation for all. Then barriers of warps, and of
// the threads of a cluster.
#pragma once

#include "host/detect.h"
#include "host/math.h"
#include "host/runtime.h"

namespace mk::host {

MK_FN void release_lanes(Warp& w) {
  w.arrived = 0;
  w.ready = w.alive;
  w.collective = Collective::kNone;
}

MK_FN __attribute__((noinline)) void open_collective(Warp& w, Collective kind, bool (*perform)(Warp&)) {
  static const char* const names[] = {"none", "shuffle", "ballot", "syncwarp", "mma", "bar.sync"};
  if (w.arrived != 0) {
    fault("lanes of one warp are in different collectives: %s here, %s in lanes %#x", names[static_cast<u32>(kind)],
          names[static_cast<u32>(w.collective)], w.arrived);
  }
  w.collective = kind;
  w.perform = perform;
}

// What a lane contributed is in the warp before the call, what it gets is there after it.
template <bool (*perform)(Warp&)>
MK_PTX void rendezvous(Collective kind) {
  Lane& me = *rt.lane;
  Warp& w = *rt.warp;
  if (__builtin_expect(w.collective != kind, 0)) open_collective(w, kind, perform);
  w.arrived |= me.bit;
  w.ready &= ~me.bit;
  if (w.arrived == w.alive) {
    ++rt.result->collectives;
    if (perform(w)) {
      release_lanes(w);
      return;
    }
  }
  run_others();
}

// Lanes read shuffle_out after others have begun to fill shuffle_in for the next shuffle.
MK_FN bool perform_shuffle(Warp& w) {
  std::memcpy(w.shuffle_out, w.shuffle_in, sizeof w.shuffle_out);
  return true;
}

MK_PTX u32 shuffle(u32 v, u32 lane) {
  Warp& w = *rt.warp;
  w.shuffle_in[rt.lane->index] = v;
  rendezvous<perform_shuffle>(Collective::kShuffle);
  return w.shuffle_out[lane % kWarpSize];
}

MK_PTX u32 shuffle_xor(u32 v, u32 mask) { return shuffle(v, rt.lane->index ^ mask); }

MK_FN bool perform_ballot(Warp& w) {
  w.ballot_out = w.ballot_in;
  w.ballot_in = 0;
  return true;
}

MK_PTX u32 ballot(bool p) {
  Warp& w = *rt.warp;
  if (p) w.ballot_in |= rt.lane->bit;
  rendezvous<perform_ballot>(Collective::kBallot);
  return w.ballot_out;
}

MK_FN bool perform_sync(Warp& w) {
  detect::sync_warp(w);
  return true;
}

MK_PTX void sync_warp(detect::Pc pc) {
  if (detect::change_at(Point::kWarpBarrier, pc) == Change::kDrop) return;
  rendezvous<perform_sync>(Collective::kSync);
}

// Counts whole warps, as the hardware does. The warp that completes the barrier releases the others.
MK_FN bool perform_barrier(Warp& w) {
  Barrier& b = w.block->barriers[w.barrier_id];
  if (b.arrived != 0 && b.threads != w.barrier_threads) {
    fault("bar.sync %u with %u threads, but another warp waits there for %u", w.barrier_id, w.barrier_threads, b.threads);
  }
  b.threads = w.barrier_threads;
  b.arrived += kWarpSize;
  if (b.arrived < b.threads) {
    w.barrier_next = b.waiting;
    b.waiting = &w;
    return false;
  }
  b.arrived = 0;
  detect::sync_warps(w, b.waiting);
  while (b.waiting != nullptr) {
    Warp& other = *b.waiting;
    b.waiting = other.barrier_next;
    release_lanes(other);
    enqueue(other);
  }
  return true;
}

MK_FN void bar_sync(u32 id, u32 threads, detect::Pc pc) {
  if (detect::change_at(Point::kBlockBarrier, pc) == Change::kDrop) return;
  if (id >= kNumBarriers || threads == 0 || threads % kWarpSize != 0 || threads > rt.num_threads) {
    fault("bar.sync %u with %u threads in a block of %u", id, threads, rt.num_threads);
  }
  Warp& w = *rt.warp;
  w.barrier_id = id;
  w.barrier_threads = threads;
  rendezvous<perform_barrier>(Collective::kBarrier);
}

MK_FN void complete_cluster_if_all_arrived(ClusterBarrier& c) {
  if (c.arrived != c.alive || c.alive == 0) return;
  c.arrived = 0;
  ++c.phase;
  detect::cluster_completed(*rt.block);
  const u32 first = rt.block->index / rt.cluster_size * rt.cluster_size;
  Block* blocks = rt.block - (rt.block->index - first);
  for (u32 b = 0; b < rt.cluster_size; ++b) {
    for (u32 t = 0; t < rt.num_threads; ++t) {
      Lane& l = blocks[b].warps[t / kWarpSize].lanes[t % kWarpSize];
      if (l.state == State::kCluster) make_ready(l);
    }
  }
}

MK_FN void cluster_arrive(detect::Pc pc) {
  if (detect::change_at(Point::kCluster, pc) == Change::kDrop) return;
  Lane& me = *rt.lane;
  ClusterBarrier& c = *rt.block->cluster;
  if (me.cluster_phase > c.phase) fault("cluster_arrive twice without cluster_wait");
  me.cluster_phase = c.phase + 1;
  ++c.arrived;
  detect::cluster_arrived(me);
  complete_cluster_if_all_arrived(c);
}

MK_FN void cluster_wait() {
  Lane& me = *rt.lane;
  if (rt.block->cluster->phase < me.cluster_phase) block_lane(State::kCluster);
  detect::cluster_passed(me);
}

// Shared memory of a block that has left belongs to another one: nothing may land there any more. (One that was given up cannot wait.)
MK_FN void check_landed(const Block& b) {
  if (rt.aborted) return;
  for (u32 w = 0; w < rt.num_threads / kWarpSize; ++w)
    if (b.warps[w].alive != 0) return;
  for (const Agent& a : rt.agents)
    if (a.dst >= b.arena && a.dst < b.arena + rt.smem_bytes) fault("a block ends with %u bytes on their way into its shared memory", a.bytes);
}

// The running lane leaves the kernel: collectives and cluster barriers no longer count it.
MK_FN void exit_lane() {
  Lane& me = *rt.lane;
  Warp& w = *me.warp;
  for (const LaneLoad& l : rt.uncounted)
    if (l.by == &me) fault("a lane ends with loads on their way that no mbarrier counts");
  me.state = State::kExited;
  w.alive &= ~me.bit;
  w.ready &= ~me.bit;
  --rt.live_lanes;
  ClusterBarrier& c = *rt.block->cluster;
  if (me.cluster_phase > c.phase) --c.arrived;
  --c.alive;
  complete_cluster_if_all_arrived(c);
  if (w.alive != 0 && w.arrived == w.alive && w.perform(w)) release_lanes(w);
  check_landed(*rt.block);
  run_others();
}

}  // namespace mk::host
