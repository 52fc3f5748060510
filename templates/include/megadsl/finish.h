// A warp of a block that finishes what the others multiply (lower/finish.py), and what it does of a linear.
#pragma once
#include "megadsl/linear.h"

namespace mk {

// The warp that finishes what a block's other consumer warps have multiplied: it adds their partial sums, and publishes. They go on to the
// next op meanwhile, as far as they can before its input is there. A team of one warp, for whatever teams do.
template <class Multiplying>
struct Finisher {
  static constexpr u32 kTokens = Multiplying::kTokens;
  static constexpr u32 kWarps = Multiplying::kWarps;  // that leave partial sums
  static constexpr u32 kThreads = kWarpSize;

  const Context& cx;
  const Buffers& buffers;
  smem_ptr<char> smem;
  u32 thread;

  MK_DEV Finisher(const Context& context, const Buffers& b) : cx(context), buffers(b), smem(ptx::smem_base()), thread(ptx::lane_id()) {}

  MK_DEV u32 warp() const { return 0; }
  MK_DEV u32 lane() const { return thread; }
  MK_DEV void sync() const { ptx::syncwarp(); }
  MK_DEV void meet_all() const { meet(); }
  MK_DEV void meet() const {
    chaos(cx, Place::kBarrier, 0, 0);
    meet_teams<Multiplying::kMeeting, Multiplying::kThreads + kWarpSize>();
  }

  template <class T>
  MK_DEV smem_ptr<T> at(i32 offset) const { return smem.template at<T>(u32(offset)); }
};

// What the finisher does while the others are in run_tiles or multiply_direct: it meets them before they bring an input, and behind each batch,
// whose sums it hands to `finish` as run_tiles does. kMet: it has met them before the first input.
template <u32 kBatch, class G, bool kMet, class B, class Finish>
MK_DEV void finish_tiles(const B& block, const LinearShape& s, const SmemShape& smem, Finish finish) {
  const RowGroups own = own_groups(block.cx, s);
  u32 turn = 0;
  bool met = kMet;
  for_each_part(s, G::kWays, own, [&](u32 part, RowGroups groups) {
    for_each_pass(G::kGroups, G::kChunks, groups, [&](u32 begin, u32 end, u32 chunk) {
      if (!met) block.meet();
      met = false;
      for_each_pass(kBatch, 1, RowGroups{begin, end}, [&](u32 first, u32 last, u32) {
        block.meet();
        const ChunkSums chunks = {block.template at<float>(smem.sums) + (first - begin) * B::kTokens * kGroupRows, chunk == 0, chunk + 1 == G::kChunks};
        finish(partials_of<kBatch>(block, smem, turn), part * u32(s.groups) + first - own.begin, last - first, chunks);
        turn ^= 1;
      });
    });
  });
}

// The finisher's side of run_matrix and run_direct; `factor` as RowScale's.
template <u32 kBatch, class G, bool kMet = false, class B, class Factor, class Epilogue>
MK_DEV void finish_matrix(const B& block, const LinearShape& s, const SmemShape& smem, Factor factor, Epilogue epilogue) {
  const u32 begin = own_groups(block.cx, s).begin;
  float scale = 1.0f;
  finish_tiles<kBatch, G, kMet>(block, s, smem, [&](smem_ptr<float> partials, u32 first, u32 count, ChunkSums chunks) {
    finish_groups<kBatch, G>(block, partials, begin, first, count, chunks, factor, scale, epilogue);
  });
}

}  // namespace mk
