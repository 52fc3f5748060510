"""Hugging Face checkpoint directories: which spec runs one, and what in its config.json no spec does yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadsl import resources
from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.kernel import Kernel
from megadsl.dsl.registry import kernel_in, models, read_json
from megadsl.ops.rope import HEAD_DIMS, SCALINGS, UNSCALED, rope_scaling
from megadsl.source import Span

ARCHITECTURE = declare(
    "MK470",
    "config.json: architectures = {value} is a model that megadsl has no spec of",
    "give a checkpoint of one of these: {known}; or write its spec and pass it as file.py with --config and --weights",
)
OPTION = declare("MK471", "config.json: {key} = {value}, and {missing}", "{mend}")
FIELD = declare(
    "MK472", "config.json: {key} = {value} is no {kind}", "copy config.json again from where the model was published, or set {key} there"
)
WINDOW = declare(
    "MK473",
    "config.json: sliding_window = {window}; attention over a window is missing, and a context of {rows} tokens is longer than the window",
    "ask for a context of at most {window} tokens: --max-kv {window}",
)

CONFIG = "config.json"
LARGE_HIDDEN = 2048  # from this hidden size on, the schedule for large shapes is faster (docs/performance.md)

QKV, OUT, MLP = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Architecture:
    """How checkpoints of one class of transformers run.

    ``spec``: a file in models/; ``kernel`` and ``large``: its kernels for small and large shapes. ``defaults``: values of keys that its
    config.json may lack. ``biases``: the projections that have one if a key of config.json is true; under "" those that always have.
    ``windows``: it may attend over a sliding window.
    """

    spec: str
    kernel: str
    large: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: bool = False


# One entry for each architecture, under the name that config.json gives it.
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama.py", "decode_step", "large", biases={"attention_bias": (*QKV, *OUT), "mlp_bias": MLP}),
    "MistralForCausalLM": Architecture(
        "llama.py", "decode_step", "large", {"num_key_value_heads": 8, "sliding_window": 4096}, windows=True
    ),
    "Qwen2ForCausalLM": Architecture(
        "llama.py", "decode_step", "large", {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}, {"": QKV}, True
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3.py",
        "decode_step",
        "decode_step",
        {"head_dim": 128, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"attention_bias": (*QKV, *OUT)},
        True,
    ),
}

# Names of activations in config.json -> functions of mk.map.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def is_checkpoint(model: str) -> bool:
    """Whether MODEL names a directory, rather than a registered model or a file."""
    return Path(model).is_dir() and model not in models()


def load_checkpoint(folder: Path, max_kv: int | None, config: Path | None = None) -> tuple[Kernel, dict[str, Any], int | None]:
    """The kernel that runs the checkpoint in ``folder``, its configuration, and the longest context that makes sense by default.

    ``config`` stands in for the folder's config.json; ``max_kv`` is the context asked for. Raises everything that is missing at once:
    MK252, MK253 and MK470 to MK473; MK181 and MK185 when config.json cannot be read.
    """
    path = config or folder / CONFIG
    raw = read_json(path)
    with collecting() as found:
        reader = _Reader(raw, path, found)
        known = reader.architecture()
        values = reader.values(known)
        window = reader.window(known)
        if window is not None and max_kv is not None and max_kv > window:
            found.add(WINDOW, reader.span("sliding_window"), window=window, rows=max_kv)
    assert known is not None, "an architecture that is not known is a finding"
    kernel = known.large if values["hidden_size"] >= LARGE_HIDDEN else known.kernel
    rows = [n for n in (window, raw.get("max_position_embeddings")) if isinstance(n, int) and n > 0]
    return kernel_in(resources.models() / known.spec, kernel), values, min(rows, default=None)


def raw_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint as it is. MK181, MK185."""
    return read_json(folder / CONFIG)


