"""The launches of a step whose schedule has launch scope "op" or "layer": the phases that each runs, and what loaders load for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megadsl.ir.graph import Attention, Graph
from megadsl.ir.plan import Instr, Item, LayerLoop, Phase, Plan, Region, Verb, ident
from megadsl.ir.schedule import BEGIN, Schedule
from megadsl.lower.steps import HANDED
from megadsl.source import Span
from megadsl.types import Level

ENTRY = "megakernel"
TRIGGER, JOIN, AWAIT = "launch_dependents", "join_launch", "await_step"
_BEGINS = (TRIGGER, "open_gate", "copy_vector", "sync", "hold_vector", "hold_tiles")  # what touches nothing that another launch writes


def join(op: str, span: Span, *, tells: bool) -> Instr:
    """Waits for the launch before to have ended: what it has written may be read, what it has read may be written. ``tells``: the
    loaders of the launch wait for what is read of the step."""
    writes = (HANDED,) if tells else ()
    return Instr(Verb.BARRIER, JOIN, op, span, reads=(Region("control", "step", Level.GPU),), writes=writes, args={"tells": tells})


def joined(phase: Phase, graph: Graph, schedule: Schedule) -> Phase:
    """A phase of the consumers with which a launch begins."""
    first = next(i for i, instr in enumerate(phase.body) if instr.call not in _BEGINS)
    it = join(phase.op, phase.span, tells=_loads_rows(phase, graph, schedule))
    return replace(phase, body=(*phase.body[:first], it, *phase.body[first:]))


def _loads_rows(phase: Phase, graph: Graph, schedule: Schedule) -> bool:
    """Whether cached rows are loaded in a launch that begins with ``phase``."""
    if schedule.scope == "op":
        return any(instr.call == "attention" for instr in phase.body)
    order = [op.name for op in graph.ops]
    late = [order.index(op.name) >= order.index(schedule.start) for op in graph.ops if isinstance(op, Attention)]
    return (any(late) or (graph.layers > 1 and bool(late))) if phase.op == schedule.start else not all(late)


def triggered(phase: Phase, schedule: Schedule) -> Phase:
    """A phase of the consumers, at whose beginning the launch behind may begin."""
    if schedule.scope != "layer" or schedule.trigger != phase.op:
        return phase
    return replace(phase, body=(Instr(Verb.SIGNAL, TRIGGER, phase.op, phase.span), *phase.body))


@dataclass(frozen=True)
class Part:
    """A phase of a launch. ``looped``: of layer ``ahead`` behind the one that the launch is for; else of no layer."""

    phase: Phase
    looped: bool
    ahead: int = 0


@dataclass(frozen=True)
class Fill:
    """What a loader loads together: ``part`` with those of its instructions."""

    part: Part
    body: tuple[Instr, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel. ``parts`` are the consumers' phases, in order; ``loads`` has each loader's for them, by role. It is launched for each
    of ``layers``, where there are none once, for layer 0. ``at_once``: the launch behind may begin when this one does."""

    name: str
    parts: tuple[Part, ...]
    loads: tuple[tuple[str, tuple[Part, ...]], ...]
    layers: range
    at_once: bool

    @property
    def entry(self) -> str:
        return f"{ENTRY}_{self.name}"

    @property
    def before(self) -> tuple[Instr, ...]:
        """What the consumers do before the launch before has ended."""
        return self.parts[0].phase.body[: self._join]

    @property
    def join(self) -> Instr:
        return self.parts[0].phase.body[self._join]

    @property
    def behind(self) -> tuple[Instr, ...]:
        """What they do of the first phase then."""
        return self.parts[0].phase.body[self._join + 1 :]

    @property
    def moves(self) -> bool:
        """Whether its phases are of several layers, or of one and of none."""
        return any(map(self.changes, range(len(self.parts))))

    def title(self, parts: tuple[Part, ...]) -> str:
        """What some of its parts are, in a line."""
        if len(parts) == 1:
            return parts[0].phase.title
        names = list(dict.fromkeys(f"{part.phase.op} of the next layer" if part.ahead else part.phase.op for part in parts))
        return f"{self.name}: {', '.join(names)}"

    def rotates(self, rotates: Callable[[Phase], bool]) -> bool:
        """Whether one of its phases does."""
        return any(rotates(part.phase) for part in self.parts)

    def changes(self, index: int) -> bool:
        """Whether part ``index`` is of another layer than the one before."""
        return index > 0 and _place(self.parts[index]) != _place(self.parts[index - 1])

    def fills(self, parts: tuple[Part, ...]) -> tuple[Fill, ...]:
        """What a loader writes to its tape at once and then plays: a phase, or that of it which waits for nothing, and the rest."""
        return tuple(Fill(part, body) for part in parts for body in _apart(part.phase.body))

    @property
    def _join(self) -> int:
        return next(i for i, instr in enumerate(self.parts[0].phase.body) if instr.call == JOIN)


