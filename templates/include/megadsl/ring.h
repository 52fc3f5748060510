// The shared-memory ring between one loader warp and the consumer warps.
//
// Two barriers a stage: `full` completes when the stage's bytes have landed, `empty` when every consumer warp has let go.
// The loader runs ahead as far as the ring is deep; bytes in flight (issued, not landed) are bounded separately, because
// every critical-path load of the SM queues behind them.
#pragma once
#include "megadsl/copies.h"

namespace mk {

// How much may be in flight: less while the consumers are about to meet other blocks, since the loads of an exchange queue
// behind it. Bytes, or stages where a loader counts in them.
struct Window {
  u32 usual, at_meetings;
  smem_ptr<u32> meeting;  // not 0 around a meeting

  // At least one stage, and at most the ring's: one round behind, a loader could not tell the parity of what it waits for.
  MK_DEV Window in_stages(u32 stage_bytes, u32 stages) const {
    return {min_u32(max_u32(usual / stage_bytes, 1), stages), min_u32(max_u32(at_meetings / stage_bytes, 1), stages), meeting};
  }
  template <class Copies>
  MK_DEV u32 now() const { return usual == at_meetings || !Copies::any(ptx::ld_shared_volatile(meeting) != 0) ? usual : at_meetings; }
};

// The same where ops have windows of their own: what the consumers tell is not only that they meet, but also how much may be in flight until
// they have met, in units (1: as the ring says).
constexpr u32 kWindowUnit = 128;
template <u32 kStageBytes>
struct OwnWindows {
  u32 usual, at_meetings;  // stages
  smem_ptr<u32> meeting;
  u32 most;

  MK_DEV OwnWindows(Window of) : usual(of.usual), at_meetings(of.at_meetings), meeting(of.meeting), most(0) {}
  MK_DEV OwnWindows in_stages(u32 stage_bytes, u32 stages) const {
    OwnWindows found = Window{usual, at_meetings, meeting}.in_stages(stage_bytes, stages);
    found.most = stages;
    return found;
  }
  template <class Copies>
  MK_DEV u32 now() const {
    const u32 told = Copies::same(ptx::ld_shared_volatile(meeting));
    if (told <= 1) return told == 0 ? usual : at_meetings;
    return min_u32(max_u32((told - 1) * kWindowUnit / kStageBytes, 1), most);
  }
};

template <u32 kStages_, u32 kStageBytes_, class Copies_, class Bound_ = Window>
struct Ring {
  using Copies = Copies_;
  using Bound = Bound_;  // of what is in flight
  static constexpr u32 kStages = kStages_;
  static constexpr u32 kStageBytes = kStageBytes_;

  smem_ptr<char> stages;
  smem_ptr<u64> full;
  smem_ptr<u64> empty;

  MK_DEV Ring(smem_ptr<char> stages_at, smem_ptr<u64> barriers) : stages(stages_at), full(barriers), empty(barriers + kStages) {}

  MK_DEV void init(u32 consumer_warps) const {
    for (u32 i = 0; i < kStages; ++i) {
      ptx::mbar_init(full + i, Copies::kArrivals);
      ptx::mbar_init(empty + i, consumer_warps);
    }
  }
  MK_DEV smem_ptr<char> stage(u32 slot) const { return stages + slot * kStageBytes; }
};

// A position in a ring: which slot, and the parity of its current round.
template <u32 kStages>
struct Cursor {
  u32 slot = 0;
  u32 parity = 0;
  MK_DEV void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// A copy that has been issued lands without anybody's help, also when the launch was given up.
template <class Copies>
MK_DEV void await_landed(const Context& cx, smem_ptr<u64> barrier, u32 parity, u32 site) {
  constexpr u32 kMostPolls = 1u << 22;
  bool done = false;
  for (u32 polls = 0; !done && polls < kMostPolls; ++polls) {
    done = Copies::passed(barrier, parity);
    if (!done) ptx::poll_pause({site, cx.layer, 0, 0, 0});
  }
}

// The producing end. One lane uses it, or all of a warp do the same.
template <class R>
struct Loader {
  using Copies = typename R::Copies;
  static constexpr u32 kStageBytes = R::kStageBytes;

  const Context& cx;
  R ring;
  Cursor<R::kStages> issued;
  Cursor<R::kStages> landed;
  u32 in_flight = 0;
  u32 last_site = 0;  // of the latest load, for the report of a drain that never ends
  typename R::Bound window;

