// The runtime that -fsanitize=thread calls: plain loads and stores of the kernel, and its call tree. Only shared memory and the
// launch's buffers are looked at; whatever else a fiber touches is its own.
#pragma once

#include "host/detect/events.h"

namespace mk::host::detect {

MK_FN void plain_access(const void* p, u64 bytes, u32 flags, const void* pc) {
  if (rt.lane == nullptr || !active()) return;
  const u64 address = reinterpret_cast<u64>(p);
  if (rt.stacks.holds(address)) return;  // most are, and no region is there
  Region* r = region_of(address);
  if (r == nullptr) return;
  access(*rt.lane, *r, address, bytes, access_by(*rt.lane, flags | kPlain, static_cast<u32>(bytes < 255 ? bytes : 255), offset_of(pc)));
}

MK_FN void enter_function(const void* pc) {
  if (rt.lane == nullptr || pool.base == nullptr) return;
  u32& context = state_of(*rt.lane).context;
  const u32 at = offset_of(pc);
  u32& call = shadow.call_of.at(u64{context} << 32 | at);
  if (call == 0) {
    call = shadow.calls.size;
    shadow.calls.push({context, at});
  }
  context = call;
}

MK_FN void leave_function() {
  if (rt.lane == nullptr || pool.base == nullptr) return;
  u32& context = state_of(*rt.lane).context;
  context = shadow.calls[context].parent;
}

}  // namespace mk::host::detect

#define MK_TSAN extern "C" __attribute__((used, noinline, visibility("hidden"))) MK_RAW void

MK_TSAN __tsan_init() {}
MK_TSAN __tsan_func_entry(void* pc) { mk::host::detect::enter_function(pc); }
MK_TSAN __tsan_func_exit() { mk::host::detect::leave_function(); }
MK_TSAN __tsan_vptr_update(void**, void*) {}
MK_TSAN __tsan_vptr_read(void**) {}

#define MK_TSAN_ACCESS(name, bytes, flags) \
  MK_TSAN name(void* p) { mk::host::detect::plain_access(p, bytes, flags, __builtin_return_address(0)); }
#define MK_TSAN_BOTH(bytes)                                               \
  MK_TSAN_ACCESS(__tsan_read##bytes, bytes, 0)                            \
  MK_TSAN_ACCESS(__tsan_write##bytes, bytes, mk::host::detect::kWrite)    \
  MK_TSAN_ACCESS(__tsan_unaligned_read##bytes, bytes, 0)                  \
  MK_TSAN_ACCESS(__tsan_unaligned_write##bytes, bytes, mk::host::detect::kWrite)
MK_TSAN_BOTH(1)
MK_TSAN_BOTH(2)
MK_TSAN_BOTH(4)
MK_TSAN_BOTH(8)
MK_TSAN_BOTH(16)
#undef MK_TSAN_BOTH
#undef MK_TSAN_ACCESS

MK_TSAN __tsan_read_range(void* p, unsigned long bytes) {
  if (bytes != 0) mk::host::detect::plain_access(p, bytes, 0, __builtin_return_address(0));
}
MK_TSAN __tsan_write_range(void* p, unsigned long bytes) {
  if (bytes != 0) mk::host::detect::plain_access(p, bytes, mk::host::detect::kWrite, __builtin_return_address(0));
}
#undef MK_TSAN
