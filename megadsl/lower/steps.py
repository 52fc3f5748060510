"""Several decode steps in one launch: which kernels can, and what their plans have for it.

A kernel feeds itself where it chooses a token and a launch makes a whole step. The rows that a step appends to a KV cache are then
copied by the next step of the same launch, in other blocks too: release_rows and acquire_rows (steps.h) stand on both sides.
"""

from __future__ import annotations

from megadsl.ir.graph import Attention, Embed, Graph, Linear, Op
from megadsl.ir.plan import Instr, Region, Verb
from megadsl.ir.schedule import Schedule
from megadsl.types import Level

PROGRESS_BYTES = 28
READABLE = 20  # of them: the word that loaders wait for; mk::Steps::readable

HANDED_BYTES = 16  # mk::HandedStep
HANDED = Region("smem", "progress.step", Level.BLOCK)
ROWS = Region("smem", "progress.readable", Level.BLOCK)


def feeds_itself(graph: Graph, schedule: Schedule) -> bool:
    """Whether a launch can make several steps."""
    return schedule.scope == "step" and any(isinstance(op, Linear) and op.sink == "argmax" for op in graph.ops)


def hands_step_on(graph: Graph, schedule: Schedule) -> bool:
    """Whether loaders learn from the consumers of their launch how many rows are cached: the launch before may write that."""
    return schedule.scope != "step" and any(isinstance(op, Attention) for op in graph.ops)


def progress_bytes(graph: Graph, schedule: Schedule) -> int:
    """Shared memory for what a block's roles tell each other of the step."""
    return PROGRESS_BYTES if feeds_itself(graph, schedule) else HANDED_BYTES if hands_step_on(graph, schedule) else 0


def passes_rows_on(graph: Graph, schedule: Schedule) -> bool:
    """Whether a step may copy rows that an earlier one of its launch has appended."""
    return feeds_itself(graph, schedule) and any(isinstance(op, Attention) for op in graph.ops)


def around_rows(op: Op, graph: Graph, schedule: Schedule) -> tuple[tuple[Instr, ...], tuple[Instr, ...]]:
    """What the consumers do before an op's first phase, and behind it."""
    if not passes_rows_on(graph, schedule):
        return (), ()
    rows = Region("kv", "all caches", Level.GPU, "rows from kv_len")
    if isinstance(op, Embed):
        return (), (Instr(Verb.SIGNAL, "acquire_rows", op.name, op.span, reads=(rows,), writes=(ROWS,)),)
    if isinstance(op, Linear) and op.sink == "argmax":
        return (Instr(Verb.SIGNAL, "release_rows", op.name, op.span, reads=(rows,)),), ()
    return (), ()
