// A dry run of a loop of products: its first iteration multiplies what has landed, for nothing, so that its code has been fetched when the
// input is there. The same instructions at the same addresses: a copy of the loop would fetch the copy.
#pragma once
#include "megadsl/block.h"

namespace mk {

// The input of a loop of products is there when it begins.
struct Begun {
  static constexpr bool kDry = false;
  MK_DEV bool due() const { return false; }
  template <class B, class R>
  MK_DEV bool runs(const B&, const R&, u32) const { return true; }
  MK_DEV void bring() const {}
};

// Or it is brought (`gather()`) by the loop itself, behind an iteration that may run dry: over the tiles that lie kAhead stages further on in the
// ring, if as many as it takes have landed. They are what the loop takes next, and nobody writes there before it has let go of them.
template <u32 kAhead_, class Gather>
struct DryRun {
  static constexpr bool kDry = true;
  static constexpr u32 kAhead = kAhead_;
  bool& waits;  // for the input
  bool& fresh;  // nothing has run dry yet
  Gather gather;

  MK_DEV bool due() const { return waits; }
  // All lanes of a warp find the same.
  template <class B, class R>
  MK_DEV bool runs(const B&, const R& reader, u32 count) const {
    if (!waits) return true;
    if (!fresh || count == 0 || kAhead + count > R::kStages) return false;
    bool there = true;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) there = there && reader.landed(kAhead + i);
    return ptx::all(there);
  }
  MK_DEV void bring() const {
    fresh = false;
    waits = false;
    gather();
  }
};

}  // namespace mk
