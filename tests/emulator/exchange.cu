// Every block publishes one tagged vector per lane and round; every block gathers all of them. With a silent block nobody
// gets past the round in which it stops. `raw` polls without the emulator's hook.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u32, mk::u64, mk::u32x4;

struct Shape {
  int rounds, silent_block, silent_round, raw;
};

constexpr u32 kSlots = 4;

MK_DEV bool gather(const u32x4* from, u32 tag, u32 source, bool raw, u32& sum) {
  for (;;) {
    const u32x4 v = ptx::ld_relaxed(from);
    if (v.w == tag) {
      sum += v.x ^ v.y ^ v.z;
      return true;
    }
    if (!raw && ptx::poll_pause({7, tag, source, tag, v.w})) return false;
  }
}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const u32 lane = ptx::lane_id(), block = ptx::block_id(), blocks = ptx::num_blocks();
  u32x4* slots = reinterpret_cast<u32x4*>(b.exchange);
  u32 sum = block;
  for (u32 round = 1; round <= static_cast<u32>(s.rounds); ++round) {
    u32x4* slot = slots + round % kSlots * blocks * mk::kWarpSize;
    const bool silent = block == static_cast<u32>(s.silent_block) && round == static_cast<u32>(s.silent_round);
    if (!silent) ptx::st_relaxed(slot + block * mk::kWarpSize + lane, {sum, block, round, round});
    u32 next = 0;
    for (u32 other = 0; other < blocks; ++other) {
      if (!gather(slot + other * mk::kWarpSize + lane, round, other, s.raw != 0, next)) return;
    }
    sum = next;
  }
  ptx::st_global(reinterpret_cast<u32*>(b.kv) + block * mk::kWarpSize + lane, sum);
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
