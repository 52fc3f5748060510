// mk::Ring alone: a loader, one lane or all of a warp, streams tiles through it, two consumer warps take them. Block b streams b tiles, drains,
// streams none, drains, and streams b tiles again, so that whatever a stream leaves behind meets the next one.
// kv: [block][consumer thread] u32, a hash of all tiles in their order; then per block {most in flight, faults after a drain}.
#include "megadsl/ring.h"

namespace {

namespace ptx = mk::ptx;
using mk::u32, mk::u64, mk::smem_ptr;

constexpr u32 kStageBytes = 128;
constexpr u32 kMostStages = 26;
constexpr u32 kConsumerWarps = 2;
constexpr u32 kStreams = 3;
constexpr u32 kLoaderSite = 10, kConsumerSite = 20;

}

struct Shape {
  mk::i32 stages;
  mk::i32 pairs;    // not 0: stages are let go of two by two
  mk::i32 window, meeting_window;  // bytes
  mk::i32 stuck;    // consumer warp 1 leaves before this tile; -1: never
  mk::i32 lanes;    // not 0: all lanes of the loader's warp copy
};

namespace {

struct Layout {
  smem_ptr<char> base = ptx::smem_base();
  smem_ptr<u64> barriers() const { return base.at<u64>(kMostStages * kStageBytes); }
  smem_ptr<u32> abort_word() const { return (barriers() + 2 * kMostStages).at<u32>(0); }
  smem_ptr<u32> meeting() const { return abort_word() + 4; }
};

MK_DEV u32 trips(u32 stream) { return stream == 1 ? 0 : ptx::block_id(); }

// Whether the drain has left nothing in flight: the latest copy has landed, and the cursors stand at the same place.
template <class R>
MK_DEV bool drained(const mk::Loader<R>& loader, const R& ring) {
  const u32 last = (loader.issued.slot + R::kStages - 1) % R::kStages;
  const u32 parity = loader.issued.slot == 0 ? loader.issued.parity ^ 1 : loader.issued.parity;
  return loader.in_flight == 0 && loader.landed.slot == loader.issued.slot && loader.landed.parity == loader.issued.parity &&
         ptx::mbar_test_wait(ring.full + last, parity);
}

template <class R>
MK_DEV void load_streams(const mk::Context& cx, const mk::Buffers& b, const Shape& s, const R& ring, u32* out) {
  mk::Loader<R> loader(cx, ring, {u32(s.window), u32(s.meeting_window), Layout().meeting()});
  const char* source = b.weights;
  u32 most = 0, faults = 0, tile = 0;
  for (u32 stream = 0; stream < kStreams; ++stream) {
    for (u32 t = 0; t < trips(stream); ++t, ++tile, source += kStageBytes) {
      loader.load(kLoaderSite, tile, source, kStageBytes, ptx::policy_evict_first());
      most = mk::max_u32(most, loader.in_flight);
    }
    loader.drain();
    if (tile != 0 && !drained(loader, ring)) ++faults;
  }
  if (!R::Copies::leads()) return;
  ptx::st_global<u32>(out, most);
  ptx::st_global<u32>(out + 1, faults);
}

template <class R>
MK_DEV void take_streams(const mk::Context& cx, const Shape& s, const R& ring, u32* out) {
  mk::Reader<R> reader(cx, ring);
  const u32 warp = ptx::warp_id() - 1, lane = ptx::lane_id();
  constexpr u32 kAtOnce = R::kStages < 2 ? 1 : 2;  // as consume_tiles: never more than the ring has
  u32 hash = 1, tile = 0;
  const auto take = [&](smem_ptr<char> stage) { hash = hash * 31 + ptx::ld_shared(stage.template at<u32>(lane * 4)); };
  for (u32 stream = 0; stream < kStreams; ++stream) {
    for (u32 t = 0; t < trips(stream);) {
      if (warp == 1 && s.stuck >= 0 && tile >= u32(s.stuck)) return;
      if (warp == 0 && lane == 0) ptx::st_shared_volatile(Layout().meeting(), tile / 3 % 2);
      const bool two = s.pairs != 0 && kAtOnce == 2 && t + 2 <= trips(stream);
      const auto first = reader.wait_stage(kConsumerSite, tile);
      if (two) {
        const auto second = reader.wait_stage(kConsumerSite, tile + 1, 1);
        take(first), take(second);
        reader.template release<kAtOnce>();
      } else {
        take(first);
        reader.release();
      }
      t += two ? 2 : 1, tile += two ? 2 : 1;
    }
  }
  ptx::st_global<u32>(out + warp * 32 + lane, hash);
}

template <u32 kStages, class Copies>
MK_DEV void run_by(const mk::Context& cx, const mk::Buffers& b, const Shape& s) {
  using R = mk::Ring<kStages, kStageBytes, Copies>;
  const R ring(Layout().base, Layout().barriers());
  if (ptx::thread_id() == 0) {
    ptx::st_shared<u32>(cx.abort_word, 0u);
    ptx::st_shared<u64>(cx.deadline(), ~u64(0));
    ptx::st_shared<u32>(Layout().meeting(), 0u);
    ring.init(kConsumerWarps);
    Copies::fence_barriers();
  }
  ptx::syncthreads();
  u32* out = reinterpret_cast<u32*>(b.kv) + ptx::block_id() * (kConsumerWarps * 32 + 2);
  if (ptx::warp_id() != 0) take_streams(cx, s, ring, out);
  else if (Copies::kArrivals > 1 || ptx::lane_id() == 0) load_streams(cx, b, s, ring, out + kConsumerWarps * 32);
}

template <u32 kStages>
MK_DEV void run(const mk::Context& cx, const mk::Buffers& b, const Shape& s) {
  return s.lanes != 0 ? run_by<kStages, mk::LaneCopies>(cx, b, s) : run_by<kStages, mk::BulkCopies>(cx, b, s);
}

}

extern "C" __global__ void megakernel(const __grid_constant__ mk::Buffers b, const __grid_constant__ Shape s) {
  const mk::Context cx = {b.control, Layout().abort_word(), ptx::block_id(), {1, 0}, 0};
  switch (s.stages) {
    case 1: return run<1>(cx, b, s);
    case 2: return run<2>(cx, b, s);
    case 3: return run<3>(cx, b, s);
    case 4: return run<4>(cx, b, s);
    case 5: return run<5>(cx, b, s);
    case 6: return run<6>(cx, b, s);
    case 7: return run<7>(cx, b, s);
    case 8: return run<8>(cx, b, s);
    case 13: return run<13>(cx, b, s);
    case 26: return run<26>(cx, b, s);
  }
}

#if defined(MK_HOST)
MK_HOST_ENTRY(megakernel, Shape)
#endif
