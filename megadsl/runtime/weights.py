"""Where weights come from, and whether they are the ones a kernel needs.

A source names tensors as the checkpoint does (``model.layers.3.mlp.down_proj.weight``) and gives each as bf16, when asked.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megadsl.diagnostics import collecting, declare
from megadsl.dsl.checkpoints import raw_config, stacked_rows
from megadsl.runtime.gguf import GgufFile, read_gguf
from megadsl.runtime.readahead import Stored
from megadsl.runtime.safetensors import open_files
from megadsl.types import Drawn

MISSING = declare("MK420", "weight {name} is missing{more}", "give a checkpoint that has it, or rename it in the spec{near}")
EXTRA = declare(
    "MK421", "weight {name} of the checkpoint is used nowhere in the spec{more}", "use it in the spec, or drop it from the checkpoint"
)
SHAPE = declare(
    "MK422", "weight {name} has shape {got}, the spec needs {want}{more}", "change the shape in the spec, or give another checkpoint"
)
DTYPE = declare(
    "MK423", "weight {name} has element type {dtype}, which cannot be turned into bf16{more}", "convert the checkpoint to one of: {known}"
)

Manifest = Mapping[str, Any]

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_STORED = dict(zip(("BF16", "F16", "F32", "F64"), _FLOATS, strict=True))  # by their names in safetensors files
_HARMLESS = re.compile(r"rope_freqs\.weight|.*rotary_emb\.inv_freq")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Need:
    """A weight that a kernel reads, of ``shape``; ``template`` is its name with ``{layer}`` left open, ``op`` its reader."""

    name: str
    shape: tuple[int, ...]
    template: str
    op: str


class WeightSource(ABC):
    """Named tensors, loaded when asked for."""

    @property
    def identity(self) -> str | None:
        """What tells these weights from others across processes; None when nothing does, and nothing is cached."""
        return None

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every name the source has, with its shape."""

    @abstractmethod
    def load(self, name: str) -> torch.Tensor:
        """The tensor, bf16 (rounded to nearest even), of the shape in :meth:`shapes`, on whatever device it lies."""

    def stored(self, name: str) -> Stored | None:
        """Where the tensor lies in a file as it is, so that many can be read at once; None where :meth:`load` alone can give it."""
        return None

    def unreadable(self, name: str) -> str | None:
        """The name of the element type when :meth:`load` cannot turn it into bf16, else None."""
        return None

    def alias(self, name: str) -> bool:
        """True when ``name`` is only another name of the embedding table (a tied output head)."""
        return False


