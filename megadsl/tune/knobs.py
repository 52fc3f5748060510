"""How each knob of a schedule (megadsl.dsl.knobs) is turned: of what, to which values, and what that may gain.

A knob that is tuned is one entry of TURNS; why another is not stands in FIXED. What cannot be is not known here: the compiler refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, TypeAlias

from megadsl.dsl.knobs import EDGE, KERNEL, OP, RING, ROLE, Knob, knobs_of
from megadsl.dsl.overrides import Decision
from megadsl.dsl.schedule import BLOCK_REGISTERS, FINISHES, HINTS, PUBLISHES, RESIDUALS, SCALES
from megadsl.ir.graph import Attention, Linear, RowMap, kept_values
from megadsl.ir.schedule import BEGIN, CODE_PARTS, END, L2_BY, LOAD, MERGES, REGISTERS, SHARED, EdgeSchedule, Flag, Sentinel, Sync, Tagged
from megadsl.lower.columns import why_whole
from megadsl.lower.factor import factored
from megadsl.lower.tiling import Tiling, tiling
from megadsl.source import UNKNOWN
from megadsl.tune import effects
from megadsl.tune.effects import Scene, attentions, linears
from megadsl.types import KIB, ceil_div

Subject: TypeAlias = tuple[str, ...]
Place: TypeAlias = tuple[Scene, Subject]

WINDOWS = tuple(n * KIB for n in (16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192))
STAGE_SIZES = tuple(n * KIB for n in (8, 12, 16, 20, 24, 28, 32, 48))
BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
WARPS = (4, 6, 7, 8, 10, 12, 16)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
HELD = (0, 1, 2, 3, 4, 6, 8, 12)
L2_SIZES = tuple(n * KIB for n in (0, 32, 64, 128, 256))
SOME_L2 = 64 * KIB
BACK_OFFS = (0, 50, 100, 200, 400)  # ns; a poll takes 500 to 800
POLLED = (0, 1, 2, 4, 8)  # vectors of a thread; 0: the compiler chooses
PAUSES = (0, 100, 200, 300, 400, 600, 800, 1000)
WIRES: tuple[Sync, ...] = (Tagged(), Sentinel(), Flag())
MOST_WAYS = 8
MOST_VALUES = 4  # of what has many divisors
USUAL_TILES = 4  # what the compiler chooses to hold, where it does
FITS = 0  # stages: as many as shared memory has room for

FIXED: Mapping[tuple[str, str], str] = {
    (KERNEL, "max_kv"): "the context is the user's to say",
    (KERNEL, "warm_code_blocks"): "all blocks share a few lines each: fewer read no faster",
    (KERNEL, "warm_code_every"): "a share of a launch's first microsecond, at each: to leave some out gains nothing",
    (KERNEL, "warps"): "the consumer role's warps are turned",
    (ROLE, "kind"): "roles are not added",
    (OP, "loader"): "roles are not added",
    (OP, "ahead_of"): "it goes with l2",
}


@dataclass(frozen=True)
class Turn:
    """``subjects``: which roles, rings, ops or edges the knob is turned of. ``now``: what a decided schedule has. ``values``: what may be
    better, likeliest first. ``gain``: what a value may save, in microseconds of a step. ``along``: what is decided with it."""

    knob: Knob
    subjects: Callable[[Scene], Sequence[Subject]]
    now: Callable[[Scene, Subject], object]
    values: Callable[[Scene, Subject], Iterable[object]]
    gain: Callable[[Scene, Subject, object], float]
    along: Callable[[Scene, Subject], tuple[Decision, ...]] = lambda scene, subject: ()

    def decisions(self, scene: Scene, subject: Subject, value: object) -> tuple[Decision, ...]:
        return (decision(self.knob, subject, value), *self.along(scene, subject))


def decision(knob: Knob, subject: Subject, value: object) -> Decision:
    return Decision(knob.record, subject, knob.field, value, UNKNOWN)


def near(grid: Sequence[int], now: int, reach: int = 2) -> list[int]:
    """The values of a grid on both sides of ``now``, nearest first."""
    below, above = [v for v in reversed(grid) if v < now][:reach], [v for v in grid if v > now][:reach]
    sides = [side[i] for i in range(reach) for side in (below, above) if i < len(side)]
    return sides


def _number(value: object) -> int:
    assert isinstance(value, int), value
    return value


def _whole(scene: Scene) -> Sequence[Subject]:
    return ((),)


def _rings(scene: Scene) -> Sequence[Subject]:
    return [(ring.name,) for _, ring in scene.schedule.rings]


def _linears(scene: Scene) -> Sequence[Subject]:
    return [(op.name,) for op in linears(scene.graph)]


def _attentions(scene: Scene) -> Sequence[Subject]:
    return [(op.name,) for op in attentions(scene.graph)]


def _loaded(scene: Scene) -> Sequence[Subject]:
    return [*_linears(scene), *_attentions(scene)]


def _ring_field(field: str) -> Callable[[Scene, Subject], int]:
    return lambda scene, of: int(getattr(next(ring for _, ring in scene.schedule.rings if ring.name == of[0]), field))


def _op_field(field: str) -> Callable[[Scene, Subject], object]:
    return lambda scene, of: getattr(scene.schedule.op(of[0]), field)


def _prefetch_field(field: str) -> Callable[[Scene, Subject], object]:
    return lambda scene, of: getattr(scene.schedule.op(of[0]).prefetch, field)


def _tiling(scene: Scene, of: Subject) -> Tiling:
    found = scene.graph.op(of[0])
    assert isinstance(found, Linear)
    return tiling(found)


def _each_run(us: float) -> Callable[[Scene, Subject, object], float]:
    return lambda scene, of, value: us * scene.runs(of[0])


def _ring_turn(name: str, grid: Sequence[int], gain: Callable[[Scene, int, int], float]) -> Turn:
    now = _ring_field(name)
    return Turn(
        knobs_of(RING)[name],
        _rings,
        now,
        lambda scene, of: near(grid, now(scene, of)),
        lambda scene, of, value: gain(scene, now(scene, of), _number(value)),
    )


def _stages() -> Turn:
    now, size = _ring_field("stages"), _ring_field("stage_bytes")

    def gain(scene: Scene, of: Subject, value: object) -> float:
        after = scene.machine.smem_per_block if value == FITS else _number(value) * size(scene, of)
        return effects.depth(scene, now(scene, of) * size(scene, of), after)

    def values(scene: Scene, of: Subject) -> list[int]:
        here = now(scene, of)
        return [FITS, *(n for n in (here - 1, here + 1, here - 2) if n > 1)]

    return Turn(knobs_of(RING)["stages"], _rings, now, values, gain)


def _stage_bytes() -> Turn:
    """The ring takes as many of the new size as fit: a number of them that was chosen for another size means nothing."""
    now = _ring_field("stage_bytes")
    return Turn(
        knobs_of(RING)["stage_bytes"],
        _rings,
        now,
        lambda scene, of: near(STAGE_SIZES, now(scene, of)),
        lambda scene, of, value: abs(log2(_number(value) / now(scene, of))) * 0.02 * scene.floor_us,
        lambda scene, of: (decision(knobs_of(RING)["stages"], of, FITS),),
    )


def _blocks(scene: Scene, of: Subject) -> list[int]:
    """Counts at which some linear's largest share becomes smaller, and all SMs; not far from what there are."""
    now, most = scene.schedule.blocks, scene.machine.sms
    shares = [tiling(op).shares for op in linears(scene.graph)]
    counts = {ceil_div(n, ceil_div(n, at)) for n in shares for at in (now, most, ceil_div(3 * now, 4))}
    allowed = [n for n in counts | {most} if ceil_div(now, 2) <= n <= min(most, 2 * now)]
    return sorted(allowed, key=lambda n: abs(n - now))


