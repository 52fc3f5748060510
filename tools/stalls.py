"""Where the warps of a kernel stand still, instruction by instruction: an ncu report laid over the ops of the kernel that it profiled.

The timeline (docs/tracing.md) says how long an op takes; this says why. On the machine with the GPU, a launch in the middle of a bench:

    ncu --kernel-name regex:megakernel --launch-skip 12 --launch-count 1 --section SourceCounters --warp-sampling-interval 0 \\
        --clock-control none --cache-control none -o report python -m megadsl bench MODEL --kv 512 --replays 20 --baseline none
    ncu -i report.ncu-rep --page source --csv --print-source sass > stalls.csv

Anywhere, with the same compiler and headers:

    python -m tools.stalls MODEL stalls.csv --step-us 288

Prints for each role and op how many instructions it has, how often a block's warps execute one on average, the time that one warp
spends there, and for what it stalls; then the instructions that take longest each time. Time is a share of the samples of the role's
warps, times the step's: ``barrier`` and ``sleeping`` are waits for others, ``long_sb`` trips to memory, ``short_sb`` to shared memory,
``no_inst`` an instruction cache that has not got the code, ``branch_resolving`` lanes that take their turns.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megadsl.build.nvcc import STAGES, build_cubin, disassemble
from megadsl.driver import DEFAULT_MAX_KV, compile_model
from megadsl.machine import DEFAULT_ARCH
from megadsl.resources import include
from tools.line_table import Instruction, line_table, name_of

KERNEL = "megakernel"
_SAMPLES, _EXECUTED, _SOURCE = "# Samples", "Instructions Executed", "Source"
_STALL = re.compile(r"^stall_(\w+)$")  # of the columns that count not-issued samples once more, none
_ROLE = re.compile(r"^MK_DEV void role_(\w+)\(")
_OP = re.compile(r"^ *// (\S.*?)  \[[^\]]+:\d+\]$")


@dataclass(frozen=True)
class Row:
    """One instruction of the report: its text, samples by reason of the stall, and how many warps executed it, over all blocks."""

    text: str
    samples: int
    executed: int
    stalls: Counter[str]


@dataclass
class Part:
    """What a role does for an op."""

    role: str
    op: str
    line: int
    instructions: int = 0
    samples: int = 0
    executed: int = 0
    stalls: Counter[str] = field(default_factory=Counter)


def read_report(text: str) -> list[Row]:
    """The rows of ``ncu --page source --csv``, in the order of the instructions. ValueError where it is none."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if f'"{_SOURCE}"' in line), None)
    if first is None:
        raise ValueError("no table of instructions: print the report with --page source --csv --print-source sass")
    rows = []
    for row in csv.DictReader(lines[first:]):
        if _SAMPLES not in row or _EXECUTED not in row:
            raise ValueError("no samples: profile with --section SourceCounters")
        stalls = {found[1]: int(row[name] or 0) for name in row if name and (found := _STALL.match(name))}
        rows.append(Row(row[_SOURCE].strip(), int(row[_SAMPLES] or 0), int(row[_EXECUTED] or 0), Counter(stalls)))
    return rows


def places(source: str) -> dict[int, tuple[str, str]]:
    """(role, op) of the lines of a kernel.cu: the function that a line stands in, and the last title of an op above it."""
    found, role, op = {}, "", ""
    for number, line in enumerate(source.splitlines(), 1):
        if (begin := _ROLE.match(line)) is not None:
            role, op = begin[1], ""
        elif line.startswith("}"):
            role, op = "", ""
        elif role and (title := _OP.match(line)) is not None:
            op = title[1]
        if role:
            found[number] = (role, op)
    return found


@dataclass(frozen=True)
class Laid:
    """An instruction, what the report says of it, and where in the kernel.cu it comes from."""

    role: str
    op: str
    line: int
    instruction: Instruction
    row: Row