  MK_DEV Loader(const Context& context, R r, typename R::Bound bound) : cx(context), ring(r), window(bound.in_stages(R::kStageBytes, R::kStages)) {}

  MK_DEV void load(u32 site, u32 tile, const char* source, u32 bytes, u64 policy) {
    load_parts(site, tile, bytes, [&](smem_ptr<char> stage, smem_ptr<u64> full) { Copies::copy(stage, source, bytes, full, policy); });
  }
  // `copy(stage, full)` copies the stage's `bytes`, from several places.
  template <class F>
  MK_DEV void load_parts(u32 site, u32 tile, u32 bytes, F copy) {
    trace_copy(cx);
    while (in_flight >= window.template now<Copies>())
      if (!retire(site, tile)) return;
    trace_window(cx);
    // A slot's first round finds its `empty` barrier in phase 0: waiting for the parity before it passes at once.
    if (!wait_barrier(site, tile, ring.empty + issued.slot, issued.parity ^ 1)) return;  // given up: the slot may still be read
    trace_free(cx);
    last_site = site;
    chaos(cx, Place::kIssue, site, tile);
    Copies::begin(bytes, ring.full + issued.slot);
    copy(ring.stage(issued.slot), ring.full + issued.slot);
    Copies::end(ring.full + issued.slot);
    issued.advance();
    ++in_flight;
    trace_issue(cx, site, bytes, in_flight);
  }

  // Copies must not outlive the block: called last, also when the launch was given up. They land without anybody's help.
  MK_DEV void drain() {
    for (; in_flight != 0; --in_flight, landed.advance()) await_landed<Copies>(cx, ring.full + landed.slot, landed.parity, last_site);
  }

 private:
  MK_DEV bool wait_barrier(u32 site, u32 tile, smem_ptr<u64> barrier, u32 parity) const {
    return Copies::wait(cx, site, tile, parity, PhasePassed<Copies>{barrier, parity});
  }
  MK_DEV bool retire(u32 site, u32 tile) {
    if (!wait_barrier(site, tile, ring.full + landed.slot, landed.parity)) return false;
    landed.advance();
    --in_flight;
    return true;
  }
};

// The consuming end; every lane of every consumer warp holds the same cursor.
template <class R>
struct Reader {
  static constexpr u32 kStageBytes = R::kStageBytes;
  static constexpr u32 kStages = R::kStages;

  const Context& cx;
  R ring;
  Cursor<R::kStages> at;
  TraceCount taken;

  MK_DEV Reader(const Context& context, R r) : cx(context), ring(r) {}

  // The stage `ahead` positions further on, without letting go of those before it.
  MK_DEV smem_ptr<char> wait_stage(u32 site, u32 tile, u32 ahead = 0) const {
    Cursor<R::kStages> there = at;
    for (u32 i = 0; i < ahead; ++i) there.advance();
    wait_barrier<typename R::Copies>(cx, site, tile, ring.full + there.slot, there.parity);
    return ring.stage(there.slot);
  }
  // Waits for the next `count` stages, one after the other: code of one wait. The i-th is then stage(i).
  MK_DEV void wait_stages(u32 site, u32 tile, u32 count) const {
    Cursor<R::kStages> there = at;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i, there.advance())
      wait_barrier<typename R::Copies>(cx, site, tile + i, ring.full + there.slot, there.parity);
  }
  // Whether the stage `ahead` positions further on has landed, without waiting for it.
  MK_DEV bool landed(u32 ahead) const {
    Cursor<R::kStages> there = at;
    for (u32 i = 0; i < ahead; ++i) there.advance();
    return ptx::mbar_test_wait(ring.full + there.slot, there.parity);
  }
  MK_DEV smem_ptr<char> stage(u32 ahead) const {
    const u32 slot = at.slot + ahead;
    return ring.stage(slot < R::kStages ? slot : slot - R::kStages);
  }
  // Lets the loader have the next kCount stages; all lanes of the warp are done with them.
  template <u32 kCount = 1>
  MK_DEV void release() {
    ptx::syncwarp();
    taken.add(kCount);
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
      chaos(cx, Place::kRelease, 0, at.slot);
      const u32 freed = ptx::frees_early() ? (at.slot + 1) % R::kStages : at.slot;
      if (ptx::lane_id() == 0) ptx::mbar_arrive(ring.empty + freed);
      at.advance();
    }
  }
};

}  // namespace mk
