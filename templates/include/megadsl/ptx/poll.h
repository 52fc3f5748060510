// The emulator's hooks in a polling loop.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/detect.h"
#include "host/watch.h"
#endif

namespace mk::ptx {

// Call after a failed poll. Device: false, no code. Host: parks the calling thread until something it polled since its
// last pause may have changed; true iff the launch is being given up (a deadlock was found), and the caller must leave.
MK_OP bool poll_pause(const WaitInfo& info) {
#if defined(MK_HOST)
  return host::poll_pause(info);
#else
  static_cast<void>(info);
  return false;
#endif
}

// kPollsAtOnce: polls of global memory between two looks at whether to give up: those cost a third of a trip to L2. kParks: a thread that polled in
// vain must pause before it polls again.
#if defined(MK_HOST)
constexpr u32 kPollsAtOnce = 1;
constexpr bool kParks = true;
#else
constexpr u32 kPollsAtOnce = 4;
constexpr bool kParks = false;
#endif

// Call before the first poll: reports of races name the last wait that a thread has begun. Device: no code.
MK_OP void poll_begin(u32 site, u32 layer) {
#if defined(MK_HOST)
  host::detect::wait_begun(site, layer);
#else
  static_cast<void>(site), static_cast<void>(layer);
#endif
}

}  // namespace mk::ptx
