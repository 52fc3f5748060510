"""The rings: loaders fill stages in the order in which the consumers take them, and nobody waits for ever.

A block's roles are a network without choices: each waits for one thing at a time, and whoever can go on may go on in any order
without changing what the others find. So playing them greedily, once, shows every schedule: if the roles reach their
ends here, they always do; if they are stuck, they always are. Played per kind of block and for several lengths of the KV cache,
among them none, with every loader, its gates, its ring's stages and the stages that the consumers hold at once.

Phases. `full` has one arrival (the loader's expect_tx) and the copy's bytes, or where the lanes of a loader's warp copy, one of each lane
behind the bytes that it has copied itself; `empty` has one of each consumer warp. A slot is filled again
only behind its `empty`, and emptied only behind its `full`, so neither barrier can be a whole round ahead of who waits for it: one parity
bit tells them apart. The loader's own look at `full`, a window behind, needs window <= stages, to which ring.h clamps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from megadsl.check.batch import Batch, after, batches, segments
from megadsl.check.memory import block_kinds
from megadsl.check.model import Device, Step, attention_unit
from megadsl.check.report import Findings, shown
from megadsl.check.ring_sizes import check_sizes
from megadsl.diagnostics import declare
from megadsl.ir.plan import Program
from megadsl.lower.gathers import tiles_together
from megadsl.lower.heads import FEW_ROWS
from megadsl.lower.memory import chunk_pieces, pass_groups
from megadsl.lower.operands import vectors
from megadsl.lower.shape import CHUNK_ROWS
from megadsl.lower.threads import WARP_THREADS
from megadsl.lower.tiling import tiling
from megadsl.types import ceil_div

ORDER = declare(
    "MK520",
    "the consumers take {taken} from ring {ring!r} where the loader fills {filled}",
    "load what an op reads in the order in which its consumers take it, through one ring, as often per layer",
)
STUCK = declare(
    "MK521",
    "{what} cannot go on: the roles of a block wait for each other",
    "give the ring more stages, or open the gate before the first wait that needs what lies behind it",
)
LEFT = declare(
    "MK524",
    "ring {ring!r} still holds {left} stages when its consumers have ended",
    "take every stage that is loaded, also in blocks without rows and with an empty cache",
)
ROWS, JOINED = "cached rows", "the step"  # gates: of all loads of them; behind which a launch's loaders know how many there are
LAYERS = 3
TURNS = 2  # steps of a launch
TILES_AT_ONCE = 2
LAPS = 3  # of a ring: begun, gone on, and left behind


@dataclass(frozen=True)
class Fill:
    """Stages that one instruction loads, or that the consumers take: ``what`` tells them from all others."""

    what: tuple[object, ...]
    count: int
    step: Step


@dataclass(frozen=True)
class Take:
    """The consumers wait for ``count`` stages, holding ``held`` at once, and let go of them unless ``keep``."""

    ring: str
    fill: Fill
    held: int
    keep: bool = False


@dataclass(frozen=True)
class Gate:
    """The loader passes when the op's gate stands at ``value``; the consumers set it."""

    op: str
    value: int
    step: Step


@dataclass(frozen=True)
class Release:
    """The consumers let go of one stage that they held."""

    ring: str
    step: Step


Action: TypeAlias = Fill | Gate | Take | Release


