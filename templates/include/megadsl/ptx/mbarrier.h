// mbarrier objects: 8 bytes of shared memory that count arrivals and bytes of asynchronous copies.
#pragma once

#include "megadsl/ptx/smem.h"

#if defined(MK_HOST)
#include "host/mbarrier.h"
#endif

namespace mk::ptx {

#if defined(MK_HOST)

MK_OP void mbar_init(smem_ptr<u64> b, u32 arrivals) { host::mbar_init(b.address, arrivals, MK_PC); }
MK_OP void mbar_inval(smem_ptr<u64> b) { host::mbar_inval(b.address); }

MK_OP void mbar_arrive(smem_ptr<u64> b) {
  host::mbar_arrive(b.address, 0, MK_PC);
  host::maybe_preempt();
}

MK_OP void mbar_arrive_expect_tx(smem_ptr<u64> b, u32 bytes) {
  host::mbar_arrive(b.address, bytes, MK_PC);
  host::maybe_preempt();
}

MK_OP bool mbar_try_wait(smem_ptr<u64> b, u32 parity) { return host::mbar_poll(b.address, parity, MK_PC); }
MK_OP bool mbar_test_wait(smem_ptr<u64> b, u32 parity) { return host::mbar_poll(b.address, parity, MK_PC); }

#else

MK_PTX void mbar_init(smem_ptr<u64> b, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b.address), "r"(arrivals) : "memory");
}

MK_PTX void mbar_inval(smem_ptr<u64> b) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(b.address) : "memory"); }

MK_PTX void mbar_arrive(smem_ptr<u64> b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b.address) : "memory");
}

MK_PTX void mbar_arrive_expect_tx(smem_ptr<u64> b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b.address), "r"(bytes) : "memory");
}

// True once the phase of that parity is complete. May suspend the thread for a short, bounded time before it says no.
MK_PTX bool mbar_try_wait(smem_ptr<u64> b, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(b.address), "r"(parity)
      : "memory");
  return done != 0;
}

MK_PTX bool mbar_test_wait(smem_ptr<u64> b, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(b.address), "r"(parity)
      : "memory");
  return done != 0;
}

#endif

}  // namespace mk::ptx
