// A stand-in for a generated kernel: the control protocol and one grid-wide wait, nothing to compute. Block 0 gathers the
// epoch from every block; the block whose number + 1 is the first word of the KV arena stays silent. The token after
// `token` at `position` is (5 * token + position) % vocab, and its logit is the weight of `token`.
#include "megadsl/kernel.h"

namespace ptx = mk::ptx;
using mk::u32;

struct Shape {
  int vocab;
};

namespace {

constexpr u32 kGather = 0, kSignal = 1;  // sites
constexpr u32 kRecords = 8;  // of the timeline

MK_DEV bool gather(const mk::Context& cx, const u32* words, u32 epoch) {
  for (u32 other = 0; other < ptx::num_blocks(); ++other) {
    const bool came = mk::wait(cx, kGather, other, epoch, [&](u32& observed) {
      observed = ptx::ld_acquire(words + 4 * other);
      return observed == epoch;
    });
    if (!came) return false;
  }
  return true;
}

MK_DEV void answer(const mk::Buffers& b, const Shape& s, u32 epoch) {
  mk::Control* c = b.control;
  const u32 count = ptx::ld_global<u32>(&c->n_tokens), vocab = u32(s.vocab);
  u32 next = 0;
  for (u32 t = 0; t < count; ++t) {
    const u32 token = ptx::ld_global<u32>(c->token_ids + t);
    next = (5 * token + ptx::ld_global<u32>(c->positions + t)) % vocab;
    const float weight = ptx::from_bf16(ptx::ld_global<mk::u16>(reinterpret_cast<const mk::u16*>(b.weights) + token));
    for (u32 v = 0; v < vocab; ++v) ptx::st_global<float>(b.logits + t * vocab + v, v == next ? weight : 0.0f);
    ptx::st_global<u32>(c->next_ids + t, next);
  }
  ptx::st_global<u32>(c->chosen, next), ptx::st_global<u32>(&c->steps_made, 1u);
  if (ptx::ld_global<u32>(&c->flags) & mk::kFlagAdvance) {
    const u32 rows = ptx::ld_global<u32>(&c->kv_len) + count;
    ptx::st_global<u32>(&c->kv_len, rows), ptx::st_global<u32>(c->positions, rows);
    ptx::st_global<u32>(c->token_ids, next), ptx::st_global<u32>(&c->n_tokens, 1u);
  }
  ptx::st_global<u32>(&c->epoch, epoch + 1);
  ptx::st_global<u32>(&c->steps, ptx::ld_global<u32>(&c->steps) + 1);
}

}  // namespace

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  mk::Context cx = mk::enter(b, ptx::smem_base().at<u32>(0), mk::Divisor::of(ptx::num_blocks()));
  if (!mk::may_run(b)) return;
  const u32 epoch = ptx::ld_global<u32>(&b.control->epoch);
  const u32 silent = ptx::ld_global<u32>(reinterpret_cast<const u32*>(b.kv));
  if (ptx::thread_id() == 0) mk::init_block(cx, 1);
  ptx::syncthreads();
  u32* words = reinterpret_cast<u32*>(b.exchange);
  if (ptx::thread_id() != 0) return;
  mk::trace_enter(cx, b.trace, {0, 1, 0}, kRecords);
  if (silent != cx.block + 1) ptx::st_release(words + 4 * cx.block, epoch);
  mk::trace(cx, mk::Event::kEnd, kSignal);
  mk::trace(cx, mk::Event::kWait, kGather);
  if (cx.block == 0 && gather(cx, words, epoch)) {
    mk::trace(cx, mk::Event::kReady, kGather);
    answer(b, s, epoch);
  }
  mk::trace_leave(cx, epoch);
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