@dataclass
class Block:
    """One block's split of the work, as its loaders and consumers compute it."""

    device: Device
    block: int
    kv_len: int
    turns: int = 1
    layer: int = 0  # of the model, where the layers that are played begin
    batch: Batch = ()  # in place of kv_len, where the kernel serves several sequences

    def tiles(self, op: str, *, loader: bool) -> list[tuple[int, int]]:
        """Runs (first tile, tiles), neighbours joined, cut behind the tiles that are held. The loader goes by Shape's words, the
        consumers by compiled-in sizes. The same for every step and number of cached rows, so that a device works it out once."""
        known = self.device.tiles
        if (self.block, op, loader) not in known:
            known[self.block, op, loader] = self._tiles(op, loader=loader)
        return known[self.block, op, loader]

    def _tiles(self, op: str, *, loader: bool) -> list[tuple[int, int]]:
        m, plan = self.device.matrix(op), self.device.plan
        linear = self.device.op(op)
        pieces, ways = (m.pieces, m.ways) if loader else (tiling(linear).pieces, plan.schedule.op(op).ways)
        chunk = m.chunk_pieces if loader else chunk_pieces(linear, plan.graph, plan.schedule)
        groups = m.pass_groups if loader else pass_groups(linear, plan.graph, plan.schedule)
        runs: list[tuple[int, int]] = []
        for part, begin, end in self.device.parts(op)[self.block]:
            step = groups if chunk * ways < pieces else max(1, end - begin)
            for first in range(begin, end, step):
                for at in range(part * pieces // ways, (part + 1) * pieces // ways, chunk):
                    runs.extend((group * pieces + at, chunk) for group in range(first, min(first + step, end)))
        return _cut(_joined(runs), self.device.held(op))

    def stages(self, op: str, tiles: int, *, loader: bool) -> int:
        """Stages that a run of tiles fills (or takes up)."""
        device = self.device
        together = device.matrix(op).together if loader else tiles_together(device.op(op), device.plan.schedule, device.tokens)
        return ceil_div(tiles, together)

    def kept(self, op: str) -> int:
        """Stages that a linear lets go of behind its products: those of its vectors and of the tiles that it holds."""
        if not self.device.direct(op):
            return 0
        held = sum(min(count, self.device.held(op)) for _, count in self.tiles(op, loader=False)[: self.held_runs(op)])
        return len(vectors(self.device.op(op))) + self.stages(op, held, loader=False)

    def held_runs(self, op: str) -> int:
        """How many of these runs are held: one, or none where the block has no tiles."""
        return min(1, len(self.tiles(op, loader=False))) if self.device.held(op) else 0

    def chunk_stages(self, op: str, ring: str, step: Step) -> Iterator[tuple[tuple[object, ...], int]]:
        """(unit and pass, stages) of an attention's cached rows in a step of the launch."""
        rows = self.kv_len + (self.device.tokens + step.turn - 1 if step.turn else 0)
        heads, per_stage = self.device.heads(op), self.device.plan.schedule.ring(ring).stage_bytes // self._chunk(op)
        if self.batch:
            yield from self._batch_stages(op, max(per_stage, 1), step.turn)
            return
        for unit in range(self.block, heads.units, self.device.blocks):
            _, begin, end, _ = attention_unit(heads.splits, unit, rows, heads.window(self.layer + (step.layer or 0)))
            for turn in range(heads.passes(self.device.warps)):
                if end > begin:
                    yield (unit, turn), ceil_div(end - begin, max(per_stage, 1))

    def _batch_stages(self, op: str, per_stage: int, turn: int) -> Iterator[tuple[tuple[object, ...], int]]:
        heads, token_rows = self.device.heads(op), self.device.heads(op).rows // self.device.tokens
        for unit in range(self.block, heads.units, self.device.blocks):
            for s in segments(heads.splits, unit % heads.splits, after(self.batch, turn), heads.window(0)):
                for one in range(ceil_div(s.tokens * token_rows, FEW_ROWS * self.device.warps)):
                    if s.end > s.begin:
                        yield (unit, s.sequence, one), ceil_div(s.end - s.begin, per_stage)

    def _chunk(self, op: str) -> int:
        return CHUNK_ROWS * int(self.device.op(op).cache_dim) * 4

    def loader(self, program: Program, layers: int) -> Iterator[Fill | Gate]:
        for step in self.device.steps(program, layers, turns=self.turns):
            op, layer = step.instr.op, step.when
            match step.instr.call:
                case "pass_gate":
                    yield _gate(step, layers)
                case "await_rows":
                    yield Gate(ROWS, step.turn, step)
                case "await_step":
                    yield Gate(JOINED, 1, step)
                case "load_vector":
                    yield Fill((str(step.instr.args["record"]), layer), 1, step)
                case "load_matrix":
                    runs = self.tiles(op, loader=True)
                    yield from (Fill((op, layer, run), self.stages(op, run[1], loader=True), step) for run in runs)
                case "load_cache":
                    yield from (Fill((op, layer, *of), n, step) for of, n in self.chunk_stages(op, program.role, step))

    def consumer(self, layers: int) -> Iterator[Action]:
        for step in self.device.steps(self.device.consumer, layers, turns=self.turns):
            op, layer = step.instr.op, step.when
            match step.instr.call:
                case "open_gate" | "acquire_rows" | "join_launch":
                    yield from _opened(step, layers)
                case "matrix":
                    yield from self._products(step)
                case "copy_vector" | "hold_vector" as call:
                    fill = Fill((f"{op}.{step.instr.args['arg']}", layer), 1, step)
                    yield Take(str(step.instr.args["ring"]), fill, 1, keep=call == "hold_vector")
                case "hold_tiles":
                    for begin, count in self.tiles(op, loader=False)[:1]:
                        held = min(count, int(str(step.instr.args["tiles"])))
                        fill = Fill((op, layer, (begin, held)), self.stages(op, held, loader=False), step)
                        yield Take(str(step.instr.args["ring"]), fill, 1, keep=self.device.direct(op))
                case "attention":
                    ring = str(step.instr.args["ring"])
                    yield from (Take(ring, Fill((op, layer, *of), n, step), 1) for of, n in self.chunk_stages(op, ring, step))
                case "custom":
                    yield from self._vectors(step)

    def _products(self, step: Step) -> Iterator[Action]:
        op = step.instr.op
        ring = str(step.instr.args["ring"])
        yield from self._vectors(step)
        yield from (Release(ring, step) for _ in range(self.kept(op)))
        at_once = 1 if self.device.direct(op) else TILES_AT_ONCE
        for run in self.tiles(op, loader=False)[self.held_runs(op) :]:
            yield Take(ring, Fill((op, step.when, run), self.stages(op, run[1], loader=False), step), at_once)

    def _vectors(self, step: Step) -> Iterator[Action]:
        for inner in step.instr.body:
            at = step.inner(inner)
            if inner.call == "wait_vector":
                name = f"{inner.op}.{inner.args['arg']}"
                yield Take(str(inner.args["ring"]), Fill((name, step.when), 1, at), int(str(inner.args["ahead"])) + 1, keep=True)
            elif inner.call == "release_vector":
                yield Release(str(inner.args["ring"]), at)


def _gate(step: Step, layers: int) -> Gate:
    """An op's gate, which counts through all steps."""
    return Gate(step.instr.op, step.turn * (layers + 1) + (step.layer or 0) + 1, step)


def _opened(step: Step, layers: int) -> Iterator[Gate]:
    """What the consumers let a loader pass."""
    match step.instr.call:
        case "open_gate":
            yield _gate(step, layers)
        case "acquire_rows":
            yield Gate(ROWS, step.turn, step)
        case "join_launch" if step.instr.args["tells"]:
            yield Gate(JOINED, 1, step)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, count in runs:
        if found and found[-1][0] + found[-1][1] == begin:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((begin, count))
    return found


def _cut(runs: list[tuple[int, int]], held: int) -> list[tuple[int, int]]:
    """The first run in two: what is held, and the rest."""
    if not runs or not 0 < held < runs[0][1]:
        return runs
    (begin, count), *others = runs
    return [(begin, held), (begin + held, count - held), *others]


@dataclass
class _Loader:
    """A loader as it runs: what it has still to do, and the stages that lie in its ring."""

    program: Program
    stages: int
    todo: list[Fill | Gate]
    at: int = 0
    done: int = 0  # stages of the current fill
    lying: list[tuple[Fill, int]] = field(default_factory=list)  # loaded, not yet taken
    used: int = 0  # stages not yet let go of
    held: int = 0

    @property
    def now(self) -> Fill | Gate | None:
        return self.todo[self.at] if self.at < len(self.todo) else None

    def advance(self, gates: dict[str, int]) -> bool:
        """Go on as far as possible; whether anything happened."""
        moved = False
        while (now := self.now) is not None:
            if isinstance(now, Gate):
                if gates.get(now.op, 0) < now.value:
                    break
            else:
                room = min(self.stages - self.used, now.count - self.done)
                if room > 0:
                    self.lying.append((now, room))
                    self.used += room
                    self.done += room
                    moved = True
                if self.done < now.count:
                    break
            self.at, self.done, moved = self.at + 1, 0, True
        return moved


class _Play:
    """All roles of one block."""

    def __init__(self, block: Block, layers: int, findings: Findings) -> None:
        device = block.device
        self.block, self.findings = block, findings
        rings = dict(device.plan.schedule.rings)
        self.loaders = {
            p.role: _Loader(p, rings[p.role].stages, list(block.loader(p, layers))) for p in device.plan.programs if p.kind == "loader"
        }
        self.todo = list(block.consumer(layers))
        self.at = 0
        self.taken = 0  # stages of the current take
        self.gates: dict[str, int] = {}
        self.failed = False

    def run(self) -> int:
        """Play to the end; the stages taken."""
        count = 0
        moved = True
        while moved and not self.failed:
            moved = sum(loader.advance(self.gates) for loader in self.loaders.values()) > 0
            while self.at < len(self.todo) and not self.failed and self._consume(self.todo[self.at]):
                moved = True
                count += 1
        if not self.failed:
            self._judge()
        return count

    def _consume(self, action: Action) -> bool:
        """Whether the consumers got further."""
        if isinstance(action, Gate):
            self.gates[action.op] = action.value
        elif isinstance(action, Release):
            loader = self.loaders[action.ring]
            loader.used, loader.held = loader.used - 1, loader.held - 1
        elif isinstance(action, Take):
            return self._take(action)
        self.at += 1
        return True

    def _take(self, take: Take) -> bool:
        loader = self.loaders[take.ring]
        if not loader.lying:
            return False
        fill, available = loader.lying[0]
        if (fill.what, fill.count) != (take.fill.what, take.fill.count):
            self._order(take, fill)
            return False
        need = min(take.held, take.fill.count - self.taken) if not take.keep else 1
        held = min(need, loader.stages)  # consume_tiles takes as many at once as the ring has
        if sum(n for f, n in loader.lying if f is fill) < held:
            return False
        loader.lying.pop(0)
        self.taken += available
        if take.keep:
            loader.held += available
        else:
            loader.used -= available
        if self.taken == take.fill.count:
            self.at, self.taken = self.at + 1, 0
        return True

    def _order(self, take: Take, fill: Fill) -> None:
        self.failed = True
        rows = [
            (f"{take.ring} of block {self.block.block}", [f"fills {_what(fill)}: {shown(fill.step.instr, fill.step.layer)}"]),
            ("consumer", [f"takes {_what(take.fill)}: {shown(take.fill.step.instr, take.fill.step.layer)}"]),
        ]
        self.findings.add(
            ORDER, take.fill.step.instr.span, rows, op=take.fill.step.instr.op, ring=take.ring, taken=_what(take.fill), filled=_what(fill)
        )

    def _judge(self) -> None:
        action = self.todo[self.at] if self.at < len(self.todo) else None
        waiting = [(role, loader) for role, loader in self.loaders.items() if loader.now is not None]
        if action is None and not waiting:
            for role, loader in self.loaders.items():
                if loader.used:
                    rows = [
                        (role, [f"filled {_what(f)}: {shown(f.step.instr, f.step.layer)}" for f, _ in loader.lying[:3]]),
                        ("consumer", ["ended"]),
                    ]
                    self.findings.add(LEFT, loader.todo[-1].step.instr.span, rows, ring=role, left=loader.used)
            return
        rows = [(role, [self._waits(loader)]) for role, loader in waiting]
        consumer = "ended" if action is None else f"waits: {shown(_step(action).instr, _step(action).layer)}"
        rows.append((f"consumer of block {self.block.block}", [consumer]))
        blamed = _step(action) if action is not None else _step(waiting[0][1].now)
        self.findings.add(STUCK, blamed.instr.span, rows, what=f"{blamed.instr.call} of {blamed.instr.op!r}")

    def _waits(self, loader: _Loader) -> str:
        now = loader.now
        assert now is not None
        what = f"room in {loader.stages} stages" if isinstance(now, Fill) else f"the gate of {now.op!r} at {now.value}"
        return f"waits for {what}: {shown(now.step.instr, now.step.layer)}"


def _step(action: Action | None) -> Step:
    assert action is not None
    return action.fill.step if isinstance(action, Take) else action.step


def _what(fill: Fill) -> str:
    return f"{fill.what[0]} ({fill.count} stages)"


def kv_lengths(device: Device) -> list[int]:
    """None, one row, a whole chunk, one more, uneven splits, about a window, a full cache; of a cache that fills a ring many times over,
    one that fills it LAPS times: each further lap finds the ring as this one did."""
    most = device.plan.schedule.max_kv
    splits = max((device.heads(op.name).splits for op in device.ops[1]), default=0)
    ring_bytes = max(r.stages * r.stage_bytes for _, r in device.plan.schedule.rings)
    rows = max((ring_bytes // (op.cache_dim * 4) for op in device.ops[1]), default=0)
    full = min(most, LAPS * rows * splits)
    windows = {window for op in device.ops[1] for window in device.heads(op.name).windows} - {0}
    near = [window + more for window in windows for more in (-1, 0, 1, CHUNK_ROWS)]
    return sorted({k for k in (0, 1, CHUNK_ROWS, CHUNK_ROWS + 1, CHUNK_ROWS * (splits + 1) + 3, full, *near) if k <= most})


def first_layers(device: Device, played: int) -> list[int]:
    """Layers of the model at which a play of ``played`` layers may begin: one for each sequence of windows that follow each other."""
    windows = [device.heads(op.name) for op in device.ops[1]]
    starts = range(max(1, device.plan.graph.layers - played + 1))
    seen = {tuple(h.window(layer) for layer in range(at, at + played) for h in windows): at for at in reversed(starts)}
    return sorted(seen.values())


def check_rings(device: Device, findings: Findings) -> list[str]:
    """Arrivals, sizes, order and progress of every ring."""
    check_sizes(device, findings)
    lengths, kinds, count = kv_lengths(device), block_kinds(device), 0
    layers = min(LAYERS, max(1, device.plan.graph.layers))
    cases: list[tuple[int, Batch]] = [(kv_len, ()) for kv_len in lengths]
    cached = ", ".join(map(str, lengths))
    if device.sequences > 1:
        cases = [(0, batch) for batch in batches(device.sequences, device.tokens, lengths, device.plan.schedule.max_kv)]
        cached += f" in {len(cases)} batches of {device.sequences}"
    for block, (kv_len, batch), layer in product(kinds, cases, first_layers(device, layers)):
        count += _Play(Block(device, block, kv_len, device.turns(TURNS), layer, batch), layers, findings).run()
    rings = ", ".join(f"{ring.name} of {role}: {ring.stages} stages" for role, ring in device.plan.schedule.rings)
    filled = "one lane asks for a stage, whose barrier counts its bytes"
    if device.plan.tunables.copies == "lanes":
        filled = f"all {WARP_THREADS} lanes of a loader's warp copy to each stage and arrive at its barrier, which counts them"
    return [
        f"rings ({rings}): loaders and consumers take the same stages in the same order and reach their ends, {len(kinds)} kinds of block"
        f" x kv_len {cached}, {device.turns(TURNS)} steps ({count} actions)",
        f"rings: {device.warps} consumer warps let go of each stage, as its barrier counts; {filled}; stages, tapes and barriers fit"
        " their areas",
    ]
