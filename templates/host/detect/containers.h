// Containers of the detector. The standard ones are templates that the compiler would instrument, and so call the detector
// from within itself. Memory comes from one reservation, is never freed singly, and all of it is zero at first.
#pragma once

#include "host/runtime.h"

namespace mk::host::detect {

constexpr u64 kPoolBytes = 1ull << 36;  // address space, not memory

struct Pool {
  char* base;
  u64 used;

  MK_FN void open() {
    void* p = mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    used = 0;
    if (base == nullptr) fault("no address space for the race detector");
  }
  MK_FN void close() {
    if (base != nullptr) munmap(base, kPoolBytes);
    base = nullptr;
  }
  template <class T>
  MK_FN T* take(u64 count) {
    T* p = reinterpret_cast<T*>(base + used);
    used += (count * sizeof(T) + 63) & ~63ull;
    if (used > kPoolBytes) fault("the race detector needs more than %llu bytes", kPoolBytes);
    return p;
  }
};

static Pool pool;

template <class T>
struct Array {
  T* items;
  u32 size, capacity;

  MK_FN T& operator[](u64 i) { return items[i]; }
  MK_FN void reset(u32 count) {
    items = pool.take<T>(count);
    size = capacity = count;
  }
  MK_FN void push(const T& item) {
    if (size == capacity) {
      const T* old = items;
      capacity = capacity == 0 ? 4 : capacity * 2;
      items = pool.take<T>(capacity);
      if (size != 0) std::memcpy(static_cast<void*>(items), old, size * sizeof(T));
    }
    items[size++] = item;
  }
};

// Values by keys that are not 0; a value not yet set is zero.
template <class V>
struct Table {
  struct Slot {
    u64 key;
    V value;
  };
  Slot* slots;
  u64 size, capacity;  // a power of two

  MK_FN void reset() {
    capacity = 1024;
    size = 0;
    slots = pool.take<Slot>(capacity);
  }
  MK_FN Slot& slot(u64 key) {
    u64 i = (key * 0x9e3779b97f4a7c15ull >> 20) & (capacity - 1);
    while (slots[i].key != 0 && slots[i].key != key) i = (i + 1) & (capacity - 1);
    return slots[i];
  }
  MK_FN V find(u64 key) { return slot(key).value; }
  MK_FN V& at(u64 key) {
    Slot* s = &slot(key);
    if (s->key == key) return s->value;
    if (++size * 2 > capacity) {
      grow();
      s = &slot(key);
    }
    s->key = key;
    return s->value;
  }

 private:
  MK_FN void grow() {
    const Slot* old = slots;
    const u64 before = capacity;
    capacity *= 2;
    slots = pool.take<Slot>(capacity);
    for (u64 i = 0; i < before; ++i) {
      if (old[i].key != 0) slot(old[i].key) = old[i];
    }
  }
};

}  // namespace mk::host::detect
