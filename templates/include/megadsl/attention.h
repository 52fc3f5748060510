// Attention over a cached prefix and this step's new tokens, split over blocks along the KV rows.
//
// A unit is (KV head, split). Query rows m = (query head in the group) * tokens + token fill m16 tiles; each warp owns one
// tile and a class of KV chunks, keeps a running maximum (log2 domain) and a row sum, and leaves its part in shared memory;
// the block adds its warps' parts and publishes one fp32 partial per query row. Readers add the splits in a fixed order.
//
// Rows older than this launch come through the ring, 16 rows (K and V, already in fragment order) at a time. This step's
// own k and v come by exchange to the unit with the last split, which also appends them to the cache: it is the only reader
// of the chunk they go to, so the append needs no fence against the bulk copy.
#pragma once
#include "megadsl/cluster.h"
#include "megadsl/pages.h"

namespace mk {

// One warp's running softmax for 16 query rows: lane (g, q) holds rows g and g + 8.
template <class T>
struct Softmax {
  float maximum[2] = {kNoMaximum, kNoMaximum};
  float sum[2] = {0.0f, 0.0f};
  float out[T::kHeadDim / 8][4] = {};
  smem_ptr<char> tile;  // this warp's query tile
  // Heads of 128 would not leave enough registers: their queries are read again for each chunk.
  static constexpr bool kKeepQueries = T::kHeadDim <= 64;
  static constexpr bool kOneTile = false;
  u32x4 kept[kKeepQueries ? T::kPanels : 1][2];

  MK_DEV static u32 row(u32 lane, u32 r) { return lane / 4 + 8 * r; }

  MK_DEV u32x4 load_query(u32 panel, u32 half, u32 lane) const {
    return T::load_panel(tile.template at<char>((panel * 16 + lane / 4 + 8 * half) * 64 + lane % 4 * 16), panel, lane);
  }
  MK_DEV Softmax(smem_ptr<char> query_tile, u32 lane) : tile(query_tile) {
    if (!kKeepQueries) return;
#pragma unroll
    for (u32 p = 0; p < (kKeepQueries ? T::kPanels : 0); ++p) kept[p][0] = load_query(p, 0, lane), kept[p][1] = load_query(p, 1, lane);
  }

  // Scores of 16 rows: score[half][i] belongs to query row g + 8 * (i / 2), KV row half * 8 + 2q + i % 2.
  template <class Chunk>
  MK_DEV void scores(const Chunk& chunk, u32 lane, float (&score)[2][4]) const {
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
#pragma unroll
      for (u32 p = 0; p < T::kPanels; ++p) {
        const u32x4 k = chunk.keys(half, p);
        const u32x4 lo = kKeepQueries ? kept[kKeepQueries ? p : 0][0] : load_query(p, 0, lane);
        const u32x4 hi = kKeepQueries ? kept[kKeepQueries ? p : 0][1] : load_query(p, 1, lane);
        ptx::mma_m16n8k16(score[half], lo.x, hi.x, lo.y, hi.y, k.x, k.y);
        ptx::mma_m16n8k16(score[half], lo.z, hi.z, lo.w, hi.w, k.z, k.w);
      }
  }