class GgufSource(WeightSource):
    """Weights of a GGUF file. A tied output head answers to ``lm_head.weight`` too."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    @property
    def identity(self) -> str:
        stat = self.file.path.stat()
        return f"{self.file.path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{self.file.header_digest}"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        found = {name: t.shape for name, t in self.file.tensors.items()}
        if self.file.tied and TABLE in found:
            found[HEAD] = found[TABLE]
        return found

    def load(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.file.load(self._stored(name))).to(torch.bfloat16)

    def unreadable(self, name: str) -> str | None:
        stored = self._stored(name)
        return None if self.file.readable(stored) else self.file.tensors[stored].dtype

    def alias(self, name: str) -> bool:
        return name == HEAD and self.file.tied

    def _stored(self, name: str) -> str:
        return TABLE if self.alias(name) else name


class SafetensorsSource(WeightSource):
    """Weights of a Hugging Face directory. Files are mapped, so that a tensor takes no memory of its own before it is converted.

    ``config`` is the directory's config.json as it is. A tied output head that the files have as well is left alone, as transformers
    leaves it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = raw_config(folder)
        self.files = open_files(folder)
        self._rows = self._parts()  # of a tensor that holds several of the spec's

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        split = {stored for stored, _, _ in self._rows.values()}
        found = {name: tuple(file.handle.get_slice(name).get_shape()) for name, file in self.files.items()}
        parts = {name: (end - begin, *found[stored][1:]) for name, (stored, begin, end) in self._rows.items()}
        return {**{name: shape for name, shape in found.items() if name not in split}, **parts}

    def load(self, name: str) -> torch.Tensor:
        stored, begin, end = self._rows.get(name, (name, 0, None))
        tensor: torch.Tensor = self.files[stored].handle.get_tensor(stored)
        return tensor[begin:end].to(torch.bfloat16)

    def stored(self, name: str) -> Stored | None:
        stored, begin, end = self._rows.get(name, (name, 0, None))
        file = self.files[stored]
        view = file.handle.get_slice(stored)
        rows, *columns = view.get_shape() or (1,)
        dtype = _STORED.get(str(view.get_dtype()))
        if dtype is None:
            return None
        first = file.begins[stored] + begin * math.prod(columns) * dtype.itemsize
        return Stored(file.path, first, ((rows if end is None else end) - begin, *columns), dtype)

    def unreadable(self, name: str) -> str | None:
        stored = self._rows.get(name, (name,))[0]
        dtype = str(self.files[stored].handle.get_slice(stored).get_dtype())
        return None if dtype in _STORED else dtype

    def alias(self, name: str) -> bool:
        return name == HEAD and bool(self.config.get("tie_word_embeddings"))

    def _parts(self) -> dict[str, tuple[str, int, int]]:
        """Where each part of a stacked tensor is: (tensor, first row, end). One of another size stays whole, and is refused as that."""
        found: dict[str, tuple[str, int, int]] = {}
        for stacked, rows in stacked_rows(self.config).items():
            for stored, file in self.files.items():
                if f".{stacked}." in stored and file.handle.get_slice(stored).get_shape()[0] == sum(rows.values()):
                    begin = 0
                    for name, count in rows.items():
                        found[stored.replace(f".{stacked}.", f".{name}.")] = (stored, begin, begin + count)
                        begin += count
        return found


class TensorSource(WeightSource):
    """Weights in memory: a state dict. Tensors may lie on any device and have any floating-point type."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def load(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach().to(torch.bfloat16)

    def unreadable(self, name: str) -> str | None:
        dtype = self.tensors[name].dtype
        return None if dtype in _FLOATS else str(dtype).removeprefix("torch.")

    def alias(self, name: str) -> bool:
        table = self.tensors.get(TABLE)
        return name == HEAD and table is not None and self.tensors[name].data_ptr() == table.data_ptr()


class RandomSource(WeightSource):
    """Random weights: m + d n, with n standard normal; m and d by ``drawn``, else 1 and 0.1 for vectors, 0 and columns^-0.5 for
    matrices.

    Each tensor depends on these, ``seed``, its name and the kind of ``device`` alone, never on the order of loading.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], drawn: Mapping[str, Drawn], seed: int, device: str) -> None:
        self._shapes = dict(shapes)
        self._drawn = dict(drawn)
        self.seed = seed
        self.device = torch.device(device)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:7], "little"))
        noise: torch.Tensor = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        mean, deviation = self._drawn.get(name, (1.0, 0.1) if len(shape) == 1 else (0.0, shape[1] ** -0.5))
        return noise.mul_(deviation).add_(mean).to(torch.bfloat16)


def open_weights(path: Path) -> GgufSource | SafetensorsSource:
    """The weights in a GGUF file or a Hugging Face directory; MK400 to MK407, MK474 to MK476 when it cannot be read."""
    return SafetensorsSource(path) if path.is_dir() else GgufSource(read_gguf(path))


def random_weights(manifest: Manifest, seed: int = 0, device: str = "cpu") -> RandomSource:
    """Random weights of every name and shape that the manifest's pack records need, drawn as its spec says."""
    found, given = needed(manifest), manifest["random"]
    drawn = {name: given[need.template] for name, need in found.items() if need.template in given}
    return RandomSource({name: need.shape for name, need in found.items()}, drawn, seed, device)


