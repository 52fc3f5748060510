// One small case per wrapper family, chosen by Shape::scenario. Inputs in weights, results as words in kv.
#include "megadsl/ptx.h"

namespace ptx = mk::ptx;
using mk::u16, mk::u32, mk::u64, mk::u32x2, mk::u32x4;

struct Shape {
  int scenario;
};

// Registers of the fragments by lane: a0..a3, b0, b1, then c[0..3].
MK_DEV void multiply(const mk::Buffers& b) {
  const u32 lane = ptx::lane_id();
  const u32* in = reinterpret_cast<const u32*>(b.weights) + lane * 10;
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = ptx::bits_float(ptx::ld_global_nc(in + 6 + i));
  ptx::mma_m16n8k16(c, ptx::ld_global_nc(in), ptx::ld_global_nc(in + 1), ptx::ld_global_nc(in + 2), ptx::ld_global_nc(in + 3),
                    ptx::ld_global_nc(in + 4), ptx::ld_global_nc(in + 5));
  for (int i = 0; i < 4; ++i) ptx::st_global(reinterpret_cast<float*>(b.kv) + lane * 4 + i, c[i]);
}

MK_DEV void collectives(u32* out) {
  const u32 lane = ptx::lane_id();
  const float f = static_cast<float>(lane) + 0.5f;
  u32* mine = out + ptx::thread_id() * 8;
  ptx::st_global(mine + 0, ptx::shfl_xor(lane * 3, 5));
  ptx::st_global(mine + 1, ptx::shfl(lane * 3, 7));
  ptx::st_global(mine + 2, ptx::float_bits(ptx::shfl_xor(f, 16)));
  ptx::st_global(mine + 3, ptx::float_bits(ptx::shfl(f, 31)));
  ptx::st_global(mine + 4, ptx::ballot(lane % 3 == 0));
  ptx::st_global(mine + 5, static_cast<u32>(ptx::any(lane == 9)) | static_cast<u32>(ptx::any(lane == 99)) << 1);
  float sum = f;
  for (u32 mask = 16; mask != 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);
  ptx::st_global(mine + 6, ptx::float_bits(sum));
  ptx::syncwarp();
  ptx::st_global(mine + 7, ptx::warp_id() << 16 | lane);
}

template <class V>
MK_DEV void round_trip(const mk::Buffers& b, u32 offset, bool nc) {
  const u32 thread = ptx::thread_id();
  const auto shared = ptx::smem_base().at<V>(0);
  const V* from = reinterpret_cast<const V*>(b.weights + offset);
  ptx::st_shared<V>(shared + thread, nc ? ptx::ld_global_nc<V>(from + thread) : ptx::ld_global<V>(from + thread));
  ptx::syncthreads();
  ptx::st_global<V>(reinterpret_cast<V*>(b.kv + offset) + thread, ptx::ld_shared<V>(shared + (thread ^ 1)));
  ptx::syncthreads();
}

template <class V>
MK_DEV void relaxed_trip(const mk::Buffers& b, u32 offset) {
  const u32 thread = ptx::thread_id();
  ptx::st_relaxed<V>(reinterpret_cast<V*>(b.kv + offset) + thread, ptx::ld_relaxed<V>(reinterpret_cast<const V*>(b.weights + offset) + thread));
}

MK_DEV void memory(const mk::Buffers& b) {
  round_trip<u16>(b, 0, false);
  round_trip<u32>(b, 1024, true);
  round_trip<float>(b, 2048, false);
  round_trip<u64>(b, 3072, true);
  round_trip<u32x2>(b, 4096, false);
  round_trip<u32x4>(b, 5120, true);
  relaxed_trip<u32>(b, 6144);
  relaxed_trip<u64>(b, 7168);
  relaxed_trip<u32x4>(b, 8192);
  if (ptx::thread_id() == 0) {
    const auto word = ptx::smem_base().at<u32>(16);
    ptx::st_shared_volatile(word, ptx::ld_acquire(reinterpret_cast<const u32*>(b.weights + 9216)));
    ptx::st_release(reinterpret_cast<u32*>(b.kv + 9216), ptx::ld_shared_volatile(word));
  }
}