  // Takes one chunk whose first `rows` rows exist. Bit i of seen[r]: query row g + 8r attends to row i of the chunk.
  template <class Chunk>
  MK_DEV void take(const Chunk& chunk, u32 lane, float scale_log2, const u32 (&seen)[2], u32 rows) {
    const u32 q = lane % 4;
    float score[2][4] = {};
    scores(chunk, lane, score);
    u32 p[2][2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      float top = kNoMaximum;
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          float& s = score[half][2 * r + e];
          s = (seen[r] >> (half * 8 + 2 * q + e) & 1) != 0 ? T::Score::of(s, scale_log2) : kNoMaximum;
          top = math::max(top, s);
        }
      top = math::max(top, ptx::shfl_xor(top, 1));
      top = math::max(top, ptx::shfl_xor(top, 2));
      const float before = maximum[r];
      maximum[r] = math::max(before, top);
      const float fade = ptx::exp2_approx(before - maximum[r]);
      float added = 0.0f;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        float w[2];
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          const float s = score[half][2 * r + e];
          w[e] = s == kNoMaximum ? 0.0f : ptx::exp2_approx(s - maximum[r]);
          added += w[e];
        }
        p[half][r] = ptx::pack_bf16(w[0], w[1]);
      }
      added += ptx::shfl_xor(added, 1);
      added += ptx::shfl_xor(added, 2);
      sum[r] = sum[r] * fade + added;
#pragma unroll
      for (u32 n = 0; n < T::kHeadDim / 8; ++n) out[n][2 * r] *= fade, out[n][2 * r + 1] *= fade;
    }
    // Rows that do not exist hold anything, NaN included, and 0 * NaN would spoil the sum.
    const u32 keep0 = row_mask(0, q, rows), keep1 = row_mask(1, q, rows);
#pragma unroll
    for (u32 pair = 0; pair < T::kHeadDim / 16; ++pair) {
      const u32x4 v = chunk.values(pair);
      ptx::mma_m16n8k16(out[2 * pair], p[0][0], p[0][1], p[1][0], p[1][1], v.x & keep0, v.y & keep1);
      ptx::mma_m16n8k16(out[2 * pair + 1], p[0][0], p[0][1], p[1][0], p[1][1], v.z & keep0, v.w & keep1);
    }
  }

  // Leaves {out, maximum, sum} of the rows that exist in this warp's part of the scratch: [row][D + 4] fp32.
  MK_DEV void leave(smem_ptr<float> part, u32 lane, u32 rows) const {
    const u32 g = lane / 4, q = lane % 4;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      if (g + 8 * r >= rows) continue;
      const smem_ptr<float> row = part + (g + 8 * r) * T::kPartFloats;
#pragma unroll
      for (u32 n = 0; n < T::kHeadDim / 8; ++n) {
        ptx::st_shared<float>(row + (n * 8 + 2 * q), out[n][2 * r]);
        ptx::st_shared<float>(row + (n * 8 + 2 * q + 1), out[n][2 * r + 1]);
      }
      if (q == 0) ptx::st_shared<float>(row + T::kHeadDim, maximum[r]), ptx::st_shared<float>(row + (T::kHeadDim + 1), sum[r]);
    }
  }
};

// Byte offset of (query row, dim) in the query tiles.
template <class T>
MK_DEV u32 query_offset(u32 row, u32 dim) {
  return (((row / 16) * T::kPanels + dim / kPanel) * 16 + row % 16) * 64 + (dim % kPanel) * 2;
}

