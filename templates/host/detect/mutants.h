// Mutants: one deliberate mistake, made at run time, to see whether anything notices it (docs/verification.md, Mutation score).
//
// A point is a place where the kernel synchronises: a kind of operation, and the chain of calls that leads to it. A launch
// records the points that it passes, or makes one change at some of them.
#pragma once

#include "host/detect/shadow.h"

namespace mk::host::detect {

MK_FN u64 mix(u64 key, u64 word) { return (key ^ word) * 0x9e3779b97f4a7c15ull >> 7 ^ key << 5; }

// The same for the same calls in every launch of a library.
MK_FN u64 key_of(Point kind, u32 pc) {
  u64 key = mix(static_cast<u64>(kind) + 1, pc);
  for (u32 node = state_of(*rt.lane).context; node != 0; node = shadow.calls[node].parent) key = mix(key, shadow.calls[node].pc);
  return key | 1;
}

MK_FN void record_point(Point kind, u32 pc) {
  const u64 key = key_of(kind, pc);
  u32& number = shadow.point_of.at(key);  // counts from 1
  const LaunchArgs& a = *rt.args;
  if (number == 0) {
    number = ++rt.result->point_count;
    if (number > a.point_capacity) fault("more than %u points of synchronisation", a.point_capacity);
    PointRecord& p = a.points[number - 1];
    p = {key, static_cast<u32>(kind), {}};
    u32 depth = 0;
    p.stack[depth++] = pc;
    for (u32 node = state_of(*rt.lane).context; node != 0 && depth < kRaceStack; node = shadow.calls[node].parent) p.stack[depth++] = shadow.calls[node].pc;
  }
}

// What is to be done wrong here.
MK_FN Change change_at(Point kind, const void* pc) {
  if (!active() || rt.lane == nullptr) return Change::kNone;
  const LaunchArgs& a = *rt.args;
  if (a.point_capacity != 0) record_point(kind, offset_of(pc));
  if (a.change == Change::kNone || a.changed != kind) return Change::kNone;
  const u64 key = key_of(kind, offset_of(pc));
  for (u32 i = 0; i < a.changed_count; ++i) {
    if (a.changed_points[i] == key) {
      ++rt.result->changes;
      return a.change;
    }
  }
  return Change::kNone;
}

}  // namespace mk::host::detect
