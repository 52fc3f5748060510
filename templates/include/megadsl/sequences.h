// A batch: the new tokens of a step belong to several sequences, each with cached rows of its own.
//
// How many rows each has, and how many new tokens, is run-time data: a table that a block copies into its shared memory when a launch
// begins. What the later steps of a launch have follows from it. Loaders, consumers and checker share the cut of the cached rows: per
// KV head, the chunks of all sequences stand one behind the other, and split i of n takes the i-th of n equal stretches of them. So a long
// sequence is spread over many blocks and short ones share one, whatever the lengths are.
#pragma once
#include "megadsl/steps.h"
#include "megadsl/units.h"

namespace mk {

// What the launch has of all sequences.
struct BatchShape {
  i32 sequences;
  i32 stride;  // KV arena of one sequence, in 16-byte units; not used where rows lie in pages
  i32 table;   // shared memory: see Sequences
};

// A sequence in a step: rows that were cached before it, and new tokens. Without new tokens it has no part in the step.
struct Sequence {
  u32 kv_len, tokens;
  MK_DEV u32 skipped(u32 window) const { return window == 0 ? 0 : window_begin(kv_len, window, 1) / kChunkRows; }
  MK_DEV u32 chunks(u32 window) const { return ceil_div(kv_len, kChunkRows) - skipped(window); }
  // What is shared out: its chunks, the last of which goes with its new rows, for that is where they are appended.
  MK_DEV u32 items(u32 window) const { return tokens == 0 ? 0 : max_u32(chunks(window), 1); }
};

// Part of one sequence that one unit takes.
struct Segment {
  u32 sequence, kv_len;
  u32 first, tokens;  // its new tokens, among those of the step
  u32 begin, end;     // chunks of cached rows
  bool fresh;         // also takes this step's rows
};

// The new tokens of the sequences that a unit has part of. They follow each other.
struct Covered {
  u32 begin, end;
};

struct Sequences {
  static constexpr bool kSeveral = true;
  static constexpr u32 kLengths = 0, kCounts = kMaxSequences, kPositions = 2 * kMaxSequences, kNext = 3 * kMaxSequences;
  static constexpr u32 kWords = 4 * kMaxSequences;
  static constexpr u32 kStops = 1u << 31;  // of a word of kNext: the sequence has chosen an id that ends the launch

  smem_ptr<u32> words;
  u32 count;
  u32 stride;

  MK_DEV Sequences(const BatchShape& s) : words(ptx::smem_base().template at<u32>(u32(s.table))), count(u32(s.sequences)), stride(u32(s.stride)) {}

  // By one thread, before the whole block meets. Positions are those of each sequence's last new token.
  MK_DEV void init(const Control* control, u32 max_tokens) const {
    const BatchControl* batch = batch_of(control);
    u32 first = 0, active = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const u32 tokens = min_u32(ptx::ld_global<u32>(batch->tokens + i), max_tokens - first);
      ptx::st_shared<u32>(words + (kLengths + i), ptx::ld_global<u32>(batch->kv_len + i));
      ptx::st_shared<u32>(words + (kCounts + i), tokens);
      first += tokens;
      if (tokens != 0) ptx::st_shared<u32>(words + (kPositions + active++), ptx::ld_global<u32>(control->positions + (first - 1)));
    }
  }

