"""Building the kernels of this folder and launching them on numpy buffers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megadsl.build.host import build_library
from megadsl.emulate import Emulator, LaunchReport
from megadsl.resources import include
from tests.libraries import library

HERE = Path(__file__).resolve().parent


# Kernels that are one library; a launch says which. The tests of the race detector name the lines of the first.
TOGETHER = ("detector", "cluster", "exchange", "faults", "formats", "mma_loop", "payloads", "pipeline", "ring", "units")
WORDS = 32  # of Shape, whatever a kernel reads of them


@cache
def emulator(define: str = "") -> Emulator:
    """The library of all kernels of this folder, compiled for the host, with one more macro if ``define`` names one."""
    first, *others = ((HERE / f"{name}.cu").read_text() for name in TOGETHER)
    source = library(others, WORDS, first)
    return Emulator(build_library(source, [include()], {define: "1"} if define else {}), source)


def launch(
    name: str,
    shape: list[int],
    *,
    blocks: int = 1,
    threads: int = 32,
    cluster: int = 1,
    smem_bytes: int = 4096,
    seed: int = 0,
    step_limit: int = 0,
    policy: int = 0,
    define: str = "",
    padded: bool = True,
    **buffers: NDArray[np.uint8],
) -> LaunchReport:
    """Launch ``name``.cu with these Shape words and uint8 buffers, by their names in mk::Buffers."""
    manifest = {
        "blocks": blocks,
        "threads": threads,
        "cluster": cluster,
        "smem_bytes": smem_bytes,
        "shape": [*shape, *[0] * (WORDS - len(shape))] if padded else shape,
        "buffers": {key: value.nbytes for key, value in buffers.items()},
    }
    addresses = {key: value.ctypes.data for key, value in buffers.items()}
    part = (TOGETHER.index(name), 0)
    return emulator(define).launch(manifest, addresses, seed=seed, step_limit=step_limit, policy=policy, part=part)


def room(count: int) -> NDArray[np.uint8]:
    """``count`` zero bytes at a multiple of 256."""
    raw = np.zeros(count + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + count]


def filled(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """A buffer with the bytes of ``values``."""
    buffer = room(values.nbytes)
    buffer[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return buffer
