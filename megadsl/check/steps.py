"""Several steps in one launch: cached rows that a step appends are there when the next one copies them.

The launch's boundary orders everything; between two steps of a launch nothing does but what the plan says. The exchanges, shared memory
and rings are proved over such steps as over layers (clocks.py, memory.py, ring.py). Rows of a KV cache are written by plain stores and
read by copies of another proxy, perhaps in another block, so that they need more than a meeting:

    appender     attention | a barrier of the block | release_rows (fences of one thread) | argmax publishes, by that thread
    reader       argmax polls every block, by one warp | acquire_rows (a fence of that warp) | await_rows | load_cache

Every row appended by any block must be behind a barrier before its block's release, the release before that block's publication,
and each loader's copies behind its own block's acquire.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megadsl.check.arrays import Bools, Ints
from megadsl.check.model import Device, Step
from megadsl.check.report import Findings, shown
from megadsl.diagnostics import declare
from megadsl.ir.plan import Instr, LayerLoop, Program

UNORDERED = declare(
    "MK561",
    "{op!r} may copy cached rows that the step before has appended in the same launch: {why}",
    "let every block release its rows before it publishes its winner, acquire all blocks' behind theirs, and every loader await that",
)


@dataclass
class Rows:
    """Who has appended, released and acquired what, as steps of the clocks; 0: nothing yet."""

    device: Device
    findings: Findings
    appended: Ints = field(init=False)  # per block: its last append
    released: Ints = field(init=False)  # per block: what is behind its last release
    carried: Ints = field(init=False)  # of these, what the last publication of winners has told
    taken: Ints = field(init=False)  # reader by writer: what a reader's polls have shown
    by: dict[int, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = self.device.blocks
        self.appended, self.released, self.carried = (np.zeros(blocks, dtype=np.int64) for _ in range(3))
        self.taken = np.zeros((blocks, blocks), dtype=np.int64)

    def append(self, mask: Bools, now: int, by: Step) -> None:
        self.appended[mask] = now
        self.by.update(dict.fromkeys(np.flatnonzero(mask).tolist(), by))

    def release(self, known: Ints) -> None:
        """All that is before each block's last barrier."""
        self.released = np.diagonal(known).copy()

    def publish(self) -> None:
        self.carried = self.released.copy()

    def take(self, polled: Bools) -> None:
        self.taken = np.where(polled, self.carried[None, :], self.taken)

    def acquire(self, step: Step) -> None:
        """Behind it loaders may copy: everything appended before must be among what was taken."""
        late = self.taken < self.appended[None, :]
        if not late.any():
            return
        reader, writer = (int(i) for i in np.argwhere(late)[0])
        append = self.by[writer]
        rows = [
            (f"consumer of block {writer}", [f"appends rows: {shown(append.instr, append.layer)}", "releases less, or nothing", ""]),
            (f"consumer of block {reader}", ["", "", f"lets its loader copy them: {shown(step.instr)}"]),
        ]
        why = f"block {writer} has not released them" if self.carried[writer] < self.appended[writer] else f"block {reader} has not asked"
        self.findings.add(UNORDERED, append.instr.span, rows, op=append.instr.op, why=why)


def check_steps(device: Device, findings: Findings) -> list[str]:
    """Who copies cached rows waits for the step's, and is told of them: the rest is proved with the exchanges."""
    if not device.several:
        return ["steps: a launch makes one"]
    loads = sum(_awaited(program, findings) for program in device.plan.programs if program.kind == "loader")
    acquires = [i for i in _instructions(device.consumer) if i.call == "acquire_rows"]
    if loads and not acquires:
        first = next(i for p in device.plan.programs for i in _instructions(p) if i.call == "load_cache")
        rows = [("loader", [f"waits: {shown(first)}"]), ("consumer", ["never acquires rows"])]
        findings.add(UNORDERED, first.span, rows, op=first.op, why="no block acquires them")
    return ["steps: within a launch, each copy of cached rows comes behind every block's appends of the steps before, proxies included"]


def _instructions(program: Program) -> list[Instr]:
    phases = (phase for item in program.body for phase in (item.body if isinstance(item, LayerLoop) else (item,)))
    return [instr for phase in phases for instr in phase.body]


def _awaited(program: Program, findings: Findings) -> int:
    """Loads of cached rows in a loader's program; each has its own wait, since it is played again in each step."""
    loads, waited = 0, ""
    for instr in _instructions(program):
        if instr.call == "await_rows":
            waited = instr.op
        elif instr.call == "load_cache":
            loads += 1
            if waited != instr.op:
                rows = [(program.role, [f"copies rows: {shown(instr)}", "waits for nothing"]), ("consumer", ["", "acquires rows"])]
                findings.add(UNORDERED, instr.span, rows, op=instr.op, why="the loader does not wait")
    return loads
