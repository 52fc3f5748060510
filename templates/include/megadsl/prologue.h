// From exchanges to the mma operand: gather a linear's inputs, reduce rows, apply the prologue in place. Or, where a prologue is
// elementwise(x) times a scale of the row, gather the finished operand and leave the scale to the products.
#pragma once
#include "megadsl/block.h"

namespace mk {

// Eight bf16, as fp32.
MK_DEV void unpack8(u32x4 x, float (&v)[8]) {
  const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) v[2 * i] = ptx::bf16_lo(w[i]), v[2 * i + 1] = ptx::bf16_hi(w[i]);
}

// Eight consecutive elements of a vector.
MK_DEV void load8(smem_ptr<char> vector, u32 column, float (&v)[8]) { unpack8(ptx::ld_shared<u32x4>(vector.template at<u32x4>(column * 2)), v); }

// Eight consecutive columns of a token in an activation buffer, as fp32; `column` is a multiple of 8.
template <u32 kTokens>
MK_DEV void load8(smem_ptr<char> rows, u32 column, u32 token, float (&v)[8]) {
#pragma unroll
  for (u32 range = 0; range < 2; ++range) {
    const u32x2 x = ptx::ld_shared<u32x2>(rows.template at<u32x2>(activation_offset<kTokens>(column + 2 * range, token)));
    v[2 * range] = ptx::bf16_lo(x.x), v[2 * range + 1] = ptx::bf16_hi(x.x);
    v[2 * range + 4] = ptx::bf16_lo(x.y), v[2 * range + 5] = ptx::bf16_hi(x.y);
  }
}
template <u32 kTokens>
MK_DEV void store8(smem_ptr<char> rows, u32 column, u32 token, const float (&v)[8]) {
#pragma unroll
  for (u32 range = 0; range < 2; ++range)
    ptx::st_shared<u32x2>(rows.template at<u32x2>(activation_offset<kTokens>(column + 2 * range, token)),
                          u32x2{ptx::pack_bf16(v[2 * range], v[2 * range + 1]), ptx::pack_bf16(v[2 * range + 4], v[2 * range + 5])});
}

// Where a unit's operand lies in an activation buffer. Whole panels are as large as the units that fill them.
template <u32 kTokens>
MK_DEV smem_ptr<char> operand_place(smem_ptr<char> rows, u32 before, u32 thread, u32 threads) {
  const bool panels = threads % (4 * kTokens) == 0;
  const Dealt<kTokens> d(panels ? 0 : before, thread, threads);
  return rows.template at<char>(activation_offset<kTokens>(d.group * kGroupRows, d.token) + (panels ? before * 16 : 0));
}

// Gathers features of a value into an activation buffer, columns past them as zeros; `begin` is a multiple of 8. `unit(place, group,
// token, bits)` and `last(group, token, bits)` are for what has arrived, see gather_units.
template <class Wire, class P, class B, class Unit, class Last, class Beside>
MK_DEV void gather_groups(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 features, u32 columns,
                          smem_ptr<char> into, Unit unit, Last last, Beside beside) {
  constexpr u32 kTokens = B::kTokens;
  const Groups wanted = groups_of(begin, features);
  const u32 filled = wanted.count * kGroupRows;
#pragma unroll 1
  for (u32 i = block.thread; i < (columns - filled) * kTokens; i += B::kThreads)
    ptx::st_shared<u16>(into.template at<u16>(activation_offset<kTokens>(filled + i / kTokens, i % kTokens)), u16(0));
  const Round round = exchange_round(block.buffers, e, sequence);
  if constexpr (P::kDense) {
    gather_dense<Wire, kTokens, P>(block.cx, site, round, wanted, block.thread, B::kThreads, [&](u32 before, u32x4 x) {
      const Dealt<kTokens> d(before, block.thread, B::kThreads);
      unit(operand_place<kTokens>(into, before, block.thread, B::kThreads), d.group, d.token, x);
    }, beside);
  } else {
    static_assert(Beside::kIdle, "work beside polls: of dense units");
    const Groups owners = P::kWhole ? Groups{0, block.cx.blocks.value} : owners_of(block.cx, e, wanted);
    gather_units<Wire, kTokens, P, 1>(
        block.cx, site, e, round, {{wanted}, {owners}}, block.thread, B::kThreads,
        [&](u32, u32 group, u32 token, u32x4 x) {
          unit(into.template at<char>(activation_offset<kTokens>(group * kGroupRows, token)), group, token, x);
        },
        [&](u32, u32 group, u32 token, u16 bits) { return last(group, token, bits); });
  }
}

