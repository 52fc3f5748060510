"""Mutants of a kernel that nothing can notice, because they are no mistake; and why.

Each argument rests on facts about this kernel, its plan and its headers, and counts only where they are found to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megadsl.check.checker import check_plan
from megadsl.check.edits import edited
from megadsl.emulate.abi import Change, Point
from megadsl.emulate.boundary import copied_elsewhere_at_once, copies_wait_for_stages
from megadsl.emulate.frames import Frame
from megadsl.emulate.mutants import Mutant, Place
from megadsl.ir.plan import Plan
from megadsl.lower.programs import instructions


@dataclass(frozen=True)
class Facts:
    """What arguments may rest on: the plan of the kernel, every point that its launches passed, and the folder of its headers."""

    plan: Plan
    places: tuple[Place, ...]
    headers: Path

    @cached_property
    def proved(self) -> bool:
        """Whether the checker finds nothing in the plan."""
        return not check_plan(self.plan).findings

    @cached_property
    def stages_order_rows(self) -> bool:
        return copies_wait_for_stages(self.plan, of_the_head=False)

    @cached_property
    def stages_order_old_rows(self) -> bool:
        return copies_wait_for_stages(self.plan, of_the_head=True)

    @cached_property
    def rows_rest_a_step(self) -> bool:
        return not copied_elsewhere_at_once(self.plan)

    def passes(self, function: str) -> bool:
        """Whether any launch synchronised within a function of the headers, by its bare name."""
        return any(frame.function.rpartition("::")[2] == function for place in self.places for frame in place.frames)

    def proved_without(self, call: str, op: str, barrier: str) -> bool:
        """Whether the checker finds nothing when an instruction of the plan does not meet at one of its barriers."""
        without = edited(
            self.plan,
            lambda i: replace(i, syncs=tuple(s for s in i.syncs if s != barrier)) if (i.call, i.op) == (call, op) else i,
        )
        return without != self.plan and not check_plan(without).findings


@dataclass(frozen=True)
class Equivalent:
    """The change at points of this kind that ``function`` of the headers leads to, where ``holds`` says so."""

    kind: Point
    change: Change
    function: str
    argument: str
    holds: Callable[[Place, Facts], bool]


def _stays_bounded(place: Place, facts: Facts) -> bool:
    """The same load waits for its stage's empty phase as well, and the consumers take every stage."""
    beyond = _beyond(place.frames, "Loader::load_parts")
    others = (p for p in facts.places if p.kind is Point.PHASE and not p.within("Loader::retire"))
    return facts.proved and any(beyond and _beyond(p.frames, "Loader::load_parts") == beyond for p in others)


def _beyond(frames: Sequence[Frame], function: str) -> tuple[Frame, ...]:
    """The calls that lead to a function, from its caller on."""
    at = next((i for i, frame in enumerate(frames) if frame.function.removeprefix("mk::") == function), len(frames))
    return tuple(frames[at + 1 :])


def _nobody_gave_up(_: Place, facts: Facts) -> bool:
    return not facts.passes("tell_all")


def _taken(place: Place, facts: Facts) -> bool:
    return facts.proved and _nobody_gave_up(place, facts) and not facts.passes("leave_steps")


def _taken_parts(place: Place, facts: Facts) -> bool:
    return facts.proved and _nobody_gave_up(place, facts)


def _met_since(place: Place, facts: Facts) -> bool:
    """Whether the stages let go of are of tiles that were taken before the block met: a finisher, for partial sums, behind a merge, or
    its publication."""
    if place.within("multiply_from_ring") or not place.within("Reader::release"):
        return False
    if facts.plan.tunables.finishes:  # before the input is polled
        return True
    taken = False
    for instr in instructions(facts.plan.program("consumer").body):
        if instr.call == "hold_tiles" and instr.op == place.op:
            taken = True
            if instr.args["whole"]:  # let go of behind the barrier of the partial sums
                return True
        elif instr.call == "matrix" and instr.op == place.op:
            return False
        elif taken and instr.call in ("merge", "publish") and instr.syncs:
            return True
    return False


