"""Who adds the partial sums of a block's warps, applies the epilogue and publishes.

By the block: its warps meet behind their products, and the first ones add. By a warp of its own, the finisher: it adds and publishes while
the others are on their way to the next op, whose addresses and held tiles then cost no time; they meet it before they poll. Where they
pause there (OpSchedule.pause), it meets them at once, and makes ready for the op meanwhile. The finisher also merges splits, takes the next
token, and gathers residual rows.
"""

from __future__ import annotations

from megadsl.ir.graph import Graph
from megadsl.ir.plan import Instr
from megadsl.ir.schedule import Schedule

MOST_TOKENS = 8  # mk::finish_batch: four threads a token

MULTIPLY, FINISH, BOTH = "multiply", "finish", "both"
_FINISHED = ("merge", "gather_kept", "release_rows", "acquire_rows")
_SHARED = ("matrix", "row_map", "attention", "custom", "argmax", "meet_finisher")


def why_block(graph: Graph, schedule: Schedule) -> str:
    """Why one warp cannot finish; "" where it can."""
    if schedule.scope == "op":
        return "a launch is an op, and ends with it"
    if schedule.sequences > 1:
        return "each sequence of a batch takes its next token by a warp of its own"
    if graph.tokens > MOST_TOKENS:
        return f"it has four threads a token, for at most {MOST_TOKENS}, and there are {graph.tokens}"
    split = next((how.op for how in schedule.ops if how.ways > 1), None)
    return f"the columns of {split!r} are split" if split is not None else ""


def finishers(schedule: Schedule) -> int:
    """Warps of a block that only finish."""
    return int(schedule.finish == "warp")


def side(instr: Instr) -> str:
    """Where a warp finishes: which of a block's consumer warps run an instruction."""
    if instr.call in _SHARED:
        return BOTH
    if instr.call in ("publish", "keep"):
        return MULTIPLY if instr.args["table"] else FINISH
    return FINISH if instr.call in _FINISHED else MULTIPLY
