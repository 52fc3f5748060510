// Loads and stores, checked for alignment and bounds as the hardware would.
#pragma once

#include "host/detect.h"
#include "host/watch.h"

namespace mk::host {

MK_FN __attribute__((noinline, cold)) void fault_shared(const char* p, u32 bytes) {
  const long offset = static_cast<long>(p - rt.block->arena);
  fault("shared memory access of %u bytes at offset %ld is misaligned or outside the block's %llu bytes", bytes, offset, rt.smem_bytes);
}

MK_FN void check_shared(const char* p, u32 bytes, u32 alignment) {
  const u64 offset = static_cast<u64>(p - rt.block->arena);
  const bool inside = offset < rt.smem_bytes && bytes <= rt.smem_bytes - offset;
  if (__builtin_expect((offset % alignment != 0) | !inside, 0)) fault_shared(p, bytes);
}

MK_FN __attribute__((noinline, cold)) void check_global_slow(u64 address, u64 bytes, u32 alignment) {
  if (address % alignment != 0) fault("global memory access of %llu bytes at %#llx is misaligned", bytes, address);
  for (u32 i = 0; i < kBufferCount; ++i) {
    const u64 base = reinterpret_cast<u64>(rt.args->buffers[i]);
    const u64 span = rt.args->buffer_bytes[i];
    if (address - base < span && bytes <= span - (address - base)) {
      rt.global_base = base;
      rt.global_span = span;
      return;
    }
  }
  static const char* const names[kBufferCount] = {"control", "weights", "kv", "exchange", "logits", "rope", "trace", "pages"};
  u32 nearest = 0;
  for (u32 i = 1; i < kBufferCount; ++i) {
    const u64 base = reinterpret_cast<u64>(rt.args->buffers[i]);
    if (base <= address && base > reinterpret_cast<u64>(rt.args->buffers[nearest])) nearest = i;
  }
  fault("global memory access of %llu bytes at %#llx is outside every buffer (%s + %lld of %llu bytes)", bytes, address,
        names[nearest], static_cast<long long>(address - reinterpret_cast<u64>(rt.args->buffers[nearest])),
        rt.args->buffer_bytes[nearest]);
}

MK_FN void check_global(const void* p, u64 bytes, u32 alignment) {
  const u64 address = reinterpret_cast<u64>(p);
  const u64 offset = address - rt.global_base;
  const bool inside = offset < rt.global_span && bytes <= rt.global_span - offset;
  if (__builtin_expect((address % alignment != 0) | !inside, 0)) check_global_slow(address, bytes, alignment);
}

template <class V>
MK_FN V load_shared(const char* p) {
  check_shared(p, sizeof(V), sizeof(V));
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
MK_FN void store_shared(char* p, V v) {
  check_shared(p, sizeof(V), sizeof(V));
  std::memcpy(p, &v, sizeof v);
  changed(p, sizeof(V));
}

template <class V>
MK_FN V load_global(const V* p) {
  check_global(p, sizeof(V), sizeof(V));
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
MK_FN void store_global(V* p, V v) {
  check_global(p, sizeof(V), sizeof(V));
  std::memcpy(static_cast<void*>(p), &v, sizeof v);
  changed(p, sizeof(V));
}

// Relaxed, acquire and release accesses. Under the detector a load may return an older value.
template <class V>
MK_PTX V load_strong(const V* p, bool acquire, detect::Pc pc) {
  maybe_preempt();
  const Change change = detect::change_at(acquire ? Point::kAcquire : Point::kLoad, pc);
  if (change != Change::kNone) acquire = false;
  V v = load_global<V>(p);
  detect::global_access(p, sizeof(V), change == Change::kNarrow ? 0 : detect::kStrong, pc);
  v = detect::relaxed_load(p, v, acquire, pc);
  polled(p, v);
  return v;
}

template <class V>
MK_PTX void store_strong(V* p, V v, bool release, detect::Pc pc) {
  check_global(p, sizeof(V), sizeof(V));
  const Change change = detect::change_at(release ? Point::kRelease : Point::kStore, pc);
  if (change == Change::kDrop) return;
  if (change != Change::kNone) release = false;
  detect::global_access(p, sizeof(V), (change == Change::kNarrow ? 0 : detect::kStrong) | detect::kWrite, pc);
  detect::relaxed_store(p, v, release, pc);
  std::memcpy(static_cast<void*>(p), &v, sizeof v);
  changed(p, sizeof(V));
  maybe_preempt();
}

// The same in shared memory, at the scope of the block.
MK_PTX u32 load_shared_acquire(const char* p, detect::Pc pc) {
  maybe_preempt();
  const bool acquire = detect::change_at(Point::kAcquire, pc) == Change::kNone;
  u32 v = load_shared<u32>(p);
  detect::shared_access(p, 4, detect::kStrong, pc);
  v = detect::relaxed_load(reinterpret_cast<const u32*>(p), v, acquire, pc);
  polled(p, v);
  return v;
}

MK_PTX void store_shared_release(char* p, u32 v, detect::Pc pc) {
  const Change change = detect::change_at(Point::kRelease, pc);
  if (change == Change::kDrop) return;
  detect::shared_access(p, 4, detect::kStrong | detect::kWrite, pc);
  detect::relaxed_store(reinterpret_cast<const u32*>(p), v, change == Change::kNone, pc);
  store_shared<u32>(p, v);
  maybe_preempt();
}

// An atomic read-modify-write: `change(old)` is the new value, `old` always the newest.
template <class F>
MK_PTX u32 exchange(u32* p, detect::Pc pc, F change) {
  maybe_preempt();
  const u32 old = load_global<u32>(p), v = change(old);
  detect::global_access(p, 4, detect::kStrong | detect::kWrite, pc);
  detect::exchanged(p, v);
  if (v != old) store_global<u32>(p, v);
  return old;
}

}  // namespace mk::host
