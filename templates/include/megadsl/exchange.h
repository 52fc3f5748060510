// Exchanges: how blocks hand activations to each other through L2.
//
// A value's features are shared out in groups of 8. A *unit* is one group of one token: 16 bytes of bf16, the piece that
// publishing, gathering and the mma operands have in common. Each block writes what it owns as a fixed number of 16-byte
// vectors (the same for every block, so that an idle block takes part too: that is what makes slot reuse provable): first
// one vector per unit, in [group][token] order. Slots rotate with the value's own sequence number.
//
// A wire format says how vectors travel:
//   Tagged    the tag (low 16 bits of the sequence number) takes the place of a unit's last element; the last elements of
//             seven units follow in an extra vector. A vector is its own flag, nothing is ever reset.
//   Sentinel  whole units; all ones means "not yet". Writers never produce it and empty the slot two rounds ahead themselves.
//   Flag      whole units, plain; one release store per block, acquired by each reader before it loads.
// The first two need no fence: a fence waits for every bulk load the SM has in flight.
#pragma once
#include "megadsl/layout.h"
#include "megadsl/wait.h"

namespace mk {

// One exchange, as data. Offsets in 16-byte units from the start of the exchange arena.
struct ExchangeShape {
  i32 offset;       // first vector of slot 0
  i32 slot_stride;  // vectors per slot
  i32 slots;        // a power of two
  i32 vectors;      // per block (or per attention unit)
  i32 vectors_inverse;  // Divisor::inverse of it
  i32 units;        // most units a block owns: its first vectors
  i32 groups;       // feature groups of 8 that are shared out over the blocks
  i32 share_offset;
  i32 flags;        // first flag word's 16-byte unit (Flag only)
};

// The vectors of one round of an exchange.
struct Round {
  u32x4* vectors;
  u32* flags;      // one per block, 64 bytes apart
  u32 sequence;
};

MK_DEV Round exchange_round(const Buffers& buffers, const ExchangeShape& e, u32 sequence) {
  u32x4* arena = reinterpret_cast<u32x4*>(buffers.exchange);
  const u32 slot = sequence & u32(e.slots - 1);
  return {arena + e.offset + size_t(slot) * u32(e.slot_stride), reinterpret_cast<u32*>(arena + e.flags), sequence};
}

constexpr u32 kFlagStride = 16;      // words between two blocks' flags
constexpr u32 kEmptyWord = ~0u;      // Sentinel's "not yet"
constexpr u32 kCanonicalNan = 0x7fffu;

constexpr u32 kLastsPerVector = 7;  // last elements of units in one extra vector

struct Tagged {
  static constexpr bool kWholeUnits = false;
  static constexpr bool kResets = false;
  static constexpr bool kFlagged = false;
  MK_DEV static u32x4 pack(u32x4 unit, u32 sequence) { return {unit.x, unit.y, unit.z, (unit.w & 0xffffu) | sequence << 16}; }
  MK_DEV static u32 tag(u32x4 x) { return x.w >> 16; }
  MK_DEV static bool ready(u32x4 x, u32 sequence) { return tag(x) == (sequence & 0xffffu); }

  // fp32: four values, each gives its four lowest mantissa bits to the tag (relative error below 2^-19).
  MK_DEV static u32x4 pack_f32(const float (&v)[4], u32 sequence) {
    u32x4 x;
    x.x = (ptx::float_bits(v[0]) & ~15u) | (sequence & 15u);
    x.y = (ptx::float_bits(v[1]) & ~15u) | (sequence >> 4 & 15u);
    x.z = (ptx::float_bits(v[2]) & ~15u) | (sequence >> 8 & 15u);
    x.w = (ptx::float_bits(v[3]) & ~15u) | (sequence >> 12 & 15u);
    return x;
  }
  MK_DEV static u32 tag_f32(u32x4 x) { return (x.x & 15u) | (x.y & 15u) << 4 | (x.z & 15u) << 8 | (x.w & 15u) << 12; }
  MK_DEV static bool ready_f32(u32x4 x, u32 sequence) { return tag_f32(x) == (sequence & 0xffffu); }
  MK_DEV static float value_f32(u32 word) { return ptx::bits_float(word & ~15u); }
};

struct Sentinel {
  static constexpr bool kWholeUnits = true;
  static constexpr bool kResets = true;
  static constexpr bool kFlagged = false;
  MK_DEV static u32 safe(u32 pair) {
    const u32 lo = pair & 0xffffu, hi = pair >> 16;
    return (lo == 0xffffu ? kCanonicalNan : lo) | (hi == 0xffffu ? kCanonicalNan : hi) << 16;
  }
  MK_DEV static u32x4 pack(u32x4 unit, u32) { return {safe(unit.x), safe(unit.y), safe(unit.z), safe(unit.w)}; }
  // Bits are compared, never floats: a flushed subnormal would look like another value.
  MK_DEV static bool ready(u32x4 x, u32) { return x.x != kEmptyWord && x.y != kEmptyWord && x.z != kEmptyWord && x.w != kEmptyWord; }
  MK_DEV static u32 tag(u32x4 x) { return x.w; }

