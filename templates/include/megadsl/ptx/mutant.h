// Places where a mutant makes a mistake that no single instruction stands for. Device: never, no code. Host: only in a launch of
// the race detector that is told to (host/detect/mutants.h).
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/detect.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)
#define MK_MUTANT(name, point) \
  MK_OP bool name() { return host::detect::change_at(host::Point::point, MK_PC) != host::Change::kNone; }
#else
#define MK_MUTANT(name, point) \
  MK_PTX constexpr bool name() { return false; }
#endif
MK_MUTANT(skips_wait, kWait)             // goes on with what the first attempt brought
MK_MUTANT(polls_fewer, kPoll)            // takes one vector without asking whether it is there
MK_MUTANT(frees_early, kFree)            // lets go of the next stage instead of this one
MK_MUTANT(sends_empty, kEmpty)           // publishes a value that readers take for "not yet"
MK_MUTANT(skips_zero_trips, kZeroTrip)   // a block without work does not take part
#undef MK_MUTANT

}  // namespace mk::ptx
