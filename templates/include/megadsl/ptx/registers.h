// Registers that move between the warps of a block. All four warps of a warpgroup execute it, with the same count: a multiple of 8,
// 24 to 256. Taking waits until others have given.
#pragma once

#include "megadsl/base.h"

namespace mk::ptx {

#if defined(MK_HOST)

// A thread of the emulator has what it needs.
template <u32 kCount>
MK_OP void take_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "registers move in eights");
}
template <u32 kCount>
MK_OP void give_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "registers move in eights");
}

#else

template <u32 kCount>
MK_PTX void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)); }
template <u32 kCount>
MK_PTX void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)); }

#endif

}  // namespace mk::ptx
