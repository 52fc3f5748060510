"""How many of a linear's first tiles, or of an attention's first chunks, consumers hold in registers while they wait for its input.

Around the hand-offs between blocks the ring is full and HBM idles. A tile that moves on into registers makes room for another copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.overrides import Overrides
from megadsl.ir.graph import Attention, Graph, Linear, Op
from megadsl.ir.schedule import Schedule
from megadsl.lower.gathers import in_registers, is_direct, is_wide, tiles_together, wide_registers
from megadsl.lower.heads import query_tiles, unit_bytes
from megadsl.lower.memory import chunk_pieces, copies_fit, least_groups, own_groups, own_part_groups
from megadsl.lower.operands import vectors
from megadsl.lower.shape import CHUNK_ROWS
from megadsl.lower.threads import WARP_THREADS, threads
from megadsl.lower.tiling import PANEL, tiling
from megadsl.machine import Machine
from megadsl.types import KIB, ceil_div

NOT_HELD = declare("MK243", "{op!r} cannot hold {tiles} tiles in registers: {why}", "{how}")

KERNEL_REGISTERS = 104  # what nvcc 13.0 gives llama-3.2-1b at 1 and 5 tokens beside held tiles, and spills nothing
DIRECT_REGISTERS = 72  # the same for ops whose input of few tokens arrives in registers
WIDE_REGISTERS = 120  # of more tokens: beside the input itself, and what of it is under way
LEAST_REGISTERS = 72  # no kernel makes do with fewer
WIDE_LEAST = 64  # nothing is multiplied with less beside it
OLDER_REGISTERS = 16  # that nvcc 13.0 needs more for machines without bulk copies
AREA_BYTES = 36 * KIB  # of shared memory beside the ring, of few tokens
BESIDE_BYTES = 8 * KIB  # of it beside a large attention's
TILES_AT_ONCE = 2  # mk::kTilesAtOnce
VECTOR_REGISTERS = 4  # of a lane, for its 16 bytes of a panel
CHUNK_REGISTERS = 32  # beside the attention's own; nvcc 13.0 spills where it is 64
REGISTER_BYTES = 4


def hold_tiles(graph: Graph, schedule: Schedule, machine: Machine, overrides: Overrides | None = None) -> Schedule:
    """``schedule`` with a number for every op. MK243, at the line of ``overrides``, for what the user asks and no block can do."""
    asked = overrides or Overrides(schedule.arch, ())
    chosen = []
    with collecting() as found:
        for how in schedule.ops:
            op, tiles = graph.op(how.op), how.prefetch.registers
            if tiles is None:
                tiles = 0 if how.dry_run else _default(graph, schedule, machine, op)
            elif tiles:
                _check(graph, schedule, machine, op, tiles, asked, found)
            chosen.append(replace(how, prefetch=replace(how.prefetch, registers=tiles)))
    return replace(schedule, ops=tuple(chosen))


def tile_registers(op: Linear, warps: int) -> int:
    """Registers of a thread that hold its part of one tile."""
    return ceil_div(tiling(op).tile_columns // PANEL, warps) * VECTOR_REGISTERS


def chunk_registers(op: Attention) -> int:
    """Registers of a thread that hold its part of 16 cached rows, keys and values."""
    return 2 * op.cache_dim * CHUNK_ROWS * 2 // (WARP_THREADS * REGISTER_BYTES)


def _frees_stages(op: Attention, tokens: int, schedule: Schedule) -> bool:
    """Whether the warps' first chunks fill a stage. With more query rows than one tile has, polls and tiles take the registers."""
    stage = schedule.ring(schedule.op(op.name).loader).stage_bytes
    return query_tiles(op, tokens) == 1 and schedule.consumer.warps * CHUNK_ROWS * op.cache_dim * 4 >= stage


def _spare(schedule: Schedule, machine: Machine, needed: int) -> int:
    """Registers that a thread has beyond ``needed``."""
    return threads(schedule, machine).registers - needed - (0 if machine.bulk else OLDER_REGISTERS)


def _input(graph: Graph, schedule: Schedule, op: Linear) -> int:
    """Registers of a thread that hold the op's input, or a chunk of it, of more than a few tokens."""
    if not is_wide(op, schedule, graph.tokens):
        return 0
    return wide_registers(op, schedule, graph.tokens) * chunk_pieces(op, graph, schedule)


def _splits(graph: Graph, schedule: Schedule, op: Linear, tiles: int) -> bool:
    """A group that is held in part goes on from the ring at a pair of tiles: else sums would be added up in another order. Where the
    input arrives in registers, groups are held whole; of few tokens, stages are: so many tiles, or all that any block has."""
    if is_direct(op, schedule, graph.tokens):
        most = own_groups(op, schedule) * tiling(op).pieces
        return tiles > most or (tiles < most and tiles % tiles_together(op, schedule, graph.tokens) != 0)
    if in_registers(op, schedule):
        return tiles % tiling(op).pieces != 0
    return tiles % tiling(op).pieces % TILES_AT_ONCE != 0


