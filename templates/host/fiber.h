// Fibers: a stack and a place to continue. Switching saves what the compiler cannot: stack and frame pointer and the
// address to resume at; every other register is declared clobbered, so only live ones are spilled.
#pragma once

#include <cstdlib>
#include <sys/mman.h>

#include "megadsl/base.h"

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace mk::host {

using FiberMain = void (*)();

#if defined(__x86_64__)

struct Context {
  void* sp;
  void* fp;
  void* resume;
};

MK_PTX void switch_context(Context& from, const Context& to) {
  Context* f = &from;
  const Context* t = &to;
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%0)\n\t"
      "movq %%rbp, 8(%0)\n\t"
      "movq %%rax, 16(%0)\n\t"
      "movq 0(%1), %%rsp\n\t"
      "movq 8(%1), %%rbp\n\t"
      "jmpq *16(%1)\n"
      "1:\n\t"
      : "+D"(f), "+S"(t)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3",
        "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
}

MK_FN void make_context(Context& c, char* stack, u64 bytes, FiberMain main) {
  // As if main had just been called: 16-byte alignment below a return address, which is null to end backtraces.
  void** top = reinterpret_cast<void**>(reinterpret_cast<u64>(stack + bytes) & ~u64{15}) - 1;
  *top = nullptr;
  c = {top, nullptr, reinterpret_cast<void*>(main)};
}

#elif defined(__aarch64__)

struct Context {
  void* sp;
  void* fp;
  void* resume;
};

// x29 is saved by hand; "hint 36" is the landing pad of indirect jumps.
MK_PTX void switch_context(Context& from, const Context& to) {
  register Context* f asm("x0") = &from;
  register const Context* t asm("x1") = &to;
  asm volatile(
      "adr x2, 1f\n\t"
      "mov x3, sp\n\t"
      "stp x3, x29, [%0]\n\t"
      "str x2, [%0, #16]\n\t"
      "ldp x3, x29, [%1]\n\t"
      "ldr x16, [%1, #16]\n\t"
      "mov sp, x3\n\t"
      "br x16\n"
      "1:\n\t"
      "hint 36\n\t"
      : "+r"(f), "+r"(t)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x18", "x19", "x20",
        "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8",
        "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25",
        "v26", "v27", "v28", "v29", "v30", "v31", "memory", "cc");
}

MK_FN void make_context(Context& c, char* stack, u64 bytes, FiberMain main) {
  c = {reinterpret_cast<void*>(reinterpret_cast<u64>(stack + bytes) & ~u64{15}), nullptr, reinterpret_cast<void*>(main)};
}

#else

struct Context {
  ucontext_t state;
};

MK_FN void switch_context(Context& from, const Context& to) { swapcontext(&from.state, &to.state); }

MK_FN void make_context(Context& c, char* stack, u64 bytes, FiberMain main) {
  getcontext(&c.state);
  c.state.uc_stack.ss_sp = stack;
  c.state.uc_stack.ss_size = bytes;
  c.state.uc_link = nullptr;
  makecontext(&c.state, main, 0);
}

#endif

// One mapping for the stacks of all fibers, kept from launch to launch. The lowest words of each stack are canaries: a
// guard page per fiber would cost a mapping each, and Linux allows 65,530.
class StackPool {
 public:
  static constexpr u64 kStackBytes = 32 * 1024;

  ~StackPool() { release(); }

  bool reserve(u64 fibers) {
    if (fibers <= capacity_) return true;
    release();
    void* p = mmap(nullptr, fibers * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    base_ = static_cast<char*>(p);
    capacity_ = fibers;
    return true;
  }

  // Tops are staggered by fiber: equal offsets in 4 KB pages would all fight for the same sets of the first-level cache.
  void prepare(Context& c, u64 fiber, FiberMain main) {
    u64* words = canaries(fiber);
    for (u32 i = 0; i < kCanaries; ++i) words[i] = kCanary;
    make_context(c, base_ + fiber * kStackBytes, kStackBytes - fiber % 32 * 128, main);
  }

  bool holds(u64 address) const { return address - reinterpret_cast<u64>(base_) < capacity_ * kStackBytes; }

  bool intact(u64 fiber) const {
    const u64* words = canaries(fiber);
    u64 different = 0;
    for (u32 i = 0; i < kCanaries; ++i) different |= words[i] ^ kCanary;
    return different == 0;
  }

 private:
  static constexpr u64 kCanary = 0x9e3779b97f4a7c15ull;
  static constexpr u32 kCanaries = 128;  // a frame that jumps over them all is larger than any of ours

  u64* canaries(u64 fiber) const { return reinterpret_cast<u64*>(base_ + fiber * kStackBytes); }

  void release() {
    if (base_ != nullptr) munmap(base_, capacity_ * kStackBytes);
    base_ = nullptr;
    capacity_ = 0;
  }

  char* base_ = nullptr;
  u64 capacity_ = 0;
};

}  // namespace mk::host
