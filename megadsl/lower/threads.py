"""A block's threads and their registers.

A launch gives every thread the same number of registers: as many as one of an SM's four partitions has for the warps that share it. Of
nine warps three share one, so that each thread has a quarter less than a ninth of the SM. Where the machine lets warps hand
registers on (setmaxnreg: four warps at a time, a warpgroup), the loaders are padded to a warpgroup of their own and leave what
they do not need to the consumers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.ir.schedule import Schedule
from megadsl.machine import Machine
from megadsl.types import ceil_div

WARP_THREADS = 32
WARPGROUP = 4  # warps; also the partitions of an SM
REGISTER_UNIT = 8  # registers are given to a thread in eights
LOADER_REGISTERS = 136  # nvcc 13.0 spills loaders of 16 tokens with 120
MOVES = "setmaxnreg"


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
    loaders = sum(r.warps for r in schedule.roles) - consumers
    launched = _launched(consumers + loaders, schedule.resident, machine)
    if MOVES in machine.features and schedule.scope == "step" and consumers % WARPGROUP == 0 and 0 < loaders <= WARPGROUP:
        warps = consumers + WARPGROUP
        pool = warps * _launched(warps, schedule.resident, machine)
        most = (pool - WARPGROUP * LOADER_REGISTERS) // consumers // REGISTER_UNIT * REGISTER_UNIT
        moved = min(most, machine.registers_per_thread // REGISTER_UNIT * REGISTER_UNIT)
        if moved > launched >= LOADER_REGISTERS:
            return Threads(warps * WARP_THREADS, moved, LOADER_REGISTERS, moved)
    return Threads((consumers + loaders) * WARP_THREADS, 0, 0, launched)


def _launched(warps: int, resident: int, machine: Machine) -> int:
    """Registers of every thread of a launch, in eights, where ``resident`` blocks find room on an SM."""
    together = ceil_div(warps * resident, WARPGROUP)
    most = machine.registers_per_sm // WARPGROUP // (together * WARP_THREADS)
    return min(most, machine.registers_per_thread) // REGISTER_UNIT * REGISTER_UNIT
