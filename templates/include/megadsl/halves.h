// Where two warps share a query tile (three or four tiles of a KV head, eight warps): they add their parts of it themselves.
//
// Each warp has all columns of the rows of its own class of chunks. It leaves one half of the columns in shared memory and adds to the
// other half what its partner left there, so that both publish from registers: half the shared memory of publish_unit, no division, one
// round of loads.
#pragma once
#include "megadsl/attention.h"

namespace mk {

// What a warp leaves for its partner: [row][half of the columns, maximum, sum] fp32. Two lanes of different rows never meet in a bank.
template <class T>
struct HalfPart {
  static_assert(T::kHeadDim % 32 == 0, "a half's groups of eight columns are taken in pairs");
  static constexpr u32 kColumns = T::kHeadDim / 2;
  static constexpr u32 kRowFloats = kColumns + 8;
  static constexpr u32 kFloats = 16 * kRowFloats;
};

MK_DEV u32x2 float_pair(float a, float b) { return {ptx::float_bits(a), ptx::float_bits(b)}; }

// Stores four neighbouring columns, or {maximum, sum, 0, 0}, of a query row.
template <class Wire, class B>
MK_DEV void publish_vector(const B& block, const ExchangeShape& e, u32 sequence, u32 index, const float (&v)[4]) {
  ptx::st_relaxed(exchange_round(block.buffers, e, sequence).vectors + index, Wire::pack_f32(v, sequence));
  if (Wire::kResets)
    ptx::st_relaxed(exchange_round(block.buffers, e, sequence + u32(e.slots) / 2).vectors + index,
                    u32x4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
}

// Adds what the two warps of each tile have and publishes the unit's partial rows: the first warp the lower half of the columns, its
// partner, `tiles` warps behind it, the other one. The block meets in between. A warp that took no chunk adds nothing.
template <class Wire, class T, class B>
MK_DEV void publish_halves(const B& block, u32 site, const AttentionShape& s, const ExchangeShape& e, u32 sequence, u32 unit, u32 tiles, u32 taken,
                           Softmax<T>& state) {
  using Part = HalfPart<T>;
  constexpr u32 kGroups = T::kHeadDim / 16;  // of eight columns, in a half
  const u32 warp = block.warp(), g = block.lane() / 4, q = block.lane() % 4;
  const bool works = warp < 2 * tiles, upper = warp >= tiles;
  const auto part = [&](u32 of, u32 r) { return block.template at<float>(s.scratch) + of * Part::kFloats + (g + 8 * r) * Part::kRowFloats; };
  if (works) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const smem_ptr<float> row = part(warp, r);
#pragma unroll
      for (u32 n = 0; n < kGroups; ++n) {
        float(&low)[4] = state.out[n], (&high)[4] = state.out[n + kGroups];
#pragma unroll
        for (u32 i = 2 * r; i < 2 * r + 2; ++i) {
          const float mine = upper ? high[i] : low[i], other = upper ? low[i] : high[i];
          low[i] = mine, high[i] = other;
        }
        ptx::st_shared<u32x2>((row + (n * 8 + 2 * q)).template at<u32x2>(0), float_pair(high[2 * r], high[2 * r + 1]));
      }
      if (q == 0) ptx::st_shared<u32x2>((row + Part::kColumns).template at<u32x2>(0), float_pair(state.maximum[r], state.sum[r]));
    }
  }
  trace(block.cx, Event::kTaken, site, taken);
  block.sync();
  trace(block.cx, Event::kParts, site, unit);
  if (!works) return;
  const u32 tile = upper ? warp - tiles : warp, partner = upper ? tile : tile + tiles;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u32 query = tile * 16 + g + 8 * r;
    const smem_ptr<float> row = part(partner, r);
    const u32x2 theirs = ptx::ld_shared<u32x2>((row + Part::kColumns).template at<u32x2>(0));
    const float maximum = ptx::bits_float(theirs.x), top = math::max(state.maximum[r], maximum);
    const float own = ptx::exp2_approx(state.maximum[r] - top), other = ptx::exp2_approx(maximum - top);
    const u32 index = unit * u32(e.vectors) + query * T::kVectors + (upper ? Part::kColumns / 4 : 0) + q / 2;
    const bool exists = query < u32(s.rows), odd = q % 2 != 0;
    chaos(block.cx, Place::kSignal, u32(e.offset), r * B::kWarps + warp);
    float four[kGroups / 2][4];
    ptx::converge();
#pragma unroll
    for (u32 n = 0; n < kGroups; n += 2) {
      float v[2][2];  // columns 2q and 2q + 1 of two groups: of one of them the lane gets its neighbour's too, the other's it gives away
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        const u32x2 x = ptx::ld_shared<u32x2>((row + ((n + j) * 8 + 2 * q)).template at<u32x2>(0));
        v[j][0] = own * state.out[n + j][2 * r] + other * ptx::bits_float(x.x);
        v[j][1] = own * state.out[n + j][2 * r + 1] + other * ptx::bits_float(x.y);
      }
      const float a = ptx::shfl_xor(odd ? v[0][0] : v[1][0], 1), b = ptx::shfl_xor(odd ? v[0][1] : v[1][1], 1);
      float(&to)[4] = four[n / 2];
      to[0] = odd ? a : v[0][0], to[1] = odd ? b : v[0][1], to[2] = odd ? v[1][0] : a, to[3] = odd ? v[1][1] : b;
    }
#pragma unroll
    for (u32 n = 0; n < kGroups; n += 2)  // behind all shuffles: lanes go different ways here
      if (exists) publish_vector<Wire>(block, e, sequence, index + 2 * (n + odd), four[n / 2]);
    const float last[4] = {top, own * state.sum[r] + other * ptx::bits_float(theirs.y), 0.0f, 0.0f};
    if (exists && !upper && q == 0) publish_vector<Wire>(block, e, sequence, index + T::kVectors - 1, last);
  }
}

}  // namespace mk
