"""What compute-sanitizer's reports say, and which of racecheck's a kernel of tools/barriers.cu shows to be false.

racecheck names the two sides of a race by instruction and line, not by call stack: as everything is inlined into one kernel, the
line is that of a PTX wrapper, and the function's name that of whatever else was inlined there. So a side is taken for the wrapper
that its line stands in, and a race for a pair of wrappers. A pair that JUSTIFIED names is justified if its kernel, which does only
that and is right by PTX, is reported for the same pair in the same session. Who called a wrapper is read from nvdisasm's line
table of the same cubin, for the reader to compare: that the pair is used the same way in a model is shown by the plan checker and by
the race detector, not here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megadsl.resources import include

UNJUSTIFIED = "UNJUSTIFIED"

# side x side: the kernel of tools/barriers.cu that does this rightly and is reported for it
JUSTIFIED = {
    "read ld_shared x write bulk_load": "elect",
    "read ld_shared_volatile x write st_shared_volatile": "hint",
}
RACY = "race"  # the kernel that must be reported: else racecheck sees nothing

_LINE = re.compile(r"([\w.]+\.(?:h|cu)):(\d+)")
_FINDING = re.compile(
    r"=+ (?:Error: |Warning: )?((?:Race reported|Potential \w+ hazard|Invalid |Uninitialized |Barrier error|Program hit).*)"
)
_SIDE = re.compile(r"(Read|Write) access at .*?\+0x([0-9a-f]+) in ([\w.]+):(\d+)(?: \[(\d+) hazards?\])?$")
_FRAME = re.compile(r'//## File "([^"]+)", line (\d+)( inlined at)?')
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


@dataclass(frozen=True)
class Race:
    """One of racecheck's reports: its pairs of sides, as in JUSTIFIED, how many hazards each pair has, and where its sides stand.

    ``places`` are (side, offset of the instruction in the kernel).
    """

    pairs: Mapping[str, int]
    places: frozenset[tuple[str, int]]


def headers() -> dict[str, str]:
    """The PTX headers' texts by file name, as a tool names them."""
    return {path.name: path.read_text() for path in sorted((include() / "megadsl" / "ptx").glob("*.h"))}


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


def _side(access: str, file: str, line: int, headers: Mapping[str, str]) -> str:
    access = access.lower()
    return f"{access} {wrapper_at(headers.get(file, ''), line, access) or f'{file}:{line}'}"


def races(text: str, headers: Mapping[str, str]) -> list[Race]:
    """The races of a racecheck report; ``headers`` are the texts of the PTX headers by file name."""
    found: list[Race] = []
    sides: list[tuple[str, int, int]] = []  # of the race that is being read: name, offset, hazards; the first against all others

    def close() -> None:
        pairs: Counter[str] = Counter()
        for name, _, hazards in sides[1:]:
            pairs[" x ".join(sorted((sides[0][0], name)))] += hazards
        if sides:
            found.append(Race(dict(pairs), frozenset((name, offset) for name, offset, _ in sides)))
        sides.clear()

    for line in text.splitlines():
        side = _SIDE.search(line)
        if side is None or "Race reported between" in line:
            close()
        if side is not None:
            name = _side(side[1], side[3], int(side[4]), headers)
            sides.append((name, int(side[2], 16), int(side[5] or 1)))
    close()
    return found


def callers(listing: str, kernel: str) -> dict[int, str]:
    """Who called the PTX wrapper that an instruction of a kernel comes from: file:line by offset.

    ``listing`` is what ``nvdisasm -gi`` prints of the cubin. A chain of frames, the innermost first, stands before the first of
    its instructions. The caller is the first frame in none of the PTX headers.
    """
    found: dict[int, str] = {}
    caller, inside, chained = "", False, False
    for line in listing.splitlines():
        if "\t.section\t" in line:
            inside = f".text.{kernel}," in line
        if not inside:
            continue
        if (frame := _FRAME.search(line)) is not None:
            if not chained:
                caller = ""
            if not caller and "/ptx/" not in frame[1]:
                caller = f"{frame[1].rpartition('/')[2]}:{frame[2]}"
            chained = frame[3] is not None
        elif caller and (instruction := _INSTRUCTION.search(line)) is not None:
            found[int(instruction[1], 16)] = caller
    return found


def called_from(text: str, headers: Mapping[str, str], listing: str, kernel: str) -> dict[str, list[str]]:
    """The callers of each side of a racecheck report's races; a side without any stays out."""
    known = callers(listing, kernel)
    found: dict[str, set[str]] = {}
    for race in races(text, headers):
        for side, offset in race.places:
            if offset in known:
                found.setdefault(side, set()).add(known[offset])
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


def summarise(text: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """One report: its count, kinds, the lines of ours that it names, pairs of sides with their hazards, and the pairs of each race."""
    reported = races(text, headers)
    pairs: Counter[str] = Counter()
    for race in reported:
        pairs.update(race.pairs)
    return {
        "findings": findings(text),
        "kinds": kinds(text),
        "lines": dict(Counter(f"{name}:{number}" for name, number in _LINE.findall(text)).most_common(40)),
        "pairs": dict(pairs.most_common()),
        "races": [sorted(race.pairs) for race in reported],
    }


def reproduced(barriers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The pairs of JUSTIFIED whose kernels ran rightly and were reported for them in this session, with those kernels."""
    return {
        pair: kernel
        for pair, kernel in JUSTIFIED.items()
        if any(row["kernel"] == kernel and row["tool"] == "racecheck" and row["exit"] == 0 and pair in row["pairs"] for row in barriers)
    }


def verdicts(row: Mapping[str, Any], justified: Mapping[str, str]) -> dict[str, int]:
    """How many findings of a row are justified by which kernel, and how many are UNJUSTIFIED.

    A race is justified if all its pairs are. A finding that could not be read, and any of another tool, is not.
    """
    count: Counter[str] = Counter()
    for pairs in row["races"]:
        if pairs and all(pair in justified for pair in pairs):
            count[" and ".join(sorted({justified[pair] for pair in pairs}))] += 1
    count[UNJUSTIFIED] = max((row["findings"] or 0) - count.total(), len(row["races"]) - count.total(), 0)
    return {**count}


def complaints(found: Mapping[str, Any]) -> list[str]:
    """What keeps a summary from being good, one line each."""
    lines = [f"barriers: {row['error']}" for row in found["barriers"] if "error" in row]
    barriers = [row for row in found["barriers"] if row.get("tool") == "racecheck"]
    lines += [f"racecheck does not report kernel {RACY!r}" for row in barriers if row["kernel"] == RACY and not row["races"]]
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
    return lines


def judge(found: dict[str, Any]) -> None:
    """Add to a summary what is justified, what is not, and what else is wrong."""
    evidence = reproduced([row for row in found["barriers"] if "error" not in row])
    for row in found["models"]:
        if row["tool"] != "none":
            row["verdicts"] = verdicts(row, evidence)
    every = [row["verdicts"] for row in found["models"] if "verdicts" in row]
    found["unjustified"] = sum(row[UNJUSTIFIED] for row in every)
    found["justified"] = sum(sum(row.values()) for row in every) - found["unjustified"]
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
        "complaints": found["complaints"],
    }
