// Exchanges: how blocks hand activations to each other through L2.
//
// A value's features are shared out in groups of 8. A *unit* is one group of one token: 16 bytes of bf16, the piece that
// publishing, gathering and the mma operands have in common. Each block writes what it owns as a fixed number of 16-byte
// vectors (the same for every block, so that an idle block takes part too: that is what makes slot reuse provable): first
// one vector per unit, in [group][token] order. Slots rotate with the value's own sequence number.
//
// How vectors travel, their wire, is a type (wires.h).
#pragma once
#include "megadsl/wires.h"

namespace mk {

// One exchange, as data. Offsets in 16-byte units from the start of the exchange arena.
struct ExchangeShape {
  i32 offset;       // first vector of slot 0
  i32 slot_stride;  // vectors per slot
  i32 slots;        // a power of two
  i32 vectors;      // per block (or per attention unit)
  i32 units;        // most units a block owns: its first vectors
  i32 groups;       // feature groups of 8 that are shared out over the blocks
  i32 groups_inverse;  // Divisor::inverse of it
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

constexpr u32 kFlagStride = 16;  // words between two blocks' flags

// Whether a block's flag tells that the round is there. The block may be rounds ahead of a reader that it did not wait for, but
// never as far as the slot's next round. Not `>=`: before the first round a flag is 0, and sequences wrap.
MK_DEV bool flag_covers(const ExchangeShape& e, u32 flag, u32 sequence) { return flag - sequence < u32(e.slots); }

// Feature groups [first, first + count) of a value.
struct Groups {
  u32 first, count;
};

MK_DEV Groups groups_of(u32 begin, u32 features) { return {begin / kGroupRows, ceil_div(features, kGroupRows)}; }

MK_DEV u32 owner_of(const Context& cx, const ExchangeShape& e, u32 group) {
  return share_owner({u32(e.groups), u32(e.groups_inverse)}, cx.blocks, u32(e.share_offset), group);
}

// Blocks [first, first + count) that own a part of the groups.
MK_DEV Groups owners_of(const Context& cx, const ExchangeShape& e, Groups g) {
  if (g.count == 0) return {0, 0};
  const u32 first = owner_of(cx, e, g.first);
  return {first, owner_of(cx, e, g.first + g.count - 1) + 1 - first};
}

// What a gather wants of a value: some ranges of groups, all tokens; and who is asked for them.
template <u32 kRanges>
struct Wanted {
  Groups ranges[kRanges];
  Groups owners[kRanges];

  // Which range the i-th of the concatenated groups (or owners) falls into; `i` becomes its place in that range.
  MK_DEV static u32 find(const Groups (&parts)[kRanges], u32& i) {
    u32 range = 0;
#pragma unroll
    for (u32 r = 0; r + 1 < kRanges; ++r)
      if (range == r && i >= parts[r].count) i -= parts[r].count, range = r + 1;
    return range;
  }
  // parts[range], without an array that would live in local memory.
  MK_DEV static Groups pick(const Groups (&parts)[kRanges], u32 range) {
    Groups found = parts[0];
#pragma unroll
    for (u32 r = 1; r < kRanges; ++r)
      if (range == r) found = parts[r];
    return found;
  }
  MK_DEV static u32 total(const Groups (&parts)[kRanges]) {
    u32 sum = 0;
#pragma unroll
    for (u32 r = 0; r < kRanges; ++r) sum += parts[r].count;
    return sum;
  }
};

// How a gather polls: units and extra vectors a thread has under way, and whether it wants the whole value.
template <u32 kUnits_, u32 kExtras_, bool kWhole_>
struct Poll {
  static constexpr u32 kUnits = kUnits_;
  static constexpr u32 kExtras = kExtras_;
  static constexpr bool kWhole = kWhole_;
  static constexpr bool kDense = false;
};

// The same where units travel whole and all blocks own equally many of them: a unit's place then follows from its number, whoever owns
// it. kEven: all threads have kUnits units in every round. kSpread: blocks take a thread's units in different orders. All blocks gather
// at the same time, and what they all want at once comes from one place in L2.
template <u32 kUnits_, bool kEven_, bool kSpread_ = (kUnits_ > 2)>
struct DensePoll {
  static constexpr u32 kUnits = kUnits_;
  static constexpr u32 kExtras = 1;
  static constexpr bool kWhole = false;  // no block has nothing to send
  static constexpr bool kDense = true;
  static constexpr bool kEven = kEven_;
  static constexpr bool kSpread = kSpread_;
};

// One of the items, kTokens to a group, that are dealt out to `threads` threads in turn; `before` of them, a multiple of the threads,
// come before the threads' turn. Where a thread's items are all of one token, the compiler sees constant steps.
template <u32 kTokens>
struct Dealt {
  u32 item, group, token;
  MK_DEV Dealt(u32 before, u32 thread, u32 threads) : item(before + thread) {
    const bool steady = threads % kTokens == 0;
    group = steady ? before / kTokens + thread / kTokens : item / kTokens;
    token = steady ? thread % kTokens : item % kTokens;
  }
};

// The items of a gather, numbered so that threads can share them: units, blocks asked for their presence alone, and extra
// vectors. kWhole: the one range is the whole value; blocks that own nothing of it are waited for as well, so that a block
// which has gathered knows that every other block has come this far.
template <class Wire, u32 kTokens, class P, u32 kRanges>
struct GatherItems {
  using W = Wanted<kRanges>;
  static constexpr u32 kNone = ~0u;  // no vector

