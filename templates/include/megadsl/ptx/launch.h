// Programmatic dependent launch: a grid may begin while the one before it still works. In the emulator launches follow each other.
#pragma once

#include "megadsl/base.h"

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP void launch_dependents() {}
MK_OP void wait_dependencies() {}

#else

// The next grid may begin as soon as every block of this one has said so, or has ended.
MK_PTX void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns when the grids before this one have ended, and what they have written can be seen.
MK_PTX void wait_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif

}  // namespace mk::ptx
