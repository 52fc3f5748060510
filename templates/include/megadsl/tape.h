// The loader's tape: what one block streams, as a few runs per op in shared memory, written while it is first played.
//
// A run is contiguous bytes in steps of one stage. Splits, distances, hints and windows are in the entries, not in code, so
// one short loop serves all ops and layers; a table entry per copy would make the loader's lane the bottleneck.
#pragma once
#include "megadsl/units.h"
#include "megadsl/linear.h"
#include "megadsl/pages.h"
#include "megadsl/scratch.h"
#include "megadsl/sequences.h"
#include "megadsl/steps.h"

namespace mk {

enum class Play : u32 { kWeights, kCache, kPrefetch, kGate, kRows, kPrefetchCache };

struct TapeEntry {
  Play kind;
  u32 site;          // kPrefetch, kPrefetchCache: how many layers ahead, and by_load()
  u32 base;          // 16-byte units from the start of the arena
  u32 layer_stride;  // likewise
  u32 bytes;         // of the run; of one cache chunk for kCache
  u32 step;          // bytes per stage
  u32 tile;          // number of the first tile, for reports; kCache, of kernels with windows: as AttentionTiling::kWindow
  u32 repeats;       // runs, each `stride` behind the one before; kCache: times each unit's rows are streamed; kPrefetchCache: most bytes
  u64 policy;
  u32 stride;        // 16-byte units; kCache: from KV head to KV head; kGate, kRows: shared-memory offset of the word to wait for
  u32 units;         // kCache: KV heads * splits; else tiles from run to run, for reports
  u32 splits;
  u32 splits_inverse;  // Divisor::inverse
};
static_assert(sizeof(TapeEntry) == 56, "lowering reserves this much per entry");

// Added to an entry that prefetches: by loads, which wait at the site. 0: by instructions.
constexpr u32 kLayersAhead = 256;
MK_DEV constexpr u32 by_load(u32 site) { return (site + 1) * kLayersAhead; }

// A vector weight, in 16-byte units from the start of the weight arena; `bytes` a multiple of 16.
struct VectorShape {
  i32 weights;
  i32 layer_stride;
  i32 bytes;
};

struct Run {
  const char* source;
  u32 bytes;
};

// The order in which a loader plays its phases, step after step: [0, kBegin) once, [kBegin, kEnd) once a layer, then the rest. In the
// first step each phase's entries are written before it is played.
template <u32 kBegin, u32 kEnd, u32 kPhases>
struct Walk {
  struct Range {
    u32 first, last;
  };
  static constexpr bool kLoops = kEnd > kBegin;

  u32 layers, steps;
  u32 phase = 0, layer = 0;
  u32 begin = 0, end = 0;  // entries of a layer
  bool written = false;

  MK_DEV bool writes() const { return !written && layer == 0; }
  // Which entries are due; `first` is how many there were before the phase's own were written, `size` how many there are.
  MK_DEV Range due(u32 first, u32 size) {
    if (writes()) {
      if (phase == kBegin) begin = first;
      if (phase < kEnd) end = size;
      return {first, size};
    }
    if (phase < kBegin) return {0, kLoops ? begin : size};
    return phase < kEnd ? Range{begin, end} : Range{end, size};
  }
  // Goes on, to the next step where one has ended; false behind the last.
  MK_DEV bool next(Step& step) {
    if (kLoops && phase + 1 == kEnd) {
      if (++layer < layers) return true;
      layer = 0;
    }
    ++phase;
    if (written && kLoops && phase == kBegin) phase = kEnd - 1;
    if (written && phase == kEnd && kEnd < kPhases) phase = kPhases - 1;
    if (phase < kPhases) return true;
    written = true;
    phase = kBegin == 0 ? kEnd - 1 : kBegin - 1;
    step = step_after(step);
    return --steps != 0;
  }
};

// Kernels of one sequence; those of a batch have Sequences in its place.
struct OneSequence {
  static constexpr bool kSeveral = false;
};

// kWindows: some attention sees a window of the rows. kAhead: something is prefetched into L2 for the layer behind, or cached rows are. W:
// OneWindow, or LayerWindows. All: whose rows. Rows: where they lie. S: where loads into L2 land, if there are any.
template <class R, bool kWindows = false, bool kAhead = false, class W = OneWindow, class All = OneSequence, class Rows = Stretches,
          class S = NoScratch>
struct Tape {
  using Copies = typename R::Copies;

