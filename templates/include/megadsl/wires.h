// Wire formats: how the vectors of an exchange travel, and how a reader knows that they are there.
//   Tagged    the tag (low 16 bits of the sequence number) takes the place of a unit's last element; the last elements of
//             seven units follow in an extra vector. A vector is its own flag, nothing is ever reset.
//   Sentinel  whole units; all ones means "not yet". Writers never produce it and empty the slot two rounds ahead themselves.
//   Flag      whole units as they are; one release store per block, acquired by each reader before it loads.
//   Dense     units in the order of their features, without room between blocks: a unit's number is its address. For Sentinel,
//             where every block owns something.
// The first two need no fence: a fence waits for every bulk load the SM has in flight.
#pragma once
#include "megadsl/layout.h"
#include "megadsl/wait.h"

namespace mk {

constexpr u32 kEmptyWord = ~0u;       // Sentinel's "not yet"; an element of all ones, a NaN in bf16 and fp16, is sent without its sign
constexpr u32 kQuietNan = 0x400000u;  // fp32: the bit that makes a NaN quiet
constexpr u32 kLastsPerVector = 7;    // last elements of units in one extra vector

// A vector travels as one access; see Words.
struct WholeVectors {
  static constexpr bool kWords = false;
  static constexpr bool kAsync = false;
  static constexpr u32 kBackOff = 0;  // ns that a reader sleeps behind a poll in vain
  MK_DEV static u32x4 load(const u32x4* from) { return ptx::ld_relaxed(from); }
  MK_DEV static void store(u32x4* to, u32x4 x) { ptx::st_relaxed(to, x); }
};

struct Tagged : WholeVectors {
  static constexpr bool kDense = false;
  static constexpr bool kWholeUnits = false;
  static constexpr bool kResets = false;
  static constexpr bool kFlagged = false;
  MK_DEV static u32x4 pack(u32x4 unit, u32 sequence) { return {unit.x, unit.y, unit.z, (unit.w & 0xffffu) | sequence << 16}; }
  MK_DEV static u32 tag(u32x4 x) { return x.w >> 16; }
  MK_DEV static bool ready(u32x4 x, u32 sequence) { return tag(x) == (sequence & 0xffffu); }

  // fp32: four values, each gives its four lowest mantissa bits to the tag (relative error below 2^-19; below 2^-145 in all where
  // numbers are subnormal). A NaN is made quiet, since it may be one by those four bits alone.
  MK_DEV static u32 without_tag(float v) { return (v != v ? ptx::float_bits(v) | kQuietNan : ptx::float_bits(v)) & ~15u; }
  MK_DEV static u32x4 pack_f32(const float (&v)[4], u32 sequence) {
    return {without_tag(v[0]) | (sequence & 15u), without_tag(v[1]) | (sequence >> 4 & 15u), without_tag(v[2]) | (sequence >> 8 & 15u),
            without_tag(v[3]) | (sequence >> 12 & 15u)};
  }
  MK_DEV static u32 tag_f32(u32x4 x) { return (x.x & 15u) | (x.y & 15u) << 4 | (x.z & 15u) << 8 | (x.w & 15u) << 12; }
  MK_DEV static bool ready_f32(u32x4 x, u32 sequence) { return tag_f32(x) == (sequence & 0xffffu); }
  MK_DEV static float value_f32(u32 word) { return ptx::bits_float(word & ~15u); }
};

struct Sentinel : WholeVectors {
  static constexpr bool kDense = false;
  static constexpr bool kWholeUnits = true;
  static constexpr bool kResets = true;
  static constexpr bool kFlagged = false;
  // Both elements at once: where all bits but the sign are ones, adding 1 to them carries into the sign's place, which is cleared.
  MK_DEV static u32 safe(u32 pair) {
    if (ptx::sends_empty()) return pair;
    constexpr u32 kSigns = 0x80008000u;
    return pair & ~(((pair & ~kSigns) + 0x00010001u) & kSigns);
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

struct Flag : WholeVectors {
  static constexpr bool kDense = false;
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

template <class Wire>
struct Dense : Wire {
  static constexpr bool kDense = true;
};

// A Sentinel whose vectors are written word by word (Outgoing): each word says by itself that it is there, and is accessed by itself.
template <class Wire>
struct Words : Wire {
  static_assert(Wire::kDense && Wire::kResets, "words that are their own flags");
  static constexpr bool kWords = true;
  MK_DEV static u32x4 load(const u32x4* from) { return ptx::ld_relaxed_words(from); }
  MK_DEV static void store(u32x4* to, u32x4 x) { ptx::st_relaxed_words(to, x); }
};

// A wire whose readers sleep between polls.
template <class Wire, u32 kNanoseconds>
struct BackOff : Wire {
  static constexpr u32 kBackOff = kNanoseconds;
};

// A wire's vectors where each is four fp32 values.
template <class Wire>
struct Floats : Wire {
  MK_DEV static bool ready(u32x4 x, u32 sequence) { return Wire::ready_f32(x, sequence); }
  MK_DEV static u32 tag(u32x4 x) { return Wire::tag_f32(x); }
};

// A value whose elements are results of conversions (ptx::to_bf16, pack_bf16): of any NaN those make 0x7fff, never the empty value.
template <class Wire>
struct Converted : Wire {
  MK_DEV static u32x4 pack(u32x4 unit, u32 sequence) { return Wire::kResets ? unit : Wire::pack(unit, sequence); }
};

}  // namespace mk
