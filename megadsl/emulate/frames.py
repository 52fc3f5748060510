"""Return addresses of an emulated kernel, in the words of its text and of the spec."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadsl.diagnostics import declare, error

NO_ADDR2LINE = declare(
    "MK362",
    "no addr2line on PATH; the race detector names lines with it",
    "apt install binutils  (or your system's package of GNU binutils)",
)

_ROLE = re.compile(r"//\s*role: (\S+)")
_OP = re.compile(r"//\s*([^:]+):.*\[([^\[\]]+:\d+)\]\s*$")


@dataclass(frozen=True)
class Frame:
    """A place in the kernel's text or its headers. ``file`` is the file's name without its folder."""

    function: str
    file: str
    line: int


def frames_at(library: Path, addresses: Sequence[int]) -> dict[int, tuple[Frame, ...]]:
    """The calls, inlined ones included, that each return address stands for, innermost first. Raises MK362 without addr2line.

    The call is the byte before a return address.
    """
    known = _known.setdefault(library, {})
    fresh = [address for address in addresses if address not in known]
    if fresh:
        known |= _asked(library, fresh)
    return {address: known[address] for address in addresses}


_known: dict[Path, dict[int, tuple[Frame, ...]]] = {}  # libraries lie in the cache by their contents, and never change


def _asked(library: Path, addresses: Sequence[int]) -> dict[int, tuple[Frame, ...]]:
    tool = shutil.which("addr2line")
    if tool is None:
        raise error(NO_ADDR2LINE)
    command = [tool, "-e", str(library), "-a", "-f", "-i", "-C", *(hex(address - 1) for address in addresses)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: list[list[Frame]] = []
    names: list[str] = []
    for text in lines:
        if text.startswith("0x"):
            found.append([])
        elif not names:
            names.append(text)
        else:
            file, _, line = text.partition(" ")[0].rpartition(":")
            found[-1].append(Frame(_short(names.pop()), Path(file).name, int(line) if line.isdigit() else 0))
    return dict(zip(addresses, map(tuple, found), strict=True))


def _short(function: str) -> str:
    """The function's name without return type, template arguments and parameters."""
    while "<" in function:
        smaller = re.sub(r"<[^<>]*>", "", function)
        if smaller == function:
            break
        function = smaller
    return function.partition("(")[0].split(" ")[-1] or function


def spec_of(source: Sequence[str], line: int) -> tuple[str, str, str]:
    """Role, op and spec line that the comments above a line of kernel.cu name."""
    op = span = ""
    for text in reversed(source[:line]):
        role = _ROLE.search(text)
        if role:
            return role[1], op, span
        found = _OP.search(text)
        if found and not op:
            op, span = found[1].strip(), found[2]
    return "", op, span
