// Readings of an SM's clock and of the timer that all SMs share, back to back; built and run by tools/timers.py.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u32, mk::u64;

// out: [block][count]{clock before, low word of globaltimer, clock behind}
extern "C" __global__ void readings(u32* out, u32 count) {
  u32* mine = out + size_t(ptx::block_id()) * count * 3;
  for (u32 i = 0; i < count; ++i) {
    const u32 before = ptx::clock();
    const u32 time = u32(ptx::globaltimer());
    const u32 behind = ptx::clock();
    mine[3 * i] = before, mine[3 * i + 1] = time, mine[3 * i + 2] = behind;
  }
}