// Stores a unit that has arrived where its operand goes, without its last element unless the wire carries whole units.
template <class Wire, u32 kTokens>
MK_DEV void store_operand(smem_ptr<char> at, u32x4 x) {
  constexpr u32 kRange = kTokens * 32;  // bytes from a unit's first column range to its second
  ptx::st_shared<u32x2>(at.template at<u32x2>(0), u32x2{x.x, x.z});
  if (Wire::kWholeUnits) {
    ptx::st_shared<u32x2>(at.template at<u32x2>(kRange), u32x2{x.y, x.w});
  } else {
    ptx::st_shared<u32>(at.template at<u32>(kRange), x.y);
    ptx::st_shared<u16>(at.template at<u16>(kRange + 4), u16(x.w));
  }
}
// What store_operand has stored.
template <class Wire, u32 kTokens>
MK_DEV u32x4 load_operand(smem_ptr<char> at) {
  constexpr u32 kRange = kTokens * 32;
  const u32x2 even = ptx::ld_shared<u32x2>(at.template at<u32x2>(0));
  if (!Wire::kWholeUnits)
    return {even.x, ptx::ld_shared<u32>(at.template at<u32>(kRange)), even.y, ptx::ld_shared<u16>(at.template at<u16>(kRange + 4))};
  const u32x2 odd = ptx::ld_shared<u32x2>(at.template at<u32x2>(kRange));
  return {even.x, odd.x, even.y, odd.y};
}

// Gathers features of a value as they are.
template <class Wire, class P, class B, class Beside = Idle>
MK_DEV void gather_value(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 features, u32 columns,
                         smem_ptr<char> into, Beside beside = {}) {
  constexpr u32 kTokens = B::kTokens;
  const auto place = [&](u32 group, u32 token) { return into.template at<char>(activation_offset<kTokens>(group * kGroupRows, token)); };
  gather_groups<Wire, P>(
      block, site, e, sequence, begin, features, columns, into,
      [&](smem_ptr<char> at, u32, u32, u32x4 x) { store_operand<Wire, kTokens>(at, x); },
      [&](u32 group, u32 token, u16 bits) {
        return [=] { ptx::st_shared<u16>(place(group, token).template at<u16>(kTokens * 32 + 6), bits); };
      },
      beside);
}

// Copies a vector out of the ring, for tiles behind it to be taken before it is read. Needs a sync() before reads.
template <class B, class R>
MK_DEV void copy_vector(const B& block, R& reader, u32 site, u32 bytes, smem_ptr<char> to) {
  const smem_ptr<char> from = reader.wait_stage(site, 0);
#pragma unroll 1
  for (u32 at = block.thread * 16; at < bytes; at += B::kThreads * 16)
    ptx::st_shared<u32x4>(to.template at<u32x4>(at), ptx::ld_shared<u32x4>(from.template at<u32x4>(at)));
  reader.release();
}

enum class RowOp { kSum, kMax };

// A thread's parts of row reductions, of the units that it gathers. Their last elements are taken apart from the others, all in
// the order of the units: what a wire makes of last elements, and how many blocks send them, then changes no bit.
template <class B, RowOp... kOps>
struct RowParts {
  static constexpr u32 kCount = sizeof...(kOps), kTokens = B::kTokens;
  // Units are numbered [group][token] and dealt out to the threads in turn: a thread's are all of one token if tokens divide a warp.
  static constexpr bool kOneToken = kWarpSize % kTokens == 0;
  static constexpr u32 kRows = kOneToken ? 1 : kTokens;
  using Parts = float[kCount][kRows];
  Parts firsts, lasts;

