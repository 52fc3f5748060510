// Between two steps of a launch whose tokens are those of a batch: each sequence goes on with the token that it has chosen.
#pragma once
#include "megadsl/sample.h"
#include "megadsl/sequences.h"

namespace mk {

// As take_token of one sequence, a warp for each that has new tokens. The first warp has the last of them: whoever publishes its winner
// has released its block's rows (release_rows), and this warp acquires them (acquire_rows).
template <class B>
MK_DEV bool take_token(const B& block, u32 site, const Round& round, Step& step, const BatchSteps& steps) {
  static_assert(!B::kFinishes, "all warps take tokens");
  Control* control = block.cx.control;
  const u32 count = steps.sequences.active(), stop = ptx::ld_global<u32>(control->stop_ids + block.lane() % kMaxStopIds);
  steps.sequences.for_each_active(steps.index(step), [&](u32 sequence, u32 last, u32 active) {
    if ((count - 1 - active) % B::kWarps != block.warp()) return;
    const u32 id = winner_id(take_winner(block, site, round, last));
    const bool stops = ptx::any(stop == id || given_up(block.cx));
    if (block.lane() != 0) return;
    ptx::st_shared<u32>(steps.sequences.words + (Sequences::kNext + active), id | (stops ? Sequences::kStops : 0u));
    if (block.cx.block == 0 && !given_up(block.cx)) {
      ptx::st_global<u32>(batch_of(control)->chosen + steps.index(step) * kMaxSequences + sequence, id);
      ptx::st_global<u32>(control->next_ids + last, id);
    }
  });
  block.meet_all();
  trace(block.cx, Event::kReady, site);
  const bool more = steps.more();
  if (more) step = steps.after(step);
  return more;
}

}  // namespace mk
