// Tensor-core multiply: bf16 operands, fp32 accumulators.
#pragma once

#include "megadsl/base.h"

#if defined(MK_HOST)
#include "host/mma.h"
#endif

namespace mk::ptx {

// C[16, 8] += A[16, 16] * B[16, 8] over the warp. With g = lane / 4 and q = lane % 4, each register holding two
// neighbours (the lower column or row in the lower half):
//   a0: A[g, 2q..], a1: A[g + 8, 2q..], a2: A[g, 2q + 8..], a3: A[g + 8, 2q + 8..]
//   b0: B[2q.., g], b1: B[2q + 8.., g]
//   c[0..1]: C[g, 2q..], c[2..3]: C[g + 8, 2q..]
// The order in which the device adds the 16 products is its own; the host adds them in order of k.
MK_OP void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if defined(MK_HOST)
  host::mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

}  // namespace mk::ptx