  MK_DEV static u32 safe_f32(float v) { return ptx::float_bits(v) == kEmptyWord ? 0x7fffffffu : ptx::float_bits(v); }
  MK_DEV static u32x4 pack_f32(const float (&v)[4], u32) { return {safe_f32(v[0]), safe_f32(v[1]), safe_f32(v[2]), safe_f32(v[3])}; }
  MK_DEV static bool ready_f32(u32x4 x, u32 s) { return ready(x, s); }
  MK_DEV static u32 tag_f32(u32x4 x) { return x.w; }
  MK_DEV static float value_f32(u32 word) { return ptx::bits_float(word); }
};

struct Flag {
  static constexpr bool kWholeUnits = true;
  static constexpr bool kResets = false;
  static constexpr bool kFlagged = true;
  MK_DEV static u32x4 pack(u32x4 unit, u32) { return unit; }
  MK_DEV static bool ready(u32x4, u32) { return true; }
  MK_DEV static u32 tag(u32x4) { return 0; }
  MK_DEV static u32x4 pack_f32(const float (&v)[4], u32) {
    return {ptx::float_bits(v[0]), ptx::float_bits(v[1]), ptx::float_bits(v[2]), ptx::float_bits(v[3])};
  }
  MK_DEV static bool ready_f32(u32x4, u32) { return true; }
  MK_DEV static u32 tag_f32(u32x4) { return 0; }
  MK_DEV static float value_f32(u32 word) { return ptx::bits_float(word); }
};

// Polls `count` vectors of a round with `threads` threads, kInFlight loads each under way, and gives each once to
// `sink(index, vector)`. `locate(i)` is the index of the i-th; `ready(vector, observed)` says whether it has arrived;
// `per_owner` consecutive vectors share a flag.
// A thread's vectors all arrive before the first is handed on: then the sink is compiled once, in a loop that shifts them
// through registers, and the hot code stays small.
template <class Wire, u32 kInFlight, class Locate, class Ready, class Sink>
MK_DEV void poll_vectors(const Context& cx, u32 site, const Round& round, u32 count, u32 per_owner, u32 thread, u32 threads,
                         Locate locate, Ready ready, Sink sink) {
#pragma unroll 1
  for (u32 base = thread; base < count; base += threads * kInFlight) {
    u32 pending = 0;
#pragma unroll
    for (u32 i = 0; i < kInFlight; ++i)
      if (base + i * threads < count) pending |= 1u << i;
    const u32 wanted = pending;
    u32x4 v[kInFlight] = {};
    wait(cx, site, locate(base), round.sequence, [&](u32& observed) {
      if (Wire::kFlagged) {
#pragma unroll
        for (u32 i = 0; i < kInFlight; ++i) {
          if (!(pending >> i & 1)) continue;
          observed = ptx::ld_acquire(round.flags + locate(base + i * threads) / per_owner * kFlagStride);
          if (observed != round.sequence) return false;
        }
      }
#pragma unroll
      for (u32 i = 0; i < kInFlight; ++i)
        if (pending >> i & 1) v[i] = ptx::ld_relaxed(round.vectors + locate(base + i * threads));
#pragma unroll
      for (u32 i = 0; i < kInFlight; ++i)
        if ((pending >> i & 1) && ready(v[i], observed)) pending &= ~(1u << i);
      return pending == 0;
    });
#pragma unroll 1
    for (u32 i = 0; wanted >> i; ++i) {
      sink(locate(base + i * threads), v[0]);
#pragma unroll
      for (u32 j = 1; j < kInFlight; ++j) v[j - 1] = v[j];
    }
  }
}

// Features [begin, end) of a value.
struct Features {
  u32 begin, end;
  MK_DEV bool holds(u32 feature) const { return feature - begin < end - begin; }
};

// The vectors of a round that hold a range of features: those of all blocks that own a part of it.
struct Vectors {
  u32 first, count;
};

MK_DEV Vectors vectors_of(const Context& cx, const ExchangeShape& e, Features f) {
  if (f.begin >= f.end) return {0, 0};
  const u32 groups = u32(e.groups), offset = u32(e.share_offset), vectors = u32(e.vectors);
  const u32 from = share_owner(groups, cx.blocks, offset, f.begin / kGroupRows);
  const u32 to = share_owner(groups, cx.blocks, offset, (f.end - 1) / kGroupRows) + 1;
  return {from * vectors, (to - from) * vectors};
}

// Takes a vector of a bf16 value apart: `unit(feature, token, bits)` for a unit (without its last element unless the wire
// carries whole units), `last(feature, token, bits)` for the last element of the unit that begins at `feature`.
template <class Wire, u32 kTokens, class Unit, class Last>
MK_DEV void unpack_vector(const Context& cx, const ExchangeShape& e, u32 index, u32x4 v, Unit unit, Last last) {
  const Divisor vectors{u32(e.vectors), u32(e.vectors_inverse)};
  const u32 groups = u32(e.groups), offset = u32(e.share_offset);
  const u32 block = vectors.divide(index), i = index - block * vectors.value;
  const u32 group0 = share_begin(groups, cx.blocks, offset, block);
  const u32 owned = (share_begin(groups, cx.blocks, offset, block + 1) - group0) * kTokens;
  if (i < u32(e.units)) {
    if (i < owned) unit((group0 + i / kTokens) * kGroupRows, i % kTokens, v);
    return;
  }
  const u32 first = (i - u32(e.units)) * kLastsPerVector, words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 j = 0; j < kLastsPerVector; ++j)
    if (first + j < owned) last((group0 + (first + j) / kTokens) * kGroupRows, (first + j) % kTokens, u16(words[j / 2] >> (j % 2 * 16)));
}