// Gathers a unit's queries into m16 tiles and, for the last split, this step's keys and values into a chunk of their own. Rows that do
// not exist are left as they are: what a tile's row gives goes to no other, a chunk's rows are masked.
template <class Wire, class T, class P, class B>
MK_DEV void gather_unit(const B& block, u32 site, const AttentionShape& s, const ExchangeShape& e, u32 sequence, const Unit& unit) {
  trace(block.cx, Event::kWait, site, unit.split);
  constexpr u32 kTokens = B::kTokens;
  const smem_ptr<char> queries = block.template at<char>(s.queries), fresh = block.template at<char>(s.fresh);
  const u32 head_rows = u32(s.rows) / kTokens;
  const Round round = exchange_round(block.buffers, e, sequence);
  // One round of polls for queries, keys and values: each further one would wait for the trip to L2 again.
  const u32 q_features = head_rows * T::kHeadDim, kv_features = unit.fresh ? T::kHeadDim : 0;
  Wanted<3> wanted;
  wanted.ranges[0] = groups_of(u32(s.q_begin) + unit.head * q_features, q_features);
  wanted.ranges[1] = groups_of(u32(s.k_begin) + unit.head * T::kHeadDim, kv_features);
  wanted.ranges[2] = groups_of(u32(s.v_begin) + unit.head * T::kHeadDim, kv_features);
#pragma unroll
  for (u32 r = 0; r < 3; ++r) wanted.owners[r] = owners_of(block.cx, e, wanted.ranges[r]);
  const auto place = [&](u32 range, u32 group, u32 token) {  // where a unit of queries or keys lies
    const u32 at = group * kGroupRows;
    const auto row = [&] { return T::kByToken ? token * head_rows + at / T::kHeadDim : at / T::kHeadDim * kTokens + token; };
    return range == 0 ? queries.template at<char>(query_offset<T>(row(), at % T::kHeadDim))
                      : fresh.template at<char>(key_offset<T::kHeadDim>(token, at));
  };
  const auto value = [&](u32 group, u32 token, u32 i) { return fresh.template at<u16>(T::kKeyBytes + value_offset(token, group * kGroupRows + i)); };
  gather_units<Wire, kTokens, P, 3>(
      block.cx, site, e, round, wanted, block.thread, B::kThreads,
      [&](u32 range, u32 group, u32 token, u32x4 x) {
        if (range < 2) {
          store_unit<Wire>(place(range, group, token), x);
          return;
        }
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (u32 i = 0; i < (Wire::kWholeUnits ? 8u : 7u); ++i) ptx::st_shared<u16>(value(group, token, i), u16(words[i / 2] >> (i % 2 * 16)));
      },
      [&](u32 range, u32 group, u32 token, u16 bits) {
        return [=] {
          if (range < 2) store_last(place(range, group, token), bits);
          else ptx::st_shared<u16>(value(group, token, 7), bits);
        };
      });
}

// Writes this step's rows behind the cached ones. Bulk copies of that chunk have landed: every warp has waited for them. The block's last
// threads begin: its first warp has the parts to add next.
template <class T, class B, class Rows>
MK_DEV void append_rows(const B& block, const AttentionShape& s, const Step& step, u32 layer, u32 head, const Rows& rows) {
  if (given_up(block.cx)) return;  // what was gathered may be garbage
  const smem_ptr<char> fresh = block.template at<char>(s.fresh);
#pragma unroll 1
  for (u32 i = B::kThreads - 1 - block.thread; i < step.tokens * T::kHeadDim; i += B::kThreads) {
    const u32 token = i / T::kHeadDim, dim = i % T::kHeadDim, row = step.kv_len + token;
    if (row >= u32(s.max_rows)) continue;
    char* chunk = nullptr;
    if constexpr (Rows::kPaged) {
      if (!rows.find(chunk, block.buffers, s, layer, head, 0, row / kChunkRows, T::kChunkBytes)) continue;
    } else {
      chunk = cache_chunk(block.buffers, s, layer, head, row / kChunkRows, T::kChunkBytes);
    }
    const u32 r = row % kChunkRows;
    ptx::st_global<u16>(reinterpret_cast<u16*>(chunk + key_offset<T::kHeadDim>(r, dim)),
                        ptx::ld_shared<u16>(fresh.template at<u16>(key_offset<T::kHeadDim>(token, dim))));
    ptx::st_global<u16>(reinterpret_cast<u16*>(chunk + T::kKeyBytes + value_offset(r, dim)),
                        ptx::ld_shared<u16>(fresh.template at<u16>(T::kKeyBytes + value_offset(token, dim))));
  }
}

// What the warps' parts of a query row come to: four values of it, its maximum, and its sum.
struct AddedParts {
  float v[4] = {}, top = kNoMaximum, sum = 0.0f;

