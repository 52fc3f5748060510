// Shadow memory: the last write and the reads since, per 2 bytes of shared and global memory (per 16 of weights and rope).
#pragma once

#include "host/detect/clock.h"

namespace mk::host::detect {

enum Flag : u32 { kWrite = 1, kStrong = 2, kAsync = 4, kPlain = 8 };  // kPlain: no wrapper, seen by the compiler's instrumentation

enum RaceKind : u32 { kDataRace, kProxyRace, kMixedSizes, kUnfencedBarrier };

constexpr u32 kInFlight = ~0u;  // time of a copy that has not landed: nobody knows of it

struct Access {
  u32 time;
  u32 lanes;    // of the warp; 0: an asynchronous copy
  u32 pc;       // offset from the library's start
  u32 context;  // node of the call tree
  u16 who;      // warp, or component of the mbarrier that counts the copy's bytes
  u8 flags;
  u8 width;  // 0: nothing here
  u16 site, layer;  // of the last wait
};

struct ReadNode {
  Access access;
  u32 next;
};

struct Cell {
  Access write;
  u32 reads;  // first node, 0: none
};

struct Region {
  u64 base, bytes;
  u32 shift;
  Cell* cells;
  u64 mapped;
};

// The call tree of the kernel: a node is a call from one place, below another node.
struct CallNode {
  u32 parent, pc;
};

struct Shadow {
  Region regions[kBufferCount + 1];  // the last: all arenas
  Array<ReadNode> reads;
  u32 free_reads;
  Array<CallNode> calls;
  Table<u32> call_of;
  Table<u32> point_of;
  Table<bool> reported;
};

static Shadow shadow;

// The library's first byte: addresses of code are reported as distances from it, which is what addr2line wants.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

MK_FN u32 offset_of(const void* pc) { return static_cast<u32>(static_cast<const char*>(pc) - &__ehdr_start); }

// Cells are all zero at first: width 0, and reads 0, so the first node is never used.
MK_FN void begin_region(Region& r, const void* base, u64 bytes, u32 shift) {
  r = {reinterpret_cast<u64>(base), bytes, shift, nullptr, 0};
  if (bytes == 0) return;
  r.mapped = ((bytes >> shift) + 1) * sizeof(Cell);
  void* p = mmap(nullptr, r.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fault("no address space for the race detector's shadow memory");
  r.cells = p == MAP_FAILED ? nullptr : static_cast<Cell*>(p);
}

MK_FN Region* region_of(u64 address) {
  for (u32 i = kBufferCount + 1; i-- != 0;) {
    Region& r = shadow.regions[i];
    if (address - r.base < r.bytes) return &r;
  }
  return nullptr;
}

MK_FN u32 take_read(const Access& a, u32 next) {
  u32 at = shadow.free_reads;
  if (at != 0) {
    shadow.free_reads = shadow.reads[at].next;
  } else {
    at = shadow.reads.size;
    shadow.reads.push({});
  }
  shadow.reads[at] = {a, next};
  return at;
}

MK_FN void drop_reads(Cell& c) {
  while (c.reads != 0) {
    const u32 at = c.reads;
    c.reads = shadow.reads[at].next;
    shadow.reads[at].next = shadow.free_reads;
    shadow.free_reads = at;
  }
}

MK_FN void describe(RaceSide& side, const Access& a, u32 lane) {
  const bool copy = a.lanes == 0;
  const u32 warp = copy ? 0 : a.who;
  side.block = copy ? a.who / kBarriersPerBlock : warp / clocks.warps_per_block;
  side.warp = copy ? 0 : warp % clocks.warps_per_block;
  side.lane = copy ? kWarpSize : lane;
  side.flags = a.flags;
  side.width = a.width;
  side.site = a.site;
  side.layer = a.layer;
  u32 depth = 0;
  side.stack[depth++] = a.pc;
  for (u32 node = a.context; node != 0 && depth < kRaceStack; node = shadow.calls[node].parent) side.stack[depth++] = shadow.calls[node].pc;
  while (depth < kRaceStack) side.stack[depth++] = 0;
}

MK_FN __attribute__((noinline, cold)) void report_race(RaceKind kind, const Region& r, u64 address, const Access& now, const Access& before,
                                                       u32 before_lane) {
  const u64 key = (now.pc * 0x9e3779b97f4a7c15ull ^ before.pc) * 0xc2b2ae3d27d4eb4full + kind * 16 + (now.flags & kWrite) * 2 + (before.flags & kWrite);
  bool& reported = shadow.reported.at(key | 1);
  if (reported) return;
  reported = true;
  LaunchResult& out = *rt.result;
  ++out.races_found;
  if (out.race_count == out.race_capacity) return;
  RaceRecord& race = out.races[out.race_count++];
  race = {};
  race.kind = kind;
  race.space = static_cast<u32>(&r - shadow.regions);
  race.offset = address - r.base;
  if (race.space == kBufferCount) {
    const u64 stride = (rt.smem_bytes + 1023) / 1024 * 1024;
    race.home = static_cast<u32>(race.offset / stride);
    race.offset %= stride;
  }
  describe(race.now, now, now.lanes == 0 ? 0 : static_cast<u32>(__builtin_ctz(now.lanes)));
  describe(race.before, before, before_lane);
}

// Two strong accesses of the same bytes never race; of partly the same bytes they are not morally strong.
MK_FN bool both_strong(const Access& a, const Access& b) { return (a.flags & b.flags & kStrong) != 0; }

// Which of the earlier access's lanes, if any, the lane does not know of; kWarpSize: none.
MK_FN u32 unordered_lane(const Lane& l, View v, const Access& before) {
  if (before.lanes == 0) {
    const bool known = before.time != kInFlight && before.time < view_of(l, v)[clocks.lanes + before.who];
    return known ? kWarpSize : 0;
  }
  if (v != kProxy && before.who == id_of(*l.warp) && (before.time < state_of(*l.warp).synced || before.lanes == l.bit)) return kWarpSize;
  const u32 first = before.who * kWarpSize;
  for (u32 rest = before.lanes; rest != 0; rest &= rest - 1) {
    const u32 lane = static_cast<u32>(__builtin_ctz(rest));
    if (!covered(l, v, first + lane, before.time)) return lane;
  }
  return kWarpSize;
}

MK_FN bool check_write(const Lane& l, const Region& r, u64 address, const Access& now, const Access& before) {
  if (both_strong(now, before)) {
    if (now.width == before.width) return false;
    const u32 lane = unordered_lane(l, kOrdered, before);
    if (lane != kWarpSize) report_race(kMixedSizes, r, address, now, before, lane);
    return lane != kWarpSize;
  }
  const u32 lane = unordered_lane(l, kOrdered, before);
  if (lane != kWarpSize) {
    // As a write after a read: the place of a copy that has landed, as somebody knew whose later store has been observed.
    if ((now.flags & kWrite) != 0 && before.lanes == 0 && unordered_lane(l, kSeen, before) == kWarpSize) {
      ++rt.result->observed;
      return false;
    }
    report_race(kDataRace, r, address, now, before, lane);
    return true;
  }
  if ((now.flags & kAsync) == 0 || (before.flags & kAsync) != 0) return false;
  const u32 unfenced = unordered_lane(l, kProxy, before);
  if (unfenced != kWarpSize) report_race(kProxyRace, r, address, now, before, unfenced);
  return unfenced != kWarpSize;
}

MK_FN bool check_reads(const Lane& l, const Region& r, u64 address, const Access& now, const Cell& c) {
  for (u32 at = c.reads; at != 0; at = shadow.reads[at].next) {
    const Access& before = shadow.reads[at].access;
    if (both_strong(now, before) && now.width == before.width) continue;
    if (unordered_lane(l, kOrdered, before) == kWarpSize) {
      const bool proxies_differ = ((now.flags ^ before.flags) & kAsync) != 0;
      if (proxies_differ && (now.flags & kAsync) != 0 && unordered_lane(l, kProxy, before) != kWarpSize) ++rt.result->refilled;
      continue;
    }
    const u32 lane = unordered_lane(l, kSeen, before);
    if (lane != kWarpSize) {
      report_race(both_strong(now, before) ? kMixedSizes : kDataRace, r, address, now, before, lane);
      return true;
    }
    ++rt.result->observed;
  }
  return false;
}

MK_FN void note_read(Cell& c, const Access& now) {
  for (u32 at = c.reads; at != 0; at = shadow.reads[at].next) {
    Access& before = shadow.reads[at].access;
    if (before.who != now.who || (before.lanes == 0) != (now.lanes == 0) || ((before.flags ^ now.flags) & kStrong) != 0) continue;
    if (before.time == now.time && before.lanes != 0) {
      before.lanes |= now.lanes;
      return;
    }
    if (before.lanes == now.lanes || (now.lanes != 0 && before.time < clocks.warp[now.who].synced)) {
      before = now;
      return;
    }
  }
  c.reads = take_read(now, c.reads);
}

// One access of `bytes` bytes by the lane, or by a copy that the lane has issued.
MK_FN void access(const Lane& l, Region& r, u64 address, u64 bytes, const Access& now) {
  const u64 first = (address - r.base) >> r.shift, last = (address - r.base + bytes - 1) >> r.shift;
  bool found = false;
  for (u64 i = first; i <= last; ++i) {
    Cell& c = r.cells[i];
    const u64 at = r.base + (i << r.shift);
    if (c.write.width != 0 && !found) found = check_write(l, r, at, now, c.write);
    if ((now.flags & kWrite) != 0) {
      if (c.reads != 0) {
        if (!found) found = check_reads(l, r, at, now, c);
        drop_reads(c);
      }
      c.write = now;
    } else {
      note_read(c, now);
    }
  }
}

MK_FN Access access_by(const Lane& l, u32 flags, u32 width, u32 pc) {
  const Warp& w = *l.warp;
  const LaneState& s = state_of(l);
  return {state_of(w).time, l.bit, pc, s.context, static_cast<u16>(id_of(w)), static_cast<u8>(flags), static_cast<u8>(width),
          s.site, s.layer};
}

MK_FN void begin_shadow(const char* arenas, u64 arena_bytes) {
  constexpr u32 kShift[kBufferCount] = {1, 4, 1, 1, 1, 4, 1, 2};  // weights and rope: nobody writes there, and they are large
  for (u32 i = 0; i < kBufferCount; ++i) begin_region(shadow.regions[i], rt.args->buffers[i], rt.args->buffer_bytes[i], kShift[i]);
  begin_region(shadow.regions[kBufferCount], arenas, arena_bytes, 1);
  shadow.reads = {};
  shadow.reads.push({});
  shadow.free_reads = 0;
  shadow.calls = {};
  shadow.calls.push({});
  shadow.call_of.reset();
  shadow.point_of.reset();
  shadow.reported.reset();
}

MK_FN void end_shadow() {
  for (Region& r : shadow.regions) {
    if (r.cells != nullptr) munmap(r.cells, r.mapped);
    r.cells = nullptr;
    r.bytes = 0;
  }
}

}  // namespace mk::host::detect