  const Context& cx;
  const Buffers& buffers;
  Loader<R> loader;
  smem_ptr<TapeEntry> entries;
  u32 size = 0;
  u32 shown = 0;  // so many all lanes of the loader have been able to read
  Step step;
  u32 gates;  // rounds of a step, see gates_before
  u32 layers = 0;  // kAhead: beyond the last there is nothing to prefetch
  W windows;
  All all;
  Rows cached_rows;
  u32 first_epoch;  // of the launch
  S scratch;

  MK_DEV Tape(const Context& context, const Buffers& b, R ring, smem_ptr<TapeEntry> at, typename R::Bound window, Step first, u32 gate_rounds, W w = {}, All sequences = {},
              Rows rows = {}, S loads = {})
      : cx(context), buffers(b), loader(context, ring, window), entries(at), step(first), gates(gate_rounds), windows(w), all(sequences),
        cached_rows(rows), first_epoch(first.epoch), scratch(loads) {}

  // Where a launch knows its step only once it has joined the one before.
  MK_DEV void begin(const Step& first) { step = first, first_epoch = first.epoch; }

  MK_DEV void add(TapeEntry e) {
    const smem_ptr<u64> to = (entries + size).template at<u64>(0);
    const u64 words[7] = {u32(e.kind) | u64(e.site) << 32, e.base | u64(e.layer_stride) << 32, e.bytes | u64(e.step) << 32,
                          e.tile | u64(e.repeats) << 32,   e.policy,                           e.stride | u64(e.units) << 32,
                          e.splits | u64(e.splits_inverse) << 32};
    if (Copies::leads()) {
#pragma unroll
      for (u32 i = 0; i < 7; ++i) ptx::st_shared<u64>(to + i, words[i]);
    }
    ++size;
  }
  MK_DEV TapeEntry entry(u32 index) const {
    const smem_ptr<u64> from = (entries + index).template at<u64>(0);
    u64 w[7];
#pragma unroll
    for (u32 i = 0; i < 7; ++i) w[i] = ptx::ld_shared<u64>(from + i);
    return {Play(u32(w[0])), u32(w[0] >> 32), u32(w[1]), u32(w[1] >> 32), u32(w[2]), u32(w[2] >> 32), u32(w[3]), u32(w[3] >> 32),
            w[4],            u32(w[5]),       u32(w[5] >> 32), u32(w[6]), u32(w[6] >> 32)};
  }

  MK_DEV void vector(u32 site, const VectorShape& s, u64 policy) {
    add({Play::kWeights, site, u32(s.weights), u32(s.layer_stride), u32(s.bytes), R::kStageBytes, 0, 1, policy, 0, 0, 0, 0});
  }

  // This block's tiles in the order the consumers take them: one entry per part of the columns, or per pass and chunk of it.
  // Whole rows follow each other in memory and are one run.
  MK_DEV void matrix(u32 site, const LinearShape& s, u64 policy) {
    const u32 ways = u32(s.ways), chunks = u32(s.pieces) / ways / u32(s.chunk_pieces);
    for_each_part(s, ways, own_groups(cx, s), [&](u32 part, RowGroups own) {
      for_each_pass(chunks == 1 ? ~0u : u32(s.pass_groups), chunks, own, [&](u32 first, u32 last, u32 chunk) {
        runs(Play::kWeights, site, s, {first, last}, part * chunks + chunk, u32(s.chunk_pieces), ~0u, policy);
      });
    });
  }

  template <class T, u32 kWarps, u32 kTokens = 1>
  MK_DEV void cache(u32 site, const AttentionShape& s, u64 policy) {
    constexpr u32 kPerStage = R::kStageBytes / T::kChunkBytes;
    static_assert(kPerStage > 0, "a KV chunk must fit a ring stage");
    // of a batch, what the passes follow from when it is known how many tokens a sequence has: query rows of one, and of a pass
    const u32 repeats = All::kSeveral ? u32(s.rows) / kTokens | kWarps * kFewRows << 16 : attention_passes(s, kWarps);
    add({Play::kCache, site, u32(s.kv), u32(s.layer_stride), T::kChunkBytes, kPerStage * T::kChunkBytes, T::kWindow, repeats, policy,
         u32(s.head_stride), u32(s.kv_heads) * u32(s.splits), u32(s.splits), u32(s.splits_inverse)});
  }