  // `part(c)`: where the row of class c lies, for every c. Of values behind the last, the last four floats of a row, nothing is used.
  template <class T, class Part>
  MK_DEV void add(Part part, u32 classes, u32 vector) {
    constexpr u32 kAtOnce = 4;  // parts on their way together
    u32x2 scale[kAtOnce];       // maximum, sum
    u32x4 x[kAtOnce];
    const auto load = [&](u32 first) {
#pragma unroll
      for (u32 c = 0; c < kAtOnce; ++c) {
        scale[c] = ptx::ld_shared<u32x2>((part(first + c) + T::kHeadDim).template at<u32x2>(0));
        x[c] = ptx::ld_shared<u32x4>((part(first + c) + vector * 4).template at<u32x4>(0));
      }
    };
    load(0);
#pragma unroll
    for (u32 c = 0; c < kAtOnce; ++c) top = math::max(top, ptx::bits_float(scale[c].x));
#pragma unroll 1
    for (u32 first = kAtOnce; first < classes; first += kAtOnce)
#pragma unroll
      for (u32 c = 0; c < kAtOnce; ++c) top = math::max(top, ptx::ld_shared<float>(part(first + c) + T::kHeadDim));
#pragma unroll 1
    for (u32 first = 0;;) {
#pragma unroll
      for (u32 c = 0; c < kAtOnce; ++c) {
        // No branch: it would put one class's exponential behind another's.
        const float weight = ptx::exp2_approx((first + c < classes ? ptx::bits_float(scale[c].x) : kNoMaximum) - top);
        sum += weight * ptx::bits_float(scale[c].y);
        v[0] += weight * ptx::bits_float(x[c].x), v[1] += weight * ptx::bits_float(x[c].y);
        v[2] += weight * ptx::bits_float(x[c].z), v[3] += weight * ptx::bits_float(x[c].w);
      }
      first += kAtOnce;
      if (first >= classes) break;
      load(first);
    }
  }
};

