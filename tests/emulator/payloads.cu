// Exchanges of any bits: two blocks publish and gather what the host asks for, and write out what arrived.
//   bf16 (f32 == 0)  the real Outgoing and gather_units, one token; weights: [groups] units, kv: [block][groups] units
//   f32  (f32 == 1)  pack_f32, poll, value_f32; weights and kv: [vectors] of four words; block 0 writes, block 1 reads
#include "megadsl/exchange.h"

namespace {

namespace ptx = mk::ptx;
using mk::u16, mk::u32, mk::u64, mk::u32x4, mk::smem_ptr;

constexpr u32 kThreads = 64, kUnitSite = 7, kFloatSite = 8;

}

struct Shape {
  mk::i32 wire;      // 0 Tagged, 1 Sentinel, 2 Flag
  mk::i32 f32;
  mk::i32 vectors;   // f32: how many
  mk::i32 sequence;
  mk::ExchangeShape exchange;
};

namespace {

// kv is preset by the host to something that is no answer.
template <class Wire>
MK_DEV void exchange_units(const mk::Context& cx, const mk::Buffers& b, const mk::ExchangeShape& e, u32 sequence) {
  const smem_ptr<char> staged = ptx::smem_base().at<char>(16), arrived = staged + u32(e.vectors) * 16;
  const mk::Share own = own_share(cx, u32(e.groups), 0);
  const u32 thread = ptx::thread_id();
  const u32x4* source = reinterpret_cast<const u32x4*>(b.weights);
  const mk::Outgoing<Wire, 1> going(cx, b, e, sequence, staged, thread, kThreads, 0, mk::own_share(cx, u32(e.groups), u32(e.share_offset)));
  for (u32 i = thread; i < own.end - own.begin; i += kThreads) going.put_unit(i, ptx::ld_global<u32x4>(source + own.begin + i));
  ptx::syncthreads();
  going.send();
  if (Wire::kFlagged) {
    ptx::syncthreads();
    going.raise();
  }
  mk::gather_units<Wire, 1, mk::Poll<2, 1, true>, 1>(
      cx, kUnitSite, e, mk::exchange_round(b, e, sequence), {{{0, u32(e.groups)}}, {{0, cx.blocks.value}}}, thread, kThreads,
      [&](u32, u32 group, u32, u32x4 x) { mk::store_unit<Wire>(arrived.at<char>(group * 16), x); },
      [&](u32, u32 group, u32, u16 bits) { return [=] { mk::store_last(arrived.at<char>(group * 16), bits); }; });
  ptx::syncthreads();
  u32x4* out = reinterpret_cast<u32x4*>(b.kv) + cx.block * u32(e.groups);
  for (u32 i = thread; i < u32(e.groups); i += kThreads) ptx::st_global<u32x4>(out + i, ptx::ld_shared<u32x4>(arrived.at<u32x4>(i * 16)));
}

template <class Wire>
MK_DEV void exchange_floats(const mk::Context& cx, const mk::Buffers& b, const Shape& s, u32 sequence) {
  const mk::Round round = mk::exchange_round(b, s.exchange, sequence);
  const u32x4* source = reinterpret_cast<const u32x4*>(b.weights);
  if (cx.block == 0) {
    for (u32 i = ptx::thread_id(); i < u32(s.vectors); i += kThreads) {
      const u32x4 x = ptx::ld_global<u32x4>(source + i);
      const float v[4] = {ptx::bits_float(x.x), ptx::bits_float(x.y), ptx::bits_float(x.z), ptx::bits_float(x.w)};
      ptx::st_relaxed(round.vectors + i, Wire::pack_f32(v, sequence));
    }
    ptx::syncthreads();
    if (Wire::kFlagged && ptx::thread_id() == 0) ptx::st_release(round.flags, sequence);
    return;
  }
  for (u32 i = ptx::thread_id(); i < u32(s.vectors); i += kThreads) {
    u32x4 x = {0, 0, 0, 0};
    mk::wait(cx, kFloatSite, i, sequence, [&](u32& observed) {
      if (Wire::kFlagged && !mk::flag_covers(s.exchange, ptx::ld_acquire(round.flags), sequence)) return false;
      x = ptx::ld_relaxed(round.vectors + i);
      observed = Wire::tag_f32(x);
      return Wire::ready_f32(x, sequence);
    });
    const auto bits = [](u32 word) { return ptx::float_bits(Wire::value_f32(word)); };
    ptx::st_global<u32x4>(reinterpret_cast<u32x4*>(b.kv) + i, u32x4{bits(x.x), bits(x.y), bits(x.z), bits(x.w)});
  }
}

template <class Wire>
MK_DEV void run(const mk::Context& cx, const mk::Buffers& b, const Shape& s) {
  if (s.f32 != 0) exchange_floats<Wire>(cx, b, s, u32(s.sequence));
  else exchange_units<Wire>(cx, b, s.exchange, u32(s.sequence));
}

}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const mk::Context cx = {b.control, ptx::smem_base().at<u32>(0), ptx::block_id(), mk::Divisor::of(2), 0};
  if (ptx::thread_id() == 0) {
    ptx::st_shared<u32>(cx.abort_word, 0u);
    ptx::st_shared<u64>(cx.deadline(), ~u64(0));
  }
  ptx::syncthreads();
  switch (s.wire) {
    case 0: return run<mk::Tagged>(cx, b, s);
    case 1: return run<mk::Sentinel>(cx, b, s);
    case 2: return run<mk::Flag>(cx, b, s);
  }
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
