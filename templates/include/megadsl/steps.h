// Several decode steps in one launch: the number is a word of the control block, so that a captured graph takes it as it stands.
//
// Every block takes the winner of a step's last new token itself (sample.h) and goes on with what follows from it: epoch + 1,
// kv_len + tokens, one token. Loaders go on streaming weights meanwhile. Cached rows alone must wait, since the step before appended
// some of them, perhaps in another block and in any case through another proxy:
//   release_rows   one thread of each block, early in the head: behind it, its block's rows are there for copies that are
//                  ordered behind the winner that this thread publishes
//   acquire_rows   the warp that has taken all blocks' winners: behind it, all blocks' rows are there for this block
//   await_rows     the loader: no cached row before that
// A fence waits for the copies in flight (docs/ptx-notes.md): here nothing that the token waits for stands behind one.
#pragma once
#include "megadsl/block.h"

namespace mk {

MK_DEV Step step_after(const Step& step) { return {step.epoch + 1, step.kv_len + step.tokens, 1}; }

// A launch's steps, in shared memory (StepShape::progress). The first three words and the last stay as they are.
struct Steps {
  static constexpr bool kSeveral = true;
  static constexpr bool kBatch = false;  // tokens are those of several sequences
  smem_ptr<u32> words;

  MK_DEV u32 first_epoch() const { return ptx::ld_shared<u32>(words); }
  MK_DEV u32 count() const { return ptx::ld_shared<u32>(words + 1); }
  // New tokens of the first step: the others have one.
  MK_DEV u32 first_tokens(const Step&) const { return ptx::ld_shared<u32>(words + 2); }
  MK_DEV u32 token(u32) const { return ptx::ld_shared<u32>(words + 3); }
  MK_DEV bool more() const { return ptx::ld_shared<u32>(words + 4) != 0; }
  // The epoch whose cached rows loaders may copy.
  MK_DEV smem_ptr<u32> readable() const { return words + 5; }
  // Position of the first step's last new token. Not asked for anew between steps: block 0 may be writing the next launch's by then.
  MK_DEV u32 position(u32) const { return ptx::ld_shared<u32>(words + 6); }

  MK_DEV u32 index(const Step& step) const { return step.epoch - first_epoch(); }
  MK_DEV bool last(const Step& step) const { return index(step) + 1 == count(); }
  MK_DEV Step after(const Step& step) const { return step_after(step); }

  // By one thread, before the whole block meets.
  MK_DEV void init(const Step& step, u32 asked, u32 position) const {
    ptx::st_shared<u32>(words + 6, position);
    ptx::st_shared<u32>(words, step.epoch);
    ptx::st_shared<u32>(words + 1, asked);
    ptx::st_shared<u32>(words + 2, step.tokens);
    ptx::st_shared<u32>(readable(), step.epoch);
  }
  MK_DEV void decide(u32 next, bool go_on) const {
    ptx::st_shared<u32>(words + 3, next);
    ptx::st_shared<u32>(words + 4, go_on ? 1u : 0u);
  }
};

// Kernels that make one step a launch.
struct OneStep {
  static constexpr bool kSeveral = false;
  static constexpr bool kBatch = false;
  MK_DEV u32 first_tokens(const Step& step) const { return step.tokens; }
  MK_DEV u32 token(u32) const { return 0; }
  MK_DEV u32 position(u32) const { return 0; }
  MK_DEV u32 index(const Step&) const { return 0; }
  MK_DEV bool last(const Step&) const { return true; }
  MK_DEV Step after(const Step& step) const { return step; }
};

MK_DEV u32 steps_asked(const Control* control) { return min_u32(max_u32(ptx::ld_global<u32>(&control->num_steps), 1), kMaxSteps); }

// Gates count through all steps: an op of layer l has its own at gates_before() + l + 1 when its turn comes. `rounds`: more than there
// are layers, or 0 where a launch is an op.
MK_DEV u32 gates_before(const Step& step, u32 rounds) { return step.epoch * rounds; }

// Behind a barrier of the block that comes after its last row is appended; by the thread that will publish the winner.
template <class Copies, class B>
MK_DEV void release_rows(const B& block, const Step& step, const Steps& steps) {
  if (block.thread + 1 != step.tokens || steps.last(step)) return;
  Copies::fence_rows();
  ptx::fence_acq_rel_gpu();
}

// By the warp that has taken the winners.
template <class B>
MK_DEV void acquire_rows(const B& block, const Step& step, const Steps& steps) {
  if (block.warp() != 0 || steps.index(step) == 0) return;
  ptx::fence_acq_rel_gpu();
  ptx::syncwarp();
  if (block.lane() == 0) ptx::st_shared_release(steps.readable(), step.epoch);
}

// The consumers' last act. Where they end before the steps that were asked for, loaders wait for room that nobody will make: their
// waits fall through, and they drain what they have issued.
template <class B, class S>
MK_DEV void leave_steps(const B& block, const Step& step, const S& steps) {
  if (!steps.last(step) && block.thread == 0) ptx::st_shared_volatile(block.cx.abort_word, 1u);
}

}  // namespace mk