  const Context& cx;
  const ExchangeShape& e;
  const W& wanted;
  u32 extras_each, units, silent, extras;

  MK_DEV GatherItems(const Context& context, const ExchangeShape& shape, const W& what)
      : cx(context), e(shape), wanted(what), extras_each(u32(shape.vectors - shape.units)), units(W::total(what.ranges) * kTokens),
        silent(P::kWhole && Wire::kWholeUnits && !Wire::kDense && u32(shape.groups) < context.blocks.value && !ptx::skips_zero_trips()
                   ? context.blocks.value
                   : 0),
        extras(Wire::kWholeUnits ? 0 : W::total(what.owners) * extras_each) {}

  MK_DEV u32 share_of(u32 block) const { return share_begin(u32(e.groups), cx.blocks, u32(e.share_offset), block); }

  MK_DEV u32 locate_unit(Dealt<kTokens> d) const {
    if (d.item >= units + silent) return kNone;
    if (d.item >= units) return (d.item - units) * u32(e.vectors);
    u32 group = d.group;
    group += W::pick(wanted.ranges, W::find(wanted.ranges, group)).first;
    if (Wire::kDense || P::kDense) return group * kTokens + d.token;
    const u32 block = owner_of(cx, e, group);
    return block * u32(e.vectors) + (group - share_of(block)) * kTokens + d.token;
  }
  // An extra vector: where it lies, the unit in its range that its first element belongs to (it may wrap below 0), the range's
  // last unit, and a bit for each element that is wanted. All of that before the wait, for it takes divisions.
  struct Extra {
    u32 at = kNone, range = 0, unit = 0, last_unit = 0, wanted = 0;
  };
  MK_DEV Extra locate_extra(u32 item) const {
    Extra found;
    if (item >= extras) return found;
    u32 block = item / extras_each;
    const u32 place = item % extras_each, first = place * kLastsPerVector;
    found.range = W::find(wanted.owners, block);
    block += W::pick(wanted.owners, found.range).first;
    found.at = block * u32(e.vectors) + u32(e.units) + place;
    const Groups inside = W::pick(wanted.ranges, found.range);
    const u32 group0 = share_of(block), owned = (share_of(block + 1) - group0) * kTokens;
    found.unit = (group0 - inside.first) * kTokens + first;
    found.last_unit = inside.count * kTokens - 1;
#pragma unroll
    for (u32 j = 0; j < kLastsPerVector; ++j)
      if (first + j < owned && found.unit + j <= found.last_unit) found.wanted |= 1u << j;
    return found;
  }
  template <class Unit>
  MK_DEV void deliver_unit(Dealt<kTokens> d, u32x4 v, Unit unit) const {
    if (d.item >= units) return;
    u32 group = d.group;
    const u32 range = W::find(wanted.ranges, group);
    unit(range, group, d.token, v);
  }
  template <class Last>
  MK_DEV void deliver_extra(const Extra& extra, u32x4 v, Last last) const {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 j = 0; j < kLastsPerVector; j += 2) {
      if (j >= u32(e.units)) break;  // no block owns more
      const auto store = [&](u32 i) {
        const u32 unit = min_u32(extra.unit + i, extra.last_unit);
        return last(extra.range, unit / kTokens, unit % kTokens, u16(words[i / 2] >> (i % 2 * 16)));
      };
      const auto one = store(j), other = store(min_u32(j + 1, kLastsPerVector - 1));  // side by side in the pipeline
      if (extra.wanted >> j & 1) one();
      if (j + 1 < kLastsPerVector && (extra.wanted >> (j + 1) & 1)) other();
    }
  }
};

// Whether `owner`, a block or a unit of one, has raised its flag for the round.
MK_DEV bool raised(const ExchangeShape& e, const Round& round, u32 owner, u32& observed) {
  observed = ptx::ld_acquire(round.flags + owner * kFlagStride);
  return flag_covers(e, observed, round.sequence);
}

// Polls those vectors of a thread that `pending` has a bit for until all of them are there; `from(i)`: where the i-th lies; `told(i, observed)`:
// whether its flag is raised, if the wire has flags. What is not wanted lies ready in `v`. All lanes of a warp call it together.
template <class Wire, u32 kCount, class From, class Told>
MK_DEV void poll_vectors(const Context& cx, u32 site, u32 tile, u32 sequence, u32& pending, u32x4 (&v)[kCount], From from, Told told) {
  wait_warp<ptx::kPollsAtOnce, Wire::kBackOff>(cx, site, tile, sequence, [&](u32& observed) {
    if constexpr (Wire::kFlagged) {
#pragma unroll
      for (u32 i = 0; i < kCount; ++i)
        if ((pending >> i & 1) && !told(i, observed) && !(i == 0 && ptx::polls_fewer())) return false;
    }
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
      if (pending >> i & 1) v[i] = Wire::load(from(i));
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
      if (Wire::ready(v[i], sequence)) pending &= ~(1u << i);
      else if (!Wire::kResets && (pending >> i & 1)) observed = Wire::tag(v[i]);
    }
    if (Wire::kResets) observed = Wire::tag(v[0]);  // all that are not there look the same
    if (!Wire::kFlagged && ptx::polls_fewer()) pending &= pending - 1;
    return pending == 0;
  });
}
template <class Wire, u32 kCount, class From>
MK_DEV void poll_vectors(const Context& cx, u32 site, u32 tile, u32 sequence, u32& pending, u32x4 (&v)[kCount], From from) {
  static_assert(!Wire::kFlagged, "vectors that are their own flags");
  poll_vectors<Wire>(cx, site, tile, sequence, pending, v, from, [](u32, u32&) { return true; });
}