  MK_DEV static constexpr RowOp op(u32 i) {
    const RowOp ops[] = {kOps...};
    return ops[i];
  }
  MK_DEV static float both(u32 i, float a, float b) { return op(i) == RowOp::kSum ? a + b : math::max(a, b); }

  MK_DEV RowParts() {
#pragma unroll
    for (u32 i = 0; i < kCount * kRows; ++i) firsts[i / kRows][i % kRows] = lasts[i / kRows][i % kRows] = op(i / kRows) == RowOp::kSum ? 0.0f : -INFINITY;
  }
  MK_DEV static void add(Parts& parts, u32 token, const float (&terms)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount * kRows; ++i) {
      float& part = parts[i / kRows][i % kRows];
      if (kOneToken || token == i % kRows) part = both(i / kRows, part, terms[i / kRows]);
    }
  }
  // Leaves the warp's parts in `to` [reduction][token][warp]. Needs a sync() before reads.
  MK_DEV void leave(const B& block, smem_ptr<float> to) const {
    constexpr u32 kLanes = kOneToken ? kTokens : 1;  // lanes from one of a token to the next
#pragma unroll
    for (u32 i = 0; i < kCount * kRows; ++i) {
      float total = both(i / kRows, firsts[i / kRows][i % kRows], lasts[i / kRows][i % kRows]);
#pragma unroll
      for (u32 mask = kWarpSize / 2; mask >= kLanes; mask /= 2) total = both(i / kRows, total, ptx::shfl_xor(total, mask));
      const u32 token = kOneToken ? block.lane() : i % kRows;
      if (block.lane() < kLanes) ptx::st_shared<float>(to + ((i / kRows * kTokens + token) * B::kWarps + block.warp()), total);
    }
  }
};

// Units of a thread that are finished where they arrive; more of them are stored first, and code that finishes one serves them all.
constexpr u32 kUnitsInRegisters = 2;

