"""Dry runs: a linear's loop of products runs once, for nothing, while its input is waited for.

Behind a hand-off between blocks the first products wait for their own code, if other code has run since the layer before. The loop that
runs dry is the loop that multiplies later, at the same addresses: its first iteration takes the op's first tiles, if they have landed, for
activations too, keeps no sum and lets go of no stage, and then brings the input (mk::DryRun). It reads what is stable: stages that are the
op's own and next in its ring.
"""

from __future__ import annotations

from megadsl.diagnostics import collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.formats import FORMATS
from megadsl.ir.graph import Graph, Linear, Op
from megadsl.ir.schedule import Schedule
from megadsl.lower.gathers import FEW_TOKENS, in_registers
from megadsl.lower.memory import copies_vectors
from megadsl.lower.operands import vectors
from megadsl.lower.tiling import PANEL, tiling

NOT_DRY = declare("MK236", "{op!r} cannot run dry: {why}", "{how}")


def check_dry_runs(graph: Graph, schedule: Schedule, overrides: Overrides | None = None) -> None:
    """MK236, at the line of ``overrides``, for each op that is to run dry and cannot."""
    asked = overrides or Overrides(schedule.arch, ())
    with collecting() as found:
        for how in schedule.ops:
            op = graph.op(how.op)
            if how.dry_run and (refused := _why_not(op, graph, schedule)) is not None:
                why, mend = refused
                found.add(NOT_DRY, asked.said(op.span, "dry_run", how.op), op=how.op, why=why, how=mend)


def _why_not(op: Op, graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    if not isinstance(op, Linear):
        return "it multiplies no tiles", "let linears run dry"
    if in_registers(op, schedule):
        return "its input arrives in the registers that multiply it", 'use .gather("shared") with it, or leave .dry_run() out'
    if graph.tokens > FEW_TOKENS:
        why = f"activations of {graph.tokens} tokens are more than a tile, which stands for them"
        return why, f"compile for at most {FEW_TOKENS} tokens, or leave .dry_run() out"
    if graph.tokens * 2 * PANEL * min(2, tiling(op).pieces) > FORMATS[op.format].panel_bytes:
        why = f"activations of {graph.tokens} tokens are more than a tile of {op.format}, which stands for them"
        return why, "compile for fewer tokens, or leave .dry_run() out"
    if schedule.op(op.name).prefetch.registers:
        return "its first tiles are held in registers, past the loop", "use .prefetch(registers=0) with it, or leave .dry_run() out"
    return None


def dry_stages(op: Linear, graph: Graph, schedule: Schedule) -> int:
    """mk::Tiles::kDry: 0 for no dry run, else 1 and the stages that lie in front of the op's first tile when its input is waited for."""
    if not schedule.op(op.name).dry_run:
        return 0
    return 1 + (0 if copies_vectors(op, graph, schedule) else len(vectors(op)))
