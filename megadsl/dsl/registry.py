"""Where MODEL on the command line leads: a registered name, or file.py[:function] with a configuration."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from megadsl import resources
from megadsl.diagnostics import MegadslError, declare, error
from megadsl.dsl.kernel import Kernel
from megadsl.dsl.mistakes import user_span
from megadsl.source import Span

MODEL_UNKNOWN = declare(
    "MK180", "no model is called {name!r}", "{hint}the models are: {known}; or pass file.py[:function] with --config FILE"
)
FILE_MISSING = declare("MK181", "{what} {path} cannot be read: {why}", "check the path")
FILE_BROKEN = declare("MK182", "{path} cannot be loaded: {why}", "mend the line")
KERNEL_MISSING = declare("MK183", "{path} has no kernel {function!r}", "decorate it with @mk.kernel; the file has: {known}")
KERNEL_CHOICE = declare("MK184", "{path} has {count} kernels", "say which: {choices}")
CONFIG_BROKEN = declare(
    "MK185", "configuration {path} is no JSON object: {why}", "write one JSON object of the fields that the kernel reads"
)
MODELS_BROKEN = declare(
    "MK186", "{path}: MODELS is not a dict of name -> (kernel, configuration)", 'write MODELS = {{"name": (kernel, {{...}})}}'
)


def models() -> dict[str, tuple[Kernel, Mapping[str, Any]]]:
    """All registered models by name. MK182, MK186 when a file of them is broken."""
    found: dict[str, tuple[Kernel, Mapping[str, Any]]] = {}
    for path in sorted(resources.models().glob("*.py")):
        entries = getattr(_module(path), "MODELS", {})
        if not isinstance(entries, dict) or not all(_is_entry(e) for e in entries.values()):
            raise error(MODELS_BROKEN, Span(str(path), 1), path=path.name)
        found.update(entries)
    return found


def load(model: str, config: Path | None = None) -> tuple[Kernel, dict[str, Any]]:
    """The kernel and configuration of ``model``; ``config``, a JSON file, replaces a registered model's own.

    MK180 unknown name, MK181 unreadable file, MK182 a file that does not load, MK183 and MK184 for its kernels, MK185 bad JSON.
    """
    name, _, function = model.partition(".py:")
    if function or model.endswith(".py"):
        path = Path(model if not function else f"{name}.py")
        return kernel_in(path, function), {} if config is None else read_json(config)
    known = models()
    if model not in known:
        close = get_close_matches(model, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise error(MODEL_UNKNOWN, name=model, hint=hint, known=", ".join(sorted(known)))
    kernel, own = known[model]
    return kernel, dict(own) if config is None else read_json(config)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], Kernel) and isinstance(entry[1], Mapping)


def _module(path: Path) -> ModuleType:
    name = f"megadsl_model_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise error(FILE_MISSING, what="model file", path=path, why="there is no such file")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None, "a .py path always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as broken:
        del sys.modules[name]
        raise error(FILE_BROKEN, Span(broken.filename or str(path), broken.lineno or 0), path=path, why=broken.msg) from broken
    except MegadslError:
        del sys.modules[name]
        raise
    except Exception as broken:
        del sys.modules[name]
        span = user_span(broken, Span(str(path), 1))
        raise error(FILE_BROKEN, span, path=path, why=f"{type(broken).__name__}: {broken}") from broken
    return module


def kernel_in(path: Path, function: str) -> Kernel:
    """The kernel ``function`` of a file, "" for the only one. MK181 to MK184."""
    kernels = {name: value for name, value in vars(_module(path)).items() if isinstance(value, Kernel)}
    if function and function in kernels:
        return kernels[function]
    if function or not kernels:
        raise error(KERNEL_MISSING, Span(str(path), 1), path=path, function=function or "at all", known=", ".join(kernels) or "none")
    if len(kernels) > 1:
        choices = ", ".join(f"{path}:{name}" for name in kernels)
        raise error(KERNEL_CHOICE, Span(str(path), 1), path=path, count=len(kernels), choices=choices)
    return next(iter(kernels.values()))


def read_json(path: Path) -> dict[str, Any]:
    """A configuration file: MK181 when it cannot be read, MK185 when it is no JSON object."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as missing:
        raise error(FILE_MISSING, what="configuration", path=path, why=missing.strerror or str(missing)) from missing
    except json.JSONDecodeError as broken:
        raise error(CONFIG_BROKEN, Span(str(path), broken.lineno, broken.colno), path=path, why=broken.msg) from broken
    except UnicodeDecodeError as broken:
        raise error(CONFIG_BROKEN, path=path, why="it is not UTF-8 text") from broken
    if not isinstance(loaded, dict):
        raise error(CONFIG_BROKEN, Span(str(path), 1), path=path, why=f"its top level is a {type(loaded).__name__}")
    return loaded
