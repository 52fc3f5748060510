"""What compute-sanitizer's reports say, and which of racecheck's a kernel of tools/barriers.cu shows to be false.

racecheck names the two sides of a race by instruction and line, not by call stack: as everything is inlined into one kernel, the
line is that of a PTX wrapper, and the function's name that of whatever else was inlined there. So a side is taken for the wrapper
that its line stands in, and a race for a pair of wrappers. A pair that JUSTIFIED names is justified if its kernel, which does only
that and is right by PTX, is reported for the same pair in the same session. Who called a wrapper is read from nvdisasm's line
table of the same cubin: of a plain load and a plain store, which anybody may use, JUSTIFIED names the calling functions too. That a pair
is used rightly in a model is shown by the plan checker and by the race detector, not here.

Some sides the tool names by their offset in the kernel alone. Their lines come from that table too, which must agree with each line
that the tool does give, and have an access to shared memory wherever it says that there is one: else it is not of the cubin that ran.
Whatever part of a report stays unread is UNREAD and justified by nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megadsl.resources import include
from tools.line_table import Instruction

UNJUSTIFIED, UNREAD = "UNJUSTIFIED", "UNREAD"

# side x side: the kernel of tools/barriers.cu that does this rightly and is reported for it
JUSTIFIED = {
    "read ld_shared x write bulk_load": "elect",
    "read ld_shared_volatile x write st_shared_volatile": "hint",
    "read ld_shared in finish_batch x write st_shared in store_partials": "turns",
    "read ld_shared in row_total x write st_shared in leave": "turns",
}
PLAIN = {"read ld_shared", "write st_shared"}
RACY = "race"  # the kernel that must be reported: else racecheck sees nothing
MEETS = "turns"  # how teams meet in kernels that are looked at: synccheck has to understand it

_LINE = re.compile(r"([\w.]+\.(?:h|cu)):(\d+)")
_FINDING = re.compile(
    r"=+ (?:Error: |Warning: )?((?:Race reported|Potential \w+ hazard|Invalid |Uninitialized |Barrier error|Program hit).*)"
)
_SIDE = re.compile(r"(Read|Write) access at .*\+0x([0-9a-f]+)(?: in ([\w.]+):(\d+))?(?: \[(\d+) hazards?\])?$")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_OPCODES = {"read": ("LDS",), "write": ("STS", "UBLKCP")}  # how SASS begins that accesses shared memory


@dataclass(frozen=True)
class Race:
    """One of racecheck's reports: its pairs of sides, as in JUSTIFIED, how many hazards each pair has, and where its sides stand.

    ``places`` are (side, offset of the instruction in the kernel). A side that could not be read is UNREAD instead of a wrapper.
    """

    pairs: Mapping[str, int]
    places: frozenset[tuple[str, int]]


def headers() -> dict[str, str]:
    """The PTX headers' texts by file name, as a tool names them."""
    return {path.name: path.read_text() for path in sorted((include() / "megadsl" / "ptx").glob("*.h"))}


@cache
def function_at(place: str) -> str:
    """The function of the headers that calls a wrapper at ``place``, file:line; "" if that is in none."""
    name, _, line = place.partition(":")
    path = include() / "megadsl" / name
    for before in reversed(path.read_text().splitlines()[: int(line)] if path.is_file() else []):
        if (found := re.match(r"\s*MK_DEV [^(=]*?\b(\w+)\(", before)) is not None:
            return found[1]
    return ""


def wrapper_at(header: str, line: int, access: str) -> str | None:
    """The PTX wrapper that line ``line`` (from 1) of a header's text stands in, or None; ``access`` is "read" or "write".

    Where a macro defines a load and a store for a type, all of the instance is one line, and the access says which of the two it is.
    """
    lines = header.splitlines()
    if not 0 < line <= len(lines):
        return None
    instance = re.match(r"(MK_\w+)\(", lines[line - 1])
    if instance is not None:
        macro = header.partition(f"#define {instance[1]}(")[2].partition(f"\n{instance[1]}(")[0]
        names = re.findall(r"MK_PTX [^\n]*?\b((?:ld|st)_\w+)<", macro)
        return next((name for name in names if name.startswith("ld" if access == "read" else "st")), None)
    for before in reversed(lines[:line]):
        found = re.match(r"MK_PTX [^(]*?\b(\w+)(?:<[^>]*>)?\(", before)
        if found is not None:
            return found[1]
        if before == "}":
            return None
    return None


