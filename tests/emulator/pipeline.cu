// A loader warp feeds two consumer warps through a ring of bulk copies; each consumer sums every stage.
// Shape::bug plants a mistake that some schedule must expose.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u32, mk::u64, mk::u32x4;

struct Shape {
  int tiles, stages, bug;
};

constexpr int kNoFullWait = 1;     // consumers do not wait for the copy
constexpr int kNoEmptyWait = 2;    // the loader does not wait for the consumers
constexpr int kSourceReuse = 3;    // the loader overwrites the source while copies are in flight
constexpr int kNoArrive = 4;       // a consumer never lets go of a stage
constexpr u32 kStageBytes = 1024;

MK_DEV bool wait(ptx::smem_ptr<u64> bar, u32 parity, u32 site, u32 tile) {
  while (!ptx::mbar_try_wait(bar, parity)) {
    if (ptx::poll_pause({site, 0, tile, parity, parity ^ 1})) return false;
  }
  return true;
}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const auto ring = ptx::smem_base();
  const auto full = ring.at<u64>(s.stages * static_cast<int>(kStageBytes));
  const auto empty = full + s.stages;
  const u32 warp = ptx::warp_id(), lane = ptx::lane_id();
  if (ptx::thread_id() == 0) {
    for (int i = 0; i < s.stages; ++i) {
      ptx::mbar_init(full + i, 1);
      ptx::mbar_init(empty + i, 2);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  const char* source = b.weights + static_cast<u64>(ptx::block_id()) * static_cast<u32>(s.tiles) * kStageBytes;
  u32 sum = 0;
  for (int t = 0; t < s.tiles; ++t) {
    const int slot = t % s.stages;
    const u32 parity = static_cast<u32>(t / s.stages) & 1;
    const auto stage = ring + slot * static_cast<int>(kStageBytes);
    if (warp == 0) {
      if (lane != 0) continue;
      if (s.bug != kNoEmptyWait && !wait(empty + slot, parity ^ 1, 10, static_cast<u32>(t))) return;
      ptx::mbar_arrive_expect_tx(full + slot, kStageBytes);
      ptx::bulk_load(stage, source + t * static_cast<int>(kStageBytes), kStageBytes, full + slot, ptx::policy_evict_first());
      if (s.bug == kSourceReuse) {
        ptx::st_global(reinterpret_cast<u32*>(const_cast<char*>(source)) + t * static_cast<int>(kStageBytes / 4), 0u);
      }
    } else {
      if (s.bug != kNoFullWait && !wait(full + slot, parity, 20, static_cast<u32>(t))) return;
      const u32x4 v = ptx::ld_shared(stage.at<u32x4>(0) + (lane + (warp - 1) * 32));
      sum += v.x + v.y + v.z + v.w;
      ptx::syncwarp();
      if (lane == 0 && (s.bug != kNoArrive || t != 3 || warp != 1)) ptx::mbar_arrive(empty + slot);
    }
  }
  if (warp > 0) ptx::st_global(reinterpret_cast<u32*>(b.kv) + ptx::block_id() * 64 + ptx::thread_id() - 32, sum);
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