def source_shape(record: Mapping[str, Any], source: Mapping[str, Any]) -> tuple[int, ...]:
    """The checkpoint shape of one source of a pack record: (columns,) for a vector, (rows,) for a bias, else (rows, columns)."""
    if record["kind"] == "bias":
        return (source["rows"],)
    return (record["columns"],) if record["kind"] == "vector" else (source["rows"], record["columns"])


def needed(manifest: Manifest) -> dict[str, Need]:
    """Every weight the kernel reads, by name, in packing order."""
    found: dict[str, Need] = {}
    for record, source, layer in _uses(manifest):
        name = source["weight"].format(layer=layer)
        found.setdefault(name, Need(name, source_shape(record, source), source["weight"], record["name"]))
    return found


def _uses(manifest: Manifest) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], int]]:
    for record in manifest["pack"]:
        for source in record["sources"]:
            for layer in range(manifest["layers"] if record["per_layer"] else 1):
                yield record, source, layer


def validate(source: WeightSource, manifest: Manifest) -> None:
    """Raise one error that lists everything wrong: MK420 missing, MK421 extra, MK422 wrong shape, MK423 element type.

    A finding that repeats over layers is listed once, with the number of layers. Rope tables and a tied output head may be
    left over.
    """
    wanted, have = needed(manifest), source.shapes()
    extra: dict[str, list[str]] = {}
    for name in have:
        if name not in wanted and not _HARMLESS.fullmatch(name) and not source.alias(name):
            extra.setdefault(_LAYER.sub(".{layer}.", name), []).append(name)
    known = ", ".join(str(d).removeprefix("torch.") for d in _FLOATS)
    spans = _spans(manifest)
    with collecting() as found:
        for (code, what), needs in _findings(source, wanted, have).items():
            first = needs[0]
            fields: dict[str, Any] = {
                "name": first.name,
                "want": first.shape,
                "got": have.get(first.name),
                "dtype": what[1],
                "known": known,
            }
            more, near = _more([need.name for need in needs]), _near(first.name, extra)
            found.add(code, detail=_reader(first, spans), more=more, near=near, **fields)
        for names in extra.values():
            found.add(EXTRA, name=names[0], more=_more(names))


def _findings(
    source: WeightSource, wanted: Mapping[str, Need], have: Mapping[str, tuple[int, ...]]
) -> dict[tuple[str, tuple[str, object]], list[Need]]:
    """Needs that are not met, by (code, what is the same over layers: the name's template, and the shape or type found)."""
    found: dict[tuple[str, tuple[str, object]], list[Need]] = {}
    for need in wanted.values():
        if need.name not in have:
            found.setdefault((MISSING, (need.template, None)), []).append(need)
        elif have[need.name] != need.shape:
            found.setdefault((SHAPE, (need.template, have[need.name])), []).append(need)
        elif (dtype := source.unreadable(need.name)) is not None:
            found.setdefault((DTYPE, (need.template, dtype)), []).append(need)
    return found


def _spans(manifest: Manifest) -> dict[str, str]:
    return {site["op"]: str(site["span"]) for site in manifest.get("sites", ()) if site.get("op") and site.get("span")}


def _reader(need: Need, spans: Mapping[str, str]) -> str:
    return f"    read by op {need.op}" + (f" at {spans[need.op]}" if need.op in spans else "")


def _more(names: Sequence[str]) -> str:
    """Which other layers have the same finding: together with the first name, all names."""
    layers = sorted(int(found[1]) for name in names[1:] if (found := _LAYER.search(name)))
    if not layers:
        return ""
    whole = len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1))
    shown = f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
    return f" (and the same in {len(layers)} more layers: {shown})"


def _near(name: str, extra: Mapping[str, list[str]]) -> str:
    """A hint when the checkpoint has the same weight under another prefix."""
    for names in extra.values():
        for other in names:
            if other.endswith(name) or name.endswith(other):
                return f" (the checkpoint has {other})"
    return ""