def laid_over(rows: Sequence[Row], table: Sequence[Instruction], source: str) -> list[Laid]:
    """Each instruction with its role and op, "" in none. ValueError where the report is of another kernel."""
    if len(rows) != len(table) or any(i.opcode not in row.text for i, row in zip(table, rows, strict=True)):
        raise ValueError("the report is of another kernel: profile the same model, tokens and headers, built by the same nvcc")
    where = places(source)
    found = []
    for instruction, row in zip(table, rows, strict=True):
        line = next((line for path, line in instruction.frames if name_of(path) == STAGES["cu"] and line in where), 0)
        found.append(Laid(*where.get(line, ("", "")), line, instruction, row))
    return found


def parts_of(laid: Iterable[Laid]) -> list[Part]:
    """Sums by role and op, in the order of the code that the compiler was given."""
    parts: dict[tuple[str, str], Part] = {}
    for at in laid:
        part = parts.setdefault((at.role, at.op), Part(at.role, at.op, at.line))
        part.line = min(part.line, at.line)
        part.instructions += 1
        part.samples += at.row.samples
        part.executed += at.row.executed
        part.stalls.update(at.row.stalls)
    return sorted(parts.values(), key=lambda part: part.line)


def _reasons(stalls: Counter[str], unit: float, count: int) -> str:
    return " ".join(f"{reason} {samples * unit:.2f}" for reason, samples in stalls.most_common(count) if samples)


def show(laid: Sequence[Laid], step_us: float, warps: Mapping[str, int], blocks: int, top: int) -> Iterable[str]:
    """The tables, as lines. ``warps``: of a block, by role, one where it names none; ``step_us``: microseconds of the step."""
    samples = Counter[str]()
    for at in laid:
        samples[at.role] += at.row.samples
    yield f"{'role':<16} {'op':<44} {'instr':>6} {'executed':>9} {'us a step':>10}  stalls, us"
    for part in parts_of(laid):
        if part.role and part.samples:
            unit, times = step_us / samples[part.role], part.executed / blocks / part.instructions
            head = f"{part.role:<16} {part.op[:44]:<44} {part.instructions:>6} {times:>9.1f} {part.samples * unit:>10.2f}"
            yield f"{head}  {_reasons(part.stalls, unit, 6)}"
    yield f"\n{'role':<16} {'op':<30} {'executed':>9} {'us each':>8}  instruction, place, stalls"
    costs = []
    for at in laid:
        if at.role and at.row.executed >= blocks:
            unit = step_us * blocks * warps.get(at.role, 1) / samples[at.role] / at.row.executed
            costs.append((at.row.samples * unit, unit, at))
    for cost, unit, at in sorted(costs, key=lambda item: -item[0])[:top]:
        place = " < ".join(f"{name_of(path)}:{line}" for path, line in at.instruction.frames[:3])
        head = f"{at.role:<16} {at.op[:30]:<30} {at.row.executed / blocks:>9.1f} {cost:>8.3f}"
        yield f"{head}  {at.row.text}  {place}  {_reasons(at.row.stalls, unit, 2)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("report", type=Path)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--step-us", type=float, required=True, help="how long the step takes, in microseconds")
    parser.add_argument("--top", type=int, default=30, help="how many instructions to list")
    args = parser.parse_args()
    compiled = compile_model(args.model, tokens=args.tokens, max_kv=DEFAULT_MAX_KV, arch=DEFAULT_ARCH)
    table = line_table(disassemble(build_cubin(compiled.source, DEFAULT_ARCH, [include()], {}).path), KERNEL)
    try:
        laid = laid_over(read_report(args.report.read_text()), [table[at] for at in sorted(table)], compiled.source)
    except ValueError as refusal:
        parser.error(f"{args.report}: {refusal}")
    schedule = compiled.schedule
    warps = {role.name: role.warps for role in schedule.roles}
    for line in show(laid, args.step_us, warps, schedule.blocks, args.top):
        print(line)


if __name__ == "__main__":
    main()
