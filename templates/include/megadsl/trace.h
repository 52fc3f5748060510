// The timeline of a launch, in builds with MK_TRACE: one lane of each role leaves records of what it did and when. Plain
// stores, which nobody waits for; a role that runs out of room counts on, so that the host knows how many are lost.
//
// Recording must not slow down what it shows. So consumers only read the time while others wait for them: the moments of an op
// stay in registers until its result is on its way, and are then stored at once. A loader stores once per copy.
//
// A time is the low word of globaltimer, ns, which all SMs share; an SM's own clock changes its rate under load.
//
// Buffers::trace holds, per block and role, a header {slots, SM, epoch, records}, then `records` slots and one to spare:
//   x  when
//   y  event, site << 4, 16 bits << 16: see Event
//   z  layer, stages in flight << 16
//   w  see Event
// docs/tracing.md says what becomes of them; megadsl/trace/records.py reads them.
#pragma once
#include "megadsl/ptx.h"

namespace mk {

// kWait to kEnd are a consumer's moments. What is stored of them are kRun and kOpen, of two slots: x and w are the ends of the
// moments below, the second slot has {kReady, kTile, kTaken, kParts}; a moment that has not come is 0.
enum class Event : u32 {
  kEnter,   // the block has begun
  kLeave,   // the role ends
  kIssue,   // loader: a copy is under way; 16 bits: bytes / 16; w: waits for bytes in flight to land, for a free stage << 16,
            // in units of kWaitUnit
  kGate,    // loader: waited w ns for the consumers to begin an op
  kRun,     // consumer: x is kEnd, w is kWait; 16 bits: stages taken from the ring since the launch began
  kOpen,    // the same, without an end
  kWait,    // begins to wait for other blocks
  kReady,   // what it waited for is there, for the whole block; an input that arrives in registers: for this warp
  kTile,    // the first tile has landed
  kTaken,   // the last one has been used; value: stages taken from the ring
  kParts,   // attention: the warps' parts lie in shared memory
  kEnd,     // the op's result is on its way
};

constexpr u32 kWaitUnit = 16;   // ns
constexpr u32 kShortWait = 64;  // ns: a loader that waits less at a gate has not waited; no time at all may seem one tick, 32 ns on an H200

// Where a role's records go: the number of its program among all of them, and the warp whose first lane writes.
struct TraceRing {
  u32 role, roles, warp;
};

// State of a thread; no code uses it without MK_TRACE. A thread that leaves no records has room for none: one comparison says both
// whether it records and whether there is room.
struct Trace {
  u32x4* first = nullptr;
  u32 records = 0, count = 0;
  u32 began = 0, waited = 0;                                       // loader
  u32 asked = 0, ready = 0, tile = 0, taken = 0, parts = 0, of = 0;  // consumer; `of`: site << 4, stages taken << 16
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

#if defined(MK_TRACE)
namespace detail {

MK_DEV void put(Trace& t, u32 time, u32 y, u32 z, u32 w) {
  if (t.count < t.records) ptx::st_global_streaming(t.first + 1 + t.count, u32x4{time, y, z, w});
  ++t.count;
}
MK_DEV u32 moment() { return u32(ptx::globaltimer()) | 1; }  // never 0; all are odd, so that none seems to lie before an earlier one

// Stores the moments since the last kWait.
MK_DEV void put_run(Trace& t, Event event, u32 site, u32 layer) {
  if (t.count < t.records) {
    u32x4* const at = t.first + 1 + t.count;
    ptx::st_global_streaming(at, u32x4{moment(), u32(event) | site << 4 | (t.of & 0xffff0000u), layer, t.asked});
    ptx::st_global_streaming(at + 1, u32x4{t.ready, t.tile, t.taken, t.parts});
  }
  t.count += 2;
  t.asked = 0;
}
MK_DEV void put_open(Trace& t, u32 layer) {
  if (t.asked != 0) put_run(t, Event::kOpen, t.of >> 4 & 0xfffu, layer);
}

}  // namespace detail
#endif

// Something happened, now.
template <class C>
MK_DEV void trace([[maybe_unused]] const C& cx, [[maybe_unused]] Event event, [[maybe_unused]] u32 site, [[maybe_unused]] u32 value = 0) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  switch (event) {
    case Event::kWait:
      detail::put_open(t, cx.layer);
      t.asked = detail::moment(), t.ready = t.tile = t.taken = t.parts = 0, t.of = site << 4;
      break;
    case Event::kReady: t.ready = detail::moment(); break;
    case Event::kTile:
      if (t.tile == 0) t.tile = detail::moment();
      break;
    case Event::kTaken: t.taken = detail::moment(), t.of = site << 4 | value << 16; break;
    case Event::kParts: t.parts = detail::moment(); break;
    default: detail::put_run(t, Event::kRun, site, cx.layer);
  }
#endif
}

// A loader turns to a copy; bytes in flight have landed, as many as had to; a stage is free; the copy is under way.
template <class C>
MK_DEV void trace_copy([[maybe_unused]] const C& cx) {
#if defined(MK_TRACE)
  cx.trace.began = detail::moment();
#endif
}
template <class C>
MK_DEV void trace_window([[maybe_unused]] const C& cx) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  const u32 now = detail::moment(), units = (now - t.began) / kWaitUnit;
  t.began = now, t.waited = units < 0xffffu ? units : 0xffffu;
#endif
}
template <class C>
MK_DEV void trace_free([[maybe_unused]] const C& cx) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  const u32 now = detail::moment(), units = (now - t.began) / kWaitUnit;
  t.began = now, t.waited |= (units < 0xffffu ? units : 0xffffu) << 16;
