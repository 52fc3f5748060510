"""What a cubin says of itself: an ELF file of 64 bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _FUNCTION = 2, 2  # kinds of a section, and of a symbol in it


def function_bytes(cubin: Path, name: str) -> int:
    """Bytes of machine code of a function, with what lies behind it in its section (what it calls); 0 where there is no such function."""
    return next((size for symbol, size in _functions(cubin.read_bytes()) if symbol == name), 0)


def _functions(elf: bytes) -> Iterator[tuple[str, int]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [_SECTION.unpack_from(elf, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        names = sections[link][4]
        for at in range(offset, offset + length, _SYMBOL.size):
            name, info, _, _, _, bytes_ = _SYMBOL.unpack_from(elf, at)
            if info & 0xF == _FUNCTION:
                begin = names + name
                yield elf[begin : elf.index(b"\0", begin)].decode(), bytes_
