// Parked polls: a thread that polls in vain sleeps until a word it looked at changes.
#pragma once

#include "host/runtime.h"

namespace mk::host {

bool mbar_phase(const char* barrier);

// One polled address. bytes 0 stands for an mbarrier, of which only the phase counts (seen[0]).
struct WatchRecord {
  const char* address;
  u32 bytes;
  Lane* lane;
  WatchRecord* next;
  WatchRecord** link;  // what points at this record while it is in a bucket, else null
  char seen[16];

  bool differs() const {
    if (bytes == 0) return mbar_phase(address) != (seen[0] != 0);
    return std::memcmp(address, seen, bytes) != 0;
  }
};

constexpr u32 kMaxWatched = 32;
constexpr u32 kUnpausedPolls = 1024;

// What a lane polled since its last pause. With more than kMaxWatched addresses, or none, any change wakes it.
struct alignas(64) Poll {
  u32 count;
  u32 excess;  // polls beyond kMaxWatched
  bool any;
  u64 since;  // rt.changes when this round of polls began
  WaitInfo info;
  WatchRecord records[kMaxWatched];

  void restart() {
    count = excess = 0;
    any = false;
    since = rt.changes;
  }
};

MK_FN WatchRecord*& bucket_of(const char* address) {
  const u64 granule = reinterpret_cast<u64>(address) >> 4;
  return rt.watchers[(granule ^ granule >> 12) % kWatchBuckets];
}

MK_FN WatchRecord* record_poll(const char* address, u32 bytes) {
  Poll& p = *rt.lane->poll;
  if (p.count == kMaxWatched) {
    p.any = true;
    if (++p.excess % kUnpausedPolls == 0) preempt();  // perhaps a loop that polls without pausing: let others run
    return nullptr;
  }
  WatchRecord& r = p.records[p.count++];
  r.address = address;
  r.bytes = bytes;
  return &r;
}

template <class V>
MK_FN void polled(const void* address, const V& value) {
  if (WatchRecord* r = record_poll(static_cast<const char*>(address), sizeof(V))) std::memcpy(r->seen, &value, sizeof(V));
}

MK_FN void polled_phase(const char* barrier, bool phase) {
  if (WatchRecord* r = record_poll(barrier, 0)) r->seen[0] = phase;
}

MK_FN void wake(Lane& l) {
  Poll& p = *l.poll;
  for (u32 i = 0; i < p.count; ++i) {
    WatchRecord& r = p.records[i];
    if (r.link == nullptr) continue;
    *r.link = r.next;
    if (r.next != nullptr) r.next->link = r.link;
    r.link = nullptr;
  }
  make_ready(l);
}

MK_FN __attribute__((noinline)) void wake_watchers(const char* address, u32 bytes) {
  bool again = true;
  while (again) {  // waking a lane unlinks all its records, so the walk starts anew
    again = false;
    for (WatchRecord* r = bucket_of(address); r != nullptr; r = r->next) {
      const u32 width = r->bytes == 0 ? 8 : r->bytes;
      if (r->address < address + bytes && address < r->address + width && r->differs()) {
        wake(*r->lane);
        again = true;
        break;
      }
    }
  }
}

// Call after every change of memory that another thread may poll; at most 16 bytes, aligned to their size.
MK_FN void changed(const void* address, u32 bytes) {
  ++rt.changes;
  const char* a = static_cast<const char*>(address);
  if (bucket_of(a) != nullptr) wake_watchers(a, bytes);
}

MK_FN bool anything_new(const Poll& p) {
  if (p.any) return rt.changes != p.since;
  for (u32 i = 0; i < p.count; ++i) {
    if (p.records[i].differs()) return true;
  }
  return false;
}

MK_FN void link_records(Lane& l) {
  Poll& p = *l.poll;
  for (u32 i = 0; i < p.count; ++i) {
    WatchRecord& r = p.records[i];
    WatchRecord*& head = bucket_of(r.address);
    r.lane = &l;
    r.next = head;
    r.link = &head;
    if (head != nullptr) head->link = &r.next;
    head = &r;
  }
}

MK_FN bool poll_pause(const WaitInfo& info) {
  Lane& me = *rt.lane;
  Poll& p = *me.poll;
  p.info = info;
  p.any |= p.count == 0;
  if (rt.aborted || (p.any && anything_new(p))) {
    preempt();
  } else if (!anything_new(p)) {
    ++rt.result->parks;
    if (p.any) p.count = 0;
    link_records(me);
    block_lane(State::kPolling);
  }
  p.restart();
  return rt.aborted;
}

}  // namespace mk::host