// Adds the parts that the warps of each query tile left and publishes the unit's partial rows [first_row, first_row + count); to the blocks of
// its cluster (Async), or to all.
template <class Wire, class T, u32 kTileRows = 16, class B, class E>
MK_DEV void publish_unit(const B& block, const AttentionShape& s, const E& e, u32 sequence, u32 unit, u32 first_row, u32 count, u32 tiles,
                         u32 classes, u32 part_rows) {
  constexpr u32 kVectors = Wire::kAsync ? T::kVectors - 1 : T::kVectors;  // a cluster's scales travel beside values
  const bool sends = !Wire::kAsync || !given_up(block.cx);  // else what nobody awaits would pile up in the barriers' counts
#pragma unroll 1
  for (u32 i = block.thread; i < count * kVectors; i += B::kThreads) {
    const u32 row = i / kVectors, vector = i % kVectors;
    const smem_ptr<float> parts = block.template at<float>(s.scratch) + (row / kTileRows * part_rows + row % kTileRows) * T::kPartFloats;
    const auto part = [&](u32 c) { return parts + min_u32(c, classes - 1) * (tiles * part_rows * T::kPartFloats); };  // no branch at the end
    AddedParts x;
    if constexpr (Wire::kAsync) {
      const PartAddress to = part_address<T, B::kTokens>(block.smem, s, e, first_row + row, vector);
      x.template add<T>(part, classes, vector);
      chaos(block.cx, Place::kSignal, u32(e.landed), i / kWarpSize);
      if (!sends) continue;
      to.send(e, block.smem, vector % 2, {ptx::float_bits(x.v[0]), ptx::float_bits(x.v[1]), ptx::float_bits(x.v[2]), ptx::float_bits(x.v[3])});
      if (vector % 2 == 0) to.send(e, block.smem, 2, {ptx::float_bits(x.top), ptx::float_bits(x.sum), 0, 0});
    } else {
      x.template add<T>(part, classes, vector);
      if (vector + 1 == T::kVectors) x.v[0] = x.top, x.v[1] = x.sum, x.v[2] = x.v[3] = 0.0f;
      const u32 index = unit * u32(e.vectors) + (first_row + row) * T::kVectors + vector;
      chaos(block.cx, Place::kSignal, u32(e.offset), i / kWarpSize);
      ptx::st_relaxed(exchange_round(block.buffers, e, sequence).vectors + index, Wire::pack_f32(x.v, sequence));
      if (Wire::kResets) {
        const Round ahead = exchange_round(block.buffers, e, sequence + u32(e.slots) / 2);
        ptx::st_relaxed(ahead.vectors + index, u32x4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
      }
    }
  }
}

// The warps leave their parts of a pass, meet, and publish what they come to.
template <class Wire, class T, class B, class S, class E>
MK_DEV void publish_all(const B& block, u32 site, const AttentionShape& s, const E& e, u32 sequence, u32 unit, u32 first_tile, u32 tiles,
                        u32 classes, u32 taken, u32 rows, S& state) {
  const u32 tile = block.warp() % tiles, mine = block.warp() / tiles, part_rows = min_u32(16, rows);
  if (mine < classes) {
    const u32 left = min_u32(part_rows, rows - (first_tile + tile) * 16);
    state.leave(block.template at<float>(s.scratch) + (mine * tiles + tile) * part_rows * T::kPartFloats, block.lane(), left);
  }
  trace(block.cx, Event::kTaken, site, taken);
  block.sync();
  trace(block.cx, Event::kParts, site, unit);
  const u32 first_row = first_tile * 16;
  publish_unit<Wire, T>(block, s, e, sequence, unit, first_row, min_u32(tiles * 16, u32(s.rows) - first_row), tiles, classes, part_rows);
}

// All parts of a unit are stored: with flags, says so.
template <class Wire, class B, class E>
MK_DEV void end_unit(const B& block, u32 site, const E& e, u32 sequence, u32 unit) {
  if constexpr (!Wire::kAsync) {
    chaos(block.cx, Place::kSignal, u32(e.flags), unit);
    if (Wire::kFlagged && block.thread == 0) ptx::st_release(exchange_round(block.buffers, e, sequence).flags + unit * kFlagStride, sequence);
  }
  trace(block.cx, Event::kEnd, site, unit);
}

// Takes each warp's first cached chunk of a unit out of the ring, as far as whole stages can be let go of by that; the number of
// those stages. `mine` is the warp's class of chunks, of `classes`.
template <class T, class B, class R>
MK_DEV u32 hold_chunks(const B& block, R& reader, u32 site, const Unit& unit, u32 classes, u32 mine, HeldChunk<T>& held) {
  constexpr u32 kPerStage = R::kStageBytes / T::kChunkBytes;
  const u32 cached = unit.end - unit.begin, stages = cached <= classes ? ceil_div(cached, kPerStage) : classes / kPerStage;
#pragma unroll 1
  for (u32 stage = 0; stage < stages; ++stage) {
    const smem_ptr<char> from = reader.wait_stage(site, unit.begin + stage * kPerStage);
    if (mine / kPerStage == stage && mine < min_u32(cached, classes)) {
      held.load({from.template at<char>(mine % kPerStage * T::kChunkBytes), block.lane()});
      held.await();
    }
    reader.release();
  }
  return stages;
}

// What one warp takes of a unit: every `classes`-th of its chunks from `next` on (~0: none), counted from the unit's first. First what
// is held of `begun` stages, then stages of cached rows, then this step's own chunk: one loop, so that the arithmetic exists once.
template <bool kHolds, class T, class B, class R, class S, u32 kMasks>
MK_DEV void take_chunks(const B& block, R& reader, u32 site, const AttentionShape& s, u32 kv_len, u32 tokens, const Unit& unit, u32 next,
                        u32 classes, u32 begun, const u32 (&ancestors)[kMasks], i32 meeting, u32 window, HeldChunk<T>& held, S& state) {
  constexpr u32 kPerStage = R::kStageBytes / T::kChunkBytes;
  const u32 cached = unit.end - unit.begin, stages = ceil_div(cached, kPerStage);
  const float scale_log2 = ptx::bits_float(u32(s.scale_log2));
  u32 depth[kMasks] = {};  // of the query rows' tokens, where a window asks for it
#pragma unroll
  for (u32 r = 0; r < kMasks && T::kWindow != 0; ++r) depth[r] = B::kTokens == 1 ? 1 : chain_depth(ancestors[r] & ((1u << tokens) - 1));
  // A long cache is streamed as weights are: the next meeting is ahead when its last stage is taken.
  const bool streams = stages > R::kStages;
  if (streams) block.meeting(meeting, false);
#pragma unroll 1
  for (u32 stage = max_u32(begun, 1) - 1; stage < stages + (unit.fresh ? 1u : 0u); ++stage) {
    const bool kept = stage < begun, lies = !kept && stage < stages;
    const u32 first = kept ? 0 : min_u32(stage * kPerStage, cached), end = kept || lies ? min_u32((stage + 1) * kPerStage, cached) : cached + 1;
    const smem_ptr<char> from = lies ? reader.wait_stage(site, unit.begin + first) : block.template at<char>(s.fresh);
    if (first == 0 && cached != 0) trace(block.cx, Event::kTile, site, unit.begin);
    if (streams && stage + 1 == stages) block.meeting(meeting, true);
#pragma unroll 1
    for (; next < end; next += classes) {
      u32 exist = tokens, seen[2];
      if (next < cached) exist = min_u32(kChunkRows, kv_len - (unit.begin + next) * kChunkRows);
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        seen[r] = (1u << exist) - 1;
        if (next == cached) seen[r] &= ancestors[r % kMasks];
        if (T::kWindow != 0 && next < cached)
          seen[r] &= rows_from((unit.begin + next) * kChunkRows, window_begin(kv_len, window, depth[r % kMasks]));
      }
      const LyingChunk<T> lying = {from.template at<char>((next - first) * T::kChunkBytes), block.lane()};
      if constexpr (kHolds) {
        if (!kept) held.load(lying);
        state.take(held, block.lane(), scale_log2, seen, exist);
      } else {
        state.take(lying, block.lane(), scale_log2, seen, exist);
      }
    }
    if (lies) reader.release();
  }
}