class _Reader:
    """Reads a racecheck report line by line: what it could read, and each line or race that it could not."""

    def __init__(self, headers: Mapping[str, str], table: Mapping[int, Instruction]) -> None:
        self.headers, self.table = headers, table
        self.races: list[Race] = []
        self.unread: list[str] = []
        self.sides: list[tuple[str, int, int]] = []  # of the race at hand: name, offset, hazards; the first against all others

    def line(self, said: str) -> None:
        if not said or said == "COMPUTE-SANITIZER" or _SUMMARY.match(said):
            self.close()
            return
        side = _SIDE.search(said)
        if side is None:
            self.unread.append(said)
            return
        if "Race reported between" in said:
            self.close()
        elif not self.sides:
            self.unread.append(f"a side of no race: {said}")
        access, offset = side[1].lower(), int(side[2], 16)
        place = self._place(access, offset, (side[3], int(side[4])) if side[3] else None)
        if place is None:
            self.unread.append(said)
        name = UNREAD if place is None else wrapper_at(self.headers.get(place[0], ""), place[1], access) or f"{place[0]}:{place[1]}"
        self.sides.append((f"{access} {name}", offset, int(side[5] or 1)))

    def _place(self, access: str, offset: int, given: tuple[str, int] | None) -> tuple[str, int] | None:
        """File and line of a side; None where nobody knows them, or the line table contradicts what the tool says."""
        known = self.table.get(offset)
        if known is None:
            return None if self.table else given
        said = (known.file, known.line)
        return said if known.opcode.startswith(_OPCODES[access]) and given in (None, said) else None

    def _pair(self, *sides: tuple[str, int, int]) -> str:
        """Two sides, in a settled order; those of a plain load and store with their callers, where the table knows them."""
        names = [name for name, _, _ in sides]
        callers = [function_at(self.table[offset].caller) if offset in self.table else "" for _, offset, _ in sides]
        if {*names} == PLAIN and all(callers):
            names = [f"{name} in {caller}" for name, caller in zip(names, callers, strict=True)]
        return " x ".join(sorted(names))

    def close(self) -> None:
        """The race at hand has no more sides."""
        if len(self.sides) == 1:
            self.unread.append(f"a race with one side: {self.sides[0][0]} at 0x{self.sides[0][1]:x}")
        pairs: Counter[str] = Counter()
        for side in self.sides[1:]:
            pairs[self._pair(self.sides[0], side)] += side[2]
        if self.sides:
            self.races.append(Race(dict(pairs), frozenset((name, offset) for name, offset, _ in self.sides)))
        self.sides = []


def races(text: str, headers: Mapping[str, str], table: Mapping[int, Instruction]) -> tuple[list[Race], list[str]]:
    """The races of a racecheck report, and what of it could not be read.

    ``headers`` are the texts of the PTX headers by file name, ``table`` the line table of the kernel that ran, empty if there is none.
    """
    reader = _Reader(headers, table)
    for line in text.splitlines():
        reader.line(line.lstrip("=").strip())
    reader.close()
    return reader.races, reader.unread


def called_from(reported: Sequence[Race], table: Mapping[int, Instruction]) -> dict[str, list[str]]:
    """The callers of each side of the races; a side without any stays out."""
    found: dict[str, set[str]] = {}
    for race in reported:
        for side, offset in race.places:
            if offset in table and table[offset].caller:
                found.setdefault(side, set()).add(table[offset].caller)
    return {side: sorted(places) for side, places in sorted(found.items())}


def findings(text: str) -> int | None:
    """The tool's own count of findings; None: it did not come to its end."""
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    return sum(counts) if counts else None


def kinds(text: str) -> dict[str, int]:
    """What kinds of findings a report has, numbers left out."""
    found: Counter[str] = Counter()
    for said in _FINDING.findall(text):
        found[re.sub(r"0x[0-9a-f]+|\d+", "N", said.partition(" at ")[0])[:120]] += 1
    return dict(found.most_common())


def summarise(tool: str, text: str, headers: Mapping[str, str], table: Mapping[int, Instruction]) -> dict[str, Any]:
    """One report: its count, kinds, the lines of ours that it names, pairs of sides with their hazards, the pairs of each race,
    callers, and what of a racecheck report could not be read."""
    reported, unread = races(text, headers, table) if tool == "racecheck" else ([], [])
    pairs: Counter[str] = Counter()
    for race in reported:
        pairs.update(race.pairs)
    return {
        "findings": findings(text),
        "kinds": kinds(text),
        "lines": dict(Counter(f"{name}:{number}" for name, number in _LINE.findall(text)).most_common(40)),
        "pairs": dict(pairs.most_common()),
        "races": [sorted(race.pairs) for race in reported],
        "callers": called_from(reported, table),
        "unread": unread,
    }


def _uncalled(pair: str) -> str:
    return re.sub(r" in \w+", "", pair)


