"""kernel.cu to a shared library for the emulator, with the host's g++."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from megadsl.build.cache import cached, headers_digest
from megadsl.diagnostics import declare, error
from megadsl.resources import templates

COMPILER_MISSING = declare(
    "MK311",
    "no g++ on PATH; the emulator compiles kernels for the CPU with it",
    "apt install g++  (or your system's package of GCC's C++ compiler, 9 or newer)",
)
COMPILER_REFUSED = declare(
    "MK312",
    "g++ refused the emitted kernel",
    "if the first line below is in a header of yours, mend it there; else report it with the kernel.cu that MEGADSL_KEEP=cu leaves",
)

# The same bits on every CPU: no -march, and no fused multiply-add that the source does not ask for.
_FLAGS = (
    *("-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-fvisibility=hidden", "-fcf-protection=none"),
    *("-w", "-DMK_HOST"),
)

# The race detector: the compiler reports plain accesses to functions of ours (templates/host/detect/tsan.h), so the link is
# a step of its own: linked with the same flag, the library would ask for the stock runtime. Lines only, no variables.
DETECT = "MK_DETECT"
_DETECT_FLAGS = ("-O2", "-fsanitize=thread", "-g1")
_PLAIN_FLAGS = ("-O1",)  # launches take as long as with -O2, building two thirds of its time


def build_library(source: str, include_dirs: Sequence[Path], defines: Mapping[str, str]) -> Path:
    """Compile ``source`` (the text of a kernel.cu that ends with MK_HOST_ENTRY) for the emulator, or take it from the cache.

    ``include_dirs`` are searched in order for the kernel's headers; ``defines`` are macros by name. The cache key is the
    compiler's version, the flags, the source and every header, the emulator's own included. Returns the library's path.
    With DETECT among the macros the library has the race detector in it. Raises MK311 without g++, MK312 with its own lines
    when it refuses.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise error(COMPILER_MISSING)
    flags = [*_FLAGS, *(_DETECT_FLAGS if DETECT in defines else _PLAIN_FLAGS)]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    includes = [f"-I{folder.resolve()}" for folder in (*include_dirs, templates())]

    def build(library: Path) -> None:
        text = library.parent / "kernel.cu"
        text.write_text(source)
        if DETECT not in defines:
            _run([compiler, *flags, *includes, "-x", "c++", text.name, "-o", library.name], library.parent)
            return
        _run([compiler, *flags, *includes, "-c", "-x", "c++", text.name, "-o", "kernel.o"], library.parent)
        _run([compiler, "-shared", "kernel.o", "-o", library.name], library.parent)

    headers = headers_digest([*include_dirs, templates() / "host"])
    return cached(["host library", _version(compiler), *flags, headers, source], ".so", build)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise error(COMPILER_REFUSED, detail="\n".join([*done.stderr.splitlines()[:40], "    " + " ".join(command)]))


@cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "-v"], capture_output=True, text=True, check=True)
    return done.stderr  # target and version
