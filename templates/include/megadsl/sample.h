// The tail of a step: logits to memory, the largest of each token, and the control block for the next launch.
#pragma once
#include "megadsl/linear.h"

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

// Every block publishes its winners as {value, index, 0, sequence}; block 0 gathers them and writes the next tokens.
template <class B>
MK_DEV void choose_tokens(const B& block, u32 site, const ExchangeShape& e, u32 sequence, smem_ptr<u32x2> scratch, smem_ptr<u32x2> winners) {
  constexpr u32 kTokens = B::kTokens;
  const Round round = exchange_round(block.buffers, e, sequence);
  chaos(block.cx, Place::kSignal, site, 0);
  if (block.thread < kTokens) {
    const u32x2 mine = ptx::ld_shared<u32x2>(winners + block.thread);
    ptx::st_relaxed(round.vectors + (block.cx.block * kTokens + block.thread), u32x4{mine.x, mine.y, 0u, sequence});
  }
  trace(block.cx, Event::kWait, site);
  if (block.cx.block != 0) return;
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
    // All logits NaN: no candidate ever won. Token 0 keeps the next launch inside the table.
    ptx::st_global<u32>(block.cx.control->next_ids + block.thread, winner.index == 0x7fffffffu ? 0u : winner.index);
  }
  static_assert(kTokens <= kWarpSize, "one warp has all tokens, for finish_step to hand on");
  if (kTokens > 1 && block.warp() == 0) ptx::syncwarp();
  trace(block.cx, Event::kEnd, site);
}

// Block 0's last act: the control block for the next launch. Every other block has read its inputs long ago, since this
// block has gathered a value that all of them published after reading them. Where one of them has given up, that value may be
// garbage, though every wait of this block was answered.
template <class B>
MK_DEV void finish_step(const B& block, const Step& step, bool has_argmax) {
  if (block.cx.block != 0 || block.thread != 0 || given_up(block.cx)) return;
  chaos(block.cx, Place::kSignal, 0, 0);
  Control* c = block.cx.control;
  const u32 flags = ptx::ld_global<u32>(&c->flags);
  if (ptx::ld_relaxed(&c->abort) != 0) return;
  if (has_argmax && (flags & kFlagAdvance)) {
    ptx::st_global<u32>(&c->kv_len, step.kv_len + step.tokens);
    ptx::st_global<u32>(c->token_ids, ptx::ld_global<u32>(c->next_ids + (step.tokens - 1)));
    ptx::st_global<u32>(c->positions, ptx::ld_global<u32>(c->positions + (step.tokens - 1)) + 1);
    ptx::st_global<u32>(c->ancestors, 1u);
    ptx::st_global<u32>(&c->n_tokens, 1u);
  }
  ptx::st_global<u32>(&c->epoch, step.epoch + 1);
  ptx::st_global<u32>(&c->steps, ptx::ld_global<u32>(&c->steps) + 1);
}

}  // namespace mk