// Gathers a value as the finished operand of the products: `apply(args)` of each element (args[0]) and the elements of vectors
// beside it, in the order of `places` ([0] is where the operand goes). The row reductions' terms of an element, `terms(x, of)`,
// are added to `rows`, but for last elements that travel apart: those lie in `lasts` as they came, see add_lasts. The operand is
// not normalised yet. That is safe: bf16 has the range of fp32, so that it overflows only where the norm's own squares did long before.
template <class Wire, class P, bool kRagged, class Rows, class B, u32 kArgs, class Terms, class Apply, class Beside = Idle>
MK_DEV void gather_operand(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 begin, u32 features, u32 columns,
                           const smem_ptr<char> (&places)[kArgs], smem_ptr<u16> lasts, Rows& rows, Terms terms, Apply apply, Beside beside = {}) {
  constexpr u32 kTokens = B::kTokens, kRange = kTokens * 32, kInUnit = Wire::kWholeUnits ? 8 : 7;
  constexpr bool kLater = P::kUnits > kUnitsInRegisters;
  const auto place = [&](u32 group, u32 token) { return places[0].template at<char>(activation_offset<kTokens>(group * kGroupRows, token)); };
  const auto finish = [&](smem_ptr<char> at, u32 group, u32 token, u32x4 x) {
        float args[kArgs][8], out[8] = {}, sums[Rows::kCount];
        unpack8(x, args[0]);
#pragma unroll
        for (u32 i = 1; i < kArgs; ++i) load8(places[i], group * kGroupRows, args[i]);
#pragma unroll
        for (u32 j = 0; j < kInUnit; ++j) {
          if (kRagged && group * kGroupRows + j >= features) continue;
          float element[kArgs], of[Rows::kCount];
#pragma unroll
          for (u32 i = 0; i < kArgs; ++i) element[i] = args[i][j];
          out[j] = apply(element);
          terms(element[0], of);
          if (j == 7) Rows::add(rows.lasts, token, of);
#pragma unroll
          for (u32 i = 0; i < Rows::kCount && j < 7; ++i) sums[i] = j == 0 ? of[i] : Rows::both(i, sums[i], of[i]);
        }
        Rows::add(rows.firsts, token, sums);
        ptx::st_shared<u32x2>(at.template at<u32x2>(0), u32x2{ptx::pack_bf16(out[0], out[1]), ptx::pack_bf16(out[4], out[5])});
        if (Wire::kWholeUnits) {
          ptx::st_shared<u32x2>(at.template at<u32x2>(kRange), u32x2{ptx::pack_bf16(out[2], out[3]), ptx::pack_bf16(out[6], out[7])});
        } else {
          ptx::st_shared<u32>(at.template at<u32>(kRange), ptx::pack_bf16(out[2], out[3]));
          ptx::st_shared<u16>(at.template at<u16>(kRange + 4), ptx::to_bf16(out[6]));
        }
      };
  gather_groups<Wire, P>(
      block, site, e, sequence, begin, features, columns, places[0],
      [&](smem_ptr<char> at, u32 group, u32 token, u32x4 x) {
        if (kLater) store_operand<Wire, kTokens>(at, x);
        else finish(at, group, token, x);
      },
      [&](u32 group, u32 token, u16 bits) {
        const u32 column = group * kGroupRows + 7;
        float element[kArgs] = {ptx::from_bf16(bits)};
#pragma unroll
        for (u32 i = 1; i < kArgs; ++i) element[i] = ptx::from_bf16(ptx::ld_shared<u16>(places[i].template at<u16>(column * 2)));
        const bool counts = !kRagged || column < features;
        const u16 out = counts ? ptx::to_bf16(apply(element)) : u16(0);
        return [=] {
          ptx::st_shared<u16>(place(group, token).template at<u16>(kRange + 6), out);
          ptx::st_shared<u16>(lasts + (group * kTokens + token), bits);
        };
      },
      beside);
  if (!kLater) return;
  const u32 units = ceil_div(features, kGroupRows) * kTokens;
#pragma unroll 1
  for (u32 before = 0; before + block.thread < units; before += B::kThreads) {
    const Dealt<kTokens> d(before, block.thread, B::kThreads);  // as gather_groups deals them out: nobody else has written there
    const smem_ptr<char> at = operand_place<kTokens>(places[0], before, block.thread, B::kThreads);
    finish(at, d.group, d.token, load_operand<Wire, kTokens>(at));
  }
}

// Adds the last elements that gather_operand has left to the thread's parts, behind a sync().
template <class Wire, bool kRagged, class Rows, class B, class Terms>
MK_DEV void add_lasts(const B& block, u32 features, smem_ptr<u16> lasts, Rows& rows, Terms terms) {
  if (Wire::kWholeUnits) return;
#pragma unroll 1
  for (u32 i = block.thread; i < ceil_div(features, kGroupRows) * B::kTokens; i += B::kThreads) {
    float of[Rows::kCount];
    terms(ptx::from_bf16(ptx::ld_shared<u16>(lasts + i)), of);
    if (!kRagged || i / B::kTokens * kGroupRows + 7 < features) Rows::add(rows.lasts, i % B::kTokens, of);
  }
}

// Gathers the rows of another value that this block's own results are combined with (a residual), as units.
template <class Wire, class B>
MK_DEV void gather_kept(const B& block, u32 site, const ExchangeShape& e, u32 sequence, u32 first, u32 end, smem_ptr<char> into) {
  constexpr u32 kTokens = B::kTokens;
  if (first >= end) return;
  const Groups wanted = groups_of(first, end - first);
  const auto place = [&](u32 group, u32 token) { return into.template at<char>(unit_offset<kTokens>(group, token, 0)); };
  gather_units<Wire, kTokens, Poll<1, 1, false>, 1>(
      block.cx, site, e, exchange_round(block.buffers, e, sequence), {{wanted}, {owners_of(block.cx, e, wanted)}}, block.thread, B::kThreads,
      [&](u32, u32 group, u32 token, u32x4 x) { store_unit<Wire>(place(group, token), x); },
      [&](u32, u32 group, u32 token, u16 bits) { return [=] { store_last(place(group, token), bits); }; });
}