  // Asks for the first `l2_bytes` of this block's share of a matrix ahead of the ring, at most of one part of the columns.
  MK_DEV void prefetch(const LinearShape& s, u32 ahead = 0, u32 by = 0) {
    bool first = true;
    for_each_part(s, u32(s.ways), own_groups(cx, s), [&](u32 part, RowGroups own) {
      if (first) runs(Play::kPrefetch, ahead + by, s, own, part, u32(s.pieces) / u32(s.ways), u32(s.l2_bytes), 0);
      first = false;
    });
  }

  // The same of the cached rows of each of this block's units, for the streamed ones.
  template <class T>
  MK_DEV void prefetch_cache(const AttentionShape& s, u32 l2_bytes, u32 ahead, u32 by = 0) {
    add({Play::kPrefetchCache, ahead + by, u32(s.kv), u32(s.layer_stride), T::kChunkBytes, fetch_bytes(), T::kWindow, l2_bytes, 0, u32(s.head_stride),
         u32(s.kv_heads) * u32(s.splits), u32(s.splits), u32(s.splits_inverse)});
  }

  // What follows waits until the consumers have begun the op.
  MK_DEV void gate(u32 site, u32 offset) { add({Play::kGate, site, 0, 0, 0, 0, 0, 1, 0, offset, 0, 0, 0}); }
  // What follows waits until the rows that the step before appended may be copied.
  MK_DEV void rows(u32 site, u32 offset) { add({Play::kRows, site, 0, 0, 0, 0, 0, 1, 0, offset, 0, 0, 0}); }

  MK_DEV bool given_up() const { return Copies::any(mk::given_up(cx)); }

  MK_DEV void play(u32 first, u32 last) {
    if (last > shown) Copies::meet();
    shown = max_u32(last, shown);
#pragma unroll 1
    for (u32 index = first; index < last; ++index) {
      const TapeEntry e = entry(index);
      if (e.kind == Play::kGate || e.kind == Play::kRows) {
        pass_gate(e);
        continue;
      }
      if constexpr (kAhead) {
        if (e.kind == Play::kPrefetchCache || (e.kind == Play::kPrefetch && layers_ahead(e) != 0)) {
          prefetch_ahead(e);
          continue;
        }
      }
      const bool cached = e.kind == Play::kCache;
      if constexpr (All::kSeveral) {
        if (cached) {
          play_sequences(e);
          continue;
        }
      }
      if constexpr (!All::kSeveral && Rows::kPaged) {
        if (cached) {
          play_pages(e);
          continue;
        }
      }
      const u32 units = cached ? e.units : cx.block + 1, repeats = e.repeats;
#pragma unroll 1
      for (u32 unit = cx.block; unit < units; unit += cx.blocks.value)
#pragma unroll 1
        for (u32 pass = 0; pass < repeats; ++pass)
          stream(e, cached ? cache_run(e, unit_of(e, unit, cx.layer), cx.layer) : weight_run(e, pass, cx.layer), cached ? 0 : pass * e.units);
    }
  }