  // In the step that `later` others of its launch came before: each of these appended one row, but the first one that step's.
  MK_DEV Sequence of(u32 index, u32 later) const {
    const u32 kv_len = ptx::ld_shared<u32>(words + (kLengths + index)), tokens = ptx::ld_shared<u32>(words + (kCounts + index));
    if (later == 0 || tokens == 0) return {kv_len, tokens};
    return {kv_len + tokens + later - 1, 1};
  }
  MK_DEV u32 active() const {
    u32 found = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) found += ptx::ld_shared<u32>(words + (kCounts + i)) != 0 ? 1 : 0;
    return found;
  }
  // Calls `use(sequence's number, its last new token's, how many others have any)` for all that have new tokens.
  template <class F>
  MK_DEV void for_each_active(u32 later, F use) const {
    u32 end = 0, active = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      const Sequence sequence = of(i, later);
      end += sequence.tokens;
      if (sequence.tokens != 0) use(i, end - 1, active++);
    }
  }

  MK_DEV u32 items(u32 later, u32 window) const {
    u32 found = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) found += of(i, later).items(window);
    return found;
  }
  // Calls `use(segment)` for each sequence that split `split` has part of, in order.
  template <class F>
  MK_DEV void for_each_segment(const Divisor& splits, u32 split, u32 later, u32 window, F use) const {
    const u32 all = items(later, window), begin = splits.divide_any(all * split), end = splits.divide_any(all * (split + 1));
    if (begin == end) return;  // fewer chunks than splits: such a one may lie within a sequence, and has no part of it
    u32 before = 0, first = 0;
#pragma unroll 1
    for (u32 i = 0; i < count && before < end; ++i) {
      const Sequence sequence = of(i, later);
      const u32 items = sequence.items(window), skipped = sequence.skipped(window);
      if (items != 0 && before + items > begin) {
        const bool fresh = before + items <= end;
        const u32 from = max_u32(begin, before) - before;
        use(Segment{i, sequence.kv_len, first, sequence.tokens, skipped + from, skipped + (fresh ? sequence.chunks(window) : end - before), fresh});
      }
      before += items, first += sequence.tokens;
    }
  }
  MK_DEV Covered covered(const Divisor& splits, u32 split, u32 later, u32 window) const {
    Covered found = {0, 0};
    for_each_segment(splits, split, later, window, [&](const Segment& segment) {
      if (found.end == 0) found.begin = segment.first;
      found.end = segment.first + segment.tokens;
    });
    return found;
  }
  // A copy's or an append's place in the arena of all sequences, from its place in that of one.
  MK_DEV char* arena(char* kv, u32 sequence) const { return kv + size_t(stride) * 16 * sequence; }
};

// Steps of a launch whose tokens are those of a batch: behind the first, each sequence that has any brings one.
struct BatchSteps : Steps {
  static constexpr bool kBatch = true;
  Sequences sequences;

  MK_DEV BatchSteps(smem_ptr<u32> progress, const BatchShape& s) : Steps{progress}, sequences(s) {}
  MK_DEV u32 token(u32 token) const { return ptx::ld_shared<u32>(sequences.words + (Sequences::kNext + token)) & ~Sequences::kStops; }
  MK_DEV u32 position(u32 token) const { return ptx::ld_shared<u32>(sequences.words + (Sequences::kPositions + token)); }
  MK_DEV Step after(const Step& step) const { return {step.epoch + 1, 0, sequences.active()}; }
  // That a sequence has chosen `id` behind the last of its new tokens, `token`; nothing where it is not a last one.
  MK_DEV void note(Control* control, const Step& step, u32 token, u32 id) const {
    u32* chosen = batch_of(control)->chosen + index(step) * kMaxSequences;
    sequences.for_each_active(index(step), [&](u32 sequence, u32 last, u32) {
      if (last == token) ptx::st_global<u32>(chosen + sequence, id);
    });
  }
  // The inputs of the next launch, by one thread: of each sequence the token that it has chosen.
  MK_DEV void advance(Control* control, const Step& step) const {
    BatchControl* batch = batch_of(control);
    const u32 made = index(step) + 1;
    sequences.for_each_active(index(step), [&](u32 i, u32 last, u32 active) {
      const Sequence sequence = sequences.of(i, made - 1);
      ptx::st_global<u32>(batch->kv_len + i, sequence.kv_len + sequence.tokens);
      ptx::st_global<u32>(batch->tokens + i, 1u);
      ptx::st_global<u32>(control->token_ids + active, ptx::ld_global<u32>(control->next_ids + last));
      ptx::st_global<u32>(control->positions + active, position(active) + made);
      ptx::st_global<u32>(control->ancestors + active, 1u << active);
    });
    ptx::st_global<u32>(&control->n_tokens, sequences.active());
  }
  MK_DEV bool more() const {
    bool all = true;
#pragma unroll 1
    for (u32 i = 0; i < sequences.active(); ++i) all = all && (ptx::ld_shared<u32>(sequences.words + (Sequences::kNext + i)) & Sequences::kStops) == 0;
    return all;
  }
};

}  // namespace mk