def _sync_turn(of: str, subjects: Callable[[Scene], Sequence[Subject]]) -> Turn:
    def now(scene: Scene, edge: Subject) -> Sync:
        """Of the value that an op gives, or with two names, of the parts that its blocks hand to each other."""
        out = scene.graph.op(edge[0]).out
        return next(e.sync for e in scene.schedule.edges if e.producer == edge[0] and (e.value == out) == (len(edge) == 1))

    return Turn(
        knobs_of(of)["sync"],
        subjects,
        now,
        lambda scene, edge: WIRES,
        lambda scene, edge, value: effects.hand_off(scene, edge[0], now(scene, edge), value),
    )


def _given(scene: Scene) -> list[Subject]:
    return [(e.producer,) for e in scene.schedule.edges if e.value == scene.graph.op(e.producer).out]


def _parts(scene: Scene) -> list[Subject]:
    return [(e.producer, e.producer) for e in scene.schedule.edges if e.value != scene.graph.op(e.producer).out]


def _rings_meeting(scene: Scene) -> int:
    ring = scene.schedule.rings[0][1]
    return ring.meeting_window or ring.window


def _edges(scene: Scene) -> list[Subject]:
    """All of them, each by its producer and a reader."""
    return [effects.ends(scene.graph, e.value, e.producer) for e in scene.schedule.edges]