 private:
  // By a load, not by an instruction.
  MK_DEV static bool loads(const TapeEntry& e) { return S::kLoads && e.site >= kLayersAhead; }
  MK_DEV static u32 layers_ahead(const TapeEntry& e) { return S::kLoads ? e.site % kLayersAhead : e.site; }
  // What L2 is asked for at once.
  MK_DEV static constexpr u32 fetch_bytes() {
    if constexpr (S::kLoads) return S::kSlotBytes;
    else return R::kStageBytes;
  }
  MK_DEV void fetch(const TapeEntry& e, const char* source, u32 bytes) {
    if constexpr (S::kLoads) {
      if (loads(e)) return scratch.template load<Copies>(cx, e.site / kLayersAhead - 1, source, bytes);
    }
    if constexpr (Copies::kPrefetches) Copies::prefetch(source, bytes);
  }
  // Of each of the row groups, tiles [index * count, index * count + count); at most `most` bytes of them all.
  MK_DEV void runs(Play kind, u32 site, const LinearShape& s, RowGroups own, u32 index, u32 count, u32 most, u64 policy) {
    const u32 tile_bytes = u32(s.tile_bytes), pieces = u32(s.pieces), groups = own.end - own.begin;
    if (own.begin >= own.end) return;
    const bool whole = count == pieces;
    const u32 tile = own.begin * pieces + index * count, bytes = min_u32((whole ? groups : 1) * count * tile_bytes, most);
    add({kind, site, u32(s.weights) + tile * (tile_bytes / 16), u32(s.layer_stride), bytes,
         kind == Play::kPrefetch ? fetch_bytes() : u32(s.together) * tile_bytes, tile, whole ? 1 : min_u32(groups, max_u32(most / bytes, 1)), policy,
         pieces * (tile_bytes / 16), pieces, 0, 0});
  }
  MK_DEV Run weight_run(const TapeEntry& e, u32 pass, u32 layer) const {
    return {buffers.weights + (size_t(e.base) + size_t(e.layer_stride) * layer + size_t(e.stride) * pass) * 16, e.bytes};
  }
  MK_DEV Unit unit_of(const TapeEntry& e, u32 index, u32 layer) const {
    return attention_unit({e.splits, e.splits_inverse}, index, step.kv_len, kWindows ? windows.of(e.tile, layer) : 0);
  }
  // What L2 is asked for of a unit: loads leave out chunks to which this launch may append, up to one more with each of its steps.
  MK_DEV Unit fetched_unit(const TapeEntry& e, u32 index, u32 layer) const {
    Unit unit = unit_of(e, index, layer);
    if (loads(e)) {
      const u32 whole = step.kv_len / kChunkRows, settled = whole - min_u32(whole, step.epoch - first_epoch);
      unit.end = max_u32(unit.begin, min_u32(unit.end, settled));
    }
    return unit;
  }
  MK_DEV Run cache_run(const TapeEntry& e, const Unit& unit, u32 layer) const {
    const size_t at = size_t(e.base) + size_t(e.layer_stride) * layer + size_t(e.stride) * unit.head;
    return {buffers.kv + at * 16 + size_t(unit.begin) * e.bytes, (unit.end - unit.begin) * e.bytes};
  }
  // The cached rows of a batch: each unit's stretch of each sequence, once for each pass over its query rows.
  MK_DEV void play_sequences(const TapeEntry& e) {
    const Divisor splits = {e.splits, e.splits_inverse};
    const u32 token_rows = e.repeats & 0xffffu, pass_rows = e.repeats >> 16;
#pragma unroll 1
    for (u32 unit = cx.block; unit < e.units; unit += cx.blocks.value) {
      const u32 head = splits.divide_any(unit), split = unit - head * splits.value;
      const size_t at = size_t(e.base) + size_t(e.layer_stride) * cx.layer + size_t(e.stride) * head;
      all.for_each_segment(splits, split, step.epoch - first_epoch, kWindows ? e.tile : 0, [&](const Segment& segment) {
        [[maybe_unused]] const Run run = {all.arena(buffers.kv, segment.sequence) + at * 16 + size_t(segment.begin) * e.bytes, (segment.end - segment.begin) * e.bytes};
        const u32 passes = ceil_div(segment.tokens * token_rows, pass_rows);
#pragma unroll 1
        for (u32 pass = 0; pass < passes; ++pass) {
          if constexpr (Rows::kPaged) stream_pages(e, head, segment.sequence, segment.begin, segment.end);
          else stream(e, run, 0);
        }
      });
    }
  }
  // The cached rows of one sequence in pages, of each unit once for each pass.
  MK_DEV void play_pages(const TapeEntry& e) {
#pragma unroll 1
    for (u32 index = cx.block; index < e.units; index += cx.blocks.value) {
      const Unit unit = unit_of(e, index, cx.layer);
#pragma unroll 1
      for (u32 pass = 0; pass < e.repeats; ++pass) stream_pages(e, unit.head, 0, unit.begin, unit.end);
    }
  }
  // A KV head's run of the first page, and the bytes from page to page.
  struct PageRuns {
    const char* first;
    u64 stride;
    MK_DEV const char* at(u32 page, u32 chunk, u32 chunk_bytes) const { return first + stride * page + chunk * chunk_bytes; }
  };
  MK_DEV PageRuns page_runs(const TapeEntry& e, u32 layer, u32 head) const {
    const u32 heads = Divisor{e.splits, e.splits_inverse}.divide_any(e.units);
    const size_t at = size_t(e.base) + size_t(e.layer_stride) * layer + size_t(e.stride) * head;
    return {buffers.kv + at * 16, u64(e.stride) * 16 * heads};
  }
  // Chunks [begin, end) of a sequence, as the same stages as where they follow each other, each put together from its pages. While the
  // loader waits for room for a page's chunks, the next one's entry is on its way.
  MK_DEV void stream_pages(const TapeEntry& e, u32 head, u32 sequence, u32 begin, u32 end) {
    if (begin == end) return;
    const u32 per_stage = e.step / e.bytes;
    const PageRuns runs = page_runs(e, cx.layer, head);
    u32 next = cached_rows.entry(sequence, begin), tile = 0;
#pragma unroll 1
    for (u32 first = begin; first < end; first += per_stage, ++tile) {
      const u32 chunks = min_u32(per_stage, end - first);
      loader.load_parts(e.site, tile, chunks * e.bytes, [&](smem_ptr<char> stage, smem_ptr<u64> full) {
        u32 done = 0;
        cached_rows.for_each_part(sequence, first, first + chunks, end, next, [&](u32 page, u32 inside, u32 count) {
          Copies::copy(stage.template at<char>(done), runs.at(page, inside, e.bytes), count * e.bytes, full, e.policy);
          done += count * e.bytes;
        });
      });
    }
  }
  MK_DEV void stream(const TapeEntry& e, Run run, u32 tiles_before) {
    u32 tile = (kWindows && e.kind == Play::kCache ? 0 : e.tile) + tiles_before;
#pragma unroll 1
    for (u32 done = 0; done < run.bytes; done += e.step, ++tile) {
      const u32 bytes = min_u32(e.step, run.bytes - done);
      if constexpr (Copies::kPrefetches || S::kLoads) {
        if (e.kind == Play::kPrefetch) {
          fetch(e, run.source + done, bytes);
          continue;
        }
      }
      loader.load(e.site, tile, run.source + done, bytes, e.policy);
    }
  }
  // Asks for what a later layer streams. Rows that this launch still appends may be among what instructions ask for: L2 has them as they come.
  MK_DEV void prefetch_ahead(const TapeEntry& e) {
    const bool cached = e.kind == Play::kPrefetchCache;
    const u32 layer = cx.layer + layers_ahead(e), units = cached ? e.units : cx.block + 1, repeats = cached ? 1 : e.repeats;
    if (layer >= layers) return;
    if constexpr (!All::kSeveral && Rows::kPaged) {
      if (cached) {
        prefetch_pages(e, layer);
        return;
      }
    }
#pragma unroll 1
    for (u32 unit = cx.block; unit < units; unit += cx.blocks.value)
#pragma unroll 1
      for (u32 pass = 0; pass < repeats; ++pass) {
        const Run run = cached ? cache_run(e, fetched_unit(e, unit, layer), layer) : weight_run(e, pass, layer);
        const u32 size = cached ? min_u32(run.bytes, e.repeats) : run.bytes;
#pragma unroll 1
        for (u32 done = 0; done < size; done += e.step) fetch(e, run.source + done, min_u32(e.step, size - done));
      }
  }
  // The first `repeats` bytes of each unit's rows, page by page.
  MK_DEV void prefetch_pages(const TapeEntry& e, u32 layer) {
#pragma unroll 1
    for (u32 index = cx.block; index < e.units; index += cx.blocks.value) {
      const Unit unit = fetched_unit(e, index, layer);
      if (unit.begin == unit.end) continue;
      const PageRuns runs = page_runs(e, layer, unit.head);
      u32 next = cached_rows.entry(0, unit.begin), left = e.repeats;
      const u32 end = min_u32(unit.end, unit.begin + ceil_div(left, e.bytes));
      cached_rows.for_each_part(0, unit.begin, end, end, next, [&](u32 page, u32 inside, u32 count) {
        const u32 size = min_u32(count * e.bytes, left);
        left -= size;
        const char* source = runs.at(page, inside, e.bytes);
#pragma unroll 1
        for (u32 done = 0; done < size; done += e.step) fetch(e, source + done, min_u32(e.step, size - done));
      });
    }
  }
  MK_DEV void pass_gate(const TapeEntry& e) const {
    const smem_ptr<u32> gate = ptx::smem_base().template at<u32>(e.stride);
    const u32 due = e.kind == Play::kRows ? step.epoch : gates_before(step, gates) + cx.layer + 1;
    trace_copy(cx);
    Copies::wait(cx, e.site, 0, due, [&](u32& observed) {
      observed = ptx::ld_shared_acquire(gate);
      return i32(observed - due) >= 0;  // where nothing is loaded for the op, the consumers may be layers ahead
    });
    trace_gate(cx, e.site);
  }
};

}  // namespace mk