// Stores a unit where its eight elements lie side by side, and its last element alone.
template <class Wire>
MK_DEV void store_unit(smem_ptr<char> at, u32x4 x) {
  if (Wire::kWholeUnits) {
    ptx::st_shared<u32x4>(at.template at<u32x4>(0), x);
    return;
  }
  ptx::st_shared<u32x2>(at.template at<u32x2>(0), u32x2{x.x, x.y});
  ptx::st_shared<u32>(at.template at<u32>(8), x.z);
  ptx::st_shared<u16>(at.template at<u16>(12), u16(x.w));
}
MK_DEV void store_last(smem_ptr<char> at, u16 bits) { ptx::st_shared<u16>(at.template at<u16>(14), bits); }

template <class Wire>
MK_DEV bool arrived(const Round& round, u32x4 v, u32& observed) {
  if (!Wire::kFlagged) observed = Wire::tag(v);
  return Wire::ready(v, round.sequence);
}

// Gathers the given features of a bf16 value, all tokens, with unpack_vector's callbacks; the range begins at a multiple of
// 8, and a unit that begins in it is handed on whole. kWhole: they are the whole value, and blocks that own nothing of it are
// waited for as well.
template <class Wire, u32 kTokens, u32 kInFlight, bool kWhole, class Unit, class Last>
MK_DEV void gather_features(const Context& cx, u32 site, const ExchangeShape& e, u32 sequence, const Buffers& buffers, Features f, u32 thread,
                            u32 threads, Unit unit, Last last) {
  const Round round = exchange_round(buffers, e, sequence);
  const Vectors from = kWhole ? Vectors{0, cx.blocks.value * u32(e.vectors)} : vectors_of(cx, e, f);
  poll_vectors<Wire, kInFlight>(
      cx, site, round, from.count, u32(e.vectors), thread, threads, [&](u32 i) { return from.first + i; },
      [&](u32x4 v, u32& observed) { return arrived<Wire>(round, v, observed); },
      [&](u32 index, u32x4 v) {
        unpack_vector<Wire, kTokens>(
            cx, e, index, v,
            [&](u32 feature, u32 token, u32x4 x) {
              if (f.holds(feature)) unit(feature, token, x);
            },
            [&](u32 feature, u32 token, u16 bits) {
              if (f.holds(feature)) last(feature, token, bits);
            });
      });
}

// Publishes this block's share of a value, staged as units. All consumer threads call it, behind a consumer barrier after
// the last staged write; `barrier()` is that barrier again (Flag needs one before its flag).
template <class Wire, u32 kTokens, class Barrier>
MK_DEV void publish_share(const Context& cx, const Buffers& buffers, const ExchangeShape& e, u32 sequence, smem_ptr<char> staged,
                          u32 thread, u32 threads, Barrier barrier) {
  const Round round = exchange_round(buffers, e, sequence);
  const u32 groups = u32(e.groups), offset = u32(e.share_offset), vectors = u32(e.vectors), first = cx.block * vectors;
  const u32 owned = (share_begin(groups, cx.blocks, offset, cx.block + 1) - share_begin(groups, cx.blocks, offset, cx.block)) * kTokens;
#pragma unroll 1
  for (u32 i = thread; i < vectors; i += threads) {
    u32x4 x = {0, 0, 0, 0};
    if (i < owned) {
      x = ptx::ld_shared<u32x4>(staged.template at<u32x4>(i * 16));
    } else if (i >= u32(e.units)) {
      u32 bits[kLastsPerVector];
#pragma unroll
      for (u32 j = 0; j < kLastsPerVector; ++j) {
        const u32 unit = (i - u32(e.units)) * kLastsPerVector + j;
        bits[j] = unit < owned ? ptx::ld_shared<u16>(staged.template at<u16>(unit * 16 + 14)) : 0u;
      }
      x = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6]};
    }
    ptx::st_relaxed(round.vectors + first + i, Wire::pack(x, sequence));
    if (Wire::kResets) {
      const Round ahead = exchange_round(buffers, e, sequence + u32(e.slots) / 2);
      ptx::st_relaxed(ahead.vectors + first + i, u32x4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
    }
  }
  if (Wire::kFlagged) {
    barrier();
    if (thread == 0) ptx::st_release(round.flags + cx.block * kFlagStride, sequence);
  }
}

}  // namespace mk