def _proved_without_done(place: Place, facts: Facts) -> bool:
    return facts.proved_without("publish", place.op, "done")


def _proved_without_idle(place: Place, facts: Facts) -> bool:
    """The barrier is the one of a block without a unit: the last of run_attention or run_heads."""
    frame = next(f for f in place.frames if f.function.removeprefix("mk::") in ("run_attention", "run_heads"))
    text = (facts.headers / "megadsl" / frame.file).read_text().splitlines()
    last = max(i for i, found in enumerate(text, 1) if "block.sync()" in found)
    return frame.line == last and facts.proved_without("attention", place.op, "idle")


def _stages_order_rows(place: Place, facts: Facts) -> bool:
    return facts.proved and facts.stages_order_rows


def _stages_order_old_rows(place: Place, facts: Facts) -> bool:
    return facts.proved and facts.stages_order_old_rows and facts.rows_rest_a_step


def _released_again(place: Place, facts: Facts) -> bool:
    """Of the two fences there, the one that is not the proxies'."""
    return "fence_acq_rel" in place.text and facts.proved and facts.rows_rest_a_step and facts.passes("acquire_rows")


def _own_rows(place: Place, facts: Facts) -> bool:
    """Whether the rows that a block's finisher gathers for a residual are those that it, or all of the block behind a barrier, has
    published itself: a value with the same shares as the op's own."""
    exchanges = {e.name: e for e in facts.plan.exchanges}
    found = [i for i in instructions(facts.plan.program("consumer").body) if i.call == "gather_kept" and i.op == place.op]
    shares = [[(e.groups, e.share_offset) for e in (exchanges[str(i.args[which])] for which in ("value", "own"))] for i in found]
    same = all(value == own and i.args["begin"] == 0 for i, (value, own) in zip(found, shares, strict=True))
    return bool(found) and same and facts.plan.tunables.finishes and facts.proved


def _flags_order(_: Place, facts: Facts) -> bool:
    """Whether flags stand for all that blocks hand to each other but the winners: whoever loads a vector has acquired the flag that its
    writer released behind it, and whoever stores to its place again, those of all who have read it, since."""
    wires = {e.wire for e in facts.plan.exchanges if not e.name.endswith(".best")}
    return facts.proved and wires == {"Flag"}


def _flags_order_rows(place: Place, facts: Facts) -> bool:
    """Of the fences there, those that are not the proxies'. Those are needed: one has to be on the way from a row to its copy, and the
    copying block's own, behind the last flags that it acquired in the step before, is."""
    fenced = any("fence_proxy_async" in p.text and p.within("release_rows") for p in facts.places)
    return _flags_order(place, facts) and fenced and "fence_proxy" not in place.text


_BETWEEN_STEPS = (
    (Point.ACQUIRE, Change.RELAX, "Tape::pass_gate"),
    (Point.RELEASE, Change.RELAX, "acquire_rows"),
    (Point.WARP_BARRIER, Change.DROP, "acquire_rows"),
)

OWN_ROWS = "the rows of the residual are those that this block has published itself: it waits for nobody, and only it reads them here"
BEHIND_FLAGS = (
    "all that blocks hand to each other stands behind flags in this plan, which the checker proves: releases and acquires at the scope of"
    " the GPU order every access of a vector, which needs no scope of its own"
)
ROWS_BEHIND_FLAGS = (
    "all that blocks hand to each other stands behind flags in this plan, which the checker proves: they order each cached row before the"
    " copying block's own proxy fence, at the end of the same step, and that comes before its copies"
)