// Queries and keys are multiplied as they are gathered; else see HeadMaps.
struct AsGathered {
  static constexpr bool kMaps = false;
};

// What the two warps of a tile do in place of leaving their parts for publish_unit, see halves.h.
template <class Wire, class T, class B>
MK_DEV void publish_halves(const B& block, u32 site, const AttentionShape& s, const ExchangeShape& e, u32 sequence, u32 unit, u32 tiles, u32 taken,
                           Softmax<T>& state);

// Consumer side of attention for all units of this block. S: Softmax, or FewRows. kHolds: warps take chunks before they wait for the
// queries. kHalves: there is one pass, two warps have each tile and publish half of its columns each. `pause`: ns before the first poll. `heads`: what is
// made of queries and keys before they are multiplied. `window`: the layer's. `cached_rows`: where they lie.
template <class QkvWire, class PartWire, class T, class P, template <class> class S, bool kHolds, bool kHalves, class B, class R, class E, class H = AsGathered, class Rows = Stretches>
MK_DEV void run_attention(const B& block, R& reader, u32 gather_site, u32 ring_site, const AttentionShape& s, const Step& step, u32 layer,
                          const ExchangeShape& qkv, u32 qkv_sequence, const E& parts, u32 parts_sequence, i32 meeting,
                          u32 pause, const H& heads = {}, u32 window = T::kWindow, const Rows& cached_rows = {}) {
  constexpr u32 kMasks = B::kTokens == 1 ? 1 : 2;  // of the two query rows of a lane
  const u32 rows = ptx::opaque(u32(s.rows)), kv_len = ptx::opaque(step.kv_len);  // or what comes of them would be kept over all layers
  const u32 all_tiles = S<T>::kOneTile ? 1 : ceil_div(rows, 16);
  if (block.cx.block >= u32(s.kv_heads) * u32(s.splits)) block.meet();
#pragma unroll 1
  for (u32 u = block.cx.block; u < u32(s.kv_heads) * u32(s.splits); u += block.cx.blocks.value) {
    const Unit unit = attention_unit(s.divisor(), u, kv_len, window);
    const u32 chunks = unit.end - unit.begin + (unit.fresh ? 1 : 0);
    // No more classes of chunks than there is work for: each leaves a part to add.
    const auto classes_of = [&](u32 tiles) { return min_u32(B::kWarps / tiles, max_u32(chunks, 1)); };
    const auto tiles_from = [&](u32 first_tile) { return S<T>::kOneTile ? 1 : min_u32(B::kWarps, all_tiles - first_tile); };
    HeldChunk<T> held = {};  // zeros: registers without a value on some path would count as in use in all the loop
    u32 held_stages = 0;
    if (kHolds) held_stages = hold_chunks<T>(block, reader, ring_site, unit, classes_of(tiles_from(0)), block.warp() / tiles_from(0), held);
    if (u != block.cx.block) block.sync();  // everybody is done with the unit before
    // Which of this step's rows a lane's query rows attend to: asked for early, for it is a trip to memory.
    u32 ancestors[kMasks] = {};
    const auto ask_ancestors = [&](u32 first_tile) {
      const u32 row0 = (first_tile + block.warp() % tiles_from(first_tile)) * 16;
#pragma unroll
      for (u32 r = 0; r < kMasks && (unit.fresh || (T::kWindow != 0 && B::kTokens != 1)); ++r)
        ancestors[r] = ptx::ld_global<u32>(block.cx.control->ancestors + (row0 + S<T>::row(block.lane(), r)) % B::kTokens);
    };
    ask_ancestors(0);
    if (u == block.cx.block) block.meet_paused(pause);
    gather_unit<QkvWire, T, P>(block, gather_site, s, qkv, qkv_sequence, unit);
    block.sync();
    if constexpr (H::kMaps) {
      heads.apply(block, s, unit.fresh);
      block.sync();
    }
    trace(block.cx, Event::kReady, ring_site, u);
#pragma unroll 1
    for (u32 first_tile = 0; first_tile < all_tiles; first_tile += B::kWarps) {
      if (first_tile != 0) {
        block.sync();  // the parts of the pass before have been read
        ask_ancestors(first_tile);
      }
      const u32 tiles = tiles_from(first_tile), classes = classes_of(tiles), tile = block.warp() % tiles, mine = block.warp() / tiles;
      S<T> state(block.template at<char>(s.queries + i32((first_tile + tile) * T::kPanels * 16 * 64)), block.lane());
      take_chunks<kHolds, T>(block, reader, ring_site, s, kv_len, step.tokens, unit, mine < classes ? mine : ~0u, classes,
                             first_tile == 0 ? held_stages : 0, ancestors, meeting, window, held, state);
      const u32 taken = reader.taken.now();
      if constexpr (kHalves) publish_halves<PartWire, T>(block, ring_site, s, parts, parts_sequence, u, tiles, taken, state);
      else publish_all<PartWire, T>(block, ring_site, s, parts, parts_sequence, u, first_tile, tiles, classes, taken, rows, state);
    }
    if (PartWire::kFlagged) block.sync();  // all of the unit's parts are stored
    end_unit<PartWire>(block, ring_site, parts, parts_sequence, u);
    if (unit.fresh) append_rows<T>(block, s, step, layer, unit.head, cached_rows);
  }
  // No barrier at the end: the merge meets before anybody writes where the unit lay. But a block without a unit meets here: what
  // it staged before is still being published, and the merge stages anew.
  if (!B::kFinishes && block.cx.block >= u32(s.kv_heads) * u32(s.splits)) block.sync();
  block.meet();
}

}  // namespace mk
