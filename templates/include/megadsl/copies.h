// How the bytes of a ring's stage come to shared memory: by what the machine has (machine.py), chosen by a type.
#pragma once
#include "megadsl/wait.h"

namespace mk {

// One lane asks for a whole stage, and the stage's barrier counts the bytes. That lane is the loader.
struct BulkCopies {
  static constexpr u32 kArrivals = 1;        // at a stage's `full`, in each phase
  static constexpr bool kPrefetches = true;  // into L2, in bulk as well

  MK_DEV static bool leads() { return true; }
  MK_DEV static void meet() {}
  MK_DEV static bool any(bool p) { return p; }
  MK_DEV static u32 same(u32 v) { return v; }
  template <class Attempt>
  MK_DEV static bool wait(const Context& cx, u32 site, u32 tile, u32 expected, Attempt attempt) {
    return mk::wait(cx, site, tile, expected, attempt);
  }
  MK_DEV static bool passed(smem_ptr<u64> barrier, u32 parity) { return ptx::mbar_try_wait(barrier, parity); }
  // A stage's bytes: begun, from one place or several, and ended.
  MK_DEV static void begin(u32 bytes, smem_ptr<u64> full) { ptx::mbar_arrive_expect_tx(full, bytes); }
  MK_DEV static void copy(smem_ptr<char> to, const char* source, u32 bytes, smem_ptr<u64> full, u64 policy) {
    ptx::bulk_load(to, source, bytes, full, policy);
  }
  MK_DEV static void end(smem_ptr<u64>) {}
  MK_DEV static void prefetch(const char* source, u32 bytes) { ptx::bulk_prefetch_l2(source, bytes); }
  // The copies are of the asynchronous proxy. What orders barriers and rows before those of other threads:
  MK_DEV static void fence_barriers() { ptx::fence_mbarrier_init(); }
  MK_DEV static void fence_rows() { ptx::fence_proxy_async(); }
};

// All lanes of the loader's warp copy a stage together, 16 bytes each at a time, and each arrives at the stage's barrier when its own
// bytes have landed. The warp goes on as one: its lanes wait together, and what each of them sees for itself they agree about.
struct LaneCopies {
  static constexpr u32 kArrivals = kWarpSize;
  static constexpr bool kPrefetches = false;

  // Which lane writes what all of them read behind meet().
  MK_DEV static bool leads() { return ptx::lane_id() == 0; }
  MK_DEV static void meet() { ptx::syncwarp(); }
  MK_DEV static bool any(bool p) { return ptx::any(p); }
  MK_DEV static u32 same(u32 v) { return ptx::shfl(v, 0); }
  template <class Attempt>
  MK_DEV static bool wait(const Context& cx, u32 site, u32 tile, u32 expected, Attempt attempt) {
    return wait_warp<ptx::kPollsAtOnce>(cx, site, tile, expected, attempt);
  }
  MK_DEV static bool passed(smem_ptr<u64> barrier, u32 parity) { return ptx::mbar_test_wait(barrier, parity); }
  MK_DEV static void begin(u32, smem_ptr<u64>) {}
  MK_DEV static void copy(smem_ptr<char> stage, const char* source, u32 bytes, smem_ptr<u64>, u64 policy) {
    constexpr u32 kRow = kWarpSize * kCopyBytes;
    u32 done = ptx::lane_id() * kCopyBytes;
    // One address for several copies: a warp has few cycles for each.
#pragma unroll 1
    for (u32 end = kAtOnce * kRow; end <= bytes; end += kAtOnce * kRow, done += kAtOnce * kRow) {
      const auto to = stage.template at<char>(int(done));
      const char* const from = source + done;
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) ptx::lane_load(to.template at<char>(int(i * kRow)), from + i * kRow, policy);
    }
#pragma unroll 1
    for (; done < bytes; done += kRow) ptx::lane_load(stage.template at<char>(int(done)), source + done, policy);
  }
  MK_DEV static void end(smem_ptr<u64> full) { ptx::mbar_arrive_loaded(full); }
  // The copies are the lanes' own: what orders other accesses of theirs orders these.
  MK_DEV static void fence_barriers() {}
  MK_DEV static void fence_rows() {}

 private:
  static constexpr u32 kCopyBytes = 16, kAtOnce = 4;
};

// What a wait attempts: whether the phase of an mbarrier is complete. Until then the other parity is what is observed.
template <class Copies>
struct PhasePassed {
  smem_ptr<u64> barrier;
  u32 parity;
  MK_DEV bool operator()(u32& observed) const {
    observed = parity ^ 1;
    return Copies::passed(barrier, parity);
  }
};

// Waits for the phase of an mbarrier to complete.
template <class Copies>
MK_DEV bool wait_barrier(const Context& cx, u32 site, u32 tile, smem_ptr<u64> barrier, u32 parity) {
  return wait(cx, site, tile, parity, PhasePassed<Copies>{barrier, parity});
}

}  // namespace mk
