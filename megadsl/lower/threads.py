"""A block's threads and their registers.

A launch gives every thread the same number of registers: as many as one of an SM's four partitions has for the warps that share it. Of
nine warps three share one, so that each thread has a quarter less than a ninth of the SM. Where the schedule says so, registers move
(setmaxnreg: four warps at a time, a warpgroup): the loaders are padded to a warpgroup of their own and leave what they do not need to
the consumers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megadsl.ir.graph import Attention, Graph
from megadsl.ir.schedule import Schedule
from megadsl.lower.finish import finishers, why_block
from megadsl.lower.scope import LAUNCHES
from megadsl.machine import Machine
from megadsl.types import ceil_div

WARP_THREADS = 32
WARPGROUP = 4  # warps; also the partitions of an SM
REGISTER_UNIT = 8  # registers are given to a thread in eights
LOADER_REGISTERS = 120  # what nvcc 13.0 needs for some of them to spill nothing
MOVES = "setmaxnreg"
NARROW, FEW_TOKENS = 64, 4
MIN_REGISTERS = 128  # that consumers need
FINISHED_ALONE = 2  # tokens: of more, one warp would finish what takes several


def choose_finish(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """``schedule`` with who finishes decided: for few tokens a warp of its own, if the others keep enough registers."""
    if schedule.finish:
        return schedule
    made = replace(schedule, finish="warp")
    warps = sum(r.warps for r in schedule.roles) + finishers(made)
    fits = warps <= machine.max_warps_per_block and _launched(warps, schedule.resident, machine) >= MIN_REGISTERS
    return made if fits and graph.tokens <= FINISHED_ALONE and not why_block(graph, made) else replace(schedule, finish="block")


def choose_registers(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """``schedule`` with its registers decided: moved where nvcc 13.0 spills else (norms of heads; wide heads with more than a few tokens)
    and the machine can; everywhere else what a launch gives is enough, and moving it costs half a percent (docs/performance.md)."""
    if schedule.block_registers:
        return schedule
    heads = [op for op in graph.ops if isinstance(op, Attention)]
    crowded = any(op.maps or (op.head_dim > NARROW and graph.tokens > FEW_TOKENS) for op in heads)
    return replace(schedule, block_registers="moved" if crowded and not why_stay(schedule, machine) else "launched")


@dataclass(frozen=True)
class Threads:
    """``count`` of a block; ``consumer`` and ``loader``: registers of a thread once they have moved, 0 where they stay as launched;
    ``registers``: what a consumer's thread can have."""

    count: int
    consumer: int
    loader: int
    registers: int


def threads(schedule: Schedule, machine: Machine) -> Threads:
    """How many threads a block has, and which registers they get."""
    consumers = schedule.consumer.warps
    loaders = sum(r.warps for r in schedule.roles) - consumers + finishers(schedule)
    launched = _launched(consumers + loaders, schedule.resident, machine)
    if schedule.block_registers == "moved" and not why_stay(schedule, machine):
        warps = consumers + WARPGROUP
        pool = warps * _launched(warps, schedule.resident, machine)
        most = (pool - WARPGROUP * LOADER_REGISTERS) // consumers // REGISTER_UNIT * REGISTER_UNIT
        moved = min(most, machine.registers_per_thread // REGISTER_UNIT * REGISTER_UNIT)
        if moved > launched >= LOADER_REGISTERS:
            return Threads(warps * WARP_THREADS, moved, LOADER_REGISTERS, moved)
    return Threads((consumers + loaders) * WARP_THREADS, 0, 0, launched)


def why_stay(schedule: Schedule, machine: Machine) -> str:
    """Why registers cannot move; "" where they can."""
    consumers = schedule.consumer.warps
    if MOVES not in machine.features:
        return f"{machine.arch} has no {MOVES}"
    if schedule.scope != "step":
        return f"threads keep the registers that they are given where a launch is {LAUNCHES[schedule.scope]}"
    if consumers % WARPGROUP:
        return f"{consumers} consumer warps are no whole warpgroups"
    if sum(r.warps for r in schedule.roles) - consumers + finishers(schedule) > WARPGROUP:
        return f"the other warps are more than {WARPGROUP}"
    return ""


def _launched(warps: int, resident: int, machine: Machine) -> int:
    """Registers of every thread of a launch, in eights, where ``resident`` blocks find room on an SM."""
    together = ceil_div(warps * resident, WARPGROUP)
    most = machine.registers_per_sm // WARPGROUP // (together * WARP_THREADS)
    return min(most, machine.registers_per_thread) // REGISTER_UNIT * REGISTER_UNIT
