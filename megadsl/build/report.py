"""What a compiled kernel costs the SM: registers, spills, shared memory, and SASS bytes by role.

The emitted kernel.cu marks where the code of a role starts with a line ``// role: NAME``. An instruction belongs to the
outermost function on its chain of inlined calls that lies in a marked section; what lies in none is ``common``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from megadsl.build.nvcc import STAGES, CubinResult, disassemble
from megadsl.build.toolchain import find_tool
from megadsl.diagnostics import Diagnostic, declare, warning
from megadsl.entries import SmallEntries
from megadsl.machine import Machine

HOT_CODE = declare(
    "MK308",
    "the kernel has {total:,} bytes of SASS and {arch} runs at most {budget:,} well: role {role} alone has {bytes:,}",
    "lower the unroll of {role}'s ops in the schedule, or have layers of several kinds share a loop",
)
SPILLS = declare(
    "MK309",
    "the kernel spills {bytes} bytes of registers per thread",
    "give the role fewer rows or columns at once, or run fewer warps so that each thread may have more registers",
)

COMMON = "common"
INSTRUCTION_BYTES = 16  # every SASS instruction since sm_70

_COUNTS = SmallEntries(".sass.json")
_MARKER = re.compile(r"\s*// role: (\S+)\s*$")
_LINE_INFO = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+\S")


@dataclass(frozen=True)
class Report:
    """Resources of one kernel. All but ``warnings`` are counts or bytes; ``sass_by_role`` is largest first."""

    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    sass_bytes: int
    sass_by_role: Mapping[str, int]
    hot_code_bytes: int
    warnings: tuple[Diagnostic, ...]

    def render(self) -> str:
        """The text of report.txt."""
        rows = [
            ("registers per thread", f"{self.registers:,}"),
            ("spilled bytes per thread", f"{self.spill_bytes:,}"),
            ("stack bytes per thread", f"{self.stack_bytes:,}"),
            ("shared memory bytes per block", f"{self.smem_bytes:,}"),
            ("SASS bytes", f"{self.sass_bytes:,} of {self.hot_code_bytes:,}"),
            *((f"  {role}", f"{count:,}") for role, count in self.sass_by_role.items()),
        ]
        width = max(len(label) for label, _ in rows)
        lines = [f"arch {self.arch}", *(f"{label:<{width}}  {value}" for label, value in rows)]
        return "\n".join([*lines, *map(str, self.warnings)]) + "\n"


def resource_report(cubin: CubinResult, kernel_source: str, machine: Machine, smem_bytes: int) -> Report:
    """Measure a compiled kernel.

    ``kernel_source`` is the text it was compiled from, with its role markers; ``smem_bytes`` is the dynamic shared memory
    per block of the launch, which a cubin does not know. Raises MK301 when there is no nvdisasm.
    """
    by_role = _by_role(cubin.path, kernel_source)
    total = sum(by_role.values())
    return Report(
        arch=machine.arch,
        registers=cubin.registers,
        spill_bytes=cubin.spill_bytes,
        stack_bytes=cubin.stack_bytes,
        smem_bytes=smem_bytes,
        sass_bytes=total,
        sass_by_role=by_role,
        hot_code_bytes=machine.hot_code_bytes,
        warnings=tuple(_warnings(cubin, by_role, machine)),
    )


def _by_role(cubin: Path, kernel_source: str) -> dict[str, int]:
    """:func:`sass_by_role`, from the cache if it was asked for before: disassembling takes as long as all else about a cached cubin."""
    key = (str(find_tool("nvdisasm").path), cubin.read_bytes(), kernel_source)
    kept = _COUNTS.load(key)
    if kept is not None:
        return {str(role): int(count) for role, count in json.loads(kept).items()}
    counts = sass_by_role(disassemble(cubin), kernel_source)
    _COUNTS.store(key, json.dumps(counts).encode())
    return counts


def _warnings(cubin: CubinResult, by_role: Mapping[str, int], machine: Machine) -> Iterator[Diagnostic]:
    if cubin.spill_bytes:
        yield warning(SPILLS, bytes=cubin.spill_bytes)
    total = sum(by_role.values())
    if total > machine.hot_code_bytes:
        role, most = next(iter(by_role.items()))
        yield warning(HOT_CODE, total=total, arch=machine.arch, budget=machine.hot_code_bytes, role=role, bytes=most)


def sass_by_role(sass: str, kernel_source: str) -> dict[str, int]:
    """Bytes of SASS of each role, largest first. ``sass`` is what :func:`megadsl.build.nvcc.disassemble` gives."""
    roles = _Roles(kernel_source)
    counts: Counter[str] = Counter()
    chain: list[tuple[str, int]] = []  # of the instructions that follow: innermost line first
    open_chain = False
    for line in sass.splitlines():
        place = _LINE_INFO.search(line)
        if place:
            if not open_chain:
                chain = []
            chain.append((place[1], int(place[2])))
            open_chain = True
        elif _INSTRUCTION.search(line):
            open_chain = False
            counts[roles.of_chain(chain)] += INSTRUCTION_BYTES
        elif line.startswith("\t.section"):
            chain = []
    return dict(counts.most_common())


class _Roles:
    """Which role each line of a kernel.cu belongs to."""

    def __init__(self, kernel_source: str) -> None:
        found = [(number, _MARKER.match(line)) for number, line in enumerate(kernel_source.splitlines(), 1)]
        marks = [(number, mark[1]) for number, mark in found if mark]
        self._starts = [number for number, _ in marks]
        self._names = [COMMON, *(name for _, name in marks)]

    def of_chain(self, chain: list[tuple[str, int]]) -> str:
        """The role of an instruction whose inlined-at chain this is, innermost first."""
        for file, line in reversed(chain):
            role = self._names[bisect_right(self._starts, line)]
            if PurePath(file).name == STAGES["cu"] and role != COMMON:
                return role
        return COMMON
