// What Python hands to an emulated launch, and what it gets back. megadsl/emulate/abi.py mirrors these structures.
#pragma once

#include "megadsl/base.h"

namespace mk::host {

constexpr u32 kBufferCount = 8;  // mk::PagedBuffers; a kernel reads as many as its argument has

// How a seeded scheduler treats some. Turns are withheld only while somebody else can run.
enum class Policy : u64 {
  kEven,
  kSlowLoader,   // warps that issue copies get one turn in 16
  kStarvedWarp,  // one warp, chosen by the seed, gets one turn in 64
  kLateCopies,   // copies take up to 32 times as long
  kFrozenBlock,  // one block, chosen by the seed, gets one turn in 4096
};

// Return values of mk_host_run.
constexpr int kOk = 0;
constexpr int kHung = 1;    // a deadlock, or the step limit; LaunchResult::hangs says who waited for what
constexpr int kFault = 2;   // the kernel did something the hardware forbids; LaunchResult::message says what
constexpr int kBadArgs = 3;

// Sites of hangs that are no mk::wait.
constexpr u32 kSiteBarrier = 0xffffffffu;  // bar.sync: tile is the barrier's id, in threads: expected, observed (arrived)
constexpr u32 kSiteCluster = 0xfffffffeu;  // barrier.cluster: in threads: expected, observed (arrived)

struct HangRecord {
  u32 site, block, warp, lane, layer, tile, expected, observed;
};

constexpr u32 kRaceStack = 8;
constexpr u32 kNoSite = 0xffffu;

// One side of a race: who accessed the memory, how, and from where.
struct RaceSide {
  u32 block, warp, lane;      // lane kWarpSize: an asynchronous copy, warp unknown
  u32 flags;                  // detect::Flag bits
  u32 site, layer;            // of the last wait the thread has begun; kNoSite: none
  u32 width;                  // bytes of the access
  u32 stack[kRaceStack];      // return addresses, innermost first, as offsets in the library; 0 ends
};

// Two accesses that nothing orders. A build without MK_DETECT never writes one.
struct RaceRecord {
  u32 kind;   // detect::RaceKind
  u32 space;  // index of a buffer, or kBufferCount: shared memory of block `home`
  u32 home;
  u32 spare;
  u64 offset;
  RaceSide now, before;
};

// Where a kernel synchronises, by what it does there.
enum class Point : u32 {
  kWait,         // mk::wait
  kPhase,        // mbarrier.try_wait
  kArrive,       // mbarrier.arrive
  kExpect,       // mbarrier.arrive.expect_tx
  kInit,         // mbarrier.init
  kBlockBarrier, // bar.sync
  kWarpBarrier,  // bar.warp.sync
  kFence,
  kLoad,         // ld.relaxed
  kStore,        // st.relaxed
  kAcquire,      // ld.acquire
  kRelease,      // st.release
  kShared,       // volatile store to shared memory
  kPoll,         // a wait for several vectors
  kFree,         // a stage that is let go of
  kEmpty,        // a value that could look empty
  kZeroTrip,     // what a block without work does
  kSend,         // st.async
  kCluster,      // barrier.cluster
};

// Mistakes that a mutant can make at its points.
enum class Change : u32 {
  kNone,
  kDrop,    // leave it out
  kTwice,   // arrive twice
  kHalve,   // half the arrivals, half the bytes
  kMore,    // one arrival or 16 bytes more
  kFlip,    // the other parity
  kRelax,   // without release or acquire; an arrival that expects no bytes
  kNarrow,  // scope of the block instead of the GPU
};

// A point that a launch has passed; `stack` as in RaceSide.
struct PointRecord {
  u64 key;
  u32 kind;
  u32 stack[kRaceStack];
};

struct LaunchResult {
  HangRecord* hangs;      // in: room for hang_capacity records
  RaceRecord* races;      // in: room for race_capacity records
  u32 race_capacity;      // in
  u32 race_count;         // records written
  u64 races_found;        // distinct ones, also those beyond the capacity
  u64 observed;           // writes after reads that only an observed relaxed store orders, in cells of shadow memory
  u64 refilled;           // copies onto what was read with no proxy fence between, likewise
  u64 stale;              // relaxed loads that returned an older value
  u32 hang_capacity;      // in
  u32 hang_count;         // records written
  u64 steps;              // times a warp was resumed
  u64 collectives;        // warp collectives performed
  u64 parks;              // polls that put a thread to sleep
  u64 copies;             // asynchronous operations completed
  u64 fingerprint;        // hash over the whole schedule
  u64 changes;            // times a mutant did something wrong
  u64 code_prefetches;    // of lines of the kernel's code,
  u64 code_lines;         // and how many different ones
  u32 point_count;        // records written
  char message[256];      // of a fault
};

struct LaunchArgs {
  void* buffers[kBufferCount];      // in the order of mk::PagedBuffers
  u64 buffer_bytes[kBufferCount];   // all 0: sizes unknown, global accesses are not checked
  const u32* shape;
  u32 shape_words;
  u32 blocks, threads, cluster, smem_bytes;
  u32 code_bytes;     // of the kernel's code, as it is told them; 0: unknown
  u32 kernel, layer;  // where a step is several launches: which kernel of the library, for which layer
  u64 seed;        // 0: round robin, short copies; else a random schedule
  u64 step_limit;  // 0: none
  Policy policy;
  LaunchResult* result;
  // Builds with MK_DETECT only.
  PointRecord* points;
  u32 point_capacity;       // 0: do not record points
  Change change;            // what goes wrong
  Point changed;            // at which kind of point,
  u32 changed_count;
  const u64* changed_points;  // and where: keys of records
};

}  // namespace mk::host