MK_DEV void arithmetic(const mk::Buffers& b) {
  const u32 thread = ptx::thread_id();
  const float x = ptx::ld_global(reinterpret_cast<const float*>(b.weights) + thread);
  u32* mine = reinterpret_cast<u32*>(b.kv) + thread * 8;
  const u32 packed = ptx::pack_bf16(x, -2.0f * x);
  ptx::st_global(mine + 0, packed);
  ptx::st_global(mine + 1, static_cast<u32>(ptx::to_bf16(x)));
  ptx::st_global(mine + 2, ptx::float_bits(ptx::bf16_lo(packed)));
  ptx::st_global(mine + 3, ptx::float_bits(ptx::bf16_hi(packed)));
  ptx::st_global(mine + 4, ptx::float_bits(ptx::from_bf16(ptx::to_bf16(x))));
  ptx::st_global(mine + 5, ptx::float_bits(ptx::exp2_approx(x)));
  ptx::st_global(mine + 6, ptx::float_bits(ptx::rsqrt(x)));
  ptx::st_global(mine + 7, ptx::float_bits(ptx::rcp(x)));
}

// One thread walks through the life of a barrier of two arrivals; bit i of the result is the i-th answer.
MK_DEV void barrier_life(u32* out) {
  const auto bar = ptx::smem_base().at<u64>(64);
  if (ptx::thread_id() != 0) return;
  u32 answers = 0, n = 0;
  const auto ask = [&](u32 parity) { answers |= static_cast<u32>(ptx::mbar_test_wait(bar, parity)) << n++; };
  ptx::mbar_init(bar, 2);
  ptx::fence_mbarrier_init();
  ask(0), ask(1);  // fresh: phase 0 is open, the one before it counts as complete
  ptx::mbar_arrive(bar);
  ask(0);
  ptx::mbar_arrive(bar);
  ask(0), ask(1);  // phase 0 complete
  ptx::mbar_arrive(bar);
  ptx::mbar_arrive(bar);
  ask(0), ask(1);  // phase 1 complete
  ptx::mbar_inval(bar);
  ptx::mbar_init(bar, 1);
  ask(0);
  ptx::mbar_arrive(bar);
  ask(0);
  ptx::st_global(out, answers);
  ptx::st_global(out + 1, n);
}

MK_DEV void atomics(const mk::Buffers& b) {
  u32* words = reinterpret_cast<u32*>(b.kv);
  ptx::atom_add(words, 1 + ptx::block_id());
  const u32 me = ptx::block_id() * 64 + ptx::thread_id() + 1;
  if (ptx::atom_cas(words + 1, 0, me) == 0) ptx::atom_add(words + 2, 1);
}

// Half of the lanes leave; the others still meet. Then barriers of two of the four warps each.
MK_DEV void partial(u32* out) {
  const u32 warp = ptx::warp_id(), lane = ptx::lane_id();
#if defined(MK_HOST)
  if (warp == 0 && lane % 2 == 1) return;
  if (warp == 0) ptx::st_global(out + 64 + lane, ptx::ballot(true));
#endif
  const auto word = ptx::smem_base().at<u32>(0) + warp / 2;
  for (u32 round = 0; round < 4; ++round) {
    if (warp % 2 == 0 && lane == 0) ptx::st_shared<u32>(word, round * 10 + warp);
    ptx::bar_sync(1 + warp / 2, 64);
    if (warp % 2 == 1 && lane == 0) ptx::st_global(out + round * 2 + warp / 2, ptx::ld_shared(word));
    ptx::bar_sync(1 + warp / 2, 64);
  }
}

MK_DEV void identity(u32* out) {
  u32* mine = out + (ptx::block_id() * 64 + ptx::thread_id()) * 4;
  ptx::st_global(mine, ptx::block_id() << 16 | ptx::num_blocks());
  ptx::st_global(mine + 1, ptx::warp_id() << 16 | ptx::lane_id());
  ptx::st_global(mine + 2, ptx::cluster_rank() << 16 | ptx::cluster_size());
  const u64 before = ptx::globaltimer();
  const u32 cycles = ptx::clock();
  for (int i = 0; i < 8; ++i) ptx::syncthreads();
  ptx::st_global(mine + 3, static_cast<u32>(ptx::globaltimer() >= before && ptx::clock() > cycles));
}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  u32* out = reinterpret_cast<u32*>(b.kv);
  switch (s.scenario) {
    case 0: return multiply(b);
    case 1: return collectives(out);
    case 2: return memory(b);
    case 3: return arithmetic(b);
    case 4: return barrier_life(out);
    case 5: return atomics(b);
    case 6: return partial(out);
    case 7: return identity(out);
  }
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
