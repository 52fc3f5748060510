// Small protocols, each right, and with Shape::bug wrong in one place that the race detector must name. Two blocks of two warps.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u16, mk::u32, mk::u64, mk::u32x4;

struct Shape {
  int scenario, bug;
};

MK_DEV bool wait_phase(ptx::smem_ptr<u64> bar, u32 parity, u32 site) {
  ptx::poll_begin(site, 3);
  while (!ptx::mbar_try_wait(bar, parity)) {
    if (ptx::poll_pause({site, 3, 0, parity, parity ^ 1})) return false;
  }
  return true;
}

MK_DEV bool wait_word(const u32* word, u32 value, bool acquire) {
  for (;;) {
    const u32 seen = acquire ? ptx::ld_acquire(word) : ptx::ld_relaxed<u32>(word);
    if (seen == value) return true;
    if (ptx::poll_pause({9, 0, 0, value, seen})) return false;
  }
}

// Warps swap values through shared memory; the bug: without a barrier between.
MK_DEV void swap_warps(const mk::Buffers& b, bool bug) {
  const auto row = ptx::smem_base().at<u32>(0);
  ptx::st_shared(row + ptx::thread_id(), ptx::thread_id());
  if (!bug) ptx::bar_sync(1, 64);
  const u32 other = ptx::ld_shared(row + (ptx::thread_id() ^ 32));
  ptx::st_global(reinterpret_cast<u32*>(b.kv) + ptx::block_id() * 64 + ptx::thread_id(), other);
}

// Lanes swap; the bug: shfl meets, but does not order memory.
MK_DEV void swap_lanes(bool bug) {
  const auto row = ptx::smem_base().at<u32>(0);
  ptx::st_shared(row + ptx::thread_id(), ptx::thread_id());
  if (bug) ptx::shfl_xor(1u, 1);
  else ptx::syncwarp();
  ptx::ld_shared(row + (ptx::thread_id() ^ 1));
}

// Payload and flag, by fences; the bug: the writer's fence reaches its own block only.
MK_DEV void pass_by_fence(const mk::Buffers& b, bool bug) {
  u32* payload = reinterpret_cast<u32*>(b.kv);
  u32* flag = reinterpret_cast<u32*>(b.exchange);
  if (ptx::thread_id() != 0) return;
  if (ptx::block_id() == 0) {
    ptx::st_global<u32>(payload, 7u);
    if (bug) ptx::fence_acq_rel_cta();
    else ptx::fence_acq_rel_gpu();
    ptx::st_relaxed<u32>(flag, 1u);
  } else if (wait_word(flag, 1, false)) {
    ptx::fence_acq_rel_gpu();
    ptx::ld_global<u32>(payload);
  }
}

// Payload of a whole block and a flag; the bug: the flag is relaxed.
MK_DEV void pass_by_release(const mk::Buffers& b, bool bug) {
  u32* payload = reinterpret_cast<u32*>(b.kv);
  u32* flag = reinterpret_cast<u32*>(b.exchange);
  if (ptx::block_id() == 0) {
    ptx::st_global<u32>(payload + ptx::thread_id(), 7u);
    ptx::syncthreads();
    if (ptx::thread_id() != 0) return;
    if (bug) ptx::st_relaxed<u32>(flag, 1u);
    else ptx::st_release(flag, 1u);
  } else if (wait_word(flag, 1, true)) {
    ptx::ld_global<u32>(payload + ptx::thread_id());
  }
}

constexpr int kEarlyFree = 1, kNoLandingWait = 2, kNoExpect = 3, kNoInitFence = 4;