#endif
}
template <class C>
MK_DEV void trace_issue([[maybe_unused]] const C& cx, [[maybe_unused]] u32 site, [[maybe_unused]] u32 bytes, [[maybe_unused]] u32 in_flight) {
#if defined(MK_TRACE)
  Trace& t = cx.trace;
  detail::put(t, t.began, u32(Event::kIssue) | site << 4 | bytes / 16 << 16, cx.layer | in_flight << 16, t.waited);
#endif
}

// A loader comes to a gate, and has passed it.
template <class C>
MK_DEV void trace_gate([[maybe_unused]] const C& cx, [[maybe_unused]] u32 site) {
#if defined(MK_TRACE)
  const u32 now = detail::moment(), waited = now - cx.trace.began;
  if (waited >= kShortWait) detail::put(cx.trace, now, u32(Event::kGate) | site << 4, cx.layer, waited);
#endif
}

// The block begins, before it does anything else; a role begins, and ends. `records` is the room that it has.
template <class C>
MK_DEV void trace_begin([[maybe_unused]] C& cx) {
#if defined(MK_TRACE)
  cx.trace.began = detail::moment();
#endif
}
template <class C>
MK_DEV void trace_enter([[maybe_unused]] C& cx, [[maybe_unused]] u32x4* buffer, [[maybe_unused]] TraceRing ring, [[maybe_unused]] u32 records) {
#if defined(MK_TRACE)
  if (buffer == nullptr || ptx::thread_id() != ring.warp * kWarpSize) return;
  cx.trace.first = buffer + (size_t(cx.block) * ring.roles + ring.role) * (2 + records);
  cx.trace.records = records;
  detail::put(cx.trace, cx.trace.began, u32(Event::kEnter), 0, 0);
#endif
}
template <class C>
MK_DEV void trace_leave([[maybe_unused]] const C& cx, [[maybe_unused]] u32 epoch) {
#if defined(MK_TRACE)
  if (cx.trace.records == 0) return;
  detail::put_open(cx.trace, cx.layer);
  detail::put(cx.trace, detail::moment(), u32(Event::kLeave), 0, 0);
  ptx::st_global(cx.trace.first, u32x4{cx.trace.count, ptx::sm_id(), epoch, cx.trace.records});
#endif
}

}  // namespace mk
