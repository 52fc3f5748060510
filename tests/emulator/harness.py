"""Building the kernels of this folder and launching them on numpy buffers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megadsl.build.host import build_library
from megadsl.emulate import Emulator, LaunchReport
from megadsl.resources import include

HERE = Path(__file__).resolve().parent


# Kernels that are one library, each in a namespace; a launch says which. detector.cu is one of its own: its tests name its lines.
TOGETHER = ("cluster", "exchange", "faults", "mma_loop", "payloads", "pipeline", "ring", "units")
WORDS = 32  # of Shape, whatever a kernel reads of them
_ENTRY = "\n#if defined(MK_HOST)\nMK_HOST_ENTRY(megakernel, Shape)\n#endif\n"


def _source(names: tuple[str, ...]) -> str:
    """One source of some kernels' files."""
    parts = [
        '#include "megadsl/exchange.h"\n#include "megadsl/ring.h"\n',
        f"struct Words {{\n  mk::u32 words[{WORDS}];\n}};\n",
    ]
    for name in names:
        text = (HERE / f"{name}.cu").read_text()
        assert text.endswith(_ENTRY) and text.count('extern "C" __global__') == 1
        text = text.removesuffix(_ENTRY).replace('extern "C" ', "")
        parts.append(f"namespace {name}_kernel {{\n{text}")
        parts.append(
            "static void enter(mk::Buffers buffers, Words words, mk::u32) {\n"
            "  Shape shape;\n  static_assert(sizeof shape <= sizeof words);\n"
            "  std::memcpy(&shape, &words, sizeof shape);\n  megakernel(buffers, shape);\n}\n}\n"
        )
    return "\n".join([*parts, f"MK_HOST_LAUNCHES(Words, {', '.join(f'{name}_kernel::enter' for name in names)})\n"])


def _library(name: str, define: str) -> tuple[str, ...]:
    """The kernels that are built with this one."""
    return TOGETHER if not define and name in TOGETHER else (name,)


@cache
def _built(names: tuple[str, ...], define: str) -> Emulator:
    source = _source(names) if names[0] in TOGETHER else (HERE / f"{names[0]}.cu").read_text()
    return Emulator(build_library(source, [include()], {define: "1"} if define else {}), source)


def emulator(name: str, define: str = "") -> Emulator:
    """The library with the kernel of ``name``.cu, compiled for the host, with one more macro if ``define`` names one."""
    return _built(_library(name, define), define)


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
    names = _library(name, define)
    manifest = {
        "blocks": blocks,
        "threads": threads,
        "cluster": cluster,
        "smem_bytes": smem_bytes,
        "shape": [*shape, *[0] * (WORDS - len(shape))] if padded and name in TOGETHER else shape,
        "buffers": {key: value.nbytes for key, value in buffers.items()},
    }
    addresses = {key: value.ctypes.data for key, value in buffers.items()}
    part = (names.index(name), 0)
    return emulator(name, define).launch(manifest, addresses, seed=seed, step_limit=step_limit, policy=policy, part=part)


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
