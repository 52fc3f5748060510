// The kernel's own code, read ahead as data: what an SM runs for the first time then comes from L2, wherever the weights have passed.
//
// Nobody waits for it and no result depends on it. Who has nothing else to do when a launch begins asks for it; all of those at once, so that
// each has a line or a few.
#pragma once
#include "megadsl/wait.h"

namespace mk {

// Which blocks read the code of `bytes` bytes: the first ones, each a share of it or the whole; and of which launches.
struct CodeShape {
  i32 bytes;   // 0: unknown, and nothing is read
  i32 blocks;
  i32 whole;
  i32 every;   // steps; the first launch reads in any case
};

constexpr u32 kCodeLine = 128;  // of L2

// By `threads` threads of each block. `epoch`: of the launch's first step.
MK_DEV void warm_code(const Context& cx, const CodeShape& s, u32 epoch, u32 thread, u32 threads) {
  if (cx.block >= u32(s.blocks) || (epoch - 1) % u32(s.every) != 0) return;
  const u32 lines = ceil_div(u32(s.bytes), kCodeLine), sharers = s.whole != 0 ? 1 : u32(s.blocks), sharer = s.whole != 0 ? 0 : cx.block;
#pragma unroll 1
  for (u32 line = sharer * threads + thread; line < lines; line += sharers * threads) ptx::prefetch_code(ptx::code_begin() + line * kCodeLine);
}

}  // namespace mk
