// Delays before signals and waits, in builds with MK_CHAOS: what is right only because somebody is usually faster goes wrong.
// Each launch reads its seed (Control::chaos, 0: no delays), so one build serves all seeds; the epoch is mixed in, so that
// replays differ. Who is slow follows from the seed; when and for how long, from a hash of where the warp stands.
#pragma once
#include "megadsl/layout.h"
#include "megadsl/ptx.h"

namespace mk {

enum class Place : u32 { kWait, kSignal, kRelease, kIssue, kBarrier, kOp };

// Who is slow: seed % kSlowKinds.
enum class Slow : u32 { kAnybody, kOneBlock, kLoaders, kOneWarp, kSignals };
constexpr u32 kSlowKinds = 5;

constexpr u32 kLongDelay = 50'000;  // ns, one place in 16,384 whoever is slow

// State of a thread; no code uses it without MK_CHAOS.
struct Chaos {
  u32 seed = 0, key = 0;
  u32 ops = 0;  // begun so far
};

MK_DEV u32 chaos_mix(u32 h, u32 word) {
  h = (h ^ word) * 0x9e3779b1u;
  h = (h ^ h >> 15) * 0x85ebca6bu;
  return h ^ h >> 13;
}

MK_DEV bool chaos_slows(const Chaos& s, Place place, u32 block, u32 blocks, u32 warp) {
  const u32 draw = chaos_mix(s.seed, 1);
  switch (Slow(s.seed % kSlowKinds)) {
    case Slow::kOneBlock: return block == draw % blocks;
    case Slow::kLoaders: return place == Place::kIssue;
    case Slow::kOneWarp: return warp % 8 == draw % 8;
    case Slow::kSignals: return place == Place::kSignal || place == Place::kRelease;
    default: return false;
  }
}

// Nanoseconds to wait at a place: mostly 0; those who are slow wait up to 4 us every other time.
MK_DEV u32 chaos_ns(const Chaos& s, Place place, u32 block, u32 blocks, u32 layer, u32 site, u32 tile) {
  const u32 warp = ptx::warp_id();
  u32 h = chaos_mix(chaos_mix(s.key, block << 8 | warp), u32(place) << 16 | site);
  h = chaos_mix(chaos_mix(h, layer << 16 | s.ops), tile);
  if (h % 16384 == 1) return kLongDelay;
  if (chaos_slows(s, place, block, blocks, warp)) return h % 2 == 0 ? h >> 8 & 4095 : 0;
  return Slow(s.seed % kSlowKinds) == Slow::kAnybody && h % 8 == 0 ? h >> 8 & 2047 : 0;
}

// A warp is about to wait or to signal.
template <class C>
MK_DEV void chaos([[maybe_unused]] const C& cx, [[maybe_unused]] Place place, [[maybe_unused]] u32 site, [[maybe_unused]] u32 tile) {
#if defined(MK_CHAOS)
  if (cx.chaos.seed == 0) return;
  const u32 ns = chaos_ns(cx.chaos, place, cx.block, cx.blocks.value, cx.layer, site, tile);
  if (ns != 0) ptx::nanosleep(ns);
#endif
}

// A launch begins.
template <class C>
MK_DEV void chaos_enter([[maybe_unused]] C& cx) {
#if defined(MK_CHAOS)
  const u32 seed = ptx::ld_global<u32>(&cx.control->chaos);
  cx.chaos = {seed, chaos_mix(seed, ptx::ld_global<u32>(&cx.control->epoch)), 0};
#endif
}

// An op begins.
template <class C>
MK_DEV void chaos_op([[maybe_unused]] C& cx) {
#if defined(MK_CHAOS)
  ++cx.chaos.ops;
  chaos(cx, Place::kOp, 0, 0);
#endif
}

}  // namespace mk
