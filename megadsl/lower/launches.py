"""The launches of a step whose schedule has launch scope "op": one a phase of the consumers, with what the loaders load for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megadsl.ir.plan import Instr, LayerLoop, Phase, Plan, Region, Verb
from megadsl.lower.shape import ident
from megadsl.source import Span
from megadsl.types import Level

ENTRY = "megakernel"
_BEGINS = ("open_gate", "copy_vector", "sync", "hold_vector", "hold_tiles")  # what touches nothing that another launch writes


def join(op: str, span: Span) -> Instr:
    """Waits for the launch before to have ended: what it has written may be read, what it has read may be written."""
    return Instr(Verb.BARRIER, "join_launch", op, span, reads=(Region("control", "step", Level.GPU),))


def joined(phase: Phase) -> Phase:
    """A phase of the consumers that is a launch of its own."""
    first = next(i for i, instr in enumerate(phase.body) if instr.call not in _BEGINS)
    return replace(phase, body=(*phase.body[:first], join(phase.op, phase.span), *phase.body[first:]))


@dataclass(frozen=True)
class Launch:
    """One kernel. ``loads`` has each loader's phase for it, by role; a ``looped`` one is launched once a layer."""

    name: str
    phase: Phase
    looped: bool
    loads: tuple[tuple[str, Phase], ...]

    @property
    def entry(self) -> str:
        return f"{ENTRY}_{self.name}"

    @property
    def before(self) -> tuple[Instr, ...]:
        """What the consumers do before the launch before has ended."""
        return self.phase.body[: self._join]

    @property
    def behind(self) -> tuple[Instr, ...]:
        return self.phase.body[self._join + 1 :]

    @property
    def _join(self) -> int:
        return next(i for i, instr in enumerate(self.phase.body) if instr.call == "join_launch")


def launches(plan: Plan) -> tuple[Launch, ...]:
    """The kernels of a step, in order; none where one launch runs the whole step."""
    return tuple(_launches(plan)) if plan.schedule.scope == "op" else ()


def _launches(plan: Plan) -> Iterator[Launch]:
    consumer = next(p for p in plan.programs if p.kind == "consumer")
    loaders = [(p.role, phase) for p in plan.programs if p.kind == "loader" for phase, _ in _phases(p.body)]
    seen: set[str] = set()
    for phase, looped in _phases(consumer.body):
        first = phase.op not in seen
        seen.add(phase.op)
        loads = tuple((role, its) for role, its in loaders if its.op == phase.op) if first else ()
        yield Launch(ident(phase.op) if first else f"{ident(phase.op)}_merge", phase, looped, loads)


def _phases(body: tuple[Phase | LayerLoop, ...]) -> Iterator[tuple[Phase, bool]]:
    for item in body:
        looped = isinstance(item, LayerLoop)
        for phase in item.body if isinstance(item, LayerLoop) else (item,):
            yield phase, looped


def sequence(plan: Plan) -> list[tuple[int, int]]:
    """(kernel, layer) of every launch of a step; the megakernel is kernel 0 of layer 0."""
    found, loop = [], []
    for index, launch in enumerate(launches(plan)):
        if launch.looped:
            loop.append(index)
            continue
        found += [(each, layer) for layer in range(plan.graph.layers) for each in loop]
        loop = []
        found.append((index, 0))
    found += [(each, layer) for layer in range(plan.graph.layers) for each in loop]
    return found or [(0, 0)]


def entries(plan: Plan) -> list[str]:
    """The kernels' names in the cubin, by their numbers."""
    return [launch.entry for launch in launches(plan)] or [ENTRY]
