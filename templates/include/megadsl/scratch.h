// What a loader brings into L2 by loading it: copies into shared memory that nobody reads.
//
// A prefetch instruction lets memory work while the ring is full; behind a load L2 also gives the same bytes again at nearly twice the rate. Such copies have
// a few slots and a barrier each, which counts their bytes: the loader waits for a slot's copy before it makes the next one there, and for all of them at
// the end.
#pragma once
#include "megadsl/ring.h"

namespace mk {

// One loader's scratch, as byte offsets in shared memory.
struct ScratchShape {
  i32 at;
  i32 landed;  // barriers, one for each slot
};

// A tape that prefetches by instructions alone.
struct NoScratch {
  static constexpr bool kLoads = false;
};

template <u32 kSlots, u32 kSlotBytes_>
struct Scratch {
  static constexpr bool kLoads = true;
  static constexpr u32 kSlotBytes = kSlotBytes_;

  smem_ptr<char> at;
  smem_ptr<u64> landed;
  u32 issued = 0;     // so far
  u32 last_site = 0;  // of the latest

  MK_DEV Scratch(smem_ptr<char> slots, smem_ptr<u64> barriers) : at(slots), landed(barriers) {}

  template <class Copies>
  MK_DEV void init() const {
    for (u32 i = 0; i < kSlots; ++i) ptx::mbar_init(landed + i, Copies::kArrivals);
  }
  // Not where the launch was given up while it waited.
  template <class Copies>
  MK_DEV void load(const Context& cx, u32 site, const char* source, u32 bytes) {
    const u32 slot = issued % kSlots;
    if (issued >= kSlots) {
      const u32 parity = parity_of(issued - kSlots);
      if (!Copies::wait(cx, site, issued, parity, PhasePassed<Copies>{landed + slot, parity})) return;
    }
    chaos(cx, Place::kIssue, site, issued);
    Copies::begin(bytes, landed + slot);
    Copies::copy(at + slot * kSlotBytes, source, bytes, landed + slot, ptx::policy_evict_normal());
    Copies::end(landed + slot);
    ++issued;
    last_site = site;
  }
  // Copies must not outlive the block: also when the launch was given up.
  template <class Copies>
  MK_DEV void drain(const Context& cx) const {
    for (u32 copy = issued - min_u32(issued, kSlots); copy != issued; ++copy)
      await_landed<Copies>(cx, landed + copy % kSlots, parity_of(copy), last_site);
  }

 private:
  MK_DEV static u32 parity_of(u32 copy) { return copy / kSlots & 1; }
};

}  // namespace mk
