"""Finding NVIDIA's compiler and its two disassemblers, and asking what they are.

Looked for in this order: the wheels installed beside megadsl (``pip install 'megadsl[cuda]'``), then ``$CUDA_HOME``, then
``$PATH``. The wheels come first because their version is the one that megadsl is tested with.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megadsl.diagnostics import declare, error, warn

TOOL_MISSING = declare(
    "MK301",
    "no {tool} found: looked in the installed NVIDIA wheels, in CUDA_HOME ({home}) and on PATH",
    "pip install 'megadsl[cuda]'  (or: pip install {wheels}), or set CUDA_HOME to a CUDA 13 toolkit",
)
TOOLKIT_OLD = declare(
    "MK304",
    "{path} is CUDA {found}; megadsl needs {oldest} or newer",
    "pip install 'megadsl[cuda]', or set CUDA_HOME to a newer toolkit",
)
TOOLKIT_NEW = declare(
    "MK305",
    "{path} is CUDA {found}; megadsl is tested with {tested}, and a driver of the 580 series may refuse what a newer toolkit makes",
    "pip install 'megadsl[cuda]' for the tested compiler, or update the driver",
)
TOOL_BROKEN = declare(
    "MK306",
    "{path} cannot be run: {reason}",
    "reinstall it: pip install --force-reinstall {wheels}",
)

OLDEST_TOOLKIT = (12, 8)
TESTED_TOOLKIT = (13, 0)

_WHEELS = {
    "nvcc": "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88"
    " nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85",
    "cuobjdump": "nvidia-cuda-cuobjdump==13.5.37",
    "nvdisasm": "nvidia-cuda-nvdisasm==13.5.37",
}


@dataclass(frozen=True)
class Tool:
    """An executable of the CUDA toolkit. ``release`` is (13, 0); ``build`` is the full text that names its build."""

    path: Path
    release: tuple[int, int]
    build: str


def _bin_folders() -> Iterator[Path]:
    """Where toolkits keep their programs, best first."""
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(Path(folder).glob("cu*/bin"), reverse=True)
    home = os.environ.get("CUDA_HOME")
    if home:
        yield Path(home) / "bin"
    yield from (Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)


def find_tool(name: str) -> Tool:
    """The tool called ``name``: "nvcc", "cuobjdump" or "nvdisasm".

    Raises MK301 when there is none, MK306 when it does not run, MK304 when nvcc is too old. Warns MK305 once when nvcc
    is of a newer release than the tested one.
    """
    for folder in _bin_folders():
        found = shutil.which(name, path=str(folder))
        if found:
            return _inspect(name, Path(found))
    raise error(TOOL_MISSING, tool=name, home=os.environ.get("CUDA_HOME", "not set"), wheels=_WHEELS[name])


@cache
def _inspect(name: str, path: Path) -> Tool:
    tool = _ask_version(name, path)
    if name == "nvcc":
        if tool.release < OLDEST_TOOLKIT:
            raise error(TOOLKIT_OLD, path=path, found=_dotted(tool.release), oldest=_dotted(OLDEST_TOOLKIT))
        if tool.release > TESTED_TOOLKIT:
            warn(TOOLKIT_NEW, path=path, found=_dotted(tool.release), tested=_dotted(TESTED_TOOLKIT))
    return tool


def _ask_version(name: str, path: Path) -> Tool:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as reason:
        raise error(TOOL_BROKEN, path=path, reason=reason, wheels=_WHEELS[name]) from reason
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if release is None:
        raise error(TOOL_BROKEN, path=path, reason="its --version names no release", wheels=_WHEELS[name])
    return Tool(path, (int(release[1]), int(release[2])), done.stdout.strip())


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
