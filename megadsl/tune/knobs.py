"""Every knob of a schedule that the tuner turns, in one table: a new knob is one entry of KNOBS.

Values are numbers, words, or AUTO, which leaves the choice to the compiler. What cannot be is not known here: the compiler refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import TypeAlias

from megadsl.dsl.overrides import Override, SetCount, SetPrefetch, SetRing, SetRole, SetScale, SetSplit, SetSync
from megadsl.ir.graph import Graph, Linear
from megadsl.ir.schedule import Flag, Schedule, Sentinel, Sync, Tagged
from megadsl.lower.columns import why_whole
from megadsl.lower.factor import factored
from megadsl.lower.operands import kept_values
from megadsl.lower.schedule import CONSUMER
from megadsl.lower.tiling import tiling
from megadsl.source import UNKNOWN
from megadsl.tune import effects
from megadsl.tune.effects import Scene, attentions, linears
from megadsl.types import KIB, ceil_div

Value: TypeAlias = int | str
AUTO = "auto"
WHOLE = ""  # the subject of a knob of the whole kernel
PARTS = ".parts"

WINDOWS = tuple(n * KIB for n in (16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192))
STAGE_SIZES = tuple(n * KIB for n in (8, 12, 16, 20, 24, 28, 32, 48))
BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
WARPS = (4, 6, 7, 8, 10, 12, 16)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
HELD = (0, 1, 2, 3, 4, 6, 8, 12)
MOST_VALUES = 4  # of what has many divisors
L2_KIB = (0, 32, 64, 128, 256)
SYNCS: dict[str, Callable[..., Sync]] = {"tagged": Tagged, "sentinel": Sentinel, "flag": Flag}
HINTS = ("evict_first", "evict_normal", "evict_last")


@dataclass(frozen=True)
class Knob:
    """``subjects``: the rings, ops or edges that it is about, or WHOLE. ``now``: what a decided schedule has. ``values``: what may be
    better than that, likeliest first. ``records``: how it is said to the compiler. ``effect``: what it may gain, in microseconds.
    ``rounds``: other bits are to be expected. ``along``: knobs of the same subject that go back to AUTO with it."""

    name: str
    subjects: Callable[[Scene], Sequence[str]]
    now: Callable[[Schedule, str], Value]
    values: Callable[[Scene, str], Iterable[Value]]
    records: Callable[[Graph, str, Value], tuple[Override, ...]]
    effect: Callable[[Scene, str, Value], float]
    rounds: bool = False
    along: tuple[str, ...] = ()


def near(grid: Sequence[int], now: int, reach: int = 2) -> list[int]:
    """The values of a grid on both sides of ``now``, nearest first."""
    below, above = [v for v in grid if v < now], [v for v in grid if v > now]
    sides = zip(reversed(below[-reach:]), above[:reach], strict=False)
    paired = [v for pair in sides for v in pair]
    return paired + [v for v in (*reversed(below[-reach:]), *above[:reach]) if v not in paired]


def _whole(scene: Scene) -> Sequence[str]:
    return (WHOLE,)


def _rings(scene: Scene) -> Sequence[str]:
    return [ring.name for _, ring in scene.schedule.rings]


def _linears(scene: Scene) -> Sequence[str]:
    return [op.name for op in linears(scene.graph)]


def _attentions(scene: Scene) -> Sequence[str]:
    return [op.name for op in attentions(scene.graph)]


def _loaded(scene: Scene) -> Sequence[str]:
    return [op.name for op in scene.graph.ops if op.name in {*_linears(scene), *_attentions(scene)}]


def _ring_knob(field: str, grid: Sequence[int], effect: Callable[[Scene, int, int], float], along: tuple[str, ...] = ()) -> Knob:
    def now(schedule: Schedule, name: str) -> int:
        return int(getattr(next(ring for _, ring in schedule.rings if ring.name == name), field))

    return Knob(
        field,
        _rings,
        now,
        lambda scene, name: near(grid, now(scene.schedule, name)),
        lambda graph, name, value: (SetRing(name, ((field, _number(value)),), UNKNOWN),),
        lambda scene, name, value: effect(scene, now(scene.schedule, name), _number(value)),
        along=along,
    )


def _stages() -> Knob:
    def ring(schedule: Schedule, name: str) -> tuple[int, int]:
        return next((ring.stages, ring.stage_bytes) for _, ring in schedule.rings if ring.name == name)

    def values(scene: Scene, name: str) -> list[Value]:
        now = ring(scene.schedule, name)[0]
        return [AUTO, *(v for v in (now - 1, now + 1, now - 2) if v > 1)]

    def effect(scene: Scene, name: str, value: Value) -> float:
        now, size = ring(scene.schedule, name)
        fits = scene.machine.smem_per_block if value == AUTO else _number(value) * size
        return effects.depth(scene, now * size, fits)

    return Knob(
        "stages",
        _rings,
        lambda schedule, name: ring(schedule, name)[0],
        values,
        lambda graph, name, value: (SetRing(name, (("stages", 0 if value == AUTO else _number(value)),), UNKNOWN),),
        effect,
    )


def _of_split(
    field: str,
    subjects: Callable[[Scene], Sequence[str]],
    values: Callable[[Scene, str], Iterable[Value]],
    effect: Callable[[Scene, str, Value], float],
    *,
    rounds: bool = False,
    auto: int | None = None,
) -> Knob:
    """A field of the ops' OpSchedule; ``auto`` is how it says that the compiler chooses."""

    def now(schedule: Schedule, op: str) -> Value:
        found: Value | None = getattr(schedule.op(op), field)
        return AUTO if found is None or found == auto else found

    return Knob(
        field,
        subjects,
        now,
        values,
        lambda graph, op, value: (SetSplit(op, ((field, auto if value == AUTO else value),), UNKNOWN),),
        effect,
        rounds,
    )


