// Shared memory: typed addresses, loads and stores. There is no static shared memory: all of it starts at smem_base().
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/memory.h"
#endif

namespace mk::ptx {

// Address in this block's shared memory: 32 bits on the device, a real pointer on the host.
template <class T>
struct smem_ptr {
#if defined(MK_HOST)
  char* address;
#else
  u32 address;
#endif
  MK_PTX smem_ptr operator+(int elements) const { return {address + elements * static_cast<int>(sizeof(T))}; }
  template <class U>
  MK_PTX smem_ptr<U> at(int byte_offset) const {
    return {address + byte_offset};
  }
};

// Address in the shared memory of any block of the cluster.
template <class T>
struct cluster_ptr {
#if defined(MK_HOST)
  char* address;
#else
  u32 address;
#endif
  MK_PTX cluster_ptr operator+(int elements) const { return {address + elements * static_cast<int>(sizeof(T))}; }
  template <class U>
  MK_PTX cluster_ptr<U> at(int byte_offset) const {
    return {address + byte_offset};
  }
};

#if defined(MK_HOST)

MK_OP smem_ptr<char> smem_base() { return {host::rt.block->arena}; }

template <class V>
MK_OP V ld_shared(smem_ptr<V> p) {
  const V v = host::load_shared<V>(p.address);
  host::detect::shared_access(p.address, sizeof(V), 0, MK_PC);
  return v;
}

template <class V>
MK_OP void st_shared(smem_ptr<V> p, V v) {
  host::store_shared<V>(p.address, v);
  host::detect::shared_access(p.address, sizeof(V), host::detect::kWrite, MK_PC);
}

MK_OP u32 ld_shared_volatile(smem_ptr<u32> p) {
  const u32 v = host::load_shared<u32>(p.address);
  host::detect::shared_access(p.address, 4, host::detect::kStrong, MK_PC);
  host::polled(p.address, v);
  return v;
}

MK_OP void st_shared_volatile(smem_ptr<u32> p, u32 v) {
  if (host::detect::change_at(host::Point::kShared, MK_PC) == host::Change::kDrop) return;
  host::store_shared<u32>(p.address, v);
  host::detect::shared_access(p.address, 4, host::detect::kStrong | host::detect::kWrite, MK_PC);
}

// The same for a word that orders nothing, whoever reads it: no point of synchronisation.
MK_OP void st_shared_hint(smem_ptr<u32> p, u32 v) {
  host::store_shared<u32>(p.address, v);
  host::detect::shared_access(p.address, 4, host::detect::kStrong | host::detect::kWrite, MK_PC);
}

// At the scope of the block.
MK_OP u32 ld_shared_acquire(smem_ptr<u32> p) { return host::load_shared_acquire(p.address, MK_PC); }
MK_OP void st_shared_release(smem_ptr<u32> p, u32 v) { host::store_shared_release(p.address, v, MK_PC); }

// That an index of a view is one of `size`. The emulator ends the launch where it is not; a GPU does not look.
MK_OP void expect_inside(u32 index, u32 size) {
  if (__builtin_expect(index >= size, 0)) host::fault("a view of %u is accessed at %d", size, i32(index));
}

#else

MK_PTX void expect_inside(u32, u32) {}

MK_PTX smem_ptr<char> smem_base() {
  extern __shared__ __align__(1024) char mk_dynamic_smem[];
  return {static_cast<u32>(__cvta_generic_to_shared(mk_dynamic_smem))};
}

// Volatile keeps these in program order among all wrappers; without a memory clobber, register arrays stay in registers.
template <class V>
MK_PTX V ld_shared(smem_ptr<V> p);
template <class V>
MK_PTX void st_shared(smem_ptr<V> p, V v);

#define MK_SHARED(V, suffix, constraint)                                                              \
  template <>                                                                                         \
  MK_PTX V ld_shared<V>(smem_ptr<V> p) {                                                              \
    V v;                                                                                              \
    asm volatile("ld.shared." suffix " %0, [%1];" : "=" constraint(v) : "r"(p.address));              \
    return v;                                                                                         \
  }                                                                                                   \
  template <>                                                                                         \
  MK_PTX void st_shared<V>(smem_ptr<V> p, V v) {                                                      \
    asm volatile("st.shared." suffix " [%0], %1;" ::"r"(p.address), constraint(v) : "memory");        \
  }
MK_SHARED(u16, "u16", "h")
MK_SHARED(u32, "u32", "r")
MK_SHARED(float, "f32", "f")
MK_SHARED(u64, "u64", "l")
#undef MK_SHARED

template <>
MK_PTX u8 ld_shared<u8>(smem_ptr<u8> p) {
  u16 v;  // the smallest register
  asm volatile("ld.shared.u8 %0, [%1];" : "=h"(v) : "r"(p.address));
  return static_cast<u8>(v);
}

template <>
MK_PTX u32x2 ld_shared<u32x2>(smem_ptr<u32x2> p) {
  u32x2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p.address));
  return v;
}

template <>
MK_PTX void st_shared<u32x2>(smem_ptr<u32x2> p, u32x2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(p.address), "r"(v.x), "r"(v.y) : "memory");
}

template <>
MK_PTX u32x4 ld_shared<u32x4>(smem_ptr<u32x4> p) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p.address));
  return v;
}

template <>
MK_PTX void st_shared<u32x4>(smem_ptr<u32x4> p, u32x4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(p.address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

MK_PTX u32 ld_shared_volatile(smem_ptr<u32> p) {
  u32 v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(p.address) : "memory");
  return v;
}

MK_PTX void st_shared_volatile(smem_ptr<u32> p, u32 v) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(p.address), "r"(v) : "memory");
}

MK_PTX void st_shared_hint(smem_ptr<u32> p, u32 v) { st_shared_volatile(p, v); }

MK_PTX u32 ld_shared_acquire(smem_ptr<u32> p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(p.address) : "memory");
  return v;
}

MK_PTX void st_shared_release(smem_ptr<u32> p, u32 v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(p.address), "r"(v) : "memory");
}

#endif

}  // namespace mk::ptx
