// Which rows a token sees through a window, and what becomes of its scores.
//
// A token of a window of w rows sees the newest w of those on its path: cached rows, new tokens before it, its own. So a chain's later
// tokens begin later, and a step reads from the chunk on in which its first token begins.
#pragma once
#include "megadsl/layout.h"
#include "megadsl/math.h"

namespace mk {

// A window that differs from layer to layer is a row of Shape's table: of an attention's own window, this bit and the row's number.
constexpr u32 kOfLayer = 1u << 31;

// A number of each layer, of `kRows` things.
template <u32 kRows, u32 kLayers>
struct LayerTable {
  i32 at[kRows][kLayers];
};

// How loaders find the window of a layer: it is in the tape, or the tape says in which row it stands.
struct OneWindow {
  MK_DEV u32 of(u32 window, u32) const { return window; }
};
template <class Table>
struct LayerWindows {
  const Table& table;
  MK_DEV u32 of(u32 window, u32 layer) const { return (window & kOfLayer) != 0 ? u32(table.at[window & ~kOfLayer][layer]) : window; }
};

// What becomes of a score; `scale` is AttentionShape::scale_log2. A kernel with a soft cap brings its own.
struct PlainScore {
  MK_DEV static float of(float score, float scale) { return score * scale; }
};

// The first cached row that the `depth`-th new token of a chain sees through a window.
MK_DEV u32 window_begin(u32 kv_len, u32 window, u32 depth) { return max_u32(kv_len + depth, window) - window; }

// Which rows of a chunk, from `row` on, are not before row `first`.
MK_DEV u32 rows_from(u32 row, u32 first) { return first <= row ? ~0u : first - row < kChunkRows ? ~0u << (first - row) : 0u; }

// New tokens on the way to one with these ancestors, itself included.
MK_DEV u32 chain_depth(u32 ancestors) {
  u32 depth = 0;
  for (; ancestors != 0; ancestors &= ancestors - 1) ++depth;
  return depth;
}

}  // namespace mk
