// The hooks of templates/host/detect.h, as annotations for the stock libtsan: found before that header, so that the same emulator and
// the same kernel run under another race detector. What is ordered here is what libtsan has words for: threads, locks, atomics.
//
// A lane is a fiber, and so is a copy: it begins when it is issued and touches memory when it lands. The scheduler is the main
// thread; what it does is nobody's access. Fences, scopes and proxies are unknown (tests/test_detector_libtsan.py lists what follows).
#pragma once

#include "host/runtime.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
unsigned __tsan_atomic32_fetch_add(volatile unsigned* address, unsigned value, int order);
unsigned __tsan_atomic32_load(const volatile unsigned* address, int order);
unsigned long __tsan_atomic64_fetch_add(volatile unsigned long* address, unsigned long value, int order);
unsigned long __tsan_atomic64_load(const volatile unsigned long* address, int order);
}

#define MK_PC __builtin_return_address(0)

namespace mk::host::detect {

using Pc = const void*;

enum Flag : u32 { kWrite = 1, kStrong = 2, kAsync = 4, kPlain = 8 };

struct Copy {
  const char* dst;
  void* fiber;
};

// Arrivals of even and of odd phases release on words of their own: who passes one phase learns nothing of the next.
struct Phases {
  const char* barrier;
  u32 complete;
  char gathered[2];
};

constexpr u32 kMost = 64;  // copies in flight, mbarriers

// No containers: their code is instrumented, and what lanes did with them would look like accesses of the kernel.
static void *main_fiber, **lane_fibers;
static Copy copies[kMost];
static Phases phases[kMost];
static u32 copy_count, phases_count;

MK_FN Phases& phases_of(const char* barrier) {
  for (u32 i = 0; i < phases_count; ++i) {
    if (phases[i].barrier == barrier) return phases[i];
  }
  if (phases_count == kMost) std::abort();
  phases[phases_count] = {barrier, 0, {}};
  return phases[phases_count++];
}

MK_FN void* fiber_of(const Lane& l) { return lane_fibers[l.warp->block->index * rt.num_threads + l.thread]; }

MK_FN void begin(const char*, u64) {
  main_fiber = __tsan_get_current_fiber();
  lane_fibers = new void*[rt.live_lanes];
  for (u64 i = 0; i < rt.live_lanes; ++i) lane_fibers[i] = __tsan_create_fiber(0);
  rt.agents.reserve(kMost);  // growing would move what other fibers have touched
  copy_count = phases_count = 0;
  __tsan_ignore_thread_begin();
}

// What the launch did comes before all that main does next.
MK_FN void end() {
  __tsan_ignore_thread_end();
  for (u64 i = 0; i < u64{rt.num_blocks} * rt.num_threads; ++i) {
    __tsan_switch_to_fiber(lane_fibers[i], 0);
    __tsan_switch_to_fiber(main_fiber, 0);
    __tsan_destroy_fiber(lane_fibers[i]);
  }
  while (copy_count != 0) __tsan_destroy_fiber(copies[--copy_count].fiber);
  delete[] lane_fibers;
}

// As every lane of the warps of one barrier: `w` runs, the others wait in a list.
template <class F>
MK_FN void as_each_lane(Warp& w, Warp* others, F act) {
  for (Warp* each = &w; each != nullptr; each = each == &w ? others : each->barrier_next) {
    for (const Lane& l : each->lanes) {
      if ((each->alive & l.bit) == 0) continue;
      __tsan_switch_to_fiber(fiber_of(l), kOrdersNothing);
      act();
    }
  }
  __tsan_switch_to_fiber(fiber_of(*rt.lane), kOrdersNothing);
}

MK_FN void sync_warps(Warp& w, Warp* others) {
  as_each_lane(w, others, [&]() MK_RAW { __tsan_release(&w); });
  as_each_lane(w, others, [&]() MK_RAW { __tsan_acquire(&w); });
}

MK_FN void sync_warp(Warp& w) { sync_warps(w, nullptr); }

MK_FN void cluster_arrived(const Lane& l) { __tsan_release(l.warp->block->cluster); }
MK_FN void cluster_completed(const Block&) {}
MK_FN void cluster_passed(const Lane& l) { __tsan_acquire(l.warp->block->cluster); }

// Strong accesses are atomic ones. Adding nothing is a write to libtsan, and leaves the value to the emulator.
MK_FN void touch(const void* p, u32 bytes, u32 flags) {
  constexpr int kRelaxed = 0;
  void* address = const_cast<void*>(p);
  if ((flags & kStrong) == 0) {
    if (flags & kWrite) __tsan_write_range(address, bytes);
    else __tsan_read_range(address, bytes);
  } else if (bytes == 4) {
    u32* word = static_cast<u32*>(address);
    if (flags & kWrite) __tsan_atomic32_fetch_add(word, 0, kRelaxed);
    else __tsan_atomic32_load(word, kRelaxed);
  } else {
    for (u32 at = 0; at < bytes; at += 8) {
      unsigned long* word = reinterpret_cast<unsigned long*>(static_cast<char*>(address) + at);
      if (flags & kWrite) __tsan_atomic64_fetch_add(word, 0, kRelaxed);
      else __tsan_atomic64_load(word, kRelaxed);
    }
  }
}

MK_FN void shared_access(const void* p, u32 bytes, u32 flags, Pc) { touch(p, bytes, flags); }
MK_FN void global_access(const void* p, u32 bytes, u32 flags, Pc) { touch(p, bytes, flags); }

template <class V>
MK_FN V relaxed_load(const V* p, V newest, bool acquire, Pc) {
  if (acquire) __tsan_acquire(const_cast<V*>(p));
  return newest;
}

template <class V>
MK_FN void relaxed_store(const V* p, V, bool release, Pc) {
  if (release) __tsan_release(const_cast<V*>(p));
}

MK_FN void exchanged(const u32*, u32) {}

MK_FN void barrier_initialised(const char* p, Pc) {
  touch(p, 8, kWrite);
  phases_of(p).complete = 0;
}

MK_FN void barrier_arrived(const char* p, Pc) {
  touch(p, 8, kStrong | kWrite);
  Phases& b = phases_of(p);
  __tsan_release(&b.gathered[b.complete & 1]);
}

MK_FN void barrier_completed(const char* p) { ++phases_of(p).complete; }

MK_FN void barrier_passed(const char* p, Pc) {
  touch(p, 8, kStrong);
  Phases& b = phases_of(p);
  if (b.complete != 0) __tsan_acquire(&b.gathered[(b.complete - 1) & 1]);
}

// The copy reads its source and writes its destination at some time from its issue until its landing: here at both.
MK_FN void touch_as_copy(const Agent& a, void* fiber) {
  __tsan_switch_to_fiber(fiber, kOrdersNothing);
  if (a.src != nullptr) __tsan_read_range(const_cast<char*>(a.src), a.bytes);
  __tsan_write_range(a.dst, a.bytes);
}

MK_FN void copy_issued(const Agent& a, Pc) {
  if (copy_count == kMost) std::abort();
  copies[copy_count] = {a.dst, __tsan_create_fiber(0)};
  touch_as_copy(a, copies[copy_count++].fiber);
  __tsan_switch_to_fiber(fiber_of(*rt.lane), kOrdersNothing);
}

MK_FN void copy_landed(const Agent& a) {
  Copy* mine = copies;
  while (mine->dst != a.dst) ++mine;
  touch_as_copy(a, mine->fiber);
  Phases& b = phases_of(a.barrier);
  __tsan_release(&b.gathered[b.complete & 1]);
  __tsan_switch_to_fiber(main_fiber, kOrdersNothing);
  __tsan_destroy_fiber(mine->fiber);
  *mine = copies[--copy_count];
}

MK_FN void proxy_fence() {}
MK_FN void barrier_fence() {}
MK_FN void thread_fence(bool) {}
MK_FN void wait_begun(u32, u32) {}
MK_PTX constexpr Change change_at(Point, Pc) { return Change::kNone; }

}  // namespace mk::host::detect

namespace mk::host {

MK_FN void* fiber_of(const Context& c) {
  if (&c == &rt.scheduler) return detect::main_fiber;
  return detect::fiber_of(*reinterpret_cast<const Lane*>(&c));  // its first member
}

}  // namespace mk::host