// Gathers units. Each thread works from the destination: it knows where its units lie and where they go before they arrive,
// so that after the wait only the stores are left. All of a thread's vectors are polled together, P::kUnits units and (where
// tags push out last elements) P::kExtras extra vectors at a time.
//   unit(range, group in the range, token, bits)   a unit, without its last element unless the wire carries whole units
//   last(range, group in the range, token, bits)   gives a function that stores the last element of a unit; called if it is wanted
template <class Wire, u32 kTokens, class P, u32 kRanges, class Unit, class Last>
MK_DEV void gather_units(const Context& cx, u32 site, const ExchangeShape& e, const Round& round, const Wanted<kRanges>& wanted, u32 thread,
                         u32 threads, Unit unit, Last last) {
  using Items = GatherItems<Wire, kTokens, P, kRanges>;
  constexpr u32 kPolls = P::kUnits + (Wire::kWholeUnits ? 0 : P::kExtras);
  const Items items(cx, e, wanted);
#pragma unroll 1
  for (u32 step = 0; step * threads * P::kUnits < items.units + items.silent || step * threads * P::kExtras < items.extras; ++step) {
    const auto unit_item = [&](u32 i) { return Dealt<kTokens>((step * P::kUnits + i) * threads, thread, threads); };
    u32 at[kPolls], pending = 0;
    typename Items::Extra extra[P::kExtras];
#pragma unroll
    for (u32 i = 0; i < kPolls; ++i) {
      if (i >= P::kUnits) extra[i - P::kUnits] = items.locate_extra((step * P::kExtras + i - P::kUnits) * threads + thread);
      at[i] = i < P::kUnits ? items.locate_unit(unit_item(i)) : extra[i - P::kUnits].at;
      if (at[i] != Items::kNone) pending |= 1u << i;
    }
    u32x4 v[kPolls] = {};
    poll_vectors<Wire>(cx, site, at[0], round.sequence, pending, v, [&](u32 i) { return round.vectors + at[i]; },
                       [&](u32 i, u32& observed) { return raised(e, round, at[i] / u32(e.vectors), observed); });
#pragma unroll
    for (u32 i = 0; i < kPolls; ++i) {
      if (i < P::kUnits) items.deliver_unit(unit_item(i), v[i], unit);
      else items.deliver_extra(extra[i - P::kUnits], v[i], last);
    }
  }
}

