// The consumer warps of a block as one unit: their threads, their barrier, their shared-memory areas.
#pragma once
#include "megadsl/exchange.h"
#include "megadsl/math.h"
#include "megadsl/ring.h"

namespace mk {

// A step's run-time inputs. Those of a launch's first are read once: after the first exchange, block 0 may already be writing the next
// launch's. Those of the others follow from them.
struct Step {
  u32 epoch;
  u32 kv_len;
  u32 tokens;
};

// Shared-memory areas of the consumer role, as byte offsets from the start of dynamic shared memory.
struct SmemShape {
  i32 activations;  // the current op's input, [panel][token][32] bf16
  i32 second;       // a second gathered operand of a prologue
  i32 partials;     // per warp fp32 partial sums, two batches
  i32 staged;       // results on their way out, as units
  i32 kept;         // own rows of an epilogue's other operand, as units
  i32 scalars;      // row reductions
  i32 meeting;      // StepShape::meeting
  i32 sums;         // products with some chunks of the columns, see ChunkSums
};

// How the teams of a block meet. compute-sanitizer wants all threads to come to a barrier by one instruction, unless it is of the form for
// threads of a warp that come one by one (tools/barriers.cu, `teams` and `turns`): a build with MK_SANITIZE has that.
template <u32 kBarrier, u32 kThreads>
MK_DEV void meet_teams() {
#if defined(MK_SANITIZE)
  ptx::barrier_sync(kBarrier, kThreads);
#else
  ptx::bar_sync(kBarrier, kThreads);
#endif
}

// Where the word of a meeting lies in shared memory: the low bits of what Shape has for it. Those above say how much may be in flight until
// then, where ops have windows of their own (OwnWindows).
constexpr u32 kMeetingPlace = 18;

// The areas of an op that tells another meeting than the last one told.
MK_DEV SmemShape with_meeting(SmemShape smem, i32 meeting) {
  smem.meeting = meeting;
  return smem;
}

// kFinishes: a further warp, Finisher, does what comes behind the partial sums. kOwnWindows: some op has a window of its own.
template <u32 kTokens_, u32 kWarps_, u32 kFirstWarp_, bool kFinishes_ = false, bool kOwnWindows = false>
struct Block {
  static constexpr bool kFinishes = kFinishes_;
  static constexpr u32 kTokens = kTokens_;
  static constexpr u32 kWarps = kWarps_;
  static constexpr u32 kThreads = kWarps * 32;
  static constexpr u32 kBarrier = 1;  // named barrier 0 belongs to the whole block
  static constexpr u32 kMeeting = 2;

  const Context& cx;
  const Buffers& buffers;
  smem_ptr<char> smem;
  u32 thread;

  MK_DEV Block(const Context& context, const Buffers& b)
      : cx(context), buffers(b), smem(ptx::smem_base()), thread(ptx::thread_id() - kFirstWarp_ * 32) {}

  MK_DEV u32 warp() const { return thread / 32; }
  MK_DEV u32 lane() const { return thread % 32; }

  // Every consumer warp arrives, also after the launch was given up: waits then fall through, so partners always come.
  MK_DEV void sync() const {
    chaos(cx, Place::kBarrier, 0, 0);
    ptx::bar_sync(kBarrier, kThreads);
  }
  // All consumer warps, of one team or two.
  MK_DEV void meet_all() const {
    if (kFinishes) {
      meet();
    } else {
      sync();
    }
  }
  // These warps and the finisher.
  MK_DEV void meet() const {
    if (!kFinishes) return;
    chaos(cx, Place::kBarrier, 0, 0);
    meet_teams<kMeeting, kThreads + kWarpSize>();
  }
  // And for about `pause` ns more.
  MK_DEV void meet_paused(u32 pause) const {
    meet();
    if (pause != 0) ptx::nanosleep(pause);
  }

