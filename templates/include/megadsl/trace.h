// The timeline of a launch, in builds with MK_TRACE: one lane of each role leaves records of what it did and when. Plain
// stores, which nobody waits for; a role that runs out of room counts on, so that the host knows how many are lost.
//
// Buffers::trace holds, per block and role, a header {events, SM, epoch, records}, then as many records:
//   x  this SM's clock, low word
//   y  event, site << 4, bytes / 16 << 16
//   z  layer, stages in flight << 16
//   w  tile, cycles of a wait, or stages taken so far: see Event
// docs/tracing.md says what becomes of them; megadsl/trace/records.py reads them.
#pragma once
#include "megadsl/ptx.h"

namespace mk {

enum class Event : u32 {
  kClock,   // z, w: globaltimer, ns, at the same moment
  kIssue,   // loader: a copy is under way
  kWindow,  // loader: waited w cycles, until now, for bytes in flight to land
  kFull,    // loader: waited w cycles for a free stage
  kGate,    // loader: waited w cycles for the consumers to begin an op
  kWait,    // consumer: begins to wait for other blocks
  kReady,   // what it waited for is there, for the whole block
  kTile,    // the first tile of a batch has landed
  kTaken,   // the last one has been used; w: stages taken from the ring since the launch began
  kParts,   // attention: the warps' parts lie in shared memory
  kEnd,     // the op's result is on its way
};

constexpr u32 kShortWait = 64;  // cycles: a loader that waits no longer has not waited

// Where a role's records go: the number of its program among all of them, and the warp whose first lane writes.
struct TraceRing {
  u32 role, roles, warp;
};

// State of a thread; no code uses it without MK_TRACE. A thread that leaves no records has room for none: one comparison says both
// whether it records and whether there is room.
struct Trace {
  u32x4* first = nullptr;
  u32 records = 0, count = 0, began = 0;
};

// Stages that a reader has let go of.
struct TraceCount {
#if defined(MK_TRACE)
  u32 stages = 0;
  MK_DEV void add(u32 more) { stages += more; }
  MK_DEV u32 now() const { return stages; }
#else
  MK_DEV void add(u32) {}
  MK_DEV u32 now() const { return 0; }
#endif
};

namespace detail {

MK_DEV void put(const Trace& t, u32 clock, u32 y, u32 z, u32 w) {
  ptx::st_global(t.first + 1 + t.count, u32x4{clock, y, z, w});
}

}  // namespace detail

// Something happened, now.
template <class C>
MK_DEV void trace([[maybe_unused]] const C& cx, [[maybe_unused]] Event event, [[maybe_unused]] u32 site, [[maybe_unused]] u32 value = 0,
                  [[maybe_unused]] u32 bytes = 0, [[maybe_unused]] u32 in_flight = 0) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  if (t.count < t.records) detail::put(t, ptx::clock(), u32(event) | site << 4 | bytes / 16 << 16, cx.layer | in_flight << 16, value);
  ++t.count;
#endif
}

// A loader may have to wait from here on; and it has waited, for what the event says.
template <class C>
MK_DEV void trace_begin([[maybe_unused]] const C& cx) {
#if defined(MK_TRACE)
  cx.trace.began = ptx::clock();
#endif
}
template <class C>
MK_DEV void trace_waited([[maybe_unused]] const C& cx, [[maybe_unused]] Event event, [[maybe_unused]] u32 site) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  const u32 now = ptx::clock(), cycles = now - t.began;
  t.began = now;
  if (cycles < kShortWait) return;
  if (t.count < t.records) detail::put(t, now, u32(event) | site << 4, cx.layer, cycles);
  ++t.count;
#endif
}

// This SM's clock beside the clock that all SMs share.
template <class C>
MK_DEV void trace_clock([[maybe_unused]] const C& cx) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  if (t.count < t.records) {
    const u32 clock = ptx::clock();
    const u64 time = ptx::globaltimer();
    detail::put(t, clock, u32(Event::kClock), u32(time), u32(time >> 32));
  }
  ++t.count;
#endif
}

// A role begins, and ends. `records` is the room that it has.
template <class C>
MK_DEV void trace_enter([[maybe_unused]] C& cx, [[maybe_unused]] u32x4* buffer, [[maybe_unused]] TraceRing ring, [[maybe_unused]] u32 records) {
#if defined(MK_TRACE)
  if (buffer == nullptr || ptx::thread_id() != ring.warp * kWarpSize) return;
  cx.trace.first = buffer + (size_t(cx.block) * ring.roles + ring.role) * (1 + records);
  cx.trace.records = records;
  trace_clock(cx);
#endif
}
template <class C>
MK_DEV void trace_leave([[maybe_unused]] const C& cx, [[maybe_unused]] u32 epoch) {
#if defined(MK_TRACE)
  if (cx.trace.records == 0) return;
  trace_clock(cx);
  ptx::st_global(cx.trace.first, u32x4{cx.trace.count, ptx::sm_id(), epoch, cx.trace.records});
#endif
}

}  // namespace mk