def _of_prefetch(
    field: str,
    subjects: Callable[[Scene], Sequence[str]],
    values: Callable[[Scene, str], Iterable[Value]],
    effect: Callable[[Scene, str, Value], float],
) -> Knob:
    return Knob(
        field,
        subjects,
        lambda schedule, op: getattr(schedule.op(op).prefetch, field),
        values,
        lambda graph, op, value: (SetPrefetch(op, ((field, None if value == AUTO else value),), UNKNOWN),),
        effect,
    )


def _edges(scene: Scene) -> list[str]:
    """Ops whose value is handed on, and what the blocks of an op hand to each other, which is called OP.parts."""
    return [edge.value if edge.value.endswith(PARTS) else edge.producer for edge in scene.schedule.edges]


def _sync_now(schedule: Schedule, subject: str) -> str:
    op = subject.removesuffix(PARTS)
    edge = next(e for e in schedule.edges if e.producer == op and e.value.endswith(PARTS) == subject.endswith(PARTS))
    return type(edge.sync).__name__.lower()


def _sync(graph: Graph, subject: str, value: Value) -> tuple[Override, ...]:
    """``sentinel``, or with another number of slots than its own, ``sentinel:8``."""
    kind, _, slots = str(value).partition(":")
    sync = SYNCS[kind](slots=int(slots)) if slots else SYNCS[kind]()
    op = subject.removesuffix(PARTS)
    return (SetSync(op, op if subject != op else None, sync, UNKNOWN),)


def _held_values(scene: Scene, op: str) -> list[Value]:
    if op in _attentions(scene):
        return [0, 1]
    return [AUTO, *near(HELD, scene.schedule.op(op).prefetch.registers or 0)]


def _held_effect(scene: Scene, op: str, value: Value) -> float:
    now = scene.schedule.op(op).prefetch.registers or 0
    return effects.held(scene, op, now, (now or 4) if value == AUTO else _number(value))


