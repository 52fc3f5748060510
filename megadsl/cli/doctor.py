"""``megadsl doctor``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megadsl.diagnostics import MegadslError

if TYPE_CHECKING:
    from megadsl.build.gpus import Gpu

EXAMPLE = "Example: megadsl doctor"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``mend`` is empty when it is fine; ``needed_by`` says what does not work without it."""

    what: str
    state: str
    mend: str = ""
    needed_by: frozenset[str] = frozenset()

    def breaks(self, use: str) -> bool:
        return bool(self.mend) and use in self.needed_by


CUDA = "run on the GPU"
CPU = "run in the emulator"
COMPILE = "compile"
DEMO = "make demo"


def command() -> None:
    """Say what is there, what is missing, and the mend.

    Looks at compiler, driver, GPUs, host compiler, cache and demo weights. Exits
    with 0 when kernels can be run, on a GPU or in the emulator, and with 1 when not.
    """
    found = list(_findings())
    width = max(len(finding.what) for finding in found)
    for finding in found:
        typer.echo(f"{'!' if finding.mend else ' '} {finding.what:<{width}}  {finding.state}")
        if finding.mend:
            typer.echo(f"  {'':<{width}}  mend: {finding.mend}")
    typer.echo()
    works = {use: not any(finding.breaks(use) for finding in found) for use in (COMPILE, CUDA, CPU, DEMO)}
    for use, fine in works.items():
        typer.echo(f"{use}: {'yes' if fine else 'no'}")
    if not (works[CUDA] or works[CPU]):
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    yield _tool("nvcc")
    yield _tool("nvdisasm")
    yield from _gpu()
    yield from _architectures()
    yield _host_compiler()
    yield _torch()
    yield _cache()
    yield from _demo()


def _tool(name: str) -> Finding:
    from megadsl.build.toolchain import find_tool

    needed_by = frozenset({COMPILE, CUDA} if name == "nvcc" else {COMPILE})
    try:
        tool = find_tool(name)
    except MegadslError as problem:
        return _missing(name, problem, needed_by)
    return Finding(name, f"{tool.release[0]}.{tool.release[1]} at {tool.path}", needed_by=needed_by)


def _missing(what: str, problem: MegadslError, needed_by: frozenset[str]) -> Finding:
    (diagnostic,) = problem.diagnostics
    return Finding(what, diagnostic.message, diagnostic.mend, needed_by)


def _gpu() -> Iterator[Finding]:
    from megadsl.build.gpus import bindings_installed, driver_version, gpus
    from megadsl.machine import ARCHES, DEFAULT_ARCH, machine

    needed_by = frozenset({CUDA})
    if not bindings_installed():
        yield Finding("cuda-python", "not installed", "pip install 'megadsl[cuda]'", needed_by)
        return
    yield Finding("cuda-python", version("cuda-bindings"))  # what is imported; cuda-python itself is an empty package around it
    driver, oldest = driver_version(), machine(DEFAULT_ARCH).min_driver
    if driver is None:
        mend = "install one of the 580 series or newer, or use --device cpu"
        yield Finding("driver", "no NVIDIA driver on this machine", mend, needed_by)
        return
    mend = f"install a driver for CUDA {_dotted(oldest)} or newer" if driver < oldest else ""
    yield Finding("driver", f"supports CUDA {_dotted(driver)}", mend, needed_by)
    listed = gpus()
    for index, gpu in enumerate(listed):
        state = f"{gpu.name}, {gpu.arch}, {gpu.sms} SMs, {gpu.memory / 2**30:.0f} GiB"
        refused = "" if gpu.runs(DEFAULT_ARCH) else f": kernels for {DEFAULT_ARCH} do not run on it{_others(gpu)}"
        yield Finding(f"GPU {index}", state + refused)
    if not any(gpu.runs(arch) for gpu in listed for arch in ARCHES):
        mend = f"use a machine with a GPU of {ARCHES[0]} or newer, or --device cpu"
        yield Finding("GPU", f"none that runs any of {', '.join(ARCHES)}", mend, needed_by)


def _others(gpu: Gpu) -> str:
    """The last architecture whose kernels a GPU runs, as an option."""
    from megadsl.machine import ARCHES

    found = [arch for arch in ARCHES if gpu.runs(arch)]
    return f", those for {found[-1]} do: --arch {found[-1]}" if found else ""


def _architectures() -> Iterator[Finding]:
    from megadsl.machine import MACHINES

    for arch, machine in MACHINES.items():
        yield Finding(f"kernels for {arch}", machine.proof)


def _dotted(driver: int) -> str:
    return f"{driver // 1000}.{driver % 1000 // 10}"


def _host_compiler() -> Finding:
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding("g++", "not on PATH", "apt-get install g++", frozenset({CPU, CUDA, COMPILE}))  # nvcc preprocesses with it
    return Finding("g++", compiler)


def _torch() -> Finding:
    try:
        return Finding("torch", version("torch"))
    except PackageNotFoundError:
        return Finding("torch", "not installed", "pip install torch", frozenset({CUDA, CPU}))


def _cache() -> Finding:
    from megadsl.entries import cache_root

    root = cache_root()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        return Finding("cache", f"{root} cannot be written", "make it writable, or set MEGADSL_CACHE_DIR to a folder that is")
    files = (Path(folder) / name for folder, _, names in os.walk(root) for name in names)
    return Finding("cache", f"{root}, {sum(map(_size, files)) / 2**20:,.0f} MiB")


def _size(path: Path) -> int:
    """In bytes; 0 of a file that is gone, as those of another process's builds may be by now."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _demo() -> Iterator[Finding]:
    from megadsl.runtime.gguf import demo_weights

    needed_by = frozenset({DEMO})
    for package in ("gguf", "tokenizers"):
        if find_spec(package) is None:
            yield Finding(package, "not installed", "pip install 'megadsl[weights]'", needed_by)
    try:
        yield Finding("demo weights", str(demo_weights()))
    except MegadslError as problem:
        yield _missing("demo weights", problem, needed_by)
