// What a custom op's role function is given (docs/new-ops.md). All consumer threads of every block call it together:
//
//   template <class Op, class Out>
//   MK_DEV void name(const Op& op, const Out& out);
//
// `op` has the inputs and weights by the names of the Python function's arguments (Rows, Weight), the parameters as constants (Op::name), and
// what CustomOp has. `out` takes the features that the block owns, Results. The function writes each of those, for all kTokens tokens, and
// touches nothing else: the block meets before it is called and behind it. Rows of tokens past op.tokens() are there, and finite.
#pragma once
#include "megadsl/prologue.h"

namespace mk {

// A custom op, as data.
struct CustomShape {
  i32 features;  // of all outputs
  i32 scratch;   // shared memory
  i32 groups;    // of 8 features, which the blocks share out
  i32 share_offset;
};

// One of its inputs.
struct RowsShape {
  i32 begin;  // first feature of the value
  i32 features;
  i32 rows;   // shared memory
};

// Whole rows of an input in shared memory, bf16: those of a token side by side, in units of 8 features.
template <u32 kTokens>
struct Rows {
  smem_ptr<char> at;
  u32 features;

  MK_DEV u32 bytes() const { return ceil_div(features, kGroupRows) * 16; }  // of a row
  MK_DEV smem_ptr<char> row(u32 token) const { return at + token * bytes(); }
  MK_DEV float operator()(u32 token, u32 feature) const {
    ptx::expect_inside(token, kTokens), ptx::expect_inside(feature, features);
    return ptx::from_bf16(ptx::ld_shared<u16>(row(token).template at<u16>(feature * 2)));
  }
  // Two neighbours, and eight: `feature` is a multiple of 2, of 8.
  MK_DEV void load2(u32 token, u32 feature, float& even, float& odd) const {
    ptx::expect_inside(token, kTokens), ptx::expect_inside(feature + 1, features);
    const u32 pair = ptx::ld_shared<u32>(row(token).template at<u32>(feature * 2));
    even = ptx::bf16_lo(pair), odd = ptx::bf16_hi(pair);
  }
  MK_DEV void load8(u32 token, u32 feature, float (&v)[8]) const {
    ptx::expect_inside(token, kTokens), ptx::expect_inside(feature, features);
    mk::load8(row(token), feature, v);
  }
};

// A weight in a stage of the ring, bf16 as the checkpoint has it: row by row where it has two dimensions.
struct Weight {
  smem_ptr<char> at;
  u32 elements;

  MK_DEV float operator()(u32 element) const {
    ptx::expect_inside(element, elements);
    return ptx::from_bf16(ptx::ld_shared<u16>(at.at<u16>(element * 2)));
  }
  MK_DEV void load8(u32 element, float (&v)[8]) const {  // from a multiple of 8 on
    ptx::expect_inside(element, elements);
    mk::load8(at, element, v);
  }
};

// What `op` has beside its operands. `sync()` is the barrier of all threads that run the function: all of them call it. `scratch` is as
// large as declared, holds anything at first, and is the function's own while it runs.
template <class B>
struct CustomOp {
  static constexpr u32 kTokens = B::kTokens, kThreads = B::kThreads, kWarps = B::kWarps;

  const B& block;
  u32 count;
  smem_ptr<char> scratch;

  MK_DEV u32 tokens() const { return count; }  // of this step, at most kTokens
  MK_DEV u32 thread() const { return block.thread; }
  MK_DEV u32 warp() const { return block.warp(); }
  MK_DEV u32 lane() const { return block.lane(); }
  MK_DEV void sync() const { block.sync(); }
};

// Features [begin, end) of the op's outputs, one output behind the other, which the block owns: whole groups of 8. Rounded to bf16 here.
template <class Outgoing>
struct Results {
  const Outgoing& out;
  u32 begin, end;

  MK_DEV bool owns(u32 feature) const { return feature - begin < end - begin; }
  MK_DEV void put(u32 token, u32 feature, float x) const { out.put_element(unit(token, feature), feature % kGroupRows, ptx::to_bf16(x)); }
  MK_DEV void put2(u32 token, u32 feature, float even, float odd) const {
    out.put_pair(unit(token, feature), feature % kGroupRows / 2, ptx::pack_bf16(even, odd));
  }
  MK_DEV void put8(u32 token, u32 feature, const float (&v)[8]) const {
    out.put_unit(unit(token, feature), u32x4{ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7])});
  }

 private:
  MK_DEV u32 unit(u32 token, u32 feature) const {
    ptx::expect_inside(token, Outgoing::kTokens), ptx::expect_inside(feature - begin, end - begin);
    return (feature - begin) / kGroupRows * Outgoing::kTokens + token;
  }
};

template <class B, class Outgoing>
MK_DEV Results<Outgoing> results_of(const B& block, const CustomShape& s, const Outgoing& out) {
  const Share own = own_share(block.cx, u32(s.groups), u32(s.share_offset));
  return {out, own.begin * kGroupRows, min_u32(own.end * kGroupRows, u32(s.features))};
}

// Gathers an input's rows of all tokens. Needs a sync() before they are read.
template <class Wire, class P, class B>
MK_DEV Rows<B::kTokens> gather_rows(const B& block, u32 site, const ExchangeShape& e, u32 sequence, const RowsShape& s) {
  constexpr u32 kTokens = B::kTokens;
  const Groups wanted = groups_of(u32(s.begin), u32(s.features));
  const Rows<kTokens> rows = {block.template at<char>(s.rows), u32(s.features)};
  const Round round = exchange_round(block.buffers, e, sequence);
  const auto place = [&](u32 group, u32 token) { return rows.row(token) + group * 16; };
  if constexpr (P::kDense) {
    gather_dense<Wire, kTokens, P>(
        block.cx, site, round, wanted, block.thread, B::kThreads,
        [&](u32 before, u32x4 x) {
          const Dealt<kTokens> d(before, block.thread, B::kThreads);
          store_unit<Wire>(place(d.group, d.token), x);
        },
        Idle{});
  } else {
    const Groups owners = P::kWhole ? Groups{0, block.cx.blocks.value} : owners_of(block.cx, e, wanted);
    gather_units<Wire, kTokens, P, 1>(
        block.cx, site, e, round, {{wanted}, {owners}}, block.thread, B::kThreads,
        [&](u32, u32 group, u32 token, u32x4 x) { store_unit<Wire>(place(group, token), x); },
        [&](u32, u32 group, u32 token, u16 bits) { return [=] { store_last(place(group, token), bits); }; });
  }
  return rows;
}

}  // namespace mk
