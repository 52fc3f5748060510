"""The plan as the device sees it: split functions, shares and sizes, read from the words of Shape that the kernel reads.

attention_unit() and Device.owners() are twins of functions in templates/include/megadsl/ (units.h, exchange.h).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from megadsl.check.batch import skipped_chunks
from megadsl.ir.graph import Attention, Custom, Linear
from megadsl.ir.plan import Exchange, Instr, Item, LayerLoop, Plan, Program, ident
from megadsl.lower.columns import parts_of, share_begin, share_owner
from megadsl.lower.shape import ALL_ROWS, CHUNK_ROWS, WINDOWS, input_name, layer_room, windowed
from megadsl.lower.steps import feeds_itself
from megadsl.lower.tiling import GROUP_ROWS
from megadsl.types import ceil_div


@dataclass(frozen=True)
class Matrix:
    """The words of mk::LinearShape that say who computes what."""

    groups: int
    fold: int
    share_offset: int
    columns: int
    tile_bytes: int
    tile_columns: int
    pieces: int
    ways: int
    chunk_pieces: int
    together: int
    pass_groups: int

    @property
    def chunks(self) -> int:
        """Of each part of the columns."""
        return self.pieces // self.ways // self.chunk_pieces

    @property
    def shared(self) -> int:
        """What is shared out over the blocks: the feature groups of all parts of the columns."""
        return self.groups // self.fold * self.ways


@dataclass(frozen=True)
class Heads:
    """The words of mk::AttentionShape and mk::MergeShape that say who computes what, and where in shared memory."""

    kv_heads: int
    splits: int
    begins: tuple[int, int, int]
    scratch: int
    queries: int
    fresh: int
    rows: int
    merge_groups: int
    merge_offset: int
    windows: tuple[int, ...]  # rows that a token sees, 0 for all: of all layers, or of each

    def window(self, layer: int) -> int:
        """Of one layer."""
        return self.windows[layer if len(self.windows) > 1 else 0]

    @property
    def units(self) -> int:
        return self.kv_heads * self.splits

    def passes(self, warps: int) -> int:
        """Times a unit's rows are streamed; mk::attention_passes."""
        return ceil_div(ceil_div(self.rows, 16), warps)


@dataclass(frozen=True)
class Cluster:
    """The words of mk::ClusterShape: where parts and their barrier lie in shared memory, and how many feature groups a block adds."""

    received: int
    landed: int
    groups: int


@dataclass(frozen=True)
class Step:
    """An instruction as it runs: its layer (None outside the loop) and the names its round may use."""

    instr: Instr
    layer: int | None
    names: dict[str, int]
    turn: int = 0  # which of the launch's steps

    @property
    def when(self) -> tuple[int, int | None]:
        return self.turn, self.layer

    def inner(self, instr: Instr) -> Step:
        """An instruction nested in this one."""
        return replace(self, instr=instr)

    def round(self, argument: str = "round") -> int:
        return evaluate(str(self.instr.args[argument]), self.names)


