// The emulator has no machine code of the GPU: lines of a range that nobody reads are counted in its place.
#pragma once

#include "host/runtime.h"

namespace mk::host {

constexpr u64 kCodeBegin = 1ull << 40;  // no address of the host's
constexpr u32 kCodeLine = 128;

MK_FN void prefetch_code(u64 at) {
  const u64 offset = at - kCodeBegin;
  if (offset >= rt.args->code_bytes || offset % kCodeLine != 0) fault("prefetch of code at byte %llu of %u", offset, rt.args->code_bytes);
  const u64 line = offset / kCodeLine;
  if (rt.code_lines.size() <= line) rt.code_lines.resize(line + 1);
  if (!rt.code_lines[line]) ++rt.result->code_lines;
  rt.code_lines[line] = true;
  ++rt.result->code_prefetches;
}

}  // namespace mk::host
