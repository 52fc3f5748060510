"""What each call does to a block's shared memory: which bytes, in which order, between which of the block's barriers.

One stream of :class:`Access` and :class:`Meet` for one block and layer after layer: the contract of the functions in
templates/include/megadsl/ (linear.h, direct.h, wide.h, prologue.h, attention.h, heads.h, merge.h, finish.h, sample.h, embed.h, custom.h,
exchange.h, block.h). A test counts their barriers against Instr.syncs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megadsl.check.accesses import Access, Event, Meet, mapped, reading, some_rows
from megadsl.check.model import Device, Matrix, Step
from megadsl.ir.expr import reductions
from megadsl.ir.graph import RowMap, ValueRef, kept_values
from megadsl.ir.plan import Exchange, Instr, ident
from megadsl.ir.schedule import STAGED
from megadsl.lower.exchanges import LASTS_PER_VECTOR, PART_BYTES
from megadsl.lower.heads import FEW_ROWS, QUERY_ROWS
from megadsl.lower.memory import row_parts
from megadsl.lower.operands import input_area, prologue_values, scratch_area, vectors
from megadsl.lower.schedule import MOST_SEQUENCES
from megadsl.lower.shape import rope_tables
from megadsl.types import ceil_div

WARP_THREADS = 32
UNIT_BYTES = 16  # 8 features of one token
MOST_PASSES = 5  # of a linear: its two halves of partial sums alternate, so that five or six show every adjacency
MOST_UNITS = 3  # of an attention
JOINT = ("input", "partials", "merge", "token")  # where the finisher meets the others
FIRST, FINISHER = "first", "finisher"
KEY_ROWS = 8  # that lie side by side in each panel, as QUERY_ROWS do: key_offset, query_offset
REGISTERS = 1 << 33  # where a linear's input lies in those of its warps: it is no shared memory either
CONTROL = 1 << 32  # the control block's place among the bytes of an Access: it is no shared memory


class Stream:
    """The accesses of one block's consumer role."""

    def __init__(self, device: Device, block: int) -> None:
        self.device = device
        self.block = block
        self.words = device.records["smem"]
        self.versions: dict[str, int] = {}  # of each value: how often the block has published it
        self.turns = 1
        self.finishes = device.plan.tunables.finishes

    def events(self, layers: int, turns: int = 1) -> Iterator[Event]:
        """Of a launch of ``turns`` steps."""
        self.turns = turns
        step = next(self.device.steps(self.device.consumer, 1))
        entry = Step(Instr(step.instr.verb, "load_angles", step.instr.op, step.instr.span), None, {})
        if self.device.plan.tunables.rope_dim:
            yield self._angles(entry, True)
        for step in self.device.steps(self.device.consumer, layers, turns=turns):
            handler = getattr(self, f"_{step.instr.call}", None)
            if handler is not None:
                yield from handler(step)

    def _angles(self, step: Step, write: bool) -> Access:
        size = rope_tables(self.device.plan.graph) * self.device.tokens * self.device.plan.tunables.rope_dim * 4
        return Access("angles", self.device.records["step"][3], size, write, step, ())

    def _next(self, step: Step, turn: int, write: bool) -> Access:
        """The token that a step has chosen, and whether there is another: written by the block's first warp."""
        if self.device.sequences > 1:  # a warp for each sequence writes its own
            begin = self.device.records["batch"][2] + 3 * 4 * MOST_SEQUENCES
            return Access("sequences", begin, 4 * self.device.sequences, write, step, ("next", turn))
        begin, solo = self.device.records["step"][9] + 12, self._one(True) if write else ""
        return Access("progress", begin, 8, write, step, ("next", turn), solo=solo)

    def owned(self, groups: int, offset: int, sharers: int | None = None) -> int:
        shares = self.device.shares(groups, offset, sharers)
        return shares[self.block + 1] - shares[self.block]

    def _meet(self, instr: Instr, name: str) -> Iterator[Event]:
        if name in instr.syncs:
            yield Meet(name, self.finishes and name not in JOINT)

    def _one(self, first: bool) -> str:
        """Who does what a finisher does, where there is one; else the ``first`` warp alone, or several."""
        return FINISHER if self.finishes else FIRST if first else ""

    def _staged(self, step: Step, e: Exchange, groups: int, write: bool, solo: str = "") -> Iterator[Event]:
        """Units, then (with tags) the extra vectors of their last elements; none where results leave word by word and nobody keeps them."""
        if self.device.plan.schedule.op(step.instr.op).publish != STAGED and f"{ident(e.name)}_kept" not in self.device.records:
            return
        units = groups * self.device.tokens
        extras = ceil_div(units, LASTS_PER_VECTOR) if e.wire == "Tagged" else 0
        for first, number in ((0, units), (e.units, extras)):
            if number:
                begin = self.words[3] + first * UNIT_BYTES
                yield Access("staged", begin, number * UNIT_BYTES, write, step, (step.instr.op, step.when, first), solo=solo)

    def _out(self, step: Step) -> Exchange:
        return self.device.exchanges[str(self.device.op(step.instr.op).out)]

    def _share(self, value: str) -> int:
        e = self.device.exchanges[value]
        return self.owned(e.groups, e.share_offset, e.owners)

    def _embed(self, step: Step) -> Iterator[Event]:
        words = self.device.records[ident(step.instr.op)]
        if step.turn:
            yield self._next(step, step.turn - 1, False)
        yield from self._staged(step, self._out(step), self.owned(words[2], words[3]), True)
        yield from self._meet(step.instr, "end")

    def _publish(self, step: Step) -> Iterator[Event]:
        value = str(step.instr.args["value"])
        self.versions[value] = self.versions.get(value, 0) + 1
        solo = "" if step.instr.args["table"] else self._one(bool(step.instr.args["solo"]))
        yield from self._staged(step, self.device.exchanges[value], self._share(value), False, solo)
        if not self.finishes:  # one warp meets itself
            yield from self._meet(step.instr, "flag")
        yield from self._meet(step.instr, "done")

    def _keep(self, step: Step) -> Iterator[Event]:
        value = str(step.instr.args["value"])
        few = self._share(value) * self.device.tokens <= WARP_THREADS  # a thread a unit
        solo = FIRST if few else ""
        if not step.instr.args["table"]:
            solo = self._one(few)
        yield from list(self._staged(step, self.device.exchanges[value], self._share(value), False, solo))[:1]
        yield from self._kept(step, value, True, solo if self.finishes else "")

    def _kept(self, step: Step, value: str, write: bool, solo: str = "") -> Iterator[Event]:
        if size := self._share(value) * self.device.tokens * UNIT_BYTES:
            at = self.device.records[f"{ident(value)}_kept"][0]
            yield Access(f"kept.{value}", at, size, write, step, (value, self.versions.get(value, 0)), solo=solo)

    def _sync(self, _: Step) -> Iterator[Event]:
        yield Meet("sync", self.finishes)

    def _meet_finisher(self, step: Step) -> Iterator[Event]:
        yield from self._meet(step.instr, "input")

    def _copy_vector(self, step: Step) -> Iterator[Event]:
        yield self._copy(step, str(step.instr.args["arg"]), True)

    def _copy(self, step: Step, arg: str, write: bool) -> Access:
        """A vector of a linear, in a place of its own: read up to the padded columns."""
        op, m = step.instr.op, self.device.matrix(step.instr.op)
        begin = self.device.records[f"{ident(f'{op}.{arg}')}_copy"][0]
        return Access(f"{op}.{arg}.copy", begin, m.tile_columns * m.pieces * 2, write, step, ("copy", op, step.when, arg))

    def _copies(self, step: Step) -> Iterator[Event]:
        """Reads of all vectors that the op has copied."""
        op = step.instr.op
        args = [arg for arg, _ in vectors(self.device.op(op)) if ident(f"{op}.{arg}") + "_copy" in self.device.records]
        yield from (self._copy(step, arg, False) for arg in args)

    def _gather_kept(self, step: Step) -> Iterator[Event]:
        fold = self._fold(step)
        groups = self._share(str(step.instr.args["own"])) * fold
        begin = self.words[4] + int(str(step.instr.args["index"])) * groups * self.device.tokens * UNIT_BYTES
        if groups:
            size = groups // fold * self.device.tokens * UNIT_BYTES
            yield Access("kept", begin, size, True, step, self._gathered(step, step.instr.args["value"]), solo=self._one(False))

    def _row_map(self, step: Step) -> Iterator[Event]:
        op, own = self.device.op(step.instr.op), self._share(str(self.device.op(step.instr.op).out))
        yield from self._meet(step.instr, "input")
        yield from self._lasts(step, op.features, True)
        yield from self._meet(step.instr, "gathered")
        yield from self._lasts(step, op.features, False)
        yield from (self._scalars(step, index, True) for index in range(len(op.reductions) if step.instr.body else 0))
        yield from self._meet(step.instr, "partials")
        yield from (replace(self._scalars(step, index, False), solo=self._one(False)) for index in range(len(op.reductions)))
        for index, (_, ref) in enumerate(kept_values(op) if own else ()):
            yield from self._own_rows(step, index, ref, own)
        alone = own * self.device.tokens * 4 <= WARP_THREADS
        yield from self._staged(step, self._out(step), own, True, self._one(alone))
        yield from self._meet(step.instr, "end")

    def _own_rows(self, step: Step, index: int, ref: ValueRef, groups: int) -> Iterator[Event]:
        """Rows of another value that are combined with the block's own of an op: kept, or gathered for it."""
        if f"{ident(ref.value)}_kept" in self.device.records and not self._remote(step, ref.value):
            yield from self._kept(step, ref.value, False, self._one(False))
            return
        size, holds = groups * self.device.tokens * UNIT_BYTES, self._gathered(step, ref.value)
        yield Access("kept", self.words[4] + index * self._fold(step) * size, size, False, step, holds, solo=self._one(False))

    def _fold(self, step: Step) -> int:
        """Row groups of 8 that become one of features."""
        return 1 if isinstance(self.device.op(step.instr.op), RowMap) else self.device.matrix(step.instr.op).fold

    def _matrix(self, step: Step) -> Iterator[Event]:
        m, batch = self.device.matrix(step.instr.op), self.device.plan.tunables.batch
        turn = 0
        for part, begin, end in self.device.parts(step.instr.op)[self.block]:
            own = end - begin
            groups = m.pass_groups if m.chunks > 1 else max(own, 1)
            for start in range(0, max(own, 1), groups)[:MOST_PASSES]:
                for chunk in range(m.chunks):
                    if turn or not step.instr.args["met"]:
                        yield from self._meet(step.instr, "input")
                    yield from self._prologue(step, m, part * m.chunks + chunk)
                    yield from self._meet(step.instr, "gathered")
                    if not step.instr.args["lanes"]:
                        yield from self._lasts(step, m.columns, False)
                    ends = chunk + 1 == m.chunks
                    count = max(min(groups, own - start), 1)
                    for index in _shown(ceil_div(count, batch)):
                        at = index * batch
                        scaled = range(self._scaled(step.instr.op) if ends and start + at == 0 else 0)
                        size = min(batch, count - at) if own else 0
                        yield from self._batch(step, m, part * m.chunks + chunk, turn + index, at, size, scaled)
                        if own and ends and not step.instr.args["parts"]:
                            alone = 4 * self.device.tokens * batch <= WARP_THREADS
                            yield from self._epilogue(step, own // m.fold, self._one(alone))
                    turn += ceil_div(count, batch)
        yield from self._meet(step.instr, "end")

    def _batch(self, step: Step, m: Matrix, chunk: int, turn: int, first: int, own: int, scaled: range) -> Iterator[Event]:
        """Products of a batch of ``own`` row groups, from ``first`` of the pass on, with one chunk of the columns; the first of them that
        sees whole rows settles the row reductions ``scaled``."""
        half = self._half()
        size = half // self.device.plan.tunables.batch * own
        partials = Access("partials", self.words[2] + turn % 2 * half, size, True, step, (step.instr.op, step.when, turn))
        yield from (self._scalars(step, i, True) for i in scaled)
        if own:
            lanes = bool(step.instr.args["lanes"])
            yield self._registers(step, chunk, False) if lanes else self._activations(step, m, chunk, 0, False)
            yield partials
        yield from self._meet(step.instr, "partials")
        yield from (replace(self._scalars(step, i, False), solo=self._one(False)) for i in scaled)
        if own:
            yield replace(reading(partials), solo=self._one(4 * self.device.tokens * self.device.plan.tunables.batch <= WARP_THREADS))
        if own and m.chunks > 1:
            size = 8 * self.device.tokens * 4
            begin = self.words[7] + first * size
            size *= min(self.device.plan.tunables.batch, m.pass_groups - first)
            sums = Access("sums", begin, size, True, step, (step.instr.op, step.when, "sums", first), own=True, solo=self._one(False))
            if chunk % m.chunks:
                yield reading(sums)
            if chunk % m.chunks + 1 < m.chunks:
                yield sums

    def _add_parts(self, step: Step) -> Iterator[Event]:
        if own := self._share(str(self.device.op(step.instr.op).out)):
            fold = self.device.matrix(step.instr.op).fold
            yield from self._epilogue(step, own, FIRST if own * fold * self.device.tokens * 2 <= WARP_THREADS else "")
        yield from self._meet(step.instr, "end")

    def _gathered(self, step: Step, what: object) -> tuple[object, ...]:
        return ("gathered", step.instr.op, step.when, what)

    def _scaled(self, op: str) -> int:
        """Row reductions of a linear whose scale meets its products."""
        factored = self.device.op(op).factored
        return 0 if factored is None else len(reductions(factored.scale))

    def _half(self) -> int:
        """Bytes of one batch's partial sums."""
        return self.device.plan.tunables.batch * self.device.warps * self.device.tokens * 8 * 4

    def _lasts(self, step: Step, columns: int, write: bool) -> Iterator[Event]:
        """Where last elements travel apart, they wait in the second batch's place."""
        op = self.device.op(step.instr.op)
        if not isinstance(op, RowMap) and not self._scaled(op.name):
            return
        value = op.reduced[1].value if isinstance(op, RowMap) else prologue_values(op)[0][1].value
        if self.device.exchanges[value].wire == "Tagged":
            size = ceil_div(columns, 8) * self.device.tokens * 2
            yield Access("partials", self.words[2] + self._half(), size, write, step, ("lasts", op.name, step.when))

    def _activations(self, step: Step, m: Matrix, chunk: int, second: int, write: bool, own: bool = False) -> Access:
        size = m.tile_columns * m.chunk_pieces * self.device.tokens * 2
        return Access(("activations", "second")[second], self.words[second], size, write, step, self._gathered(step, chunk), own)

    def _registers(self, step: Step, chunk: int, write: bool) -> Access:
        """An input that arrives in registers. Each warp has its own, and no other touches them."""
        return Access("registers", REGISTERS, 4, write, step, self._gathered(step, chunk), solo="each")

    def _prologue(self, step: Step, m: Matrix, chunk: int) -> Iterator[Event]:
        operands = [0]
        for inner in step.instr.body:
            at = step.inner(inner)
            if inner.call == "gather" and step.instr.args["lanes"]:
                yield from self._copies(at)
                yield self._registers(at, chunk, True)
            elif inner.call == "gather":
                operand = ("activations", "second").index(str(inner.args["into"]))
                operands = sorted({*operands, operand})
                yield self._activations(at, m, chunk, operand, True)
                yield from self._lasts(at, m.columns, True)
                if self._scaled(step.instr.op):
                    yield from self._copies(at)
            elif inner.call == "sync":
                yield Meet("sync")
            elif inner.call == "reduce":
                yield from (self._activations(at, m, chunk, operand, False) for operand in operands)
                yield from self._copies(at)
                yield from (self._scalars(at, i, False) for i in range(int(str(inner.args["index"]))))
                yield self._scalars(at, int(str(inner.args["index"])), True)
            elif inner.call == "apply":
                yield from self._copies(at)
                yield from (self._scalars(at, i, False) for i in range(len(list(inner.args["reductions"]))))  # type: ignore[call-overload]
                yield from (self._activations(at, m, chunk, operand, False) for operand in operands)
                yield self._activations(at, m, chunk, 0, True, own=True)

    def _scalars(self, step: Step, index: int, write: bool) -> Access:
        tokens, warps = self.device.tokens, self.device.warps
        size = tokens * row_parts(self.device.op(step.instr.op), tokens, warps) * 4
        return Access("scalars", self.words[5] + index * size, size, write, step, (step.instr.op, step.when, index))

    def _epilogue(self, step: Step, groups: int, solo: str) -> Iterator[Event]:
        op = self.device.op(step.instr.op)
        for index, (_, ref) in enumerate(kept_values(op)):
            yield from self._own_rows(step, index, ref, groups)
        if step.instr.args["rope"] is not None:
            yield replace(self._angles(step, False), solo=self._one(False))
        if op.out is not None:
            yield from self._staged(step, self._out(step), groups, True, solo)

    def _remote(self, step: Step, value: str) -> bool:
        """Whether the op gathers the rows that it combines with its own, rather than having kept them."""
        found = self.device.steps(self.device.consumer, 1)
        return any(s.instr.call == "gather_kept" and s.instr.op == step.instr.op and s.instr.args["value"] == value for s in found)

    def _attention(self, step: Step) -> Iterator[Event]:
        instr, heads, device = step.instr, self.device.heads(step.instr.op), self.device
        units = range(self.block, heads.units, device.blocks)
        yield from self._meet(instr, "input")
        for unit in units[:MOST_UNITS]:
            if unit != units[0]:
                yield from self._meet(instr, "again")
            inputs, fresh, scratch = self._unit(step, unit)
            gathered = list(self._unit_writes(step, unit, inputs))
            yield from gathered
            yield from self._meet(instr, "gathered")
            if device.op(instr.op).maps and instr.args["direct"]:
                yield from [self._angles(step, False)] if device.op(instr.op).rope is not None else []
            elif device.op(instr.op).maps:
                yield from self._map_heads(step, gathered)
                yield from self._meet(instr, "mapped")
                inputs, fresh = [mapped(a) for a in inputs], [mapped(a) for a in fresh]
            # of a batch, each sequence that a unit has part of takes passes of its own: two stand for all
            passes = 2 if device.sequences > 1 else min(MOST_PASSES, heads.passes(device.warps))
            for turn in range(passes):
                if turn:
                    yield from self._meet(instr, "next")
                yield from (reading(a) for a in inputs)
                left = replace(scratch, holds=(*scratch.holds, turn))
                yield left
                yield from self._meet(instr, "parts")
                yield reading(left)
            yield from self._meet(instr, "published")
            yield from (replace(reading(a), own=False) for a in fresh)
        if not units:
            yield from self._meet(instr, "idle")
        yield from self._meet(instr, "merge")

    def _map_heads(self, step: Step, gathered: list[Access]) -> Iterator[Event]:
        """In place: each thread rewrites what it has read."""
        if self.device.op(step.instr.op).rope is not None:
            yield self._angles(step, False)
        for area in gathered:
            yield reading(area)
            yield replace(mapped(area), own=True)

    def _unit_writes(self, step: Step, unit: int, inputs: list[Access]) -> Iterator[Access]:
        """What of a unit's areas is written: rows that exist, of values whole chunks. All of it is read."""
        op, rows = self.device.op(step.instr.op), self.device.heads(step.instr.op).rows
        if bool(step.instr.args["direct"]):
            yield from inputs
            return
        queries, all_of_it = self._first_warp_gathers(step, unit)
        for area in inputs:
            if area.area.endswith(".fresh"):
                half = area.size // 2
                keys = some_rows(area, range(self.device.tokens), op.head_dim, KEY_ROWS)
                values = replace(area, begin=area.begin + half, size=half)
                yield from (replace(a, solo=FIRST if all_of_it else "") for a in (*keys, values))
            else:
                alone = queries if rows <= QUERY_ROWS else 0
                yield from (replace(a, solo=FIRST) for a in some_rows(area, range(alone), op.head_dim, QUERY_ROWS))
                yield from some_rows(area, range(alone, rows), op.head_dim, QUERY_ROWS)

    def _first_warp_gathers(self, step: Step, unit: int) -> tuple[int, bool]:
        """Of how many of the unit's query rows no other warp has a vector to poll, and whether that is so of all that it gathers.

        Threads take vectors in turn: those of the queries head by head, each unit for all tokens, then this step's rows; extra vectors
        alike.
        """
        device, heads, dim = self.device, self.device.heads(step.instr.op), int(self.device.op(step.instr.op).head_dim)
        e, (head, split) = device.exchanges[str(step.instr.args["qkv"])], divmod(unit, heads.splits)
        features = heads.rows // device.tokens * dim
        asked = [(heads.begins[0] + head * features, features)]
        if split + 1 == heads.splits:
            asked += [(begin + head * dim, dim) for begin in heads.begins[1:]]
        if device.sequences > 1:  # rows are ordered by token there
            return 0, False
        if sum(len(device.owners(e, *of)) for of in asked) * (e.vectors - e.units) > WARP_THREADS:
            return 0, False
        units = sum(ceil_div(count, 8) for _, count in asked) * device.tokens
        rows = WARP_THREADS // (ceil_div(dim, 8) * device.tokens) * device.tokens
        return min(rows, heads.rows), units <= WARP_THREADS

    def _unit(self, step: Step, unit: int) -> tuple[list[Access], list[Access], Access]:
        """What a unit gathers (unless registers take it), this step's rows among it, and its warps' parts, as they are written."""
        name, heads = step.instr.op, self.device.heads(step.instr.op)
        dim, room, all_tiles = self.device.op(name).head_dim, self.device.op(name).cache_dim, ceil_div(heads.rows, 16)
        tiles = min(self.device.warps, all_tiles)
        row, count = dim + 4, self.device.warps // tiles * tiles * min(16, heads.rows)
        if step.instr.args["halves"]:  # of two warps to a tile: half of the columns, whichever rows exist
            row, count = dim // 2 + 8, 2 * tiles * 16
        holds = (name, step.when, unit)
        if self.device.sequences > 1:
            count = self.device.warps * min(FEW_ROWS, heads.rows)
        direct, takes = bool(step.instr.args["direct"]), unit % heads.splits + 1 == heads.splits or self.device.sequences > 1
        queries = [] if direct else [Access(f"{name}.queries", heads.queries, all_tiles * 16 * room * 2, True, step, holds)]
        # Where queries arrive in registers, one warp, not always the first, stages this step's row and multiplies it.
        fresh = [Access(f"{name}.fresh", heads.fresh, 16 * room * 4, True, step, holds, own=direct)] if takes else []
        return (
            [*queries, *fresh],
            fresh,
            Access(f"{name}.scratch", heads.scratch, count * row * 4, True, step, holds),
        )

    def _merge(self, step: Step) -> Iterator[Event]:
        heads = self.device.heads(step.instr.op)
        groups = self.owned(heads.merge_groups, heads.merge_offset, self.device.sharers(step.instr.op))
        yield from self._received(step, groups)
        solo = self._one(groups * self.device.tokens * int(str(step.instr.args["lanes"])) <= WARP_THREADS)
        yield from self._staged(step, self._out(step), groups, True, solo)
        yield from self._meet(step.instr, "end")

    def _received(self, step: Step, groups: int) -> Iterator[Event]:
        """What other blocks of a cluster leave here: its barrier stands between their writing and the reading."""
        cluster, op = self.device.cluster(step.instr.op), step.instr.op
        if cluster is not None and groups:
            size = self.device.heads(op).splits * groups * self.device.tokens * PART_BYTES
            received = Access(f"{op}.received", cluster.received, size, True, step, ("received", op, step.when), own=True)
            yield from (received, reading(received))

    def _custom(self, step: Step) -> Iterator[Event]:
        op = self.device.op(step.instr.op)
        yield from self._meet(step.instr, "input")
        inputs = {arg: self._rows(step, arg) for arg, _ in op.inputs}
        yield from (inputs[str(inner.args["arg"])] for inner in step.instr.body if inner.call == "gather")
        yield from self._meet(step.instr, "gathered")
        yield from (reading(a) for a in inputs.values())
        _, scratch, groups, offset = self.device.records[ident(op.name)]
        if op.call.scratch:
            yield Access(scratch_area(op), scratch, op.call.scratch, True, step, ("scratch", op.name, step.when))
        yield from self._staged(step, self._out(step), self.owned(groups, offset), True)
        yield from self._meet(step.instr, "computed")

    def _rows(self, step: Step, arg: str) -> Access:
        """An input of a custom op, as it is gathered."""
        _, features, at = self.device.rows(step.instr.op, arg)
        size = ceil_div(features, 8) * UNIT_BYTES * self.device.tokens
        return Access(input_area(self.device.op(step.instr.op), arg), at, size, True, step, self._gathered(step, arg))

    def _argmax(self, step: Step) -> Iterator[Event]:
        threads, op = self.device.warps * WARP_THREADS, step.instr.op
        area, begin = f"{op}.candidates", self.device.records[f"{ident(op)}_candidates"][0]
        one = self._one(False)
        winners = Access(area, begin + threads * 8, self.device.tokens * 8, True, step, ("winners",), solo=one)
        candidates = Access(area, begin, threads * 8, True, step, ("candidates",), solo=one)
        choice = replace(candidates, holds=("choice",))
        tokens = Access("control.next_ids", CONTROL, self.device.tokens * 4, True, step, ("tokens",), solo=self._one(True))
        yield candidates
        yield from self._meet(step.instr, "candidates")
        yield from (reading(candidates), winners)
        yield from self._meet(step.instr, "winners")
        yield reading(winners)
        if step.turn + 1 < self.turns:
            if self.device.plan.tunables.rope_dim:
                yield self._angles(step, True)
            yield self._next(step, step.turn, True)
            yield from self._meet(step.instr, "token")
            yield self._next(step, step.turn, False)
        elif self.block == 0:
            yield choice
            yield from self._meet(step.instr, "choice")
            yield reading(choice)
            yield tokens
            yield reading(tokens)  # finish_step() hands them to the next launch


def _shown(batches: int) -> list[int]:
    """Batches of a pass that stand for all: of many the first and the last ones, an even number left out between them."""
    skipped = max(0, batches - MOST_PASSES) // 2 * 2
    return [i for i in range(batches) if not 3 <= i < 3 + skipped]