class Device:
    """A plan and what its blocks make of it. ``layers`` are unrolled, as many as the caller asks for, at most the model's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.blocks = plan.schedule.blocks
        self.tokens = plan.tunables.tokens
        self.sequences = plan.schedule.sequences
        self.consumer = next(p for p in plan.programs if p.kind == "consumer")
        self.warps = self.consumer.warps
        self.records = {r.name: r.words for r in plan.shape}
        self.exchanges = {e.name: e for e in plan.exchanges}
        self._shares: dict[tuple[int, int, int], list[int]] = {}
        self._parts: dict[str, list[list[tuple[int, int, int]]]] = {}
        self._products: dict[str, Instr | None] = {}
        self.tiles: dict[tuple[int, str, bool], list[tuple[int, int]]] = {}  # of blocks, see megadsl/check/ring.py

    def matrix(self, op: str) -> Matrix:
        w = self.records[ident(op)]
        return Matrix(w[2], w[3], w[4], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[14])

    def _product(self, op: str) -> Instr | None:
        if op not in self._products:
            products = (s.instr for s in self.steps(self.consumer, 1) if s.instr.call == "matrix" and s.instr.op == op)
            self._products[op] = next(products, None)
        return self._products[op]

    def held(self, op: str) -> int:
        """Tiles that the products of a linear take from registers, at most."""
        found = self._product(op)
        return 0 if found is None else int(str(found.args["held"]))

    def direct(self, op: str) -> bool:
        """Whether a linear's input arrives in registers, of few tokens."""
        found = self._product(op)
        return found is not None and bool(found.args["direct"])

    def heads(self, op: str) -> Heads:
        w, m = self.records[ident(op)], self.records[f"{ident(op)}_merge"]
        return Heads(w[3], w[4], (w[5], w[6], w[7]), w[9], w[10], w[11], w[12], m[0], m[1], self.windows(op))

    def windows(self, op: str) -> tuple[int, ...]:
        """What a kernel compares with: the number that is compiled in, or the table of layers."""
        by_layer = [a.name for a in windowed(self.plan.graph)]
        if op not in by_layer:
            return (int(self.op(op).window or 0),)
        row = self.records[WINDOWS][by_layer.index(op) * layer_room(self.plan.graph) :]
        return tuple(0 if word == ALL_ROWS else word for word in row[: self.plan.graph.layers])

    def cluster(self, op: str) -> Cluster | None:
        """Where an attention adds its splits within a cluster of blocks."""
        words = self.records.get(f"{ident(op)}_cluster")
        return Cluster(*words[:3]) if words is not None else None

    def partners(self, op: str) -> list[range]:
        """Per block, those of its cluster that have a unit, where an attention adds its splits within clusters; none for a block
        without one. mk::merge_cluster."""
        units, size = self.heads(op).units, self.plan.schedule.cluster
        firsts = (block // size * size for block in range(self.blocks))
        return [range(first, min(first + size, units)) if block < units else range(0) for block, first in enumerate(firsts)]

    def shares(self, groups: int, offset: int, sharers: int | None = None) -> list[int]:
        """First item of every block, and the end of the last's, where the first ``sharers`` (None: all) blocks share them."""
        of = self.blocks if sharers is None else sharers
        if (groups, offset, of) not in self._shares:
            self._shares[groups, offset, of] = [share_begin(groups, of, offset, min(i, of)) for i in range(self.blocks + 1)]
        return self._shares[groups, offset, of]

    def sharers(self, op: str) -> int:
        """How many blocks, the first ones, share out the features of an op's value."""
        return self.blocks if self.cluster(op) is None else self.heads(op).units

    def rows(self, op: str, arg: str) -> tuple[int, int, int]:
        """The words of mk::RowsShape: first feature and features of a custom op's input, and where its rows lie."""
        begin, features, at = self.records[input_name(self.op(op), arg)]
        return begin, features, at

    def customs(self) -> list[Custom]:
        return [o for o in self.plan.graph.ops if isinstance(o, Custom)]

    def parts(self, op: str) -> list[list[tuple[int, int, int]]]:
        """Per block, the parts of an op's columns that it multiplies: (part, first row group, last)."""
        if op not in self._parts:
            m = self.matrix(op)
            shares = [begin * m.fold for begin in self.shares(m.shared, m.share_offset)]
            self._parts[op] = [parts_of(m.groups, m.ways, begin, end) for begin, end in pairwise(shares)]
        return self._parts[op]

    def op(self, name: str) -> Any:
        return self.plan.graph.op(name)

    @cached_property
    def ops(self) -> tuple[list[Linear], list[Attention]]:
        ops = self.plan.graph.ops
        return [o for o in ops if isinstance(o, Linear)], [o for o in ops if isinstance(o, Attention)]

    def owners(self, e: Exchange, begin: int, features: int) -> list[int]:
        """Blocks whose vectors a gather of the features polls: the owners of the units; with tags, whose extra vectors are asked
        of mk::owners_of's whole range of blocks, also those in between that own nothing."""
        if features <= 0:
            return []
        first, count = begin // GROUP_ROWS, ceil_div(features, GROUP_ROWS)
        found = {share_owner(e.groups, e.owners, e.share_offset, g) for g in range(first, first + count)}
        return list(range(min(found), max(found) + 1)) if e.wire == "Tagged" else sorted(found)

    @cached_property
    def several(self) -> bool:
        """Whether a launch can make several steps."""
        return feeds_itself(self.plan.graph, self.plan.schedule)

    def turns(self, count: int) -> int:
        """Steps of a launch, at most ``count``."""
        return count if self.several else 1

    def steps(self, program: Program, layers: int, epoch: int = 1, turns: int = 1) -> Iterator[Step]:
        """Every instruction in program order, a prologue's left inside its linear, over ``turns`` steps of ``layers`` layers."""
        for turn in range(turns):
            for item in program.body:
                looped = isinstance(item, LayerLoop)
                for layer in _layers(item, layers):
                    names = {"epoch": epoch + turn, "layers": layers, "layer": layer}
                    for phase in item.body if isinstance(item, LayerLoop) else (item,):
                        yield from (Step(i, layer if looped else None, names, turn) for i in phase.body)


def _layers(item: Item, layers: int) -> Iterable[int]:
    """Layers that an item of a program runs for."""
    if not isinstance(item, LayerLoop):
        return (0,)
    return range(layers) if item.trips == "layers" else (item.begin,)


def attention_unit(splits: int, unit: int, kv_len: int, window: int = 0) -> tuple[int, int, int, bool]:
    """(KV head, first chunk, end, takes this step's rows); mk::attention_unit."""
    head, split = divmod(unit, splits)
    skipped = skipped_chunks(kv_len, window)
    chunks = ceil_div(kv_len, CHUNK_ROWS) - skipped
    last, fresh = max(chunks, 1) - 1, split + 1 == splits
    begin, end = (min((chunks + 1) * at // splits, last) for at in (split, split + 1))
    return head, skipped + begin, skipped + (chunks if fresh else end), fresh


def evaluate(expression: str, names: dict[str, int]) -> int:
    """A round: integers and names under +, - and *."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=op, right=right):
                a, b = value(left), value(right)
                return a + b if isinstance(op, ast.Add) else a - b if isinstance(op, ast.Sub) else a * b
        raise AssertionError(f"no round: {expression!r}")

    return value(ast.parse(expression, mode="eval").body)


def prologue_gathers(matrix: Instr) -> list[Instr]:
    """The gathers nested in a linear's instruction, or in a custom op's."""
    return [i for i in matrix.body if i.call == "gather"]
