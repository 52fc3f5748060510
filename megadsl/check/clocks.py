"""Happens-before between blocks, by vector clocks over the real split functions.

All blocks run one program, so one pass over it in program order advances every block's clock; ``known[w, b]`` is the last
step of block b that *every thread* of block w knows to be over. Knowledge travels only as the kernel makes it travel: a block
takes on what it polled at its next barrier, and publishes what it knew at its last one. Nothing is assumed about time.

What is checked at each publication, with S slots, round r:
    Tagged    who polled round r - S has finished, as far as the writer knows (its slot is overwritten)
    Sentinel  who polled round r - S / 2 has finished (that slot is emptied); and a reader of round r knows that the slot had been
              emptied before it polled, else it could take the payload of round r - S for the new one
    Flag      as Tagged; one flag word per block serves all slots, so that it may be up to S - 1 rounds ahead of a reader, which
              exchange.h allows for
and at each poll that the round has been published earlier in program order: since the program is the same in all blocks, a
publication that comes later could wait for the poll, and the launch for ever.

Why a few layers are enough. A chain from a reader of round r - d to a writer of round r uses only steps between the two, that is
of d + 1 consecutive layers, and every layer runs the same instructions: whether such a chain exists does not depend on which
layers they are. So S + 2 layers show every adjacency, entry into the loop and exit from it included. Launches are ordered
by the stream they run on, so that nothing earlier than this launch can be in conflict with it. Steps of one launch are not: where a
launch can make several, as many are played as show every adjacency of the values that take one round a step; and a launch of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from megadsl.check import polls
from megadsl.check.arrays import Bools, Ints
from megadsl.check.model import Device, Step
from megadsl.check.report import Findings, shown
from megadsl.check.steps import Rows
from megadsl.diagnostics import declare
from megadsl.ir.plan import Exchange, Instr

NEVER = declare(
    "MK500",
    "{op!r} waits for round {round} of {value!r}, which {state}",
    "publish the value before the first op that reads it, in every role and in the round that the reader asks for",
)
REUSED = declare(
    "MK501",
    "{op!r} overwrites round {old} of {value!r} while a block may still be reading it",
    "give the edge more slots, or let every block take part in a gather that lies between the read and the write",
)
STALE = declare(
    "MK502",
    "{op!r} may take a stale vector of {value!r} for round {round}: the slot may not have been emptied yet",
    "give the edge more slots, so that a whole exchange lies between emptying and refilling, or use mk.Tagged",
)
CONTROL = declare(
    "MK503",
    "block 0 writes the next launch's {what} while a block may still read this launch's",
    "let block 0 gather a value that every block publishes after its last read (a whole gather, or argmax)",
)


T = TypeVar("T")


@dataclass
class Publication:
    """What one turn of a round carried: who wrote, at which step, and what the writers knew."""

    mask: Bools
    step: int
    carried: Ints


@dataclass
class Read:
    """Who polled whom, at which step."""

    polled: Bools
    step: int
    by: Step


@dataclass
class Clocks:
    """The state of all blocks while the program is played."""

    device: Device
    findings: Findings
    step: int = 0
    labels: list[str] = field(default_factory=lambda: ["launch"])
    published: dict[tuple[str, int, int], Publication] = field(default_factory=dict)
    reads: dict[tuple[str, int, int], list[Read]] = field(default_factory=lambda: defaultdict(list))
    latest: dict[str, int] = field(default_factory=dict)
    control: dict[str, Read] = field(default_factory=dict)
    turns: int = 1

    def __post_init__(self) -> None:
        blocks = self.device.blocks
        self.rows = Rows(self.device, self.findings)
        self.known = np.zeros((blocks, blocks), dtype=np.int64)
        self.pending = np.zeros((blocks, blocks), dtype=np.int64)
        self.everybody = np.ones(blocks, dtype=np.bool_)

    def at(self, label: str) -> int:
        self.step += 1
        self.labels.append(label)
        return self.step

    def barrier(self, mask: Bools) -> None:
        now = self.at("barrier")
        self.known[mask] = np.maximum(self.known[mask], self.pending[mask])
        blocks = np.flatnonzero(mask)
        self.known[blocks, blocks] = now

    def join(self, by: Step) -> None:
        """All that earlier launches did is over."""
        self.known[:] = self.pending[:] = self.at(shown(by.instr, by.layer))

    def read_control(self, what: str, mask: Bools, by: Step) -> None:
        self.control[what] = Read(mask, self.at(shown(by.instr, by.layer)), by)

    def poll(self, by: Step, instr: Instr, value: str, round_: int, parts: polls.Parts) -> None:
        now = self.at(shown(instr, by.layer))
        latest = self.latest.get(value)
        if latest != round_:
            state = "no block has published by then" if latest is None or latest < round_ else f"round {latest} has already replaced"
            self._never(by, instr, value, round_, state)
            return
        for part, polled in enumerate(parts):
            found = self.published.get((value, round_, part))
            if found is None or (polled & ~found.mask[None, :]).any():
                self._never(by, instr, value, round_, "some of the polled blocks never publish")
                return
            self._emptied(by, instr, value, round_, part, polled)
            self._take(polled, found.carried)
            self.reads[value, round_, part].append(Read(polled, now, by))

    def publish(self, by: Step, value: str, round_: int, mask: Bools, part: int = 0) -> None:
        now = self.at(shown(by.instr, by.layer))
        distance = _distance(self.device.exchanges[value])
        for read in self.reads.get((value, round_ - distance, part), ()):
            late = read.polled.T & mask[:, None] & (self.known < read.step)
            if late.any():
                self._conflict(by, value, round_, read, late)
        self.published[value, round_, part] = Publication(mask, now, self.known.copy())
        self.latest[value] = round_

    def finish(self) -> None:
        """Block 0 writes the control block."""
        for what, read in self.control.items():
            late = read.polled & (self.known[0] < read.step)
            if late.any():
                block = int(np.flatnonzero(late)[0])
                rows = [
                    (f"consumer of block {block}", [self.labels[read.step], "", ""]),
                    ("consumer of block 0", ["", "writes the control block, end of the launch", self._knows(0, block)]),
                ]
                self.findings.add(CONTROL, read.by.instr.span, rows, what=what)

    def _take(self, polled: Bools, carried: Ints) -> None:
        """Readers with the same partners learn the same."""
        groups: dict[bytes, list[int]] = defaultdict(list)
        for block, row in enumerate(polled):
            groups[row.tobytes()].append(block)
        for blocks in groups.values():
            row = polled[blocks[0]]
            if row.any():
                self.pending[blocks] = np.maximum(self.pending[blocks], carried[row].max(axis=0))

    def _emptied(self, by: Step, instr: Instr, value: str, round_: int, part: int, polled: Bools) -> None:
        e = self.device.exchanges[value]
        emptied = self.published.get((value, round_ - e.slots // 2, part)) if e.wire == "Sentinel" else None
        if emptied is None or not (late := polled & (self.known < emptied.step)).any():
            return
        reader, writer = (int(i) for i in np.argwhere(late)[0])
        rows = [
            (f"consumer of block {writer}", [f"empties the slot of round {round_}: {self.labels[emptied.step]}", "", ""]),
            (f"consumer of block {reader}", ["", f"polls round {round_}: {shown(instr, by.layer)}", self._knows(reader, writer)]),
        ]
        self.findings.add(STALE, instr.span, rows, op=instr.op, value=value, round=round_)

    def _conflict(self, by: Step, value: str, round_: int, read: Read, late: Bools) -> None:
        writer, reader = (int(i) for i in np.argwhere(late)[0])
        e = self.device.exchanges[value]
        what, old = ("empties" if e.wire == "Sentinel" else "overwrites"), round_ - _distance(e)
        rows = [
            (f"consumer of block {reader}", [f"reads round {old}: {self.labels[read.step]}", "", ""]),
            (
                f"consumer of block {writer}",
                ["", f"{what} its slot in round {round_}: {shown(by.instr, by.layer)}", self._knows(writer, reader)],
            ),
        ]
        self.findings.add(REUSED, by.instr.span, rows, op=by.instr.op, value=value, round=round_, old=old)

    def _never(self, by: Step, instr: Instr, value: str, round_: int, state: str) -> None:
        latest = self.latest.get(value)
        last = f"has published round {latest} last" if latest is not None else "has published nothing"
        rows = [("consumer of any block", [f"waits: {shown(instr, by.layer)}"]), (f"writers of {value}", [last])]
        self.findings.add(NEVER, instr.span, rows, op=instr.op, value=value, round=round_, state=state)

    def _knows(self, block: int, other: int) -> str:
        return f"knows of block {other} up to: {self._before(int(self.known[block, other]))}"

    def _before(self, step: int) -> str:
        """The last instruction at or before a step; barriers have no name of their own."""
        while step and self.labels[step] == "barrier":
            step -= 1
        return self.labels[step]


def _distance(e: Exchange) -> int:
    """How many rounds before its own a publication must not overtake: those whose slot it writes to."""
    return e.slots // 2 if e.wire == "Sentinel" else e.slots


def check_exchanges(device: Device, findings: Findings) -> list[str]:
    """Play one launch for all blocks and report every read and reuse that nothing orders."""
    layers, turns = unrolled(device), unrolled_steps(device)
    for count in sorted({1, turns}):
        clocks = _played(device, findings, layers, count)
    reads = sum(len(r) for r in clocks.reads.values())
    return [
        f"exchanges: {len(clocks.published)} publications and {reads} gathers of {device.blocks} blocks over {layers} layers of {turns}"
        " steps: each read after its writer, each slot reused after its last reader",
        "control block: rewritten by block 0 after every block's last read",
    ]


def _played(device: Device, findings: Findings, layers: int, turns: int) -> Clocks:
    clocks = Clocks(device, findings, turns=turns)
    first = Step(_entry(device), None, {})
    for what in ("kv_len and epoch", "positions"):
        clocks.read_control(what, clocks.everybody, first)
        if what == "kv_len and epoch":
            clocks.barrier(clocks.everybody)  # __syncthreads() behind the block's entry
    player = Player(clocks)
    for step in device.steps(device.consumer, layers, turns=turns):
        player.play(step)
    clocks.finish()
    return clocks


def unrolled(device: Device) -> int:
    """Layers that show every adjacency: see above."""
    return min(device.plan.graph.layers, max((e.slots for e in device.plan.exchanges), default=2) + 2)


def unrolled_steps(device: Device) -> int:
    """Steps of a launch that show every adjacency of the values that take one round a step: as many as layers, for the same reason."""
    return device.turns(max((e.slots for e in device.plan.exchanges if e.uses == "1"), default=2) + 2)


def _entry(device: Device) -> Instr:
    first = next(device.steps(device.consumer, 1)).instr
    return Instr(first.verb, "entry of the launch", first.op, first.span)


@dataclass
class Player:
    """What each call does to the clocks: its polls, barriers and publications, in the order in which its header has them."""

    clocks: Clocks
    cache: dict[tuple[int, str], object] = field(default_factory=dict)

    def play(self, step: Step) -> None:
        call = step.instr.call
        handler = getattr(self, f"_{call}", None)
        if handler is not None:
            handler(step)

    def _meets(self, instr: Instr, *names: str) -> bool:
        return any(name in instr.syncs for name in names)

    def _barrier(self, instr: Instr, *names: str, mask: Bools | None = None) -> None:
        if self._meets(instr, *names):
            self.clocks.barrier(self.clocks.everybody if mask is None else mask)

    def _join_launch(self, step: Step) -> None:
        self.clocks.join(step)
        for what in ("kv_len and epoch", "positions"):
            self.clocks.read_control(what, self.clocks.everybody, step)

    def _embed(self, step: Step) -> None:
        if step.turn == 0:
            self.clocks.read_control("token_ids", self.clocks.everybody, step)
        self._barrier(step.instr, "end")

    def _publish(self, step: Step) -> None:
        instr = step.instr
        value = str(instr.args["value"])
        self.clocks.publish(step, value, step.round(), np.arange(self.clocks.device.blocks) < self.clocks.device.sharers(instr.op))

    def _gather_kept(self, step: Step) -> None:
        instr = step.instr
        polled = self._cached(instr, polls.gather_kept)
        self.clocks.poll(step, instr, str(instr.args["value"]), step.round(), [polled])

    def _row_map(self, step: Step) -> None:
        instr = step.instr
        self._barrier(instr, "input")
        self._gather(step, self._cached(instr, polls.row_map))
        self._barrier(instr, "gathered", "partials")
        self._barrier(instr, "end")

    def _matrix(self, step: Step) -> None:
        instr = step.instr
        for turn, (mask, gathers) in enumerate(self._cached(instr, polls.matrix)):
            self._barrier(instr, "input", mask=mask)
            self._gather(step, gathers)
            self._barrier(instr, "gathered", "partials", mask=mask)
            if instr.args["parts"]:
                self.clocks.publish(step, str(instr.args["parts"]), step.round("parts_round"), mask, turn)
                if self.clocks.device.matrix(instr.op).chunks > 1:  # the next batch gathers anew
                    self._gather(step, gathers)
        self._barrier(instr, "end")

    def _gather(self, step: Step, gathers: list[tuple[Instr, Bools]]) -> None:
        for inner, polled in gathers:
            at = step.inner(inner)
            self.clocks.poll(step, inner, str(inner.args["value"]), at.round(), [polled])

    def _add_parts(self, step: Step) -> None:
        instr = step.instr
        self.clocks.poll(step, instr, str(instr.args["parts"]), step.round(), self._cached(instr, polls.add_parts))
        self._barrier(instr, "end")

    def _attention(self, step: Step) -> None:
        instr, clocks = step.instr, self.clocks
        turns = self._cached(instr, polls.attention)
        readers = self._cached(instr, lambda d, i: polls.reads_ancestors(d, i.op), "ancestors")
        clocks.read_control(f"ancestors (of {instr.op})", readers, step)
        self._barrier(instr, "input")
        for turn, (mask, polled) in enumerate(turns):
            self.clocks.poll(step, instr, str(instr.args["qkv"]), step.round("qkv_round"), [polled])
            self._barrier(instr, "gathered", "parts", mask=mask)
            clocks.publish(step, str(instr.args["parts"]), step.round("parts_round"), mask, turn)
            self._barrier(instr, "published", "end", mask=mask)
        fresh = self._cached(instr, lambda d, i: polls.fresh_units(d, i.op), "fresh")
        clocks.rows.append(fresh, clocks.at(shown(instr, step.layer)), step)
        self._barrier(instr, "idle", mask=~turns[0][0])
        self._barrier(instr, "merge")

    def _merge(self, step: Step) -> None:
        instr = step.instr
        self.clocks.poll(step, instr, str(instr.args["parts"]), step.round(), self._cached(instr, polls.merge))
        self._barrier(instr, "end")

    def _custom(self, step: Step) -> None:
        self._barrier(step.instr, "input")
        self._gather(step, self._cached(step.instr, polls.custom))
        self._barrier(step.instr, "gathered", "computed")

    def _argmax(self, step: Step) -> None:
        instr, clocks = step.instr, self.clocks
        block0 = np.zeros(clocks.device.blocks, dtype=np.bool_)
        block0[0] = True
        self._barrier(instr, "candidates", "winners")
        clocks.publish(step, str(instr.args["value"]), step.round(), clocks.everybody)
        clocks.rows.publish()
        if step.turn + 1 < clocks.turns:
            clocks.poll(step, instr, str(instr.args["value"]), step.round(), [polls.winners(clocks.device)])
            clocks.rows.take(polls.winners(clocks.device))
            self._barrier(instr, "token")
            return
        clocks.poll(step, instr, str(instr.args["value"]), step.round(), [polls.chosen(clocks.device)])
        self._barrier(instr, "choice", mask=block0)

    def _release_rows(self, step: Step) -> None:
        if step.turn + 1 < self.clocks.turns:
            self.clocks.rows.release(self.clocks.known)

    def _acquire_rows(self, step: Step) -> None:
        if step.turn:
            self.clocks.rows.acquire(step)

    def _cached(self, instr: Instr, make: Callable[[Device, Instr], T], kind: str = "") -> T:
        """A layer's polls are those of every layer."""
        key = (id(instr), kind)
        if key not in self.cache:
            self.cache[key] = make(self.clocks.device, instr)
        return cast(T, self.cache[key])