def rope_fields(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """theta and scaling in a config.json of any age; the scaling is None when there is none."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type"))
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type", "rope_type")}
    return theta, None if kind in UNSCALED else {"rope_type": kind, **scaling}


class _Reader:
    """Reads one config.json and collects what is wrong, each finding at its key's line."""

    def __init__(self, raw: Mapping[str, Any], path: Path, found: Collector) -> None:
        self._raw = raw
        self._path = path
        self._lines = path.read_text(encoding="utf-8").splitlines()
        self._found = found

    def span(self, key: str) -> Span:
        """The first line with ``key``; where the file has none, its first."""
        return Span(str(self._path), next((i for i, line in enumerate(self._lines, 1) if f'"{key}"' in line), 1))

    def architecture(self) -> Architecture | None:
        names = self._raw.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        known = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if known is None:
            self._found.add(ARCHITECTURE, self.span("architectures"), value=repr(name), known=", ".join(ARCHITECTURES))
        return known

    def values(self, known: Architecture | None) -> dict[str, Any]:
        """What the spec reads. Of an architecture that is not known only the options are looked at: its sizes may have other names."""
        defaults = {**_DEFAULTS, **(known.defaults if known else {})}
        got = {**defaults, **self._raw}
        self._options(got)
        theta, scaling = self._rope()
        if known is None:
            return {}
        sizes = {key: self._size(key, got.get(key)) for key in _SIZES}
        heads = sizes["num_attention_heads"]
        head_dim = self._size("head_dim", sizes["hidden_size"] // heads if got.get("head_dim") is None else got["head_dim"])
        if head_dim not in HEAD_DIMS:
            self._refuse("head_dim", head_dim, "the kernels have heads of 64 or 128 features", "give a checkpoint with such heads")
        kv_heads = heads if got.get("num_key_value_heads") is None else got["num_key_value_heads"]
        return {
            **sizes,
            "head_dim": head_dim,
            "num_key_value_heads": self._size("num_key_value_heads", kv_heads),
            "rms_norm_eps": self._number("rms_norm_eps", got["rms_norm_eps"]),
            "rope_theta": self._number("rope_theta", theta),
            "rope_scaling": scaling,
            "tie_word_embeddings": bool(got["tie_word_embeddings"]),
            "activation": ACTIVATIONS.get(got["hidden_act"], "silu"),
            "biases": [name for key, names in known.biases.items() if not key or got.get(key) for name in names],
        }

    def window(self, known: Architecture | None) -> int | None:
        """Tokens that a token sees of the past, itself included; None for all."""
        if known is None or not known.windows:
            return None
        got = {**known.defaults, **self._raw}
        if not got.get("use_sliding_window", True) or got.get("sliding_window") is None:
            return None
        types, first, layers = got.get("layer_types"), got.get("max_window_layers", 0), got.get("num_hidden_layers")
        slides = "sliding_attention" in types if types else not (isinstance(first, int) and isinstance(layers, int)) or first < layers
        return self._size("sliding_window", got["sliding_window"]) if slides else None

    def _options(self, got: Mapping[str, Any]) -> None:
        """What would change the results and is not there."""
        if got["hidden_act"] not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            self._refuse("hidden_act", got["hidden_act"], "mk.map has no such function", f"give a checkpoint with one of: {known}")
        quantised = got.get("quantization_config")
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            self._refuse("quantization_config", method, "quantised weights are not read", "give the checkpoint in bf16, fp16 or fp32")
        types = got.get("layer_types")
        if other := sorted({str(t) for t in types} - set(_LAYER_TYPES)) if isinstance(types, list) else []:
            self._refuse("layer_types", other, "layers of this kind are missing", f"give a checkpoint whose layers are {_LAYER_TYPES[0]}")

    def _rope(self) -> tuple[float, Mapping[str, Any] | None]:
        theta, scaling = rope_fields(self._raw)
        key = "rope_parameters" if self._raw.get("rope_parameters") else "rope_scaling"
        for source in (self._raw, scaling or {}):
            factor = source.get("partial_rotary_factor", 1.0)
            if factor != 1.0:
                missing = "heads that are rotated in part are missing"
                self._refuse("partial_rotary_factor", factor, missing, "give a checkpoint that rotates whole heads")
        if scaling is None:
            return theta, None
        if scaling["rope_type"] not in SCALINGS:
            missing, mend = (
                "this scaling of the rotary frequencies is missing",
                f"give a checkpoint with one of: none, {', '.join(SCALINGS)}",
            )
            self._refuse(f"{key}.rope_type", scaling["rope_type"], missing, mend, line=key)
            return theta, None
        return theta, scaling if rope_scaling(scaling, self._found, self.span(key)) else None

    def _refuse(self, key: str, value: object, missing: str, mend: str, line: str = "") -> None:
        self._found.add(OPTION, self.span(line or key), key=key, value=repr(value), missing=missing, mend=mend)

    def _size(self, key: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self._found.add(FIELD, self.span(key), key=key, value="(absent)" if value is None else repr(value), kind="positive integer")
        return 1

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self._found.add(FIELD, self.span(key), key=key, value=repr(value), kind="positive number")
        return 1.0