EQUIVALENT = (
    Equivalent(
        Point.PHASE,
        Change.DROP,
        "Loader::retire",
        "the window orders nothing: it bounds how much is in flight. The same load waits for its stage's empty phase too, and the"
        " checker, which knows of no window, proves that consumers take every stage behind its full one",
        _stays_bounded,
    ),
    Equivalent(
        Point.PHASE,
        Change.DROP,
        "Loader::drain",
        "only a launch that was given up, or that a stop id has ended early, needs it, and none was: in every other the consumers wait for"
        " every copy, as the checker proves, and shared memory outlives them",
        _taken,
    ),
    Equivalent(
        Point.CLUSTER,
        Change.DROP,
        "leave_cluster",
        "only a launch that gives up sends to a block that no longer waits for it, and none did: in every other a block leaves behind the"
        " last part that it is sent",
        _taken_parts,
    ),
    Equivalent(
        Point.LOAD,
        Change.NARROW,
        "may_run",
        "within a launch only one that gives up writes the word, and none did; earlier launches are ordered before by their stream",
        _nobody_gave_up,
    ),
    Equivalent(
        Point.LOAD,
        Change.NARROW,
        "finish_step",
        "only a launch that gives up writes the word, its results do not count, and none did",
        _nobody_gave_up,
    ),
    Equivalent(
        Point.WARP_BARRIER,
        Change.DROP,
        "multiply_direct",
        "the block has met since the warp took these tiles: its finisher, for partial sums, behind what is merged in between or its"
        " publication, each time",
        _met_since,
    ),
    Equivalent(
        Point.BLOCK_BARRIER,
        Change.DROP,
        "Publication::publish",
        "the checker proves this plan without the barrier behind the publication: the next op meets before it writes what was read",
        _proved_without_done,
    ),
    Equivalent(
        Point.BLOCK_BARRIER,
        Change.DROP,
        "run_attention",
        "the checker proves this plan without the barrier of blocks that have no unit: publishing the queries ends with one",
        _proved_without_idle,
    ),
    Equivalent(
        Point.BLOCK_BARRIER,
        Change.DROP,
        "run_heads",
        "the checker proves this plan without the barrier of blocks that have no unit: publishing the queries ends with one",
        _proved_without_idle,
    ),
    Equivalent(Point.LOAD, Change.NARROW, "gather_kept", OWN_ROWS, _own_rows),
    Equivalent(Point.POLL, Change.DROP, "gather_kept", OWN_ROWS, _own_rows),
    *(
        Equivalent(Point.STORE, Change.NARROW, of, BEHIND_FLAGS, _flags_order)
        for of in ("Outgoing::send", "publish_unit", "publish_halves")
    ),
    *(Equivalent(Point.LOAD, Change.NARROW, of, BEHIND_FLAGS, _flags_order) for of in ("gather_units", "add_parts_of")),
    *(Equivalent(Point.FENCE, Change.DROP, of, ROWS_BEHIND_FLAGS, _flags_order_rows) for of in ("release_rows", "acquire_rows")),
    *(
        Equivalent(
            *of,
            "the ring has no more stages than a step streams before its first cached row: so each copy of cached rows fills one that all"
            " warps of the block let go of behind acquire_rows of the same step, and is ordered by that",
            _stages_order_rows,
        )
        for of in _BETWEEN_STEPS
    ),
    *(
        Equivalent(
            *of,
            "no block copies what another has appended in the step just before (worked out for every length of the cache), and the ring has"
            " no more stages than are streamed from the head on before the next cached row: so each copy fills a stage that all warps let"
            " go of behind release_rows and acquire_rows of the step before, and is ordered by that",
            _stages_order_old_rows,
        )
        for of in _BETWEEN_STEPS
    ),
    Equivalent(
        Point.FENCE,
        Change.DROP,
        "release_rows",
        "no block copies what another has appended in the step just before (worked out for every length of the cache): the fence of"
        " acquire_rows, a step later, releases these rows too, before the winner that the copying block takes",
        _released_again,
    ),
)


def argument_for(mutant: Mutant, facts: Facts) -> str:
    """Why ``mutant`` is no mistake, "" when nobody has said so or what was said does not hold."""
    place = mutant.place
    found = (e for e in EQUIVALENT if e.kind is place.kind and e.change is mutant.change and place.within(e.function))
    return next((e.argument for e in found if e.holds(place, facts)), "")