// How the warps share the tokens of a row reduction: `kPerToken` warps work on one token at a time.
template <class B>
struct RowShare {
  static constexpr u32 kTokensAtOnce = B::kTokens < B::kWarps ? B::kTokens : B::kWarps;
  static constexpr u32 kPerToken = B::kWarps / kTokensAtOnce;
};

// Per-warp parts of one row reduction into `parts` [token][RowShare::kPerToken] fp32. `load(column, token, values)` gives
// the operand's eight values from a column on. Columns from `columns` on do not count. Needs a sync() before reads.
template <RowOp kOp, class B, class Load>
MK_DEV void reduce_rows(const B& block, u32 columns, smem_ptr<float> parts, Load load) {
  using Share = RowShare<B>;
  const u32 part = block.warp() / Share::kTokensAtOnce;
  if (part >= Share::kPerToken) return;
#pragma unroll 1
  for (u32 token = block.warp() % Share::kTokensAtOnce; token < B::kTokens; token += Share::kTokensAtOnce) {
    float total = kOp == RowOp::kSum ? 0.0f : -INFINITY;
#pragma unroll 1
    for (u32 column = (part * 32 + block.lane()) * 8; column < columns; column += Share::kPerToken * 256) {
      float v[8];
      load(column, token, v);
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        if (column + i >= columns) continue;
        total = kOp == RowOp::kSum ? total + v[i] : math::max(total, v[i]);
      }
    }
#pragma unroll
    for (u32 mask = 16; mask != 0; mask /= 2) {
      const float other = ptx::shfl_xor(total, mask);
      total = kOp == RowOp::kSum ? total + other : math::max(total, other);
    }
    if (block.lane() == 0) ptx::st_shared<float>(parts + (token * Share::kPerToken + part), total);
  }
}

// The finished reduction of one token: kParts of it, added up in pairs, then pairs of pairs.
template <RowOp kOp, u32 kParts>
MK_DEV float row_total(smem_ptr<float> parts, u32 token) {
  float part[kParts];
  if constexpr (kParts % 4 == 0) {
#pragma unroll
    for (u32 i = 0; i < kParts; i += 4) {
      const u32x4 v = ptx::ld_shared<u32x4>((parts + (token * kParts + i)).template at<u32x4>(0));
      part[i] = ptx::bits_float(v.x), part[i + 1] = ptx::bits_float(v.y), part[i + 2] = ptx::bits_float(v.z), part[i + 3] = ptx::bits_float(v.w);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < kParts; ++i) part[i] = ptx::ld_shared<float>(parts + (token * kParts + i));
  }
#pragma unroll
  for (u32 apart = 1; apart < kParts; apart *= 2) {
#pragma unroll
    for (u32 i = 0; i + apart < kParts; i += 2 * apart)
      part[i] = kOp == RowOp::kSum ? part[i] + part[i + apart] : math::max(part[i], part[i + apart]);
  }
  return part[0];
}

// Rewrites an activation buffer in place, eight columns at a time: `f(column, token, values)` fills the new values.
template <class B, class F>
MK_DEV void apply_rows(const B& block, u32 columns, u32 columns_padded, smem_ptr<char> rows, F f) {
#pragma unroll 1
  for (u32 i = block.thread; i < columns_padded / 8 * B::kTokens; i += B::kThreads) {
    const u32 quarter = i % 4, token = i / 4 % B::kTokens, panel = i / (4 * B::kTokens);
    const u32 column = panel * kPanel + quarter * 8;
    float v[8];
    f(column, token, v);
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (column + j >= columns) v[j] = 0.0f;
    store8<B::kTokens>(rows, column, token, v);
  }
}

}  // namespace mk
