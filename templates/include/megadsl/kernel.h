// Everything a generated kernel uses, and how a block enters and leaves it.
#pragma once
#include "megadsl/batch.h"
#include "megadsl/bias.h"
#include "megadsl/code.h"
#include "megadsl/custom.h"
#include "megadsl/direct.h"
#include "megadsl/embed.h"
#include "megadsl/few_rows.h"
#include "megadsl/finish.h"
#include "megadsl/halves.h"
#include "megadsl/head_maps.h"
#include "megadsl/heads.h"
#include "megadsl/merge.h"
#include "megadsl/parts.h"
#include "megadsl/prologue.h"
#include "megadsl/rope.h"
#include "megadsl/rows.h"
#include "megadsl/sample.h"
#include "megadsl/sample_batch.h"
#include "megadsl/tape.h"
#include "megadsl/wide.h"

namespace mk {

// One ring, as data: byte offsets in shared memory (tape: its loader's entries) and the bytes that may be in flight, around meetings too.
struct RingShape {
  i32 stages;
  i32 barriers;
  i32 tape;
  i32 window;
  i32 meeting_window;
};

// What belongs to the launch rather than to an op.
struct StepShape {
  i32 blocks;
  i32 blocks_inverse;  // Divisor::inverse of it
  i32 layers;
  i32 angles;      // shared memory: this launch's rotary angles
  i32 angle_rows;  // rows of the table in memory
  i32 abort_word;  // shared memory
  i32 gates;       // shared memory: one word per op whose loads wait for the op to begin
  i32 meeting;     // shared memory: not 0 while the consumers are about to meet other blocks
  i32 records;     // room of a role for its timeline
  i32 progress;    // shared memory: see Steps; not used where a launch makes one step
};

// Rows of a linear that are rotated: [begin, end).
struct RopeShape {
  i32 begin;
  i32 end;
};

// Loads that must not run ahead wait here: the consumers open an op's gate for a layer when they reach it.
MK_DEV void open_gate(smem_ptr<u32> gate, u32 thread, u32 before) {
  if (thread == 0) ptx::st_shared_release(gate, before + 1);
}
// False when an earlier launch left an error: queued replays then return at once, whatever they were to do.
MK_DEV bool may_run(const Buffers& buffers) { return ptx::ld_relaxed(&buffers.control->error) == kErrorNone; }

// Called by every thread. One of them then sets up shared memory with init_block(), and the whole block meets.
MK_DEV Context enter(const Buffers& buffers, smem_ptr<u32> abort_word, Divisor blocks) {
  Context cx = {buffers.control, abort_word, ptx::block_id(), blocks, 0};
  trace_begin(cx);
  chaos_enter(cx);
  return cx;
}

// `steps`: of the launch, each has the time of one.
MK_DEV void init_block(const Context& cx, u32 steps) {
  ptx::st_shared<u32>(cx.abort_word, 0u);
  ptx::st_shared<u64>(cx.deadline(), ptx::globaltimer() + u64(ptx::ld_global<u32>(&cx.control->timeout_us)) * 1000 * steps);
}

MK_DEV Step read_step(const Buffers& buffers, u32 max_tokens) {
  const Control* c = buffers.control;
  return {ptx::ld_global<u32>(&c->epoch), ptx::ld_global<u32>(&c->kv_len), min_u32(ptx::ld_global<u32>(&c->n_tokens), max_tokens)};
}

// Where a launch is a part of a step: the launch before has ended from here on. Before, a role may read weights alone. After an error in an
// earlier launch the block's waits fall through.
MK_DEV Step join_launch(const Context& cx, const Buffers& buffers, u32 max_tokens) {
  ptx::wait_dependencies();
  if (!may_run(buffers)) ptx::st_shared_volatile(cx.abort_word, 1u);
  return read_step(buffers, max_tokens);
}

// What the consumers of such a launch have read behind their join, for their block's loaders (StepShape::progress): in the last launch of
// a step a loader that reads the control block by itself may come too late.
struct HandedStep {
  smem_ptr<u32> words;  // of Step, then 1 when they are there

  // By one thread, before the whole block meets.
  MK_DEV void init() const { ptx::st_shared<u32>(words + 3, 0u); }
  template <class B>
  MK_DEV void give(const B& block, const Step& step) const {
    if (block.thread != 0) return;
    ptx::st_shared<u32>(words, step.epoch);
    ptx::st_shared<u32>(words + 1, step.kv_len);
    ptx::st_shared<u32>(words + 2, step.tokens);
    ptx::st_shared_release(words + 3, 1u);
  }
  // A loader that gives up finds no cached rows.
  template <class Copies>
  MK_DEV Step take(const Context& cx, u32 site) const {
    ptx::wait_dependencies();  // for what the loader copies
    const bool given = Copies::wait(cx, site, 0, 1, [&](u32& observed) {
      observed = ptx::ld_shared_acquire(words + 3);
      return observed == 1;
    });
    if (!given) return {};
    return {ptx::ld_shared<u32>(words), ptx::ld_shared<u32>(words + 1), ptx::ld_shared<u32>(words + 2)};
  }
};

}  // namespace mk
