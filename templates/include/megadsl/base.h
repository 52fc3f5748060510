// Words that every header shares: integer and vector types, function markers, and the structures that the host fills
// before a launch. Layouts here are read by Python (runtime and emulate): change both or neither.
#pragma once

#if defined(MK_HOST)
#include <cstddef>
#include <cstdint>
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define MK_DEV inline
#define MK_PTX inline __attribute__((always_inline))  // a fiber switch inside a called function would make its return mispredict
#define MK_NOINLINE __attribute__((noinline))
#if defined(MK_DETECT)
#define MK_RAW __attribute__((no_sanitize("thread")))  // reports its accesses itself
#define MK_OP inline __attribute__((noinline)) MK_RAW  // its return address names the line of the kernel
#define MK_FN inline MK_RAW
#else
#define MK_RAW
#define MK_OP MK_PTX
#define MK_FN inline
#endif
#else
#define MK_DEV __device__ __forceinline__
#define MK_PTX MK_DEV
#define MK_OP MK_PTX
#define MK_NOINLINE __device__ __noinline__
#endif

// What nearly always holds: keeps the other branch out of the hot line of code.
#define MK_LIKELY(x) __builtin_expect(!!(x), 1)

namespace mk {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;

struct alignas(8) u32x2 {
  u32 x, y;
};

struct alignas(16) u32x4 {
  u32 x, y, z, w;
};

constexpr u32 kWarpSize = 32;
constexpr u32 kMaxTokens = 16;
constexpr u32 kMaxSteps = 32;     // of one launch
constexpr u32 kMaxStopIds = 8;
constexpr u32 kMaxSequences = 8;  // of a batch

// What a wait is waiting for; written to the error record when the wait gives up.
struct WaitInfo {
  u32 site, layer, tile, expected, observed;
};

// Values of Control::error. The record is complete only at kErrorRecorded; the word is sticky until the host clears it.
constexpr u32 kErrorNone = 0;
constexpr u32 kErrorWriting = 1;
constexpr u32 kErrorRecorded = 2;

// Bit of Control::flags: after the step, feed its last new token as the next step's input.
constexpr u32 kFlagAdvance = 1;

struct ErrorRecord {
  u32 site, block, warp, layer, tile, expected, observed, spare;
};

// State of one kernel instance in device memory, 512 bytes. token_ids, positions, ancestors and next_ids have one entry
// per new token; bit j of ancestors[i] says that new token i attends to new token j (its own bit included). `steps` counts launches.
struct alignas(16) Control {
  u32 error, epoch, kv_len, n_tokens, flags, timeout_us, steps, abort;
  u32 token_ids[kMaxTokens];
  u32 positions[kMaxTokens];
  u32 ancestors[kMaxTokens];
  u32 next_ids[kMaxTokens];
  ErrorRecord record;
  u32 chaos;      // seed of a build with MK_CHAOS, 0: none
  u32 num_steps;  // of the next launches, at most kMaxSteps; 0 is one
  u32 stop_ids[kMaxStopIds];  // a launch of several steps ends with the step that chooses one of them
  u32 steps_made;             // by the last launch
  u32 chosen[kMaxSteps];      // the id that each of its steps has chosen behind its last new token
  u32 reserved[5];
};
static_assert(sizeof(Control) == 512, "Control is 128 words");

// What follows Control in kernels of a batch: per sequence the rows in its cache and how many of the new tokens are its own. Tokens are
// ordered by sequence; control.kv_len and chosen are not used. `chosen`: what each step has chosen behind each sequence's last new token.
struct BatchControl {
  u32 kv_len[kMaxSequences];
  u32 tokens[kMaxSequences];
  u32 chosen[kMaxSteps * kMaxSequences];
};
static_assert(sizeof(BatchControl) == 272 * 4, "BatchControl is 272 words");
MK_DEV const BatchControl* batch_of(const Control* control) { return reinterpret_cast<const BatchControl*>(control + 1); }
MK_DEV BatchControl* batch_of(Control* control) { return reinterpret_cast<BatchControl*>(control + 1); }

// Kernel argument: base addresses in device memory (host memory when emulated).
struct Buffers {
  Control* control;
  const char* weights;
  char* kv;
  char* exchange;
  float* logits;
  const float* rope;
  u32x4* trace;
};
static_assert(sizeof(Buffers) == 7 * 8, "Buffers is seven pointers");

// Of kernels whose cached rows lie in pages: per sequence the numbers of its pages, see pages.h.
struct PagedBuffers : Buffers {
  const u32* pages;
};
static_assert(sizeof(PagedBuffers) == 8 * 8, "one pointer more");

}  // namespace mk
