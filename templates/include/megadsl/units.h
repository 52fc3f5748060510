// Which cached rows an attention's units take, and a chunk of them as operands. Loaders and consumers share it.
#pragma once
#include "megadsl/block.h"
#include "megadsl/window.h"

namespace mk {

struct AttentionShape {
  i32 kv;            // KV arena of this cache, in 16-byte units
  i32 layer_stride;
  i32 head_stride;
  i32 kv_heads;
  i32 splits;
  i32 q_begin;       // features of the q value where the queries begin; likewise keys and values
  i32 k_begin;
  i32 v_begin;
  i32 scale_log2;    // fp32 bits of scale * log2(e)
  i32 scratch;       // shared memory: warps' parts
  i32 queries;       // shared memory: query tiles
  i32 fresh;         // shared memory: this step's K and V as one cache chunk
  i32 rows;          // query rows per KV head
  i32 max_rows;      // capacity of the cache
  i32 splits_inverse;  // Divisor::inverse of splits

  MK_DEV Divisor divisor() const { return {u32(splits), u32(splits_inverse)}; }
};

// kWindow: how many rows a token sees, its own included; 0 for all; with kOfLayer, where each layer's number stands.
// kByToken: query rows are ordered by token, then by head, so that those of one sequence of a batch follow each other; else by head.
template <u32 kHeadDim_, class B, u32 kWindow_ = 0, class Score_ = PlainScore, bool kByToken_ = false>
struct AttentionTiling {
  using Score = Score_;
  static constexpr bool kByToken = kByToken_;
  static constexpr u32 kWindow = kWindow_;
  static constexpr u32 kHeadDim = kHeadDim_;
  static_assert(kHeadDim % 16 == 0, "a step of the second product takes 16 features");
  static constexpr u32 kPanels = ceil_div(kHeadDim, kPanel);
  static constexpr u32 kChunkBytes = kChunkRows * kPanels * kPanel * 2 * 2;
  static constexpr u32 kKeyBytes = kChunkBytes / 2;
  static constexpr u32 kVectors = kHeadDim / 4 + 1;  // fp32 vectors per query row of a partial: D values, then {max, sum}
  static constexpr u32 kPartFloats = kHeadDim + 4;

  // A lane's 16 bytes of a panel. A head may end in the middle of its last panel: what lies behind it is anything, and counts as zeros.
  MK_DEV static u32x4 load_panel(smem_ptr<char> at, u32 panel, u32 lane) {
    const u32x4 x = ptx::ld_shared<u32x4>(at.template at<u32x4>(0));
    const bool ends = kHeadDim % kPanel != 0 && panel + 1 == kPanels && lane % 4 * kGroupRows >= kHeadDim % kPanel;
    return ends ? u32x4{0, 0, 0, 0} : x;
  }
};

constexpr u32 kFewRows = 8;           // query rows of a tile where an mma has them as its N, see few_rows.h
constexpr float kNoMaximum = -1.0e30f;  // finite, so that tag bits cannot turn it into a NaN

struct Unit {
  u32 head, split;
  u32 begin, end;  // chunks of rows older than this launch
  bool fresh;      // also takes this step's rows
};

// Splits differ by one chunk at most, this step's rows counted as one; the last one has the last of the older chunks in any case,
// for that is where its rows go. With a window the chunks are those that the step's first token sees. Loader and consumers call it alike.
MK_DEV Unit attention_unit(const Divisor& splits, u32 unit, u32 kv_len, u32 window = 0) {
  const u32 skipped = window == 0 ? 0 : window_begin(kv_len, window, 1) / kChunkRows;
  const u32 head = splits.divide_any(unit), split = unit - head * splits.value;
  const u32 chunks = ceil_div(kv_len, kChunkRows) - skipped, last = max_u32(chunks, 1) - 1, before = (chunks + 1) * split;
  const bool fresh = split + 1 == splits.value;
  const u32 begin = splits.divide_any(before), end = splits.divide_any(before + chunks + 1);
  return {head, split, skipped + min_u32(begin, last), skipped + (fresh ? chunks : min_u32(end, last)), fresh};
}

MK_DEV char* cache_chunk(const Buffers& buffers, const AttentionShape& s, u32 layer, u32 head, u32 chunk, u32 chunk_bytes) {
  const size_t at = size_t(u32(s.kv)) + size_t(u32(s.layer_stride)) * layer + size_t(u32(s.head_stride)) * head;
  return buffers.kv + at * 16 + size_t(chunk) * chunk_bytes;
}

// m16 tiles that one pass over the KV rows serves: one per warp.
MK_DEV u32 attention_passes(const AttentionShape& s, u32 warps) { return ceil_div(ceil_div(u32(s.rows), 16), warps); }

// Which V words of a chunk hold rows that exist: rows 2q and 2q + 1 of a half, `rows` exist in all.
MK_DEV u32 row_mask(u32 half, u32 q, u32 rows) {
  const u32 row = half * 8 + 2 * q;
  return (row < rows ? 0x0000ffffu : 0u) | (row + 1 < rows ? 0xffff0000u : 0u);
}

// Rows [begin, end) of a chunk of this step's own: those of one sequence.
struct RowRange {
  u32 begin, end;
};
MK_DEV u32 row_mask(u32 half, u32 q, const RowRange& rows) { return row_mask(half, q, rows.end) & ~row_mask(half, q, rows.begin); }

// A chunk as a lane's operands of the products: where it lies in shared memory, or taken into registers.
template <class T>
struct LyingChunk {
  smem_ptr<char> at;
  u32 lane;
  MK_DEV u32x4 keys(u32 half, u32 panel) const {
    return T::load_panel(at.template at<char>(((half * T::kPanels + panel) * 8 + lane / 4) * 64 + lane % 4 * 16), panel, lane);
  }
  MK_DEV u32x4 values(u32 pair) const {
    return ptx::ld_shared<u32x4>(at.template at<u32x4>(T::kKeyBytes + (pair * 32 + lane) * 16));
  }
};
template <class T>
struct HeldChunk {
  u32x4 key[2][T::kPanels], value[T::kHeadDim / 16];

  MK_DEV void load(const LyingChunk<T>& from) {
#pragma unroll
    for (u32 i = 0; i < 2 * T::kPanels; ++i) key[i / T::kPanels][i % T::kPanels] = from.keys(i / T::kPanels, i % T::kPanels);
#pragma unroll
    for (u32 i = 0; i < T::kHeadDim / 16; ++i) value[i] = from.values(i);
  }
  // Comes back when all of it is there: only then may the place that it came from be filled anew.
  MK_DEV void await() const {
    u32 seen = 0;
#pragma unroll
    for (u32 i = 0; i < 2 * T::kPanels; ++i) seen ^= key[i / T::kPanels][i % T::kPanels].w;
#pragma unroll
    for (u32 i = 0; i < T::kHeadDim / 16; ++i) seen ^= value[i].w;
    ptx::await(seen);
  }
  MK_DEV u32x4 keys(u32 half, u32 panel) const { return key[half][panel]; }
  MK_DEV u32x4 values(u32 pair) const { return value[pair]; }
};

}  // namespace mk
