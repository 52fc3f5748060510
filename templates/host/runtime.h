// State of one emulated launch and the ways a CUDA thread ("lane", a fiber) can stop running.
//
// Everything runs on one OS thread. The warp is the unit of scheduling: its lanes run in order, each until it blocks, and
// hand over to each other directly; only when none can run does the scheduler (scheduler.h) choose another warp.
// A library is one translation unit, so the state below has internal linkage and two kernels never share it.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "host/args.h"
#include "host/fiber.h"

namespace mk::host {

struct Warp;
struct Poll;

enum class State : u32 { kReady, kCollective, kPolling, kCluster, kExited };

// The first 64 bytes are all that a collective touches.
struct alignas(64) Lane {
  Context context;
  Lane* next;         // in the warp, round
  u32 bit, next_bit;  // this lane and the next one in the warp's masks
  u32 index;          // in the warp
  u32 mma_a, mma_b, mma_c;  // first element in MmaOperands, in words
  Warp* warp;
  Poll* poll;
  u32 thread;  // in the block
  State state;
  u32 cluster_phase;  // phase of the cluster barrier that the last arrival belongs to, plus one
};

enum class Collective : u32 { kNone, kShuffle, kBallot, kSync, kMma, kBarrier };

// Operands of one mma, rows and columns in place: a[row, k pair], b[k pair, column], c[row, column].
struct alignas(64) MmaOperands {
  u32 a[16 * 8];
  u32 b[8 * 8];
  float c[16 * 8];
  u32 rows;  // bit r: row r of a or c is not all zero bits
};

struct Block;

struct alignas(64) Warp {
  Lane lanes[kWarpSize];
  MmaOperands mma;
  u32 shuffle_in[kWarpSize], shuffle_out[kWarpSize];
  u32 ballot_in, ballot_out;
  u32 alive;    // lanes that have not exited
  u32 ready;    // lanes that can run, the running one included
  u32 arrived;  // lanes waiting in the collective below
  Collective collective;
  bool (*perform)(Warp&);  // false: done later, by another warp
  u32 barrier_id, barrier_threads;
  Warp* barrier_next;  // next warp waiting at the same barrier
  Block* block;
  u32 index;  // in the block
  bool queued;
  bool loads;  // has issued copies
};

struct Barrier {
  u32 arrived, threads;
  Warp* waiting;
};

struct ClusterBarrier {
  u32 alive, arrived, phase;
};

constexpr u32 kNumBarriers = 16;

struct Block {
  char* arena;
  u32 index;
  Warp* warps;
  ClusterBarrier* cluster;
  Barrier barriers[kNumBarriers];
};

struct WatchRecord;

// What becomes of an agent's barrier when it completes.
enum class Counts : u32 {
  kBytes,    // they are counted
  kNothing,  // a lane's load: its arrival comes behind it
  kArrival,  // of a lane, all of whose loads have landed; copies nothing
};

// A copy or a remote store on its way.
struct Agent {
  u64 due, order;
  char* dst;
  const char* src;  // null: the bytes are in payload
  u32 bytes;
  char* barrier;
  char payload[16];
  Counts counts;
};

// A lane's load that no barrier counts yet.
struct LaneLoad {
  const Lane* by;
  char* dst;
  const char* src;
};

constexpr u32 kWatchBuckets = 4096;

struct Runtime {
  // Who runs; lane and warp are null in the scheduler.
  Lane* lane;
  Warp* warp;
  Block* block;
  Context scheduler;

  u32 num_blocks, num_threads, cluster_size;
  u64 smem_bytes;
  u64 now_ns;

  bool seeded, aborted, failed;
  u64 victim;  // of the policy
  u64 random_state;
  u64 changes;  // stores, arrivals and completions so far
  u64 live_lanes;
  u64 global_base, global_span;  // the buffer that the last checked access fell into

  Warp** queue;  // ring of runnable warps, queue_mask + 1 slots
  u64 queue_mask, queue_head, queue_tail;

  WatchRecord* watchers[kWatchBuckets];
  const LaunchArgs* args;
  LaunchResult* result;
  void (*entry)();

  std::vector<Agent> agents;  // heap, earliest on top
  u64 agents_issued;
  std::vector<LaneLoad> uncounted;
  std::vector<bool> code_lines;  // those that were prefetched
  StackPool stacks;
};

static Runtime rt;

// xorshift64*
MK_FN u64 random_u64() {
  u64 x = rt.random_state;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  rt.random_state = x;
  return x * 0x2545f4914f6cdd1dull >> 16;
}

MK_FN void enqueue(Warp& w) {
  if (w.queued) return;
  w.queued = true;
  rt.queue[rt.queue_tail++ & rt.queue_mask] = &w;
}

MK_FN __attribute__((noinline)) void run_distant_lane() {
  Lane& me = *rt.lane;
  const u32 ready = me.warp->ready;
  if (ready == 0) {
    switch_context(me.context, rt.scheduler);
    return;
  }
  Lane* next = me.next;
  while ((ready & next->bit) == 0) next = next->next;
  rt.lane = next;
  switch_context(me.context, next->context);
}

// The running lane has stopped being ready: run the next ready lane of its warp, else whoever the scheduler picks.
// Returns when the lane has been made ready again and its turn has come. Nearly always it is the neighbour that runs
// next; a predicted branch says so sooner than a search in the mask would.
MK_PTX void run_others() {
  Lane& me = *rt.lane;
  Lane& next = *me.next;
  if (__builtin_expect((rt.warp->ready & me.next_bit) == 0, 0)) {
    run_distant_lane();
    return;
  }
  rt.lane = &next;
  switch_context(me.context, next.context);
}

MK_FN __attribute__((noinline)) void block_lane(State why) {
  Lane& me = *rt.lane;
  me.state = why;
  me.warp->ready &= ~me.bit;
  run_others();
}

MK_FN void make_ready(Lane& l) {
  l.state = State::kReady;
  l.warp->ready |= l.bit;
  if (l.warp != rt.warp) enqueue(*l.warp);
}

// The whole warp goes to the end of the queue; its running lane stays ready.
MK_FN __attribute__((noinline)) void preempt() {
  Lane& me = *rt.lane;
  enqueue(*me.warp);
  switch_context(me.context, rt.scheduler);
}

// Under a seed, a warp may lose its turn wherever others can see what it does.
MK_FN void maybe_preempt() {
  if (rt.seeded && random_u64() % 16 == 0) preempt();
}

// The kernel did what the hardware forbids: end the launch with a message. From a lane this does not return.
MK_FN __attribute__((format(printf, 1, 2), noinline, cold)) void fault(const char* format, ...) {
  if (!rt.failed) {
    char* out = rt.result->message;
    int n = 0;
    if (rt.lane != nullptr) {
      n = std::snprintf(out, sizeof rt.result->message, "block %u, warp %u, lane %u: ", rt.block->index, rt.warp->index,
                        rt.lane->index);
    }
    va_list list;
    va_start(list, format);
    std::vsnprintf(out + n, sizeof rt.result->message - static_cast<u64>(n), format, list);
    va_end(list);
  }
  rt.failed = true;
  if (rt.lane != nullptr) {
    Context never;
    switch_context(never, rt.scheduler);
  }
}

}  // namespace mk::host