// What a gather's threads do while their first polls are under way: nothing.
struct Idle {
  static constexpr bool kIdle = true;
  MK_DEV void operator()() const {}
};
// Or `work()`, in a gather of one round: what comes of it then has a value on every path.
template <class Work>
struct Meanwhile {
  static constexpr bool kIdle = false;
  Work work;
  MK_DEV void operator()() const { work(); }
};
template <class Work>
Meanwhile(Work) -> Meanwhile<Work>;

// gather_units of one range of units that lie densely. `unit(before, bits)`: the thread's unit after `before` others, see Dealt.
template <class Wire, u32 kTokens, class P, class Unit, class Beside>
MK_DEV void gather_dense(const Context& cx, u32 site, const Round& round, Groups wanted, u32 thread, u32 threads, Unit unit, Beside beside) {
  static_assert(P::kDense && Wire::kWholeUnits && !Wire::kFlagged, "units that are their own flags");
  const u32 units = wanted.count * kTokens, size = P::kUnits * threads, steps = ceil_div(units, size);
  const u32 first_step = P::kSpread ? cx.block / P::kUnits & (steps - 1) : 0, first = P::kSpread ? cx.block % P::kUnits * threads : 0;
  const auto poll = [&](u32 step) {
    const u32 turn = step + first_step, begin = (turn < steps ? turn : turn - steps) * size;
    const auto before = [&](u32 i) {  // each of them once, from `first` on
      return (P::kUnits & (P::kUnits - 1)) == 0 ? i * threads ^ first : min_u32(i * threads + first, i * threads + first - size);
    };
    const u32x4* from = round.vectors + (wanted.first * kTokens + begin + thread);
    u32 pending = (1u << P::kUnits) - 1;
#pragma unroll
    for (u32 i = 0; i < P::kUnits; ++i)
      if (!P::kEven && begin + before(i) + thread >= units) pending &= ~(1u << i);
    u32x4 v[P::kUnits] = {};
    if constexpr (!Beside::kIdle) {
#pragma unroll
      for (u32 i = 0; i < P::kUnits; ++i)
        if (pending >> i & 1) v[i] = Wire::load(from + before(i));
      beside();
#pragma unroll
      for (u32 i = 0; i < P::kUnits; ++i)
        if (Wire::ready(v[i], round.sequence)) pending &= ~(1u << i);
    }
    poll_vectors<Wire>(cx, site, wanted.first * kTokens + begin + thread, round.sequence, pending, v, [&](u32 i) { return from + before(i); });
#pragma unroll
    for (u32 i = 0; i < P::kUnits; ++i)
      if (P::kEven || begin + before(i) + thread < units) unit(begin + before(i), v[i]);
  };
  if constexpr (Beside::kIdle) {
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) poll(step);
  } else {
    poll(0);
  }
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

// This block's share of a value on its way out. The vectors are staged in shared memory as they will be published: units, then
// (where tags push out last elements) the extra vectors. Where a thread's vectors go is known ahead of the data, and worked out
// then: behind the last product each instruction counts.
//
// kVia: or each pair of elements leaves as the word that it is, from the registers of the thread that has it, and at once: for wires each of
// whose words says by itself that it is there. kBoth: and is staged too, for whoever keeps it.
enum class Via { kStaged, kWords, kBoth };
template <class Wire, u32 kTokens_, Via kVia = Via::kStaged>
struct Outgoing {
  static constexpr u32 kTokens = kTokens_;
  static constexpr bool kAtOnce = kVia != Via::kStaged, kStages = kVia != Via::kWords;
  static_assert(!kAtOnce || Wire::kWords, "words that are their own flags");

  const Context& cx;
  const Buffers& buffers;
  const ExchangeShape& e;
  smem_ptr<char> staged;
  u32 sequence;
  u32 thread, threads;  // those that publish
  u32 begin, count;     // this block's vectors in a slot
  u32 owned;            // units
  u32 at;               // the thread's first vector, in the arena
  bool first;           // whether something is staged for it
  u32 units;            // kAtOnce: the block's first vector, in the arena
  u32 site;