def _edge_of(scene: Scene, names: Subject) -> EdgeSchedule:
    return next(e for e in scene.schedule.edges if effects.ends(scene.graph, e.value, e.producer) == names)


def _held() -> Turn:
    def now(scene: Scene, of: Subject) -> int:
        return scene.schedule.op(of[0]).prefetch.registers or 0

    def values(scene: Scene, of: Subject) -> list[int | None]:
        return [0, 1] if of in _attentions(scene) else [None, *near(HELD, now(scene, of))]

    def gain(scene: Scene, of: Subject, value: object) -> float:
        return effects.held(scene, of[0], now(scene, of), (now(scene, of) or USUAL_TILES) if value is None else _number(value))

    return Turn(knobs_of(OP)["registers"], _loaded, now, values, gain)


def _divisors(scene: Scene, of: Subject) -> list[int]:
    """Chunks of an op's columns in tiles; 0: as the compiler thinks best."""
    pieces = _tiling(scene, of).pieces // scene.schedule.op(of[0]).ways
    return [0, *[n for n in range(pieces, 0, -1) if pieces % n == 0][:MOST_VALUES]]


def _ways(scene: Scene, of: Subject) -> list[int]:
    pieces = _tiling(scene, of).pieces
    return [n for n in range(1, MOST_WAYS + 1) if pieces % n == 0]


def _uneven(scene: Scene) -> list[Subject]:
    """Linears of which some blocks have a larger share than others."""
    return [(op.name,) for op in linears(scene.graph) if tiling(op).shares % scene.schedule.blocks]