def _most(graph: Graph, schedule: Schedule, op: Linear, registers: int) -> int:
    """Tiles that fit ``registers`` and belong to the first batch of row groups."""
    most = min(schedule.batch * tiling(op).pieces, registers // tile_registers(op, schedule.consumer.warps))
    return next(n for n in range(max(0, most), -1, -1) if not _splits(graph, schedule, op, n))


def _default(graph: Graph, schedule: Schedule, machine: Machine, op: Op) -> int:
    """As many as every block has and the kernel leaves registers for, where the op finds the ring full and its vectors find room."""
    if isinstance(op, Attention):
        if in_registers(op, schedule) or schedule.sequences > 1:  # which takes its chunks before it polls in any case
            return 0
        crowded = schedule.scope == "layer" and chunk_registers(op) > _spare(schedule, machine, KERNEL_REGISTERS)  # two blocks an SM
        return int(chunk_registers(op) <= CHUNK_REGISTERS and _frees_stages(op, graph.tokens, schedule) and not crowded)
    if not isinstance(op, Linear) or chunk_pieces(op, graph, schedule) != tiling(op).pieces:
        return 0
    if _before(graph, schedule, op) > machine.smem_per_block:
        return 0
    if is_direct(op, schedule, graph.tokens):
        most = _most(graph, schedule, op, _spare(schedule, machine, DIRECT_REGISTERS))
        return next(n for n in range(most, -1, -1) if not _splits(graph, schedule, op, n) and _stages(graph, schedule, op, n, machine))
    if vectors(op) and not copies_fit(op, graph, schedule):
        return 0
    least = least_groups(op, schedule) * tiling(op).pieces
    needed = WIDE_REGISTERS + _input(graph, schedule, op) if in_registers(op, schedule) else KERNEL_REGISTERS
    fitting = _most(graph, schedule, op, _spare(schedule, machine, needed))
    return next(n for n in range(min(least, fitting), -1, -1) if not _splits(graph, schedule, op, n))


def _stages(graph: Graph, schedule: Schedule, op: Linear, tiles: int, machine: Machine) -> bool:
    """Whether the ring has as many stages as the op lets go of behind its products, if it holds so many tiles. An open ring has what
    other areas leave of shared memory."""
    ring = schedule.ring(schedule.op(op.name).loader)
    warps, attentions = schedule.consumer.warps, [o for o in graph.ops if isinstance(o, Attention)]
    areas = max([AREA_BYTES, *(sum(unit_bytes(o, graph.tokens, warps, schedule.sequences)[1:]) + BESIDE_BYTES for o in attentions)])
    stages = ring.stages or (machine.smem_for(schedule.resident) - areas) // ring.stage_bytes
    return not tiles or len(vectors(op)) + ceil_div(tiles, tiles_together(op, schedule, graph.tokens)) <= stages


def _before(graph: Graph, schedule: Schedule, op: Linear) -> int:
    """Bytes of weights that the busiest block streams in the op before, in a loop the one of the layer before: more than shared
    memory, and the ring has been emptied by its end."""
    index = graph.ops.index(op)
    before = graph.ops[index - 1]
    if op.loop is not None and before.loop != op.loop:
        before = [o for o in graph.ops if o.loop == op.loop][-1]
    if not isinstance(before, Linear):
        return 0
    return own_part_groups(before, schedule) * tiling(before).group_bytes // schedule.op(before.name).ways


def _check_chunks(schedule: Schedule, machine: Machine, op: Attention, tiles: int, refuse: Callable[[str, str], None]) -> None:
    if tiles and schedule.sequences > 1:
        refuse("a unit of a batch has chunks of several sequences", "use registers=0")
    elif tiles > 1 or chunk_registers(op) > _spare(schedule, machine, LEAST_REGISTERS):
        refuse(f"each warp holds one chunk at most, in {chunk_registers(op)} registers of a thread", "use registers=1 or registers=0")


def _check(graph: Graph, schedule: Schedule, machine: Machine, op: Op, tiles: int, asked: Overrides, found: Collector) -> None:
    span = asked.said(op.span, "registers", op.name)

    def refuse(why: str, how: str) -> None:
        found.add(NOT_HELD, span, op=op.name, tiles=tiles, why=why, how=how)

    if isinstance(op, Attention):
        _check_chunks(schedule, machine, op, tiles, refuse)
        return
    if not isinstance(op, Linear):
        refuse("it streams no weights of its own", "hold tiles of the linears")
        return
    pieces, chunk = tiling(op).pieces, chunk_pieces(op, graph, schedule)
    most = _most(graph, schedule, op, _spare(schedule, machine, max(LEAST_REGISTERS, WIDE_LEAST + _input(graph, schedule, op))))
    if schedule.op(op.name).ways > 1:
        refuse("its columns are split", "use registers=0, or .columns(ways=1)")
    elif chunk != pieces:
        refuse(f"its input comes in {pieces // chunk} chunks", f"use registers=0, or .split(chunk={pieces}) where shared memory allows it")
    elif tiles > most:
        each = tile_registers(op, schedule.consumer.warps)
        refuse(f"a tile takes {each} registers of a thread, a batch of row groups has {schedule.batch * pieces}", f"use at most {most}")
    elif in_registers(op, schedule) and _splits(graph, schedule, op, tiles):
        stage = tiles_together(op, schedule, graph.tokens)
        whole, each = (f"{stage} tiles lie in a stage", stage) if stage > 1 else (f"a row group has {pieces} tiles", pieces)
        refuse(f"its input arrives in registers and {whole}", f"use a multiple of {each}")
    elif _splits(graph, schedule, op, tiles):
        refuse(f"a row group has {pieces} tiles, which are multiplied in pairs", f"use registers={tiles - 1}")
