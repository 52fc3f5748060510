// Global memory: plain, read-only, relaxed and acquire/release accesses (scope: this GPU), and atomics.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/memory.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

template <class V>
MK_OP V ld_global(const V* p) {
  const V v = host::load_global<V>(p);
  host::detect::global_access(p, sizeof(V), 0, MK_PC);
  return v;
}

template <class V>
MK_OP V ld_global_nc(const V* p) {
  const V v = host::load_global<V>(p);
  host::detect::global_access(p, sizeof(V), 0, MK_PC);
  return v;
}

template <class V>
MK_OP void st_global(V* p, V v) {
  host::store_global<V>(p, v);
  host::detect::global_access(p, sizeof(V), host::detect::kWrite, MK_PC);
}

MK_OP void st_global_streaming(u32x4* p, u32x4 v) {
  host::store_global<u32x4>(p, v);
  host::detect::global_access(p, sizeof(u32x4), host::detect::kWrite, MK_PC);
}

template <class V>
MK_OP V ld_relaxed(const V* p) {
  return host::load_strong(p, false, MK_PC);
}

template <class V>
MK_OP void st_relaxed(V* p, V v) {
  host::store_strong(p, v, false, MK_PC);
}

// Four words side by side, each a relaxed access of its own.
MK_OP u32x4 ld_relaxed_words(const u32x4* p) {
  const u32* w = reinterpret_cast<const u32*>(p);
  return {ld_relaxed(w), ld_relaxed(w + 1), ld_relaxed(w + 2), ld_relaxed(w + 3)};
}
MK_OP void st_relaxed_words(u32x4* p, u32x4 v) {
  u32* w = reinterpret_cast<u32*>(p);
  st_relaxed(w, v.x), st_relaxed(w + 1, v.y), st_relaxed(w + 2, v.z), st_relaxed(w + 3, v.w);
}

MK_OP u32 ld_acquire(const u32* p) { return host::load_strong(p, true, MK_PC); }

MK_OP void st_release(u32* p, u32 v) { host::store_strong(p, v, true, MK_PC); }

MK_OP u32 atom_cas(u32* p, u32 expect, u32 value) {
  return host::exchange(p, MK_PC, [&](u32 old) { return old == expect ? value : old; });
}

MK_OP u32 atom_add(u32* p, u32 value) {
  return host::exchange(p, MK_PC, [&](u32 old) { return old + value; });
}

#else

template <class V>
MK_PTX V ld_global(const V* p);
template <class V>
MK_PTX V ld_global_nc(const V* p);
template <class V>
MK_PTX void st_global(V* p, V v);
template <class V>
MK_PTX V ld_relaxed(const V* p);
template <class V>
MK_PTX void st_relaxed(V* p, V v);

#define MK_GLOBAL(V, suffix, constraint)                                                       \
  template <>                                                                                  \
  MK_PTX V ld_global<V>(const V* p) {                                                          \
    V v;                                                                                       \
    asm volatile("ld.global." suffix " %0, [%1];" : "=" constraint(v) : "l"(p));               \
    return v;                                                                                  \
  }                                                                                            \
  template <>                                                                                  \
  MK_PTX V ld_global_nc<V>(const V* p) {                                                       \
    V v;                                                                                       \
    asm("ld.global.nc." suffix " %0, [%1];" : "=" constraint(v) : "l"(p));                     \
    return v;                                                                                  \
  }                                                                                            \
  template <>                                                                                  \
  MK_PTX void st_global<V>(V* p, V v) {                                                        \
    asm volatile("st.global." suffix " [%0], %1;" ::"l"(p), constraint(v) : "memory");         \
  }
MK_GLOBAL(u16, "u16", "h")
MK_GLOBAL(u32, "u32", "r")
MK_GLOBAL(float, "f32", "f")
MK_GLOBAL(u64, "u64", "l")
#undef MK_GLOBAL

template <>
MK_PTX u32x2 ld_global<u32x2>(const u32x2* p) {
  u32x2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

template <>
MK_PTX u32x2 ld_global_nc<u32x2>(const u32x2* p) {
  u32x2 v;
  asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

template <>
MK_PTX void st_global<u32x2>(u32x2* p, u32x2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

template <>
MK_PTX u32x4 ld_global<u32x4>(const u32x4* p) {
  u32x4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

template <>
MK_PTX u32x4 ld_global_nc<u32x4>(const u32x4* p) {
  u32x4 v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

template <>
MK_PTX void st_global<u32x4>(u32x4* p, u32x4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Evicted first. For what nobody in the kernel reads: other accesses may pass it.
MK_PTX void st_global_streaming(u32x4* p, u32x4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

#define MK_RELAXED(V, suffix, constraint)                                                                 \
  template <>                                                                                             \
  MK_PTX V ld_relaxed<V>(const V* p) {                                                                    \
    V v;                                                                                                  \
    asm volatile("ld.relaxed.gpu.global." suffix " %0, [%1];" : "=" constraint(v) : "l"(p) : "memory");   \
    return v;                                                                                             \
  }                                                                                                       \
  template <>                                                                                             \
  MK_PTX void st_relaxed<V>(V* p, V v) {                                                                  \
    asm volatile("st.relaxed.gpu.global." suffix " [%0], %1;" ::"l"(p), constraint(v) : "memory");        \
  }
MK_RELAXED(u32, "u32", "r")
MK_RELAXED(u64, "u64", "l")
#undef MK_RELAXED

// .b128 and not .v4.b32: only a single 128-bit access carries its tag and its payload together.
template <>
MK_PTX u32x4 ld_relaxed<u32x4>(const u32x4* p) {
  u32x4 v;
  asm volatile(
      "{\n\t.reg .b128 q;\n\t.reg .b64 lo, hi;\n\t"
      "ld.relaxed.gpu.global.b128 q, [%4];\n\t"
      "mov.b128 {lo, hi}, q;\n\tmov.b64 {%0, %1}, lo;\n\tmov.b64 {%2, %3}, hi;\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
  return v;
}

template <>
MK_PTX void st_relaxed<u32x4>(u32x4* p, u32x4 v) {
  asm volatile(
      "{\n\t.reg .b128 q;\n\t.reg .b64 lo, hi;\n\t"
      "mov.b64 lo, {%1, %2};\n\tmov.b64 hi, {%3, %4};\n\tmov.b128 q, {lo, hi};\n\t"
      "st.relaxed.gpu.global.b128 [%0], q;\n\t}" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// A vector is four operations to the memory model, each of which meets stores of its own word.
MK_PTX u32x4 ld_relaxed_words(const u32x4* p) {
  u32x4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
MK_PTX void st_relaxed_words(u32x4* p, u32x4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

MK_PTX u32 ld_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

MK_PTX void st_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MK_PTX u32 atom_cas(u32* p, u32 expect, u32 value) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expect), "r"(value) : "memory");
  return old;
}

MK_PTX u32 atom_add(u32* p, u32 value) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

#endif

}  // namespace mk::ptx
