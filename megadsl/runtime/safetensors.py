"""The safetensors files of a Hugging Face directory: one, or many with an index. Opened by mapping; only their headers are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadsl.diagnostics import Collector, collecting, declare, error
from megadsl.runtime.gguf import PACKAGE_MISSING

try:
    import safetensors
except ModuleNotFoundError:
    safetensors = None  # type: ignore[assignment]

NO_FILES = declare(
    "MK474",
    "{path} has no weights: neither {index} nor model.safetensors{other}",
    "fetch the safetensors files of the checkpoint, or save it again with save_pretrained",
)
FILE_ABSENT = declare(
    "MK475", "{path} is missing, which {index} lists for {count} tensors", "fetch the file from where the others came from"
)
FILE_DAMAGED = declare("MK476", "{path} is damaged: {why}", "fetch the file again and compare its size and checksum with the source's")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class OpenFile:
    """One file: ``handle`` is the library's, ``begins`` the byte at which each tensor begins."""

    path: Path
    handle: Any
    begins: Mapping[str, int]


def open_files(folder: Path) -> Mapping[str, OpenFile]:
    """The open file of each tensor, by the tensor's name. Of a tensor that several files have, the one that the index names.

    MK400 without the package, MK474 when there are no files; all at once MK475 for each that is missing, MK476 for what is damaged.
    """
    if safetensors is None:
        raise error(PACKAGE_MISSING, what="reading safetensors", package="safetensors")
    listed = _listed(folder)
    places = {tensor: name for name, tensors in listed.items() for tensor in tensors}
    found: dict[str, OpenFile] = {}
    with collecting() as findings:
        for name, tensors in listed.items():
            path = folder / name
            if not path.is_file():
                findings.add(FILE_ABSENT, path=path, index=INDEX, count=len(tensors))
            else:
                opened = _open(path, tensors, findings)
                found.update({tensor: file for tensor, file in opened.items() if places.get(tensor, name) == name})
    return found


def _listed(folder: Path) -> dict[str, list[str]]:
    """File names with the tensors that an index promises of each."""
    index = folder / INDEX
    if index.is_file():
        try:
            places = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_once)["weight_map"]
            files: dict[str, list[str]] = {}
            for tensor, name in places.items():
                files.setdefault(name, []).append(tensor)
            return files
        except (ValueError, KeyError, TypeError, AttributeError) as bad:
            raise error(FILE_DAMAGED, path=index, why=f"it is no JSON object with a weight_map ({bad})") from bad
    if not (folder / SINGLE).is_file():
        others = sorted(p.name for p in folder.glob("*.bin"))
        raise error(NO_FILES, path=folder, index=INDEX, other=f" (it has {others[0]}, which is not read)" if others else "")
    return {SINGLE: []}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which no key may be there twice: json would take the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _open(path: Path, promised: list[str], found: Collector) -> dict[str, OpenFile]:
    try:
        handle: Any = safetensors.safe_open(path, framework="pt")
        names = set(handle.keys())
    except (OSError, safetensors.SafetensorError) as bad:
        found.add(FILE_DAMAGED, path=path, why=str(bad))
        return {}
    absent = [name for name in promised if name not in names]
    if absent:
        found.add(FILE_DAMAGED, path=path, why=f"it lacks {absent[0]} and {len(absent) - 1} more tensors that {INDEX} lists")
    return dict.fromkeys(sorted(names), OpenFile(path, handle, _begins(path)))


def _begins(path: Path) -> dict[str, int]:
    """From the header of a file that the library has found sound: its length in 8 bytes, then JSON with offsets behind it."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
