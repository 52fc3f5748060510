// The tail of a step: logits to memory, the largest of each token, and the control block for the next launch.
#pragma once
#include "megadsl/linear.h"
#include "megadsl/steps.h"

namespace mk {

struct Best {
  float value = -INFINITY;
  u32 index = 0x7fffffffu;
  // The larger value wins, of equal values the smaller index.
  MK_DEV void take(float v, u32 i) {
    if (v > value || (v == value && i < index)) value = v, index = i;
  }
};

// Epilogue of the head: stores a pair of logits and keeps the thread's best. Padding rows do neither.
template <class B>
MK_DEV void take_logits(const B& block, const LinearShape& s, u32 group, u32 pair, u32 token, float even, float odd, Best& best) {
  const u32 row = group * kGroupRows + 2 * pair, rows = u32(s.rows);
  float* logits = block.buffers.logits + size_t(token) * rows;
  if (row < rows) ptx::st_global<float>(logits + row, even), best.take(even, row);
  if (row + 1 < rows) ptx::st_global<float>(logits + row + 1, odd), best.take(odd, row + 1);
}

// Reduces the threads' bests (laid out as in finish_batch) to one per token in `into` {value, index}[token].
template <class B>
MK_DEV void reduce_best(const B& block, smem_ptr<u32x2> scratch, Best best, smem_ptr<u32x2> into) {
  constexpr u32 kItems = 4 * B::kTokens, kAtOnce = B::kThreads / kItems;
#pragma unroll
  for (u32 mask = 1; mask <= 2; mask *= 2) {
    const float v = ptx::shfl_xor(best.value, mask);
    const u32 i = ptx::shfl_xor(best.index, mask);
    best.take(v, i);
  }
  if (block.thread % 4 == 0) ptx::st_shared<u32x2>(scratch + block.thread / 4, u32x2{ptx::float_bits(best.value), best.index});
  block.sync();
  if (block.thread < B::kTokens) {
    Best winner;
#pragma unroll 1
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32x2 v = ptx::ld_shared<u32x2>(scratch + (i * B::kTokens + block.thread));
      winner.take(ptx::bits_float(v.x), v.y);
    }
    ptx::st_shared<u32x2>(into + block.thread, u32x2{ptx::float_bits(winner.value), winner.index});
  }
  block.sync();
}

// The id of a winner. All logits NaN: no candidate ever won. Token 0 keeps the next step inside the table.
MK_DEV u32 winner_id(const Best& winner) { return winner.index == 0x7fffffffu ? 0u : winner.index; }

// Takes all blocks' winners of one token, by one warp, all of whose lanes get the best.
template <class B>
MK_DEV Best take_winner(const B& block, u32 site, const Round& round, u32 token) {
  constexpr u32 kAtOnce = 4;
  const u32 blocks = block.cx.blocks.value;
  const u32x4* from = round.vectors + token;
  Best best;
#pragma unroll 1
  for (u32 before = 0; before < blocks; before += kAtOnce * kWarpSize) {
    const u32 first = before + block.lane();
    u32 pending = 0;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i)
      if (first + i * kWarpSize < blocks) pending |= 1u << i;
    wait_warp<ptx::kPollsAtOnce>(block.cx, site, first, round.sequence, [&](u32& observed) {
      u32x4 v[kAtOnce] = {};
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i)
        if (pending >> i & 1) v[i] = ptx::ld_relaxed(from + (first + i * kWarpSize) * B::kTokens);
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        if (!(pending >> i & 1)) continue;
        observed = v[i].w;
        if (v[i].w != round.sequence) continue;
        best.take(ptx::bits_float(v[i].x), v[i].y);
        pending &= ~(1u << i);
      }
      if (ptx::polls_fewer()) pending &= pending - 1;
      return pending == 0;
    });
  }
#pragma unroll
  for (u32 mask = kWarpSize / 2; mask != 0; mask /= 2) {
    const float v = ptx::shfl_xor(best.value, mask);
    const u32 i = ptx::shfl_xor(best.index, mask);
    best.take(v, i);
  }
  return best;
}

// Between two steps of a launch: the block's first warp takes all blocks' winners of the last new token, so that no block waits for
// another to choose. Whether there is a step to come; `step` is then that one's.
template <class B>
MK_DEV bool take_token(const B& block, u32 site, const Round& round, Step& step, const Steps& steps) {
  Control* control = block.cx.control;
  if (block.warp() == 0) {
    const u32 stop = ptx::ld_global<u32>(control->stop_ids + block.lane() % kMaxStopIds);
    const Best best = take_winner(block, site, round, step.tokens - 1);
    const u32 id = winner_id(best);
    const bool go_on = !ptx::any(stop == id || given_up(block.cx));
    if (block.lane() == 0) {
      steps.decide(id, go_on);
      if (block.cx.block == 0 && !given_up(block.cx)) {
        ptx::st_global<u32>(control->chosen + steps.index(step), id);
        ptx::st_global<u32>(control->next_ids + (step.tokens - 1), id);
      }
    }
  }
  block.meet_all();
  trace(block.cx, Event::kReady, site);
  const bool more = steps.more();
  if (more) step = step_after(step);
  return more;
}

