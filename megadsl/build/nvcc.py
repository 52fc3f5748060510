"""kernel.cu to kernel.cubin, with what ptxas says about it; and MEGADSL_KEEP, which copies the stages out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadsl.build.cache import cached, headers_digest
from megadsl.build.toolchain import find_tool
from megadsl.diagnostics import declare, error
from megadsl.machine import code_for, virtual

NVCC_FAILED = declare(
    "MK302",
    "nvcc refused the emitted kernel",
    "if the first line below is in a header of yours, mend it there; else report it with the kernel.cu that MEGADSL_KEEP=cu leaves",
)
KEEP_UNKNOWN = declare(
    "MK307",
    "MEGADSL_KEEP names an unknown stage {stage!r}",
    "give a comma-separated list out of: {known}",
)

_AGAIN = re.compile(r'^(#line \d+) "kernel\.cu"$', re.MULTILINE)  # the text goes on behind a header of the user's

STAGES = {"plan": "plan.txt", "cu": "kernel.cu", "ptx": "kernel.ptx", "cubin": "kernel.cubin", "sass": "kernel.sass"}


@dataclass(frozen=True)
class CubinResult:
    """A compiled kernel. ``path`` lies in the cache beside kernel.cu and kernel.ptx and must not be changed.

    ``log`` is the compiler's own text. ``registers`` is per thread; ``spill_bytes`` (stores and loads) and
    ``stack_bytes`` are per thread too, over every function of the cubin.
    """

    path: Path
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def build_cubin(
    source: str,
    arch: str,
    include_dirs: Sequence[Path],
    defines: Mapping[str, str],
    keep: Sequence[str] = (),
    on: str | None = None,
) -> CubinResult:
    """Compile ``source`` (the text of a kernel.cu) for ``arch`` ("sm_90a"), or take it from the cache.

    ``on`` is the architecture of the GPU that is to run it ("sm_90"; default: the one it is for): where that is newer, the kernel's
    PTX is ``arch``'s and its machine code the GPU's.
    ``keep`` lists stages (keys of STAGES) to copy to the keep folder, on top of those in MEGADSL_KEEP. The cache key is the
    compiler's build, the flags, the source and every header under ``include_dirs``. Raises MK302 with nvcc's own lines.
    """
    wanted = kept_stages(keep)
    nvcc = find_tool("nvcc")
    keep_text("cu", source, wanted)
    flags = [
        *("-cubin", f"-gencode=arch={virtual(arch)},code={code_for(arch, on or arch)}"),
        *("-std=c++17", "-O3", "-lineinfo", "--ptxas-options=-v"),
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    ]
    includes = [f"-I{folder.resolve()}" for folder in include_dirs]

    def build(entry: Path) -> None:
        entry.mkdir()
        _compile([str(nvcc.path), *flags, *includes], source, entry)

    entry = cached(["cubin", nvcc.build, *flags, headers_digest(include_dirs), source], ".nvcc", build)
    for stage in {"ptx", "cubin"} & wanted:
        _keep(stage, (entry / STAGES[stage]).read_bytes())
    cubin = entry / STAGES["cubin"]
    if "sass" in wanted:
        _keep("sass", disassemble(cubin).encode())
    return _result(cubin, (entry / "log.txt").read_text())


def _compile(command: list[str], source: str, entry: Path) -> None:
    """Run nvcc in ``entry``, which lies in a temporary folder of the cache, and keep there what later readers want."""
    # Line info has to name the file where profilers will find it: in the finished entry, not in the temporary one.
    home = entry.parent.parent / entry.name / STAGES["cu"]
    scratch = entry.parent
    (entry / STAGES["cu"]).write_text(source)
    behind_headers = _AGAIN.sub(lambda found: f'{found[1]} "{_c_string(home)}"', source)
    (scratch / STAGES["cu"]).write_text(f'#line 1 "{_c_string(home)}"\n{behind_headers}')
    command = [*command, "--keep", "--keep-dir", ".", STAGES["cu"], "-o", STAGES["cubin"]]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    log = (done.stdout + done.stderr).replace(str(home), STAGES["cu"])
    if done.returncode != 0:
        lines = [line for line in log.splitlines() if not line.startswith("ptxas info")]
        raise error(NVCC_FAILED, detail="\n".join([*lines[:40], "    " + " ".join(command)]))
    for stage in ("ptx", "cubin"):
        os.replace(scratch / STAGES[stage], entry / STAGES[stage])
    (entry / "log.txt").write_text(log)


def _c_string(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _result(cubin: Path, log: str) -> CubinResult:
    def figures(pattern: str) -> list[int]:
        return [int(figure) for figure in re.findall(pattern, log)]

    return CubinResult(
        path=cubin,
        log=log,
        registers=max(figures(r"Used (\d+) registers"), default=0),
        spill_bytes=sum(figures(r"(\d+) bytes spill")),
        stack_bytes=sum(figures(r"(\d+) bytes stack frame")),
    )


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin, each instruction with the source line it comes from and the lines that this was inlined at."""
    command = [str(find_tool("nvdisasm").path), "--print-code", "--print-line-info-inline", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kept_stages(keep: Sequence[str] = ()) -> frozenset[str]:
    """The stages in ``keep`` and in MEGADSL_KEEP ("plan,cu,ptx,cubin,sass"). Raises MK307 for an unknown one."""
    asked = [stage.strip() for stage in os.environ.get("MEGADSL_KEEP", "").split(",") if stage.strip()]
    wanted = frozenset([*keep, *asked])
    for stage in sorted(wanted - STAGES.keys()):
        raise error(KEEP_UNKNOWN, stage=stage, known=",".join(STAGES))
    return wanted


def keep_text(stage: str, text: str, wanted: frozenset[str]) -> None:
    """Copy ``text`` to the keep folder when ``stage`` is wanted: ``$MEGADSL_KEEP_DIR``, or megadsl-keep in the current folder."""
    if stage in wanted:
        _keep(stage, text.encode())


def _keep(stage: str, content: bytes) -> None:
    folder = Path(os.environ.get("MEGADSL_KEEP_DIR", "megadsl-keep"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAGES[stage]).write_bytes(content)