def _place(part: Part) -> tuple[bool, int]:
    return part.looped, part.ahead


def _apart(body: tuple[Instr, ...]) -> Iterator[tuple[Instr, ...]]:
    at = next((i for i, instr in enumerate(body) if instr.call == AWAIT), 0)
    yield from (some for some in (body[:at], body[at:]) if some)


def launches(plan: Plan) -> tuple[Launch, ...]:
    """The kernels of a step, in order; none where one launch runs the whole step."""
    match plan.schedule.scope:
        case "op":
            return tuple(_of_ops(plan))
        case "layer":
            return tuple(_of_layers(plan))
    return ()


def _of_ops(plan: Plan) -> Iterator[Launch]:
    loaders = [(p.role, part) for p in plan.programs if p.kind == "loader" for part in _parts(p.body)]
    seen: set[str] = set()
    for part in _parts(_consumers(plan)):
        op = part.phase.op
        first = op not in seen
        seen.add(op)
        loads = tuple((role, (its,)) for role, its in loaders if its.phase.op == op) if first else ()
        layers = range(plan.graph.layers if part.looped else 0)
        yield Launch(ident(op) if first else f"{ident(op)}_merge", (part,), loads, layers, True)


def _of_layers(plan: Plan) -> Iterator[Launch]:
    """The layer up to where launches begin, as often as there is a next layer from there to there, and the rest."""
    layers, start = plan.graph.layers, plan.schedule.start
    order = [op.name for op in plan.graph.ops]
    inside = {op.name for op in plan.graph.ops if op.loop is not None}

    def late(op: str) -> bool:
        return order.index(op) >= order.index(start)

    def first(part: Part) -> tuple[Part, ...]:
        return () if late(part.phase.op) else (part,)

    def last(part: Part) -> tuple[Part, ...]:
        return (part,) if late(part.phase.op) else ()

    yield from _launch(plan, "first", first, range(0))
    if layers > 1:
        ahead: Callable[[Part], tuple[Part, ...]] = lambda part: (replace(part, ahead=0 if late(part.phase.op) else 1),)  # noqa: E731
        yield from _launch(plan, "layer", lambda part: ahead(part) if part.phase.op in inside else (), range(layers - 1))
    yield from _launch(plan, "last", last, range(layers - 1, layers))


def _launch(plan: Plan, name: str, of: Callable[[Part], tuple[Part, ...]], layers: range) -> Iterator[Launch]:
    def chosen(body: Sequence[Item]) -> tuple[Part, ...]:
        return tuple(sorted((its for part in _parts(body) for its in of(part)), key=lambda part: part.ahead))

    parts = chosen(_consumers(plan))
    if not parts:
        return
    loads = tuple((p.role, its) for p in plan.programs if p.kind == "loader" and (its := chosen(p.body)))
    triggers = any(instr.call == TRIGGER for part in parts for instr in part.phase.body)
    yield Launch(name, parts, loads, layers, plan.schedule.trigger == BEGIN or (_waits_for_op(plan.schedule) and not triggers))


def _waits_for_op(schedule: Schedule) -> bool:
    return schedule.trigger in [how.op for how in schedule.ops]


def _consumers(plan: Plan) -> tuple[Item, ...]:
    return next(p.body for p in plan.programs if p.kind == "consumer")


def _parts(body: Sequence[Item]) -> Iterator[Part]:
    for item in body:
        looped = isinstance(item, LayerLoop)
        for phase in item.body if isinstance(item, LayerLoop) else (item,):
            yield Part(phase, looped)


def items(parts: Sequence[Part]) -> tuple[Item, ...]:
    """The body of a program that is these parts, for the first layer."""
    return tuple(LayerLoop("1", (part.phase,), part.ahead) if part.looped else part.phase for part in parts)


def sequence(plan: Plan) -> list[tuple[int, int]]:
    """(kernel, layer) of every launch of a step; the megakernel is kernel 0 of layer 0."""
    found: list[tuple[int, int]] = []
    loop: list[int] = []
    ordered = launches(plan)
    for index, launch in enumerate(ordered):
        if launch.layers:
            loop.append(index)
        if loop and (not launch.layers or index + 1 == len(ordered)):
            found += [(each, layer) for layer in range(plan.graph.layers) for each in loop if layer in ordered[each].layers]
            loop = []
        if not launch.layers:
            found.append((index, 0))
    return found or [(0, 0)]


def entries(plan: Plan) -> list[str]:
    """The kernels' names in the cubin, by their numbers."""
    return [launch.entry for launch in launches(plan)] or [ENTRY]
