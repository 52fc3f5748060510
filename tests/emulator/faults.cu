// What the hardware forbids, one case each; every one must end the launch with a message.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u32, mk::u64, mk::u32x4;

struct Shape {
  int scenario;
};

MK_NOINLINE u32 deep(u32 n) {
  volatile char room[256];  // a stack frame that no optimiser removes
  room[n % 256] = static_cast<char>(n);
  return n == 0 ? static_cast<u32>(room[0]) : deep(n - 1) + static_cast<u32>(room[n % 256]);
}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const auto base = ptx::smem_base();
  const u32 lane = ptx::lane_id();
  const auto bar = base.at<u64>(0);
  switch (s.scenario) {
    case 0: ptx::ld_shared(base.at<u32x4>(8)); break;
    case 1: ptx::st_shared<u32>(base.at<u32>(4096), 1); break;
    case 2: ptx::ld_global(reinterpret_cast<const u32*>(b.weights + 1024)); break;
    case 3: ptx::ld_relaxed(reinterpret_cast<const u64*>(b.weights + 4)); break;
    case 4: lane < 16 ? ptx::syncwarp() : static_cast<void>(ptx::ballot(true)); break;
    case 5: ptx::mbar_test_wait(bar, 0); break;
    case 6:
      ptx::mbar_init(bar, 1), ptx::mbar_arrive_expect_tx(bar, 16), ptx::mbar_arrive(bar);
      break;
    case 7: ptx::mbar_init(bar, 1), ptx::bulk_load(base.at<char>(64), b.weights, 24, bar, 0); break;
    case 8: ptx::bulk_load(base.at<char>(64), b.weights + 1008, 32, bar, 0); break;
    case 9: ptx::bar_sync(1, 1000); break;
    case 10: ptx::bar_sync(1, ptx::warp_id() == 0 ? 32 * 2 : 32 * 3); break;
    case 11:
      if (lane == 31) ptx::st_global(reinterpret_cast<u32*>(b.kv), deep(200));
      break;
    case 12: ptx::mapa(base, 2); break;
    case 13: ptx::bulk_prefetch_l2(b.weights, 8); break;
    case 15: ptx::lane_load(base.at<char>(8), b.weights, 0); break;
    case 16: ptx::lane_load(base.at<char>(64), b.weights, 0); break;
    case 14: ptx::mbar_init(bar, 1), ptx::bulk_load(base.at<char>(64), b.weights, 16, base.at<u64>(512), 0);
      while (!ptx::mbar_test_wait(bar, 0)) ptx::poll_pause({0, 0, 0, 0, 0});
      break;
  }
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
