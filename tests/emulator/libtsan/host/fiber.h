// The emulator's fibers, told to libtsan: found before templates/host/fiber.h.
#pragma once

#define switch_context switch_registers
#include_next "host/fiber.h"
#undef switch_context

extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}

namespace mk::host {

constexpr unsigned kOrdersNothing = 1;  // __tsan_switch_to_fiber_no_sync

void* fiber_of(const Context& c);  // libtsan's, detect.h

MK_PTX void switch_context(Context& from, const Context& to) {
  __tsan_switch_to_fiber(fiber_of(to), kOrdersNothing);
  switch_registers(from, to);
}

}  // namespace mk::host
