// The kernel's machine code as data.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/code.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP u64 code_begin() { return host::kCodeBegin; }
MK_OP void prefetch_code(u64 at) { host::prefetch_code(at); }

#else

// Where the code of the kernel begins: the address of its entry, as PTX has it.
MK_PTX u64 code_begin() {
  u64 at;
  asm("mov.u64 %0, megakernel;" : "=l"(at));
  return at;
}

// Its line of L2 comes from memory if it is not there, and is evicted after others. A prefetch never faults.
MK_PTX void prefetch_code(u64 at) { asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(at)); }

#endif

}  // namespace mk::ptx
