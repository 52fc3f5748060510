"""Several kernels as one library of the emulator: a build for all of them, which parses the headers and compiles the emulator once."""

from __future__ import annotations

from collections.abc import Sequence

ENTRY = "\n#if defined(MK_HOST)\nMK_HOST_ENTRY(megakernel, Shape)\n#endif\n"
EXTERN = 'extern "C" __global__'


def library(sources: Sequence[str], words: int, first: str = "") -> str:
    """One source of several ``megakernel``s, each in a namespace; the launch's ``part`` says which.

    ``words`` are those of the Shape that all of them take, at least as many as any of them reads. ``first`` is the text of another one
    that keeps the numbers of its lines: it becomes kernel 0.
    """
    parts = [_without_entry(first)] if first else []
    parts += ['#include "megadsl/kernel.h"\n', f"struct Words {{\n  mk::u32 words[{words}];\n}};\n"]
    entries = []
    for index, source in enumerate([*([""] if first else []), *sources]):
        inside, text = (f"kernel{index}::", _without_entry(source)) if source else ("", "")
        entries.append(f"{inside}enter")
        enter = (
            "static void enter(mk::PagedBuffers buffers, Words words, mk::u32) {\n"  # with those of any kernel
            "  Shape shape;\n  static_assert(sizeof shape <= sizeof words);\n"
            "  std::memcpy(&shape, &words, sizeof shape);\n  megakernel(buffers, shape);\n}\n"
        )
        parts.append(f"namespace kernel{index} {{\n{text}\n{enter}}}\n" if source else enter)
    return "\n".join([*parts, f"MK_HOST_LAUNCHES(Words, {', '.join(entries)})\n"])


def _without_entry(source: str) -> str:
    text = source.rstrip() + "\n"
    assert text.endswith(ENTRY) and text.count(EXTERN) == 1
    return text.removesuffix(ENTRY).replace(EXTERN, "__global__")
