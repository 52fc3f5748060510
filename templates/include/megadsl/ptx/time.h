// Clocks. On the host time is virtual: it advances with the scheduler's steps, never with the wall clock.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/runtime.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP u64 globaltimer() { return host::rt.now_ns; }
MK_OP u32 clock() { return u32(host::rt.now_ns); }

// The warp loses its turn, once and again for every 512 ns: in virtual time the others decide how long that is.
MK_OP void nanosleep(u32 ns) {
  for (u32 turns = 1 + ns / 512; turns != 0; --turns) host::preempt();
}

#else

// Nanoseconds, the same clock in all blocks; it goes on by 32 ns at a time on an H200, and may by 1 us elsewhere.
// Clobbers memory: a reading stays where it is among loads, stores and barriers.
MK_PTX u64 globaltimer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Sleeps for up to twice that many nanoseconds; at most 1 ms may be asked for.
MK_PTX void nanosleep(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }

// Cycles of this SM, the low word. Ordered among what is volatile alone.
MK_PTX u32 clock() {
  u32 t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
  return t;
}

#endif

}  // namespace mk::ptx
