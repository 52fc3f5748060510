// The one way to wait. Every spin in a generated kernel goes through mk::wait, so every spin can be given up.
#pragma once
#include "megadsl/chaos.h"
#include "megadsl/layout.h"
#include "megadsl/ptx.h"
#include "megadsl/trace.h"

namespace mk {

using ptx::smem_ptr;

// What every role carries: where the block stands and how it learns that the launch was given up.
struct Context {
  Control* control;
  smem_ptr<u32> abort_word;  // one per block, so that a stuck warp need not ask global memory at each poll
  u32 block;
  Divisor blocks;
  u32 layer;
#if defined(MK_CHAOS)
  Chaos chaos;
#endif
#if defined(MK_TRACE)
  mutable Trace trace;
#endif

  // globaltimer, ns: when a waiter gives the launch up. In shared memory behind the abort word, since only cold code reads it.
  MK_DEV smem_ptr<u64> deadline() const { return abort_word.template at<u64>(8); }
};

// What a block owns of something shared out over all blocks: items [begin, end).
struct Share {
  u32 begin, end;
};

MK_DEV Share own_share(const Context& cx, u32 n, u32 offset) {
  return {share_begin(n, cx.blocks, offset, cx.block), share_begin(n, cx.blocks, offset, cx.block + 1)};
}

constexpr u32 kPollsPerCheck = 256;  // how often a waiter looks at the clock and at the global abort word

namespace detail {

// From here on the block's waits fall through, and block 0 leaves the control block alone.
MK_DEV void tell_all(const Context& cx) {
  ptx::st_relaxed(&cx.control->abort, 1u);
  ptx::st_shared_volatile(cx.abort_word, 1u);
}

// The cold end of a wait, behind polls in vain: whether the waiter leaves without what it waits for. One function for all sites, out of the
// hot code's way. `polls`: how often it came here, 0 for a lane that has what it waits for. The first waiter that is late writes the
// record. The error word is sticky: launches queued behind this one return at once until the host has read and cleared it.
// `cx` is a copy: a reference would keep the caller's in memory.
MK_NOINLINE bool gives_up(const Context cx, u32 site, u32 tile, u32 expected, u32 observed, u32 polls) {
  if (ptx::ld_shared_volatile(cx.abort_word) != 0) return true;  // before the pause: a parked thread has to see it change
  if (polls == 0) return false;
  if (ptx::poll_pause({site, cx.layer, tile, expected, observed})) {
    tell_all(cx);
    return true;
  }
  if (polls % kPollsPerCheck != 0) return false;
  const bool late = ptx::globaltimer() > ptx::ld_shared<u64>(cx.deadline());
  if (!late && ptx::ld_relaxed(&cx.control->abort) == 0) return false;
  if (late && ptx::atom_cas(&cx.control->error, kErrorNone, kErrorWriting) == kErrorNone) {
    ErrorRecord& record = cx.control->record;
    ptx::st_global(&record.site, site), ptx::st_global(&record.block, cx.block), ptx::st_global(&record.warp, ptx::warp_id());
    ptx::st_global(&record.layer, cx.layer), ptx::st_global(&record.tile, tile);
    ptx::st_global(&record.expected, expected), ptx::st_global(&record.observed, observed);
    ptx::st_release(&cx.control->error, kErrorRecorded);
  }
  tell_all(cx);
  return true;
}

}  // namespace detail

// Polls `attempt(observed)` until it returns true. Returns false when the launch was given up (a deadline passed here or
// in any other block): the caller then goes on without the data, so that every barrier still meets its partners and
// every role reaches its end. `expected` is what the hang report shows beside the last `observed`. kAtOnce attempts
// follow each other before anything else is looked at.
template <u32 kAtOnce = 1, class Attempt>
MK_DEV bool wait(const Context& cx, u32 site, u32 tile, u32 expected, Attempt attempt) {
  u32 observed = 0;
  ptx::poll_begin(site, cx.layer);
  chaos(cx, Place::kWait, site, tile);
  for (u32 polls = 1;; ++polls) {
#pragma unroll 1
    for (u32 i = 0; i < kAtOnce; ++i)
      if (MK_LIKELY(attempt(observed)) || ptx::skips_wait()) return true;
    if (!ptx::kParks && ptx::ld_shared_volatile(cx.abort_word) != 0) return false;
    if ((ptx::kParks || polls % kPollsPerCheck == 0) && detail::gives_up(cx, site, tile, expected, observed, polls)) return false;
  }
}

// The same for a whole warp: all lanes call it together, and leave it together once the attempt of each has returned true. Lanes that leave one by
// one also go on one by one, and a collective behind that takes the slow way to bring them together (docs/performance.md, step 35).
// kBackOff: ns that it sleeps behind each attempt in vain.
template <u32 kAtOnce = 1, u32 kBackOff = 0, class Attempt>
MK_DEV bool wait_warp(const Context& cx, u32 site, u32 tile, u32 expected, Attempt attempt) {
  u32 observed = 0;
  bool there = false;
  ptx::poll_begin(site, cx.layer);
  chaos(cx, Place::kWait, site, tile);
  for (u32 polls = 1;; ++polls) {
#pragma unroll 1
    for (u32 i = 0; i < (kBackOff != 0 ? 1 : kAtOnce); ++i) {
      there = (ptx::kParks && there) || attempt(observed) || ptx::skips_wait();  // a lane that may park does not poll again
      if (MK_LIKELY(ptx::all(there))) return true;
    }
    if (ptx::any(detail::gives_up(cx, site, tile, expected, observed, there ? 0 : polls))) return false;
    if (kBackOff != 0) ptx::nanosleep(kBackOff);
  }
}

// A planted fault for tests of the watchdog: a build with -DMK_LOST_SIGNAL=<site> never sends that signal.
MK_DEV constexpr bool lost_signal([[maybe_unused]] u32 site) {
#if defined(MK_LOST_SIGNAL)
  return site == u32(MK_LOST_SIGNAL);
#else
  return false;
#endif
}

// True once this launch was given up, as far as the block knows.
MK_DEV bool given_up(const Context& cx) { return ptx::ld_shared_volatile(cx.abort_word) != 0; }

}  // namespace mk