  // Tells the loaders that the block is about to meet others, or that it has met them.
  MK_DEV void meeting(i32 word, bool ahead) const {
    if constexpr (kOwnWindows) {
      if (thread == 0) ptx::st_shared_hint(at<u32>(word & ((1 << kMeetingPlace) - 1)), ahead ? u32(word) >> kMeetingPlace : 0u);
      return;
    }
    if (thread == 0) ptx::st_shared_hint(at<u32>(word), ahead ? 1u : 0u);
  }

  template <class T>
  MK_DEV smem_ptr<T> at(i32 offset) const { return smem.template at<T>(u32(offset)); }
};

// Begins an op: what the compiler could derive from the thread's and block's numbers is derived anew in each op. Kept over
// the whole layer loop instead, as invariants, those values would cost more registers than there are.
template <class B>
MK_DEV void begin_op(Context& cx, B& block) {
  cx.block = ptx::opaque(cx.block);
  block.thread = ptx::opaque(block.thread);
  chaos_op(cx);
}

// What a block's threads stage and then publish. kSolo: its first warp, or its finisher, has staged everything and publishes alone, so that no
// barrier of the block stands between the last result and its way out.
// kVia: words have left already, and what is left to do is to empty the slot for a later round.
template <class Wire, bool kSolo, class B, Via kVia = Via::kStaged>
struct Publication : Outgoing<Wire, B::kTokens, kVia> {
  static_assert(kVia == Via::kStaged || kSolo, "of results that one warp has");

  MK_DEV Publication(const B& block, const ExchangeShape& e, u32 sequence, smem_ptr<char> staged, u32 site)
      : Publication(block, e, sequence, staged, site, own_share(block.cx, u32(e.groups), u32(e.share_offset))) {}
  // Of the feature groups `own`, rather than of an even share of all blocks.
  MK_DEV Publication(const B& block, const ExchangeShape& e, u32 sequence, smem_ptr<char> staged, u32 site, Share own)
      : Outgoing<Wire, B::kTokens, kVia>(block.cx, block.buffers, e, sequence, staged, block.thread, kSolo ? kWarpSize : B::kThreads, site, own) {}

  MK_DEV void publish(const B& block) const {
    const bool lost = lost_signal(this->site);
    if (kSolo) {
      if (block.warp() == 0) {
        if (kVia != Via::kWords) ptx::syncwarp();
        if (!lost) this->send();
        if (Wire::kFlagged) {
          ptx::syncwarp();
          if (!lost) this->raise();
        }
        trace(block.cx, Event::kEnd, this->site);
      }
      // Now others may write where the results came from. Where they could not do so before the block meets anyway, the barrier still
      // pays (docs/performance.md): the other warps would poll beside the one that publishes.
      if (B::kThreads > kWarpSize) block.sync();  // a finisher meets the block before it stages anew
      return;
    }
    if (!lost) this->send();
    if (Wire::kFlagged) {
      block.sync();
      if (!lost) this->raise();
    }
    trace(block.cx, Event::kEnd, this->site);
  }
};

// Keeps this block's share of a value beside publishing it: a later op of the same share adds to it without asking anybody.
template <class B>
MK_DEV void keep(const B& block, const ExchangeShape& e, smem_ptr<char> staged, smem_ptr<char> kept) {
  const Share own = own_share(block.cx, u32(e.groups), u32(e.share_offset));
#pragma unroll 1
  for (u32 i = block.thread; i < (own.end - own.begin) * B::kTokens; i += B::kThreads)
    ptx::st_shared<u32x4>(kept.template at<u32x4>(i * 16), ptx::ld_shared<u32x4>(staged.template at<u32x4>(i * 16)));
}

// Byte offset of an element in staged or kept units: the group counts from the block's first.
template <u32 kTokens>
MK_DEV u32 unit_offset(u32 group, u32 token, u32 element) {
  return (group * kTokens + token) * 16 + element * 2;
}

}  // namespace mk