// A ring of one slot, one loader lane, one consumer warp.
MK_DEV void run_ring(const mk::Buffers& b, int bug) {
  const auto slot = ptx::smem_base();
  const auto full = slot.at<u64>(1024), empty = full + 1;
  if (ptx::thread_id() == 0) {
    ptx::mbar_init(full, 1);
    ptx::mbar_init(empty, 1);
    if (bug != kNoInitFence) ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  for (u32 t = 0; t < 4; ++t) {
    if (ptx::thread_id() == 0) {
      if (!wait_phase(empty, (t & 1) ^ 1, 10)) return;
      if (bug == kNoExpect) ptx::mbar_arrive(full);
      else ptx::mbar_arrive_expect_tx(full, 1024);
      ptx::bulk_load(slot, b.weights + t * 1024, 1024, full, ptx::policy_evict_first());
    } else if (ptx::warp_id() == 1) {
      if (bug != kNoLandingWait && !wait_phase(full, t & 1, 11)) return;
      if (bug == kEarlyFree && ptx::lane_id() == 0) ptx::mbar_arrive(empty);
      ptx::ld_shared(slot.at<u32x4>(0) + static_cast<int>(ptx::lane_id()));
      ptx::syncwarp();
      if (bug != kEarlyFree && ptx::lane_id() == 0) ptx::mbar_arrive(empty);
    }
  }
}

constexpr int kNoRoomWait = 3;

// The same with a loader warp whose lanes copy 16 bytes each, of rows that they have just written: no proxy, so no fence.
MK_DEV void run_lane_ring(const mk::Buffers& b, int bug) {
  const auto slot = ptx::smem_base();
  const auto full = slot.at<u64>(1024), empty = full + 1;
  const u32 lane = ptx::lane_id();
  u32x4* const own = reinterpret_cast<u32x4*>(b.kv) + ptx::block_id() * 32 + lane;
  if (ptx::thread_id() == 0) ptx::mbar_init(full, 32), ptx::mbar_init(empty, 1);
  ptx::syncthreads();
  for (u32 t = 0; t < 4; ++t) {
    if (ptx::warp_id() == 0) {
      const bool skips = bug == kNoRoomWait && lane == 9;
      if (!skips && !wait_phase(empty, (t & 1) ^ 1, 14)) return;
      if (t == 0) ptx::st_global<u32x4>(own, {t, t, t, t});
      ptx::lane_load(slot.at<char>(static_cast<int>(lane) * 16), reinterpret_cast<const char*>(own), ptx::policy_evict_first());
      ptx::mbar_arrive_loaded(full);
    } else {
      if (bug != kNoLandingWait && !wait_phase(full, t & 1, 15)) return;
      if (bug == kEarlyFree && lane == 0) ptx::mbar_arrive(empty);
      ptx::ld_shared(slot.at<u32x4>(0) + static_cast<int>(lane ^ 1));
      ptx::syncwarp();
      if (bug != kEarlyFree && lane == 0) ptx::mbar_arrive(empty);
    }
  }
}

// A copy of what the same thread has just written; the bug: no proxy fence between.
MK_DEV void copy_own(const mk::Buffers& b, bool bug) {
  const auto slot = ptx::smem_base();
  const auto full = slot.at<u64>(1024);
  char* own = b.kv + ptx::block_id() * 16;
  if (ptx::thread_id() != 0) return;
  ptx::mbar_init(full, 1);
  ptx::fence_mbarrier_init();
  ptx::st_global<u32>(reinterpret_cast<u32*>(own), 5u);
  if (!bug) ptx::fence_proxy_async();
  ptx::mbar_arrive_expect_tx(full, 16);
  ptx::bulk_load(slot, own, 16, full, ptx::policy_evict_normal());
  wait_phase(full, 0, 12);
}

// Two words, relaxed; the bug: only the one that was written last is polled. kv[0] is what was read of the other.
MK_DEV void exchange_pair(const mk::Buffers& b, bool bug) {
  u32* first = reinterpret_cast<u32*>(b.exchange);
  u32* second = first + 16;
  if (ptx::thread_id() != 0) return;
  if (ptx::block_id() == 0) {
    ptx::st_relaxed<u32>(first, 1u);
    ptx::st_relaxed<u32>(second, 1u);
  } else if (wait_word(second, 1, false)) {
    if (!bug && !wait_word(first, 1, false)) return;
    ptx::st_global<u32>(reinterpret_cast<u32*>(b.kv), ptx::ld_relaxed<u32>(first));
  }
}

// Through plain pointers, as custom device code may; the bug: two blocks write one word.
MK_DEV void plain_pointers(const mk::Buffers& b, bool bug) {
  if (ptx::thread_id() == 0) reinterpret_cast<volatile u32*>(b.kv)[bug ? 0 : ptx::block_id()] = 1;
}

// The bug: half of a 64-bit word is polled.
MK_DEV void mixed_sizes(const mk::Buffers& b, bool bug) {
  u64* word = reinterpret_cast<u64*>(b.exchange);
  if (ptx::thread_id() != 0) return;
  if (ptx::block_id() == 0) ptx::st_relaxed<u64>(word, 1ull);
  else if (bug) ptx::ld_relaxed<u32>(reinterpret_cast<u32*>(word));
  else ptx::ld_relaxed<u64>(word);
}

// Block 1 overwrites what block 0 has read before it said so with a relaxed store; the bug: it does not wait for that.
MK_DEV void write_after_read(const mk::Buffers& b, bool bug) {
  u32* word = reinterpret_cast<u32*>(b.kv);
  u32* flag = reinterpret_cast<u32*>(b.exchange);
  if (ptx::block_id() == 0) {
    ptx::ld_global<u32>(word);
    ptx::syncthreads();
    if (ptx::thread_id() == 0) ptx::st_relaxed<u32>(flag, 1u);
  } else if (ptx::thread_id() == 0 && (bug || wait_word(flag, 1, false))) {
    ptx::st_global<u32>(word, 1u);
  }
}

constexpr int kOneLane = 1, kStalePhase = 2;

// Lanes of warp 1 wait for what lanes of warp 0 have stored, each behind an mbarrier of its own, twice: most in the order of the barriers, some
// the other way round, one with knowledge of its own. The bugs: one lane does not wait for one barrier; in the second round nobody does.
MK_DEV void learn_phases(int bug) {
  constexpr u32 kBars = 6, kRounds = 2;
  const auto row = ptx::smem_base().at<u32>(0);
  const auto bars = ptx::smem_base().at<u64>(1024);
  const u32 lane = ptx::lane_id();
  if (ptx::thread_id() < kBars) ptx::mbar_init(bars + ptx::thread_id(), 1);
  ptx::syncthreads();
  for (u32 round = 0; round < kRounds; ++round) {
    if (ptx::warp_id() == 0) {
      if (lane < kBars) {
        ptx::st_shared(row + lane, round);
        ptx::mbar_arrive(bars + lane);
      }
    } else {
      if (lane == 7) ptx::fence_proxy_async();
      for (u32 i = 0; i < kBars; ++i) {
        const u32 which = lane % 3 == 2 ? kBars - 1 - i : i;
        const bool skips = which == 3 && ((bug == kOneLane && lane == 9) || (bug == kStalePhase && round == 1));
        if (!skips && !wait_phase(bars + which, round, 13)) return;
      }
      ptx::ld_shared(row + lane % kBars);
      ptx::syncwarp();
    }
    ptx::bar_sync(1, 64);
  }
}

constexpr int kNoAnswer = 1, kNoArrivalWait = 2;

// In a cluster of two, block 0 sends two vectors to one place of block 1, the second one once block 1 has said, by a relaxed store, that it has read the
// first. The bugs: it does not wait for that; block 1 does not wait for what it reads.
MK_DEV void send_twice(const mk::Buffers& b, int bug) {
  const auto slot = ptx::smem_base().at<u32x4>(0);
  const auto landed = ptx::smem_base().at<u64>(1024);
  u32* flag = reinterpret_cast<u32*>(b.exchange);
  if (ptx::thread_id() == 0) {
    ptx::mbar_init(landed, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  for (u32 round = 0; round < 2 && ptx::thread_id() == 0; ++round) {
    if (ptx::block_id() == 0) {
      if (round == 1 && bug != kNoAnswer && !wait_word(flag, 1, false)) break;
      ptx::st_async(ptx::mapa(slot, 1), u32x4{round, round, round, round}, ptx::mapa(landed, 1));
    } else {
      ptx::mbar_arrive_expect_tx(landed, 16);
      if (bug != kNoArrivalWait && !wait_phase(landed, round, 14)) break;
      ptx::st_global<u32>(reinterpret_cast<u32*>(b.kv) + round, ptx::ld_shared(slot).x);
      ptx::st_relaxed<u32>(flag, round + 1);
    }
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const bool bug = s.bug != 0;
  switch (s.scenario) {
    case 0: return swap_warps(b, bug);
    case 1: return swap_lanes(bug);
    case 2: return pass_by_fence(b, bug);
    case 3: return pass_by_release(b, bug);
    case 4: return run_ring(b, s.bug);
    case 5: return copy_own(b, bug);
    case 6: return exchange_pair(b, bug);
    case 7: return plain_pointers(b, bug);
    case 8: return mixed_sizes(b, bug);
    case 9: return write_after_read(b, bug);
    case 10: return learn_phases(s.bug);
    case 11: return run_lane_ring(b, s.bug);
    case 12: return send_twice(b, s.bug);
  }
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
