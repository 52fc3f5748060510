// Clocks. On the host time is virtual: it advances with the scheduler's steps, never with the wall clock.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/runtime.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP u64 globaltimer() { return host::rt.now_ns; }
MK_OP u64 clock64() { return host::rt.now_ns; }

#else

// Nanoseconds, the same clock in all blocks; its resolution can be as coarse as 1 us.
MK_PTX u64 globaltimer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Cycles of this SM.
MK_PTX u64 clock64() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

#endif

}  // namespace mk::ptx
