// mbarrier objects in 8 bytes of the arena, with every way of misusing them that the hardware leaves undefined as a fault.
#pragma once

#include "host/memory.h"

namespace mk::host {

// A word of another kind (poison, plain data) has another mark. Field widths are the hardware's limits.
struct MbarWord {
  u64 phase : 1;
  u64 pending : 20;   // arrivals still missing in this phase
  u64 expected : 20;  // arrivals per phase
  u64 tx : 21;        // bytes still missing, biased by kTxBias: completions may come before they are expected
  u64 mark : 2;
};
static_assert(sizeof(MbarWord) == 8, "an mbarrier is 8 bytes");

constexpr u64 kMbarMark = 1;
constexpr long kTxLimit = (1 << 20) - 1;
constexpr long kTxBias = kTxLimit;

MK_FN MbarWord mbar_read(const char* b) {
  MbarWord w;
  std::memcpy(&w, b, sizeof w);
  if (__builtin_expect(w.mark != kMbarMark, 0)) fault("mbarrier used before mbar_init, or overwritten");
  return w;
}

MK_FN bool mbar_phase(const char* b) {
  MbarWord w;
  std::memcpy(&w, b, sizeof w);
  return w.phase != 0;
}

MK_FN void mbar_init(char* b, u32 arrivals, detect::Pc pc) {
  check_shared(b, 8, 8);
  detect::barrier_initialised(b, pc);
  const Change change = detect::change_at(Point::kInit, pc);
  if (change == Change::kHalve && arrivals == 1) --rt.result->changes;  // half of one arrival is none, which PTX forbids: no change
  if (change == Change::kHalve && arrivals > 1) arrivals /= 2;
  if (change == Change::kMore) ++arrivals;
  if (arrivals == 0 || arrivals > kTxLimit) fault("mbarrier initialised with %u arrivals (1 to %ld)", arrivals, kTxLimit);
  const MbarWord w{0, arrivals, arrivals, static_cast<u64>(kTxBias), kMbarMark};
  std::memcpy(b, &w, sizeof w);
}

MK_FN void mbar_inval(char* b) {
  check_shared(b, 8, 8);
  mbar_read(b);
  std::memset(b, 0, 8);
}

// Writes the word back and completes the phase when nothing is missing any more.
MK_FN void mbar_update(char* b, MbarWord w) {
  const bool complete = w.pending == 0 && static_cast<long>(w.tx) == kTxBias;
  if (complete) {
    detect::barrier_completed(b);
    w.phase ^= 1;
    w.pending = w.expected;
  }
  std::memcpy(b, &w, sizeof w);
  if (complete) changed(b, 8);
}

MK_FN u64 mbar_add_tx(const MbarWord& w, long bytes) {
  const long tx = static_cast<long>(w.tx) - kTxBias + bytes;
  if (tx > kTxLimit || tx < -kTxLimit) fault("mbarrier transaction count %ld is out of range", tx);
  return static_cast<u64>(tx + kTxBias);
}

MK_FN MbarWord mbar_take_arrival(const char* b) {
  MbarWord w = mbar_read(b);
  if (w.pending == 0) fault("more arrivals on an mbarrier than the %u of its phase", static_cast<u32>(w.expected));
  w.pending -= 1;
  return w;
}

MK_FN void mbar_arrive_once(char* b, u32 expect_bytes, detect::Pc pc) {
  MbarWord w = mbar_take_arrival(b);
  w.tx = mbar_add_tx(w, expect_bytes);
  detect::barrier_arrived(b, pc);
  mbar_update(b, w);
}

// Of a lane whose loads have landed. It says nothing of what else the lane did before: PTX promises no release.
MK_FN void mbar_arrive_landed(char* b) { mbar_update(b, mbar_take_arrival(b)); }

// One arrival, after expecting that many bytes.
MK_FN void mbar_arrive(char* b, u32 expect_bytes, detect::Pc pc) {
  check_shared(b, 8, 8);
  const Change change = detect::change_at(expect_bytes == 0 ? Point::kArrive : Point::kExpect, pc);
  if (change == Change::kDrop) return;
  if (change == Change::kHalve) expect_bytes /= 2;
  if (change == Change::kMore) expect_bytes += 16;
  if (change == Change::kRelax) expect_bytes = 0;
  if (change == Change::kTwice) mbar_arrive_once(b, 0, pc);
  mbar_arrive_once(b, expect_bytes, pc);
}

MK_FN void mbar_complete_tx(char* b, u32 bytes) {
  MbarWord w = mbar_read(b);
  w.tx = mbar_add_tx(w, -static_cast<long>(bytes));
  mbar_update(b, w);
}

MK_FN bool mbar_poll(char* b, u32 parity, detect::Pc pc) {
  maybe_preempt();
  check_shared(b, 8, 8);
  const Change change = detect::change_at(Point::kPhase, pc);
  if (change == Change::kDrop) return true;
  if (change == Change::kFlip) parity ^= 1;
  const MbarWord w = mbar_read(b);
  if (w.phase != (parity & 1)) {
    detect::barrier_passed(b, pc);
    return true;
  }
  polled_phase(b, w.phase != 0);
  return false;
}

}  // namespace mk::host
