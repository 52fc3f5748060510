// What a ring does, and nothing else: does a checker of shared-memory races understand mbarriers and bulk copies? Built and run
// by tools/sanitize.py, one kernel a process: the argument is its number. All but the last are race-free.
//
//   0 arrive    warp 0 stores and arrives on an mbarrier, warp 1 waits for it and loads
//   1 copy      warp 0 starts a bulk copy, warp 1 waits for its mbarrier and loads
//   2 refill    as 1; warp 1 then arrives on a second mbarrier, warp 0 waits for that and copies anew into the same bytes
//   3 elect     as 2, but all lanes of warp 1 load and only one arrives, behind __syncwarp
//   4 hint      warp 0 stores a volatile word, which warp 1 polls: relaxed accesses, one word, nothing else is read by it
//   5 teams     eight warps store what a ninth loads, in turns; they meet at a named barrier, each team by instructions of its own
//   6 turns     the same, with the form of the barrier that is for threads of a warp that come one by one
//   7 race      warp 1 loads what warp 0 stores, and nobody waits: must be reported
#include <cstdio>
#include <cstdlib>

#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u32, mk::u64, mk::ptx::smem_ptr;

constexpr u32 kBytes = 128, kRounds = 4, kPolls = 1u << 22;
constexpr u32 kTurns = 64, kAdded = 8 * kTurns * (kTurns - 1) / 2;

struct Stage {
  smem_ptr<u64> full, empty;
  smem_ptr<u32> words;
};

__device__ Stage begin(u32 readers) {
  const smem_ptr<char> smem = ptx::smem_base();
  const Stage stage = {smem.at<u64>(0), smem.at<u64>(8), smem.at<u32>(128)};
  if (ptx::thread_id() == 0) {
    ptx::mbar_init(stage.full, 1);
    ptx::mbar_init(stage.empty, readers);
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  return stage;
}

__device__ void await(smem_ptr<u64> barrier, u32 parity) {
  for (u32 polls = 0; polls < kPolls; ++polls)
    if (ptx::mbar_try_wait(barrier, parity)) return;
}

__device__ void copy(const Stage& stage, const char* from) {
  ptx::mbar_arrive_expect_tx(stage.full, kBytes);
  ptx::bulk_load(stage.words.at<char>(0), from, kBytes, stage.full, ptx::policy_evict_first());
}

__global__ void arrive(const char*, u32* out) {
  const Stage stage = begin(1);
  if (ptx::thread_id() == 0) {
    ptx::st_shared<u32>(stage.words, 7u);
    ptx::mbar_arrive(stage.full);
  }
  if (ptx::thread_id() != 32) return;
  await(stage.full, 0);
  *out = ptx::ld_shared<u32>(stage.words);
}

__global__ void bulk_copy(const char* from, u32* out) {
  const Stage stage = begin(1);
  if (ptx::thread_id() == 0) copy(stage, from);
  if (ptx::thread_id() != 32) return;
  await(stage.full, 0);
  *out = ptx::ld_shared<u32>(stage.words);
}

__global__ void refill(const char* from, u32* out) {
  const Stage stage = begin(1);
  u32 sum = 0;
  for (u32 round = 0; round < kRounds; ++round) {
    if (ptx::thread_id() == 0) {
      if (round != 0) await(stage.empty, (round - 1) & 1);
      copy(stage, from);
    }
    if (ptx::thread_id() == 32) {
      await(stage.full, round & 1);
      sum += ptx::ld_shared<u32>(stage.words);
      ptx::mbar_arrive(stage.empty);
    }
  }
  if (ptx::thread_id() == 32) *out = sum;
}

__global__ void elect(const char* from, u32* out) {
  const Stage stage = begin(1);
  u32 sum = 0;
  for (u32 round = 0; round < kRounds; ++round) {
    if (ptx::thread_id() == 0) {
      if (round != 0) await(stage.empty, (round - 1) & 1);
      copy(stage, from);
    }
    if (ptx::warp_id() == 1) {
      await(stage.full, round & 1);
      sum += ptx::ld_shared<u32>(stage.words + ptx::lane_id());
      ptx::syncwarp();
      if (ptx::lane_id() == 0) ptx::mbar_arrive(stage.empty);
    }
  }
  if (ptx::thread_id() == 32) *out = sum;
}

__global__ void hint(const char*, u32* out) {
  const Stage stage = begin(1);
  if (ptx::thread_id() == 0) ptx::st_shared_volatile(stage.words, 0u);
  ptx::syncthreads();
  if (ptx::thread_id() == 0) ptx::st_shared_volatile(stage.words, 7u);
  if (ptx::thread_id() != 32) return;
  u32 seen = 0;
  for (u32 polls = 0; polls < kPolls && seen == 0; ++polls) seen = ptx::ld_shared_volatile(stage.words);
  *out = seen;
}

// Warps 0 to 7 store, warp 8 adds, in turns, as consumers and their finisher do. They meet at a named barrier before and behind the stores,
// each team by instructions of its own; the first also meets alone. Warp 9, like a loader, takes no part and waits for the end.
template <class Meet>
__device__ void in_turns(Meet meet, u32* out) {
  constexpr u32 kStoring = 8;
  const Stage stage = begin(1);
  u32 sum = 0;
  if (ptx::warp_id() < kStoring) {
#pragma unroll 1
    for (u32 round = 0; round < kTurns; ++round) {
      meet();
      ptx::bar_sync(1, kStoring * 32);
      ptx::st_shared<u32>(stage.words + (round % 2 * kStoring * 32 + ptx::thread_id()), round);
      meet();
    }
  } else if (ptx::warp_id() == kStoring) {
#pragma unroll 1
    for (u32 round = 0; round < kTurns; ++round) {
      meet();
      meet();
      for (u32 warp = 0; warp < kStoring; ++warp) sum += ptx::ld_shared<u32>(stage.words + ((round % 2 * kStoring + warp) * 32 + ptx::lane_id()));
    }
    if (ptx::lane_id() == 0) {
      *out = sum;
      ptx::mbar_arrive(stage.full);
    }
  } else if (ptx::lane_id() == 0) {
    await(stage.full, 0);
  }
}

__global__ void teams(const char*, u32* out) {
  in_turns([] { ptx::bar_sync(2, 288); }, out);
}

__global__ void turns(const char*, u32* out) {
  in_turns([] { ptx::barrier_sync(2, 288); }, out);
}

__global__ void race(const char*, u32* out) {
  const Stage stage = begin(1);
  if (ptx::thread_id() == 0) ptx::st_shared<u32>(stage.words, 7u);
  if (ptx::thread_id() == 32) *out = ptx::ld_shared<u32>(stage.words);
}

int main(int, char** argv) {
  void (*const kernels[])(const char*, u32*) = {arrive, bulk_copy, refill, elect, hint, teams, turns, race};
  const int which = std::atoi(argv[1]);
  char* from = nullptr;
  u32 *out = nullptr, found = 0;
  cudaMalloc(&from, kBytes);
  cudaMalloc(&out, sizeof *out);
  cudaMemset(from, 1, kBytes);
  kernels[which]<<<1, kernels[which] == teams || kernels[which] == turns ? 320 : 64, 4096>>>(from, out);
  const cudaError_t status = cudaMemcpy(&found, out, sizeof found, cudaMemcpyDeviceToHost);
  const u32 word = 0x01010101u, expected[] = {7, word, kRounds * word, kRounds * word, 7, kAdded, kAdded, found};
  std::printf("kernel %d: %s, %s\n", which, cudaGetErrorString(status), found == expected[which] ? "right" : "wrong");
  return status != cudaSuccess || found != expected[which];
}
