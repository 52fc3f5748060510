// Splits of an attention that are added within a cluster of blocks, past the loads in flight (lower/cluster.py).
//
// A KV head's splits are the blocks of a cluster, in the order of their ranks. Each block adds some of the head's feature groups, as many as
// the others, and is sent those of every split by st.async: into a place of its own for each split, with the bytes counted by a barrier of the
// receiver. Distributed shared memory does not queue behind bulk loads, so that this hop takes a fraction of one through L2. A block is sent the next layer's
// parts only after it has published what it made of this layer's, see docs/ptx-notes.md.
#pragma once
#include "megadsl/units.h"

namespace mk {

struct ClusterShape {
  i32 received;        // shared memory: parts of the groups that a block adds, [group][token][split] of kPartVectors vectors
  i32 landed;          // shared memory: the barrier that counts their bytes
  i32 groups;          // of 8 features, that a block adds
  i32 groups_inverse;  // Divisor::inverse of it
};

constexpr u32 kPartVectors = 3;  // of a group of a token: eight fp32 values, then {maximum, sum}

// How parts travel that a cluster adds, in place of a wire.
struct Async : WholeVectors {
  static constexpr bool kAsync = true;
  static constexpr bool kFlagged = false;
};

// Called by all threads of a block. Each block of the cluster makes its barriers ready before any is sent to.
template <class... Barriers>
MK_DEV void enter_cluster(Barriers... landed) {
  if (ptx::thread_id() == 0) {
    (ptx::mbar_init(landed, 1), ...);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
// No block leaves while another may send to it: as those of a launch do that was given up.
MK_DEV void leave_cluster() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// What a block adds of the attention's value: nothing if it has no unit.
MK_DEV Share cluster_share(const Context& cx, const AttentionShape& a, const ClusterShape& s) {
  const u32 units = u32(a.kv_heads) * u32(a.splits), groups = u32(s.groups);
  return {min_u32(cx.block, units) * groups, min_u32(cx.block + 1, units) * groups};
}

// Where the vectors of a row of this block's unit go: vector `i` of the row's eights, and the row's maximum and sum.
struct PartAddress {
  smem_ptr<u32x4> part;  // in the receiver's shared memory, as an address of this block's
  u32 rank;              // of the receiver

  MK_DEV void send(const ClusterShape& s, smem_ptr<char> smem, u32 i, u32x4 x) const {
    ptx::st_async(ptx::mapa(part + i, rank), x, ptx::mapa(smem.template at<u64>(u32(s.landed)), rank));
  }
};

template <class T, u32 kTokens>
MK_DEV PartAddress part_address(smem_ptr<char> smem, const AttentionShape& a, const ClusterShape& s, u32 row, u32 vector) {
  const Divisor groups = {u32(s.groups), u32(s.groups_inverse)};
  const u32 group = row / kTokens * (T::kHeadDim / kGroupRows) + vector / 2, rank = groups.divide(group);
  const u32 item = (group - rank * groups.value) * kTokens + row % kTokens;
  return {smem.template at<u32x4>(u32(s.received) + (item * u32(a.splits) + ptx::cluster_rank()) * (kPartVectors * 16)), rank};
}

// Which of the block's rounds comes next. Nothing is expected any more once a wait was given up: its phase is not over.
struct Landings {
  u32 round = 0;
  bool lost = false;

  // Waits until all splits have sent this block what it adds. All threads of the team call it.
  template <class B>
  MK_DEV void await(const B& block, u32 site, const AttentionShape& a, const ClusterShape& s) {
    const smem_ptr<u64> landed = block.template at<u64>(s.landed);
    if (block.thread == 0 && !lost)
      ptx::mbar_arrive_expect_tx(landed, u32(a.splits) * u32(s.groups) * B::kTokens * (kPartVectors * 16));
    const u32 parity = round & 1;
    if (!wait_warp(block.cx, site, block.cx.block, parity, [&](u32&) { return ptx::mbar_try_wait(landed, parity); })) lost = true;
    ++round;
  }
};

}  // namespace mk