  MK_DEV Outgoing(const Context& context, const Buffers& b, const ExchangeShape& shape, u32 round, smem_ptr<char> area, u32 one, u32 all,
                  u32 signal, Share own)
      : cx(context), buffers(b), e(shape), staged(area), sequence(round), thread(one), threads(all), site(signal) {
    owned = (own.end - own.begin) * kTokens;
    begin = Wire::kDense ? own.begin * kTokens : cx.block * u32(e.vectors), count = Wire::kDense ? owned : u32(e.vectors);
    at = ptx::opaque(slot(sequence) + thread);  // opaque: or the compiler would put it off until it is needed
    first = holds(thread);
    if constexpr (kAtOnce) units = ptx::opaque(slot(sequence));
  }

  MK_DEV u32x4* arena() const { return reinterpret_cast<u32x4*>(buffers.exchange); }
  // First vector of this block in the slot of a round.
  MK_DEV u32 slot(u32 round) const {
    return u32(e.offset) + (round & u32(e.slots - 1)) * u32(e.slot_stride) + begin;
  }
  MK_DEV bool holds(u32 vector) const {
    return vector < owned || (!Wire::kWholeUnits && vector >= u32(e.units) && (vector - u32(e.units)) * kLastsPerVector < owned);
  }

  // Stage a unit, a pair of its elements, one element; `unit` = group * kTokens + token, groups counted from the block's first.
  MK_DEV void put_unit(u32 unit, u32x4 x) const {
    if constexpr (kAtOnce) {
      chaos(cx, Place::kSignal, u32(e.offset), 0);
      if (!lost_signal(site)) Wire::store(arena() + (units + unit), Wire::pack(x, sequence));
      if (!kStages) return;
    }
    ptx::st_shared<u32x4>(staged.template at<u32x4>(unit * 16), x);
    put_copy(unit, 7, u16(x.w >> 16));
  }
  MK_DEV void put_pair(u32 unit, u32 pair, u32 bits) const {
    if constexpr (kAtOnce) {
      chaos(cx, Place::kSignal, u32(e.offset), 0);
      if (!lost_signal(site)) ptx::st_relaxed(reinterpret_cast<u32*>(arena() + units) + (unit * 4 + pair), Wire::pack(u32x4{bits, 0, 0, 0}, sequence).x);
      if (!kStages) return;
    }
    ptx::st_shared<u32>(staged.template at<u32>(unit * 16 + pair * 4), bits);
    put_copy(unit, 2 * pair + 1, u16(bits >> 16));
  }
  MK_DEV void put_element(u32 unit, u32 element, u16 bits) const {
    static_assert(!kAtOnce, "an element is half a word");
    ptx::st_shared<u16>(staged.template at<u16>(unit * 16 + element * 2), bits);
    put_copy(unit, element, bits);
  }
  // A last element again, in its extra vector. Other elements go where they are already: a branch would cost more than the store.
  MK_DEV void put_copy(u32 unit, u32 element, u16 bits) const {
    if (Wire::kWholeUnits) return;
    const u32 last = (u32(e.units) + unit / kLastsPerVector) * 16 + unit % kLastsPerVector * 2;
    ptx::st_shared<u16>(staged.template at<u16>(element == 7 ? last : unit * 16 + element * 2), bits);
  }

  // Publishes what is staged: behind a barrier of those who staged it and those who publish. Blocks that own nothing publish zeros.
  MK_DEV void send() const {
    bool stored = first;
    u32 to = at;
#pragma unroll 1
    for (u32 i = thread; !kAtOnce && i < count; i += threads, to += threads, stored = holds(i)) {
      u32x4 x = {0, 0, 0, 0};
      if (stored) x = ptx::ld_shared<u32x4>(staged.template at<u32x4>(i * 16));
      chaos(cx, Place::kSignal, u32(e.offset), i / kWarpSize);
      Wire::store(arena() + to, Wire::pack(x, sequence));
    }
    if (!Wire::kResets) return;
    const u32 ahead = slot(sequence + u32(e.slots) / 2);
#pragma unroll 1
    for (u32 i = thread; i < count; i += threads)
      Wire::store(arena() + ahead + i, u32x4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
  }
  // Flag: raises the block's flag, behind a barrier after send().
  MK_DEV void raise() const {
    chaos(cx, Place::kSignal, u32(e.flags), 0);
    u32* flags = reinterpret_cast<u32*>(arena() + e.flags);
    if (thread == 0) ptx::st_release(flags + cx.block * kFlagStride, sequence);
  }
};

}  // namespace mk
