"""The line table of a cubin: for each instruction the source line that it comes from, and the lines that this was inlined at."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FRAME = re.compile(r'//## File "([^"]+)", line (\d+)( inlined at)?')
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)")


@dataclass(frozen=True)
class Instruction:
    """An instruction's opcode and its frames, (path, line), the innermost first; none for what the compiler added by itself."""

    opcode: str
    frames: tuple[tuple[str, int], ...]

    @property
    def file(self) -> str:
        """Name of the file that it stands in itself."""
        return name_of(self.frames[0][0]) if self.frames else ""

    @property
    def line(self) -> int:
        return self.frames[0][1] if self.frames else 0

    @property
    def caller(self) -> str:
        """file:line of who called the PTX wrapper that it stands in: the first frame in none of the PTX headers."""
        return next((f"{name_of(path)}:{number}" for path, number in self.frames if "/ptx/" not in path), "")


def name_of(path: str) -> str:
    """A file's name without its folders."""
    return path.rpartition("/")[2]


def line_table(listing: str, kernel: str) -> dict[int, Instruction]:
    """The instructions of a kernel by offset; ``listing`` is what ``nvdisasm --print-line-info-inline`` prints of its cubin.

    A chain of frames, the innermost first, stands before the first of its instructions.
    """
    found: dict[int, Instruction] = {}
    chain: list[tuple[str, int]] = []
    inside, chained = False, False
    for line in listing.splitlines():
        if "\t.section\t" in line:
            inside, chain = f".text.{kernel}," in line, []
        if not inside:
            continue
        if (frame := _FRAME.search(line)) is not None:
            chain = [*(chain if chained else []), (frame[1], int(frame[2]))]
            chained = frame[3] is not None
        elif (instruction := _INSTRUCTION.search(line)) is not None:
            found[int(instruction[1], 16)] = Instruction(instruction[2], tuple(chain))
    return found


def placed(table: dict[int, Instruction]) -> dict[int, Instruction]:
    """Those that come from a line of the source."""
    return {offset: instruction for offset, instruction in table.items() if instruction.frames}