def reproduced(barriers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The pairs of JUSTIFIED whose kernels ran rightly and were reported for them, whoever calls, in this session, with those kernels."""
    return {
        pair: kernel
        for pair, kernel in JUSTIFIED.items()
        if any(
            row["kernel"] == kernel
            and row["tool"] == "racecheck"
            and row["exit"] == 0
            and not row["unread"]
            and _uncalled(pair) in row["pairs"]
            for row in barriers
        )
    }


def verdicts(row: Mapping[str, Any], justified: Mapping[str, str]) -> dict[str, int]:
    """How many findings of a row are justified by which kernel, how many are UNREAD, and how many UNJUSTIFIED.

    A race is justified if all its pairs are. A finding that no race was read for, and any of another tool, is not.
    """
    count: Counter[str] = Counter()
    for pairs in row["races"]:
        if not pairs or any(UNREAD in pair for pair in pairs):
            count[UNREAD] += 1
        elif all(pair in justified for pair in pairs):
            count[" and ".join(sorted({justified[pair] for pair in pairs}))] += 1
        else:
            count[UNJUSTIFIED] += 1
    count[UNJUSTIFIED] += max((row["findings"] or 0) - count.total(), 0)
    return {**count}


def complaints(found: Mapping[str, Any]) -> list[str]:
    """What keeps a summary from being good, one line each."""
    lines = [f"barriers: {row['error']}" for row in found["barriers"] if "error" in row]
    barriers = [row for row in found["barriers"] if row.get("tool") == "racecheck"]
    lines += [f"racecheck does not report kernel {RACY!r}" for row in barriers if row["kernel"] == RACY and not row["races"]]
    lines += [
        f"synccheck reports kernel {MEETS!r}"
        for row in found["barriers"]
        if row.get("tool") == "synccheck" and row["kernel"] == MEETS and row["findings"] != 0
    ]
    understood = any(row.get("tool") == "synccheck" and row["kernel"] == MEETS for row in found["barriers"])
    if any(row["tool"] == "synccheck" for row in found["models"]) and not understood:
        lines.append(f"synccheck did not look at kernel {MEETS!r}")
    lines += [f"barriers, kernel {row['kernel']!r}: {_unread(row)}" for row in barriers if row["unread"]]
    for row in found["models"]:
        tool = row["tool"]
        if row["exit"] != 0:
            lines.append(f"{tool}: exit {row['exit']}")
        lines += [f"{tool}: {case} differs from the run without a tool" for case, same in row.get("as_without", {}).items() if not same]
        if tool == "none":
            continue
        if row["findings"] is None:
            lines.append(f"{tool} did not come to its end")
        elif row["verdicts"][UNJUSTIFIED] != 0:
            lines.append(f"{tool}: {row['verdicts'][UNJUSTIFIED]} findings of {row['findings']} are {UNJUSTIFIED}")
        if row["unread"]:
            lines.append(f"{tool}: {_unread(row)}")
    return lines


def _unread(row: Mapping[str, Any]) -> str:
    return f"{len(row['unread'])} parts of the report cannot be read, the first: {row['unread'][0]}"


def judge(found: dict[str, Any]) -> None:
    """Add to a summary what is justified, what is not, and what else is wrong."""
    evidence = reproduced([row for row in found["barriers"] if "error" not in row])
    for row in found["models"]:
        if row["tool"] != "none":
            row["verdicts"] = verdicts(row, evidence)
    every = [row["verdicts"] for row in found["models"] if "verdicts" in row]
    found["unjustified"] = sum(row[UNJUSTIFIED] for row in every)
    found["unread"] = sum(row.get(UNREAD, 0) for row in every)
    found["justified"] = sum(sum(row.values()) for row in every) - found["unjustified"] - found["unread"]
    found["complaints"] = complaints(found)


def record(found: Mapping[str, Any]) -> dict[str, Any]:
    """A summary small enough to be committed: tools, kinds, pairs, callers and counts, a tool's runs together."""
    tools: dict[str, dict[str, Any]] = {}
    for row in found["models"]:
        into = tools.setdefault(row["tool"], {"cases": 0})
        into["cases"] += len(row["cases"])
        if row["tool"] != "none":
            into["findings"] = into.get("findings", 0) + (row["findings"] or 0)
            for key in ("kinds", "pairs", "verdicts"):
                into[key] = dict(Counter(into.get(key, {})) + Counter(row[key]))
        for side, places in row.get("callers", {}).items():
            of_side = into.setdefault("callers", {})
            of_side[side] = sorted({*of_side.get(side, []), *places})
    return {
        "device": found["device"],
        "version": next((line for line in found["version"] if line.startswith("Version")), ""),
        "barriers": {f"{row['kernel']}, {row['tool']}": row["pairs"] for row in found["barriers"] if row.get("findings")},
        "models": tools,
        "justified": found["justified"],
        "unjustified": found["unjustified"],
        "unread": found["unread"],
        "complaints": found["complaints"],
    }
