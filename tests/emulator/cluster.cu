// Blocks of a cluster pass vectors round through distributed shared memory: st.async and an mbarrier, two buffers.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u32, mk::u64, mk::u32x2, mk::u32x4;

struct Shape {
  int rounds, one_leaves;
};

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const auto base = ptx::smem_base();
  const auto bar = base.at<u64>(0);  // one per buffer
  const auto data = base.at<char>(64);
  const u32 lane = ptx::lane_id(), rank = ptx::cluster_rank(), size = ptx::cluster_size();
  if (s.one_leaves != 0 && rank == 1) {
    while (!ptx::poll_pause({99, 0, 0, 0, 0})) {
    }
    return;
  }
  if (ptx::thread_id() == 0) {
    ptx::mbar_init(bar, 1);
    ptx::mbar_init(bar + 1, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  const u32 peer = (rank + 1) % size;
  u32 value = ptx::block_id() * 100 + lane;
  for (u32 round = 0; round < static_cast<u32>(s.rounds); ++round) {
    const u32 half = round % 2, bytes = 32 * (16 + 8 + 8 + 4);
    const auto mine = data.at<char>(static_cast<int>(half * 2048));
    const auto theirs = ptx::mapa(mine, peer);
    const auto their_bar = ptx::mapa(bar + static_cast<int>(half), peer);
    const int at = static_cast<int>(lane);
    if (lane == 0) ptx::mbar_arrive_expect_tx(bar + static_cast<int>(half), bytes);
    ptx::st_async(theirs.at<u32x4>(0) + at, {value, 1, 2, 3}, their_bar);
    ptx::st_async(theirs.at<u32x2>(512) + at, {value, 4}, their_bar);
    ptx::st_async(theirs.at<u64>(768) + at, static_cast<u64>(value) << 32, their_bar);
    ptx::st_async(theirs.at<u32>(1024) + at, value, their_bar);
    while (!ptx::mbar_try_wait(bar + static_cast<int>(half), round / 2 & 1)) {
      if (ptx::poll_pause({5, 0, round, 0, 0})) return;
    }
    const u32x4 v = ptx::ld_shared(mine.at<u32x4>(0) + at);
    const u32x2 w = ptx::ld_shared(mine.at<u32x2>(512) + at);
    const u64 x = ptx::ld_shared(mine.at<u64>(768) + at);
    const u32 y = ptx::ld_shared(mine.at<u32>(1024) + at);
    const bool same = v.x == y && w.x == y && static_cast<u32>(x >> 32) == y && v.y + v.z + v.w + w.y == 10;
    value = same ? y + 1 : 0xdead;
    ptx::syncwarp();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  ptx::st_global(reinterpret_cast<u32*>(b.kv) + ptx::block_id() * mk::kWarpSize + lane, value);
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