// What the multiplying warps do meanwhile, where a finisher chooses.
template <class B, class S, class Beside>
MK_DEV bool await_token(const B& block, Step& step, const S& steps, Beside beside) {
  if (steps.last(step)) return false;
  beside(step_after(step));
  block.meet();
  const bool more = steps.more();
  if (more) step = step_after(step);
  return more;
}

// Every block publishes its winners as {value, index, 0, sequence}. In a launch's last step block 0 gathers them and writes the next
// tokens; between steps every block takes what it needs. `beside(next step)`: what is done while the winners are on their way.
template <class B, class S, class Beside>
MK_DEV bool choose_tokens(const B& block, u32 site, const ExchangeShape& e, u32 sequence, smem_ptr<u32x2> scratch, smem_ptr<u32x2> winners,
                          Step& step, const S& steps, Beside beside) {
  constexpr u32 kTokens = B::kTokens;
  const Round round = exchange_round(block.buffers, e, sequence);
  chaos(block.cx, Place::kSignal, site, 0);
  if (block.thread < kTokens) {
    const u32x2 mine = ptx::ld_shared<u32x2>(winners + block.thread);
    ptx::st_relaxed(round.vectors + (block.cx.block * kTokens + block.thread), u32x4{mine.x, mine.y, 0u, sequence});
  }
  trace(block.cx, Event::kWait, site);
  if constexpr (S::kSeveral) {
    if (!steps.last(step)) {
      beside(steps.after(step));
      return take_token(block, site, round, step, steps);
    }
  }
  if (block.cx.block != 0) return false;
  // Threads share a token's candidates; a thread's token stays the same.
  constexpr u32 kPerToken = B::kThreads / kTokens;
  const u32 token = block.thread % kTokens, sub = block.thread / kTokens;
  Best best;
#pragma unroll 1
  for (u32 other = sub; sub < kPerToken && other < block.cx.blocks.value; other += kPerToken)
    wait(block.cx, site, other, sequence, [&](u32& observed) {
      const u32x4 v = ptx::ld_relaxed(round.vectors + (other * kTokens + token));
      observed = v.w;
      if (v.w == sequence) best.take(ptx::bits_float(v.x), v.y);
      return v.w == sequence;
    });
  ptx::st_shared<u32x2>(scratch + block.thread, u32x2{ptx::float_bits(best.value), best.index});
  block.sync();
  trace(block.cx, Event::kReady, site);
  if (block.thread < kTokens && !given_up(block.cx)) {
    Best winner;
#pragma unroll 1
    for (u32 i = 0; i < kPerToken; ++i) {
      const u32x2 v = ptx::ld_shared<u32x2>(scratch + (i * kTokens + block.thread));
      winner.take(ptx::bits_float(v.x), v.y);
    }
    const u32 id = winner_id(winner);
    ptx::st_global<u32>(block.cx.control->next_ids + block.thread, id);
    if constexpr (S::kBatch) steps.note(block.cx.control, step, block.thread, id);
    else if (block.thread + 1 == step.tokens) ptx::st_global<u32>(block.cx.control->chosen + steps.index(step), id);
  }
  static_assert(kTokens <= kWarpSize, "one warp has all tokens, for finish_step to hand on");
  if (kTokens > 1 && block.warp() == 0) ptx::syncwarp();
  trace(block.cx, Event::kEnd, site);
  return false;
}

// Block 0's last act: the control block for the next launch. Every other block has read its inputs long ago, since this
// block has gathered a value that all of them published after reading them. Where one of them has given up, that value may be
// garbage, though every wait of this block was answered.
template <class B, class S>
MK_DEV void finish_step(const B& block, const Step& step, const S& steps, bool has_argmax) {
  if (block.cx.block != 0 || block.thread != 0 || given_up(block.cx)) return;
  chaos(block.cx, Place::kSignal, 0, 0);
  Control* c = block.cx.control;
  const u32 made = steps.index(step) + 1, flags = ptx::ld_global<u32>(&c->flags);
  if (ptx::ld_relaxed(&c->abort) != 0) return;
  if (has_argmax && (flags & kFlagAdvance)) {
    if constexpr (S::kBatch) {
      steps.advance(c, step);
    } else {
      ptx::st_global<u32>(&c->kv_len, step.kv_len + step.tokens);
      ptx::st_global<u32>(c->token_ids, ptx::ld_global<u32>(c->next_ids + (step.tokens - 1)));
      ptx::st_global<u32>(c->positions, ptx::ld_global<u32>(c->positions + (steps.first_tokens(step) - 1)) + made);
      ptx::st_global<u32>(c->ancestors, 1u);
      ptx::st_global<u32>(&c->n_tokens, 1u);
    }
  }
  ptx::st_global<u32>(&c->steps_made, made);
  ptx::st_global<u32>(&c->epoch, step.epoch + 1);
  ptx::st_global<u32>(&c->steps, ptx::ld_global<u32>(&c->steps) + 1);
}

}  // namespace mk
