"""Hand-written mistakes in tests/specs/broken: every finding's code, line, column, words and mend; what is mended compiles.

Below a broken line, comments say what is found there and how it is mended as the message says:

    # MK113 `mk.linear(` | words of the message | words of the mend
    # mend: 64 => «128»

The column is where the text in backticks last begins (none: the whole line). A mend replaces a text that stands once in the
function; what is in «» must stand word for word in a message's mend, so that code in messages cannot rot («at most (\\d+)»
takes a number from there). The comments are all that may be found, in any order. A finding about a schedule that stands at
an op is marked ``spec``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import megadsl as mk
from megadsl.check.checker import check_plan
from megadsl.diagnostics import Diagnostic, MegadslError
from megadsl.dsl.registry import load
from megadsl.lower.pipeline import lower
from megadsl.machine import DEFAULT_ARCH, machine
from tests.dsl_tools import findings

BROKEN = Path(__file__).parent / "specs" / "broken"
SCHEDULED = BROKEN / "schedules.py"  # its kernel ``step`` is what schedule functions of all files are for
FIELDS = {"hidden": 128, "layers": 2, "vocab": 256, "nothing": None}
FUNCTION = re.compile(r"((?:@mk\.kernel\n(?:#.*\n)*)?def (\w+)\(.*\n(?:(?:[ #].*)?\n)*)")
EXPECTED = re.compile(r"^ *# (MK\d+) (spec )?`(.*)` \| (.+) \| (.+)$")
MEND = re.compile(r"^ *# mend: (.+?) =>(?: (.*))?$")
COMMENT = re.compile(r"^ *# (MK\d|mend)")
HOLE = re.compile(r"«(.*?)»")


@dataclass(frozen=True)
class Expected:
    """A finding at ``line`` of the file, where ``mark`` stands."""

    code: str
    line: int
    column: int
    message: str
    mend: str


@dataclass(frozen=True)
class Case:
    """A function of a file of broken ones, what is found in it, and the replacements that mend it."""

    path: Path
    name: str
    source: str
    first: int
    expected: tuple[Expected, ...]
    mends: tuple[tuple[str, str], ...]

    @property
    def plain(self) -> str:
        """The source without the comments."""
        return "".join(line for line in self.source.splitlines(keepends=True) if not line.lstrip().startswith("#"))

    def plain_line(self, line: int) -> int:
        """Where a line of the file stands in ``plain``, from 1."""
        above = self.source.splitlines()[: line - self.first]
        return sum(not text.lstrip().startswith("#") for text in above)


def _cases(path: Path) -> list[Case]:
    text = path.read_text()
    lines = text.splitlines()
    found = []
    for function in FUNCTION.finditer(text):
        first = text[: function.start()].count("\n")
        expected, mends, code = [], [], first
        for i in range(first, first + function[1].count("\n")):
            if wanted := EXPECTED.match(lines[i]):
                at = next(n for n, line in enumerate(lines) if wanted[3] in line) if wanted[2] else code
                assert wanted[3] in lines[at], f"{path}:{at + 1} has no {wanted[3]!r}"
                column = lines[at].rindex(wanted[3]) + 1 if wanted[3] else 0
                expected.append(Expected(wanted[1], at + 1, column, wanted[4], wanted[5]))
            elif mend := MEND.match(lines[i]):
                mends.append((mend[1], mend[2] or ""))
            elif lines[i].strip():
                assert not COMMENT.match(lines[i]), f"{path}:{i + 1}: a comment that says nothing: {lines[i].strip()}"
                code = i
        if expected:
            found.append(Case(path, function[2], function[1], first, tuple(expected), tuple(mends)))
    return found


CASES = {f"{path.stem}:{case.name}": case for path in sorted(BROKEN.glob("*.py")) for case in _cases(path)}


def codes() -> set[str]:
    """What the broken files provoke."""
    return {e.code for case in CASES.values() for e in case.expected}


def compiled(path: Path, name: str, blocks: int) -> None:
    """Lower and check a kernel of the file, or the kernel ``step`` of SCHEDULED under the file's schedule function of that name."""
    function = getattr(_module(path), name)
    kernel = function if isinstance(function, mk.Kernel) else load(f"{SCHEDULED}:step")[0]
    if kernel is not function:
        kernel.records.clear()
        with mk.schedule(kernel, arch=DEFAULT_ARCH) as s:
            function(s)
    asked = any(getattr(r, "field", "") == "blocks" for r in kernel.overrides_for(DEFAULT_ARCH).records)
    state = lower(
        kernel.trace(FIELDS, tokens=1),
        machine(DEFAULT_ARCH),
        blocks=None if asked else blocks,
        overrides=kernel.overrides_for(DEFAULT_ARCH),
    )
    if wrong := check_plan(state.plan, state.machine).findings:
        raise MegadslError(list(wrong))


def _module(path: Path) -> object:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def found(name: str) -> tuple[Diagnostic, ...]:
    case = CASES[name]
    return tuple(findings(lambda: compiled(case.path, case.name, blocks=4)))


def _taken(said: str, shown: tuple[Diagnostic, ...]) -> str:
    """The words, or the number, that a mend says."""
    pattern = said if r"(\d+)" in said else f"({re.escape(said)})"
    hits = [hit for d in shown if (hit := re.search(pattern, d.mend))]
    assert hits, f"no mend says {said!r}:\n" + "\n".join(map(str, shown))
    return hits[0][1]


def mended(case: Case, shown: tuple[Diagnostic, ...]) -> str:
    """The function as its mends leave it; what is in «» is taken from the messages."""
    assert case.mends, "no mend is given"
    source = case.plain
    for old, new in case.mends:
        old = old.replace("\\n", "\n")
        new = HOLE.sub(lambda hole: _taken(hole[1], shown), new)
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in:\n{source}"
        source = source.replace(old, new.replace("\\n", "\n").replace("return return", "return"))
    return source.replace("stages=..., stage_bytes=..., window=...", "stages=2, stage_bytes=8192, window=8192").replace("(...)", "()")