def _blocks(scene: Scene, subject: str) -> list[Value]:
    """Counts at which some linear's largest share becomes smaller, and all SMs; not far from what there are."""
    now, most = scene.schedule.blocks, scene.machine.sms
    counts = {ceil_div(t.shares, ceil_div(t.shares, at)) for t in map(tiling, linears(scene.graph)) for at in (now, most, now * 3 // 4)}
    allowed = [n for n in counts | {most} if ceil_div(now, 2) <= n <= min(most, 2 * now) and n != now]
    return [*sorted(allowed, key=lambda n: abs(n - now))]


def _ways(scene: Scene, op: str) -> list[Value]:
    found = scene.graph.op(op)
    assert isinstance(found, Linear)
    return [n for n in range(1, tiling(found).pieces + 1) if tiling(found).pieces % n == 0 and n <= 8]


def _chunks(scene: Scene, op: str) -> list[Value]:
    found = scene.graph.op(op)
    assert isinstance(found, Linear)
    pieces = tiling(found).pieces // scene.schedule.op(op).ways
    divisors = [n for n in range(pieces, 0, -1) if pieces % n == 0]
    return [AUTO, *divisors[:MOST_VALUES]]


def _uneven(scene: Scene) -> list[str]:
    """Linears of which some blocks have a larger share than others."""
    return [op.name for op in linears(scene.graph) if tiling(op).shares % scene.schedule.blocks]


def _quarters(scene: Scene, op: str) -> list[Value]:
    return sorted({scene.schedule.blocks * quarter // 4 for quarter in (1, 2, 3)} - {0})


def _number(value: Value) -> int:
    assert isinstance(value, int), value
    return value


def _ahead(graph: Graph, op: str, value: Value) -> tuple[Override, ...]:
    """KiB of each block's share into L2 while the ops before it wait: from the attention on, or else from the op in front."""
    names = [o.name for o in graph.ops]
    before = [o.name for o in attentions(graph) if names.index(o.name) < names.index(op)]
    ahead_of = before[-1] if before else names[max(0, names.index(op) - 1)]
    return (SetPrefetch(op, (("l2_bytes", _number(value) * KIB), ("ahead_of", ahead_of)), UNKNOWN),)


def _counted(name: str, grid: Sequence[int], us: float) -> Knob:
    return Knob(
        name,
        _whole,
        lambda schedule, _: int(getattr(schedule, name)),
        lambda scene, _: near(grid, getattr(scene.schedule, name)),
        lambda graph, _, value: (SetCount(name, _number(value), UNKNOWN),),
        lambda scene, _, value: us * abs(log2(_number(value) / getattr(scene.schedule, name))) * scene.hops,
    )


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        _stages(),
        _ring_knob(
            "stage_bytes", STAGE_SIZES, lambda scene, before, after: abs(log2(after / before)) * 0.02 * scene.floor_us, along=("stages",)
        ),
        _ring_knob("window", WINDOWS, lambda scene, before, after: 0.5 * effects.in_flight(scene, before, after)),
        _ring_knob("meeting_window", WINDOWS, effects.in_flight),
        _counted("batch", BATCHES, 0.2),
        Knob(
            "blocks",
            _whole,
            lambda schedule, _: schedule.blocks,
            _blocks,
            lambda graph, _, value: (SetCount("blocks", _number(value), UNKNOWN),),
            lambda scene, _, value: effects.shares(scene, _number(value)),
        ),
        Knob(
            "warps",
            _whole,
            lambda schedule, _: schedule.consumer.warps,
            lambda scene, _: near(WARPS, scene.schedule.consumer.warps),
            lambda graph, _, value: (SetRole(CONSUMER, _number(value), None, UNKNOWN),),
            lambda scene, _, value: 0.01 * scene.floor_us,
            rounds=True,
        ),
        Knob(
            "sync",
            _edges,
            _sync_now,
            lambda scene, subject: SYNCS,
            _sync,
            lambda scene, subject, value: effects.hand_off(
                scene, subject.removesuffix(PARTS), _sync_now(scene.schedule, subject), str(value)
            ),
        ),
        _of_prefetch(
            "registers",
            _loaded,
            _held_values,
            _held_effect,
        ),
        _of_split(
            "splits",
            _attentions,
            lambda scene, op: near(SPLITS, scene.schedule.op(op).splits),
            lambda scene, op, value: effects.per_run(abs(log2(_number(value) / scene.schedule.op(op).splits)), scene, op),
            rounds=True,
        ),
        _of_split(
            "residual",
            lambda scene: [op.name for op in linears(scene.graph) if kept_values(op)],
            lambda scene, op: ("block", "exchange"),
            lambda scene, op, value: effects.per_run(0.2, scene, op),
        ),
        Knob(
            "scale",
            lambda scene: [op.name for op in linears(scene.graph) if factored(op)],
            lambda schedule, op: schedule.op(op).scale,
            lambda scene, op: ("before", "after"),
            lambda graph, op, value: (SetScale(op, str(value), UNKNOWN),),
            lambda scene, op, value: effects.per_run(0.3, scene, op),
            rounds=True,
        ),
        _of_split(
            "gather",
            _loaded,
            lambda scene, op: ("registers", "shared"),
            lambda scene, op, value: effects.per_run(0.3, scene, op),
            rounds=True,
        ),
        _of_split(
            "ways",
            lambda scene: [op.name for op in linears(scene.graph) if not why_whole(op) and tiling(op).pieces > 1],
            _ways,
            lambda scene, op, value: effects.per_run(0.5, scene, op),
            rounds=True,
        ),
        _of_split(
            "chunk",
            lambda scene: [op.name for op in linears(scene.graph) if tiling(op).pieces > 1],
            _chunks,
            lambda scene, op, value: effects.per_run(0.1, scene, op),
            rounds=True,
            auto=0,
        ),
        _of_prefetch("hint", _loaded, lambda scene, op: HINTS, lambda scene, op, value: 0.02 * scene.weight_us(op) + effects.TRIFLE_US),
        Knob(
            "smem",
            _linears,
            lambda schedule, op: "ring" if schedule.op(op).prefetch.smem else "late",
            lambda scene, op: ("ring", "late"),
            lambda graph, op, value: (SetPrefetch(op, (("smem", value == "ring"),), UNKNOWN),),
            lambda scene, op, value: effects.TRIFLE_US,
        ),
        _of_split("share_offset", _uneven, _quarters, lambda scene, op, value: effects.per_run(0.1, scene, op), auto=0),
        Knob(
            "l2",
            _linears,
            lambda schedule, op: schedule.op(op).prefetch.l2_bytes // KIB,
            lambda scene, op: L2_KIB,
            _ahead,
            lambda scene, op, value: effects.per_run(0.1, scene, op),
        ),
    )
}
