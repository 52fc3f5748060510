// Words that are accessed strongly (relaxed, acquire, release) have histories: a relaxed load may return an older value.
//
// It may not be older than
//   a value whose store the reader knows to be ordered before it, or wrote itself;
//   a value that the reader, or somebody ordered before it, has already read there (coherence);
//   a value whose writer has since made a round trip: some other block observed something that the writer's block did after the
//   store, and the writer's block observed something of that. PTX does not promise that last one; it stands for stores that
//   drain, and without it nothing could be reset without fences (docs/ptx-notes.md, Sentinels).
#pragma once

#include "host/detect/mutants.h"

namespace mk::host::detect {

constexpr u32 kHistory = 4;
constexpr u32 kStaleOdds = 4;  // one load in so many looks a step further back
constexpr u32 kBeforeLaunch = ~0u;

// What a store carries: the writer's clock, and what is ordered before the store if a reader acquires it.
struct Message {
  const u32* clock;
  u32 writer;  // lane; kBeforeLaunch
  u32 time;
  const u32* released;  // null: nothing
  u32 releaser, released_time;
  bool gpu;  // scope of the release
};

struct Store {
  char value[16];
  u64 serial;
  Message message;
};

struct Sight {
  u32 lane, time;
  u64 serial;
};

struct Word {
  u32 bytes, count;
  Store stores[kHistory];  // oldest first
  Array<Sight> sights;
};

struct Words {
  Table<Word*> at;
  u64 serial;
  Array<u32> settled;  // per lane: stores before this time have made a round trip
};

static Words words;

MK_FN Word& word_at(const void* p, u32 bytes) {
  Word*& known = words.at.at(reinterpret_cast<u64>(p));
  if (known == nullptr) known = pool.take<Word>(1);
  Word& w = *known;
  const bool stale = w.count == 0 || w.bytes != bytes || std::memcmp(w.stores[w.count - 1].value, p, bytes) != 0;
  if (stale) {  // first access, or changed by other means
    w.bytes = bytes;
    w.count = 1;
    w.sights.size = 0;
    Store& s = w.stores[0];
    std::memcpy(s.value, p, bytes);
    s.serial = ++words.serial;
    s.message = {nullptr, kBeforeLaunch, 0, nullptr, 0, 0, false};
  }
  return w;
}

MK_FN bool must_see(const Lane& l, const Store& s) {
  const Message& m = s.message;
  return m.writer == kBeforeLaunch || covered(l, kOrdered, m.writer, m.time) || m.time < words.settled[m.writer];
}

MK_FN u64 oldest_coherent(const Lane& l, Word& w) {
  u64 floor = 0;
  for (u32 i = 0; i < w.sights.size; ++i) {
    const Sight& s = w.sights[i];
    const bool mine = s.lane / kWarpSize == id_of(*l.warp);
    if (s.serial > floor && (mine || covered(l, kOrdered, s.lane, s.time))) floor = s.serial;
  }
  return floor;
}

MK_FN void note_sight(const Lane& l, Word& w, u64 serial) {
  const Sight now{id_of(l), state_of(*l.warp).time, serial};
  for (u32 i = 0; i < w.sights.size; ++i) {
    Sight& s = w.sights[i];
    if (s.lane / kWarpSize != now.lane / kWarpSize) continue;
    s = now;
    return;
  }
  w.sights.push(now);
}

MK_FN const Store& choose(const Lane& l, Word& w) {
  u32 i = w.count - 1;
  if (rt.seeded && i != 0) {
    const u64 floor = oldest_coherent(l, w);
    while (i != 0 && !must_see(l, w.stores[i]) && w.stores[i].serial > floor && random_u64() % kStaleOdds == 0) --i;
    if (i != w.count - 1) ++rt.result->stale;
  }
  note_sight(l, w, w.stores[i].serial);
  return w.stores[i];
}

// What the writer's block learns of its own earlier stores by observing another block's.
MK_FN void settle_stores(const Lane& l, const Message& m) {
  const u32 block = l.warp->block->index, first = block * rt.num_threads;
  if (m.writer / rt.num_threads == block) return;
  const u32* seen = m.clock + kSeen * clocks.words;
  for (u32 i = first; i < first + rt.num_threads; ++i) words.settled[i] = words.settled[i] > seen[i] ? words.settled[i] : seen[i];
}

MK_FN void raise(u32* clock, View v, u32 who, u32 time) {
  u32& entry = clock[v * clocks.words + who];
  if (entry < time) entry = time;
}

// Readers acquire at the scope of the GPU; a release of smaller scope reaches its own block.
MK_FN bool in_scope(const Lane& l, const Message& m) {
  return m.gpu || m.releaser / rt.num_threads == l.warp->block->index;
}

MK_FN void observe(Lane& l, const Message& m, bool acquire) {
  if (m.writer == kBeforeLaunch) return;
  if (m.writer != id_of(l) && !covered(l, kSeen, m.writer, m.time)) {
    settle_stores(l, m);
    u32* mine = private_clock(l);
    join(mine + kSeen * clocks.words, m.clock + kSeen * clocks.words, clocks.words);
    raise(mine, kSeen, m.writer, m.time + 1);
  }
  if (m.released == nullptr || !in_scope(l, m) || covered(l, kOrdered, m.releaser, m.released_time)) return;
  LaneState& s = state_of(l);
  if (!acquire && s.pending == nullptr) s.pending = clocks.take_clock();
  u32* to = acquire ? private_clock(l) : s.pending;
  join(to, m.released, kViews * clocks.words);
  for (const View v : {kOrdered, kSeen}) raise(to, v, m.releaser, m.released_time + 1);
}

template <class V>
MK_FN V relaxed_load(const V* p, V newest, bool acquire, const void*) {
  if (!active()) return newest;
  Lane& l = *rt.lane;
  const Store& s = choose(l, word_at(p, sizeof(V)));
  V v;
  std::memcpy(&v, s.value, sizeof v);
  observe(l, s.message, acquire);
  return v;
}

// Call before memory changes.
template <class V>
MK_FN void relaxed_store(const V* p, V v, bool release, const void*) {
  if (!active()) return;
  Lane& l = *rt.lane;
  Word& w = word_at(p, sizeof(V));
  if (w.count == kHistory) {
    for (u32 i = 1; i < kHistory; ++i) w.stores[i - 1] = w.stores[i];
    --w.count;
  }
  Store& s = w.stores[w.count++];
  std::memcpy(s.value, &v, sizeof v);
  s.serial = ++words.serial;
  const LaneState& state = state_of(l);
  const u32* clock = publishable(l);
  const u32 time = tick(l);
  s.message = {clock, id_of(l), time, state.released, id_of(l), state.released_time, state.released_gpu};
  if (release) s.message.released = clock, s.message.released_time = time, s.message.gpu = true;
  note_sight(l, w, s.serial);
}

// A read-modify-write: reads the newest value, and hands on what its store released.
MK_FN void exchanged(const u32* p, u32 v) {
  if (!active()) return;
  Message read = word_at(p, 4).stores[word_at(p, 4).count - 1].message;
  observe(*rt.lane, read, false);
  relaxed_store(p, v, false, nullptr);
  Word& w = word_at(p, 4);
  Message& m = w.stores[w.count - 1].message;
  if (m.released == nullptr && read.released != nullptr) m.released = read.released, m.releaser = read.releaser, m.released_time = read.released_time, m.gpu = read.gpu;
}

MK_FN void begin_words() {
  words.at.reset();
  words.serial = 0;
  words.settled.reset(clocks.lanes);
}

}  // namespace mk::host::detect
