// Where cached rows lie: in stretches, or in pages.
//
// A stretch is what a KV head of one sequence has of a layer, row after row, with room for all rows that there may be. Pages are the same
// cut into pieces of 16, 32 or 64 rows, which lie anywhere in a pool that all sequences share: a table in device memory says which page a
// sequence has for its first rows, for the next ones, and so on; each layer and each of K and V uses the same numbers. A page has a run of
// whole chunks for each KV head, so that it is one bulk copy. Units, stages and chunks are those of stretches: a stage is the same bytes, put
// together from as many copies as it has pages. So consumers know nothing of pages, but for the place that they append to.
#pragma once
#include "megadsl/units.h"

namespace mk {

// The pool of a layer, and the table.
struct PageShape {
  i32 pages;   // of the pool; the table's numbers are below that
  i32 stride;  // entries of a sequence
};

struct Stretches {
  static constexpr bool kPaged = false;
};

template <u32 kPageRows>
struct Pages {
  static constexpr bool kPaged = true;
  static constexpr u32 kChunks = kPageRows / kChunkRows;  // of a page
  static_assert(kPageRows % kChunkRows == 0, "a page is whole chunks");

  const u32* table;
  u32 count;
  u32 stride;

  MK_DEV Pages(const PagedBuffers& buffers, const PageShape& s) : table(buffers.pages), count(u32(s.pages)), stride(u32(s.stride)) {}

  // Which page has a chunk of a sequence, as the table says: any number. Not waited for: the loader asks for a page ahead.
  MK_DEV u32 entry(u32 sequence, u32 chunk) const { return ptx::ld_global<u32>(table + (size_t(stride) * sequence + chunk / kChunks)); }
  // The page that is read: of a number that is none, the pool's last one.
  MK_DEV u32 readable(u32 page) const { return min_u32(page, count - 1); }

  // Where a chunk is appended to. False where the table has no page for it: then nothing is written. What could be worked out of the row ahead
  // of all layers is not: it would cost registers that attention needs.
  MK_DEV bool find(char*& chunk, const Buffers& buffers, const AttentionShape& s, u32 layer, u32 head, u32 sequence, u32 at_chunk,
                   u32 chunk_bytes) const {
    const u32 index = ptx::opaque(at_chunk), page = entry(sequence, index);
    if (page >= count) return false;
    const size_t at = size_t(u32(s.kv)) + size_t(u32(s.layer_stride)) * layer + size_t(u32(s.head_stride)) * (u32(s.kv_heads) * page + head);
    chunk = buffers.kv + at * 16 + size_t(index % kChunks) * chunk_bytes;
    return true;
  }

  // Calls `use(page, first chunk of it, chunks)` for each stretch of a sequence's chunks [begin, end) that lies in one page. `next` is
  // begin's entry, and becomes end's where `last`, the end of all that is read, lies behind.
  template <class F>
  MK_DEV void for_each_part(u32 sequence, u32 begin, u32 end, u32 last, u32& next, F use) const {
#pragma unroll 1
    for (u32 at = begin; at < end;) {
      const u32 inside = at % kChunks, chunks = min_u32(kChunks - inside, end - at), page = readable(next);
      at += chunks;
      if (inside + chunks == kChunks && at < last) next = entry(sequence, at);
      use(page, inside, chunks);
    }
  }
};

}  // namespace mk