def _quarters(scene: Scene, of: Subject) -> list[int]:
    return sorted({0, *(scene.schedule.blocks * quarter // 4 for quarter in (1, 2, 3))})


def _ahead(scene: Scene, of: Subject) -> tuple[Decision, ...]:
    """From the attention on, or else from the op in front: where blocks wait, HBM has time for it. An attention's rows for the next layer,
    from the largest linear behind it on."""
    names, op = [op.name for op in scene.graph.ops], scene.graph.op(of[0])
    if isinstance(op, Attention):
        behind = [o for o in linears(scene.graph) if o.loop == op.loop and names.index(o.name) > names.index(op.name)]
        largest = max(behind, key=lambda o: o.rows * o.columns, default=op)
        return (decision(knobs_of(OP)["ahead_of"], of, largest.name),)
    before = [op.name for op in attentions(scene.graph) if names.index(op.name) < names.index(of[0])]
    ahead_of = before[-1] if before else names[max(0, names.index(of[0]) - 1)]
    return (decision(knobs_of(OP)["ahead_of"], of, ahead_of),)


def _asked_l2(scene: Scene, of: Subject) -> int:
    """How many bytes come into L2 by the other way: as many as now, or some."""
    return scene.schedule.op(of[0]).prefetch.l2_bytes or SOME_L2


def _read_by(scene: Scene, of: Subject) -> tuple[Decision, ...]:
    """A part of the code means something where some role reads it."""
    role = scene.schedule.warm_up or next(r.name for r in scene.schedule.roles if r.kind == "loader")
    return (decision(knobs_of(KERNEL)["warm_code"], (), role),)


def _octaves(us: float, now: Callable[[Scene, Subject], object]) -> Callable[[Scene, Subject, object], float]:
    return lambda scene, of, value: us * abs(log2(_number(value) / _number(now(scene, of))))


def _by_layer(scene: Scene) -> Sequence[Subject]:
    return ((),) if scene.schedule.scope == "layer" else ()


def _inside(scene: Scene, _: Subject) -> list[str]:
    """The ops of the layers, those that stream most first: rings fill with their weights while the launch before ends."""
    inside = [op for op in scene.graph.ops if op.loop is not None]
    return [op.name for op in sorted(inside, key=lambda op: -scene.weight_us(op.name))]


def _all_that_fits(scene: Scene, _: Subject) -> tuple[Decision, ...]:
    """Rings of launches that overlap have half the shared memory."""
    return tuple(decision(knobs_of(RING)["stages"], of, FITS) for of in _rings(scene))


_BATCH = lambda scene, of: scene.schedule.batch  # noqa: E731
_WARPS = lambda scene, of: scene.schedule.role(of[0]).warps  # noqa: E731
_SPLITS = _op_field("splits")


def _another(name: str, field: str, known: Callable[[Scene], Sequence[object]], *rest: Any) -> Turn:
    """One of a few words about the kernel, which the schedule keeps as ``field``: each but the present one."""

    def now(scene: Scene, of: tuple[str, ...]) -> object:
        return getattr(scene.schedule, field)

    return Turn(knobs_of(KERNEL)[name], _whole, now, lambda scene, of: [word for word in known(scene) if word != now(scene, of)], *rest)


TURNS: tuple[Turn, ...] = (
    _stages(),
    _stage_bytes(),
    _ring_turn("window", WINDOWS, lambda scene, before, after: 0.5 * effects.in_flight(scene, before, after)),
    _ring_turn("meeting_window", WINDOWS, effects.in_flight),
    Turn(  # one op a launch is for comparison; and what is said of a layer's launches has no meaning for a step's
        knobs_of(KERNEL)["launch"],
        _whole,
        lambda scene, of: scene.schedule.scope,
        lambda scene, of: ("layer",) if scene.schedule.scope == "step" and any(op.loop for op in scene.graph.ops) else (),
        lambda scene, of, value: effects.TRIFLE_US,
        _all_that_fits,
    ),
    Turn(
        knobs_of(KERNEL)["launch_start"],
        _by_layer,
        lambda scene, of: scene.schedule.start,
        _inside,
        lambda scene, of, value: effects.TRIFLE_US,
    ),
    Turn(
        knobs_of(KERNEL)["launch_trigger"],
        _by_layer,
        lambda scene, of: scene.schedule.trigger,
        lambda scene, of: (BEGIN, END, *_inside(scene, of)),
        lambda scene, of, value: effects.TRIFLE_US,
        _all_that_fits,
    ),
    Turn(
        knobs_of(KERNEL)["batch"],
        _whole,
        _BATCH,
        lambda scene, of: near(BATCHES, scene.schedule.batch),
        lambda scene, of, value: 0.2 * scene.hops * abs(log2(_number(value) / scene.schedule.batch)),
    ),
    _another(
        "block_registers",
        "block_registers",
        lambda scene: BLOCK_REGISTERS,
        lambda scene, of, value: effects.TRIFLE_US,
    ),
    _another(
        "finish",
        "finish",
        lambda scene: FINISHES,
        lambda scene, of, value: 0.2 * scene.hops,
    ),
    _another(
        "warm_code",
        "warm_up",
        lambda scene: (None, *(r.name for r in scene.schedule.roles)),
        lambda scene, of, value: effects.code(scene, read=value is not None),
    ),
    _another(
        "warm_code_part",
        "warm_part",
        lambda scene: CODE_PARTS,
        lambda scene, of, value: effects.TRIFLE_US,
        _read_by,
    ),
    Turn(
        knobs_of(KERNEL)["blocks"],
        _whole,
        lambda scene, of: scene.schedule.blocks,
        _blocks,
        lambda scene, of, value: effects.shares(scene, _number(value)),
    ),
    Turn(
        knobs_of(ROLE)["warps"],
        lambda scene: [(scene.schedule.consumer.name,)],
        _WARPS,
        lambda scene, of: near(WARPS, scene.schedule.consumer.warps),
        lambda scene, of, value: 0.01 * scene.floor_us,
    ),
    _sync_turn(OP, _given),
    _sync_turn(EDGE, _parts),
    _held(),
    Turn(
        knobs_of(OP)["split_kv"],
        _attentions,
        _SPLITS,
        lambda scene, of: near(SPLITS, _number(_SPLITS(scene, of))),
        lambda scene, of, value: scene.runs(of[0]) * _octaves(1.0, _SPLITS)(scene, of, value),
    ),
    Turn(
        knobs_of(OP)["residual"],
        lambda scene: [(op.name,) for op in scene.graph.ops if isinstance(op, Linear | RowMap) and kept_values(op)],
        _op_field("residual"),
        lambda scene, of: RESIDUALS,
        _each_run(0.2),
    ),
    Turn(
        knobs_of(OP)["scale"],
        lambda scene: [(op.name,) for op in linears(scene.graph) if factored(op)],
        _op_field("scale"),
        lambda scene, of: SCALES,
        _each_run(0.3),
    ),
    Turn(knobs_of(OP)["gather"], _loaded, _op_field("gather"), lambda scene, of: (REGISTERS, SHARED), _each_run(0.3)),
    Turn(
        knobs_of(OP)["publish"],
        lambda scene: [of for of in _loaded(scene) if scene.graph.op(of[0]).out is not None],
        _op_field("publish"),
        lambda scene, of: PUBLISHES,
        _each_run(0.1),
    ),
    Turn(
        knobs_of(OP)["merge"],
        lambda scene: [(op.name,) for op in attentions(scene.graph)],
        _op_field("merge"),
        lambda scene, of: MERGES,
        _each_run(0.3),
    ),
    Turn(
        knobs_of(OP)["columns"],
        lambda scene: [(op.name,) for op in linears(scene.graph) if not why_whole(op) and tiling(op).pieces > 1],
        _op_field("ways"),
        _ways,
        _each_run(0.5),
    ),
    Turn(
        knobs_of(OP)["chunk"],
        lambda scene: [(op.name,) for op in linears(scene.graph) if tiling(op).pieces > 1],
        _op_field("chunk"),
        _divisors,
        _each_run(0.1),
    ),
    Turn(
        knobs_of(OP)["hint"],
        _loaded,
        _prefetch_field("hint"),
        lambda scene, of: HINTS,
        lambda scene, of, value: 0.02 * scene.weight_us(of[0]) + effects.TRIFLE_US,
    ),
    Turn(
        knobs_of(OP)["smem"],
        _linears,
        _prefetch_field("smem"),
        lambda scene, of: (True, False),
        lambda scene, of, value: effects.TRIFLE_US if value else -effects.TRIFLE_US,
    ),
    Turn(
        knobs_of(OP)["pause"],
        _loaded,
        _op_field("pause"),
        lambda scene, of: near(PAUSES, scene.schedule.op(of[0]).pause),
        _each_run(0.2),
    ),
    Turn(
        knobs_of(OP)["meeting_window"],
        _loaded,
        lambda scene, of: scene.schedule.op(of[0]).meeting_window or _rings_meeting(scene),
        lambda scene, of: near(WINDOWS, scene.schedule.op(of[0]).meeting_window or _rings_meeting(scene)),
        lambda scene, of, value: effects.own_window(
            scene, of[0], scene.schedule.op(of[0]).meeting_window or _rings_meeting(scene), _number(value)
        ),
    ),
    Turn(
        knobs_of(OP)["dry_run"],
        _linears,
        _op_field("dry_run"),
        lambda scene, of: [on for on in (True, False) if on != scene.schedule.op(of[0]).dry_run],
        lambda scene, of, value: effects.dry(scene, of[0], on=bool(value)),
    ),
    Turn(
        knobs_of(EDGE)["back_off"],
        _edges,
        lambda scene, edge: _edge_of(scene, edge).back_off,
        lambda scene, edge: near(BACK_OFFS, _edge_of(scene, edge).back_off),
        _each_run(0.1),
    ),
    Turn(
        knobs_of(EDGE)["width"],
        lambda scene: [edge for edge in _edges(scene) if edge[0] != edge[1]],
        lambda scene, edge: _edge_of(scene, edge).width,
        lambda scene, edge: [n for n in POLLED if n != _edge_of(scene, edge).width],
        _each_run(0.1),
    ),
    Turn(knobs_of(OP)["share_offset"], _uneven, _op_field("share_offset"), _quarters, _each_run(0.1)),
    Turn(
        knobs_of(OP)["l2_by"],
        _loaded,
        _prefetch_field("l2_by"),
        lambda scene, of: [by for by in L2_BY if by != scene.schedule.op(of[0]).prefetch.l2_by],
        lambda scene, of, value: effects.into_l2(scene, of[0], by_load=value == LOAD, size=_asked_l2(scene, of)),
        lambda scene, of: (decision(knobs_of(OP)["l2"], of, _asked_l2(scene, of)), *_ahead(scene, of)),
    ),
    Turn(knobs_of(OP)["l2"], _loaded, _prefetch_field("l2_bytes"), lambda scene, of: L2_SIZES, _each_run(0.1), _ahead),
)
