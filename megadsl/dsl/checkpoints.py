"""Hugging Face checkpoint directories: which spec runs one, and what in its config.json no spec does yet."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadsl import resources
from megadsl.diagnostics import Collector, collecting, declare
from megadsl.dsl.kernel import Kernel
from megadsl.dsl.registry import kernel_in, models, read_json
from megadsl.ops.rope import HEAD_DIMS, MAPPED_DIMS, ROTARY_UNIT, SCALINGS, UNSCALED, dims_text, rope_scaling
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
CONFIG = "config.json"
LARGE_HIDDEN = 2048  # from this hidden size on, the schedule for large shapes is faster (docs/performance.md)

QKV, OUT, MLP = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj")
FUSED_MLP: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
FUSED: dict[str, tuple[str, ...]] = {"qkv_proj": QKV, **FUSED_MLP}


@dataclass(frozen=True)
class Architecture:
    """How checkpoints of one class of transformers run.

    ``spec``: a file in models/; ``kernel`` and ``large``: its kernels for small and large shapes. ``defaults``: values of keys that its
    config.json may lack. ``biases``: the projections that have one if a key of config.json is true; under "" those that always have.
    ``windows``: "all" where every layer attends over the sliding window, if there is one; "typed" where it depends on the kind of the
    layer; "" for none. ``thetas``: of layers that do and of those that do not, where they are rotated
    differently. ``rotated``: the part of a head that is rotated where config.json does not say; None
    where it is always whole. ``style``: of the rotation. ``head_dims``: what heads it may have, None for
    all that there are. ``activations``: names that mean something else here than elsewhere. ``scales``: embeddings are multiplied by the
    root of the hidden size. ``fused``: tensors of the files that are several of the spec's weights, stacked.
    """

    spec: str
    kernel: str
    large: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: str = ""
    thetas: tuple[float, float] | None = None
    rotated: float | None = None
    style: str = "half"
    head_dims: tuple[int, ...] | None = None
    activations: Mapping[str, str] = field(default_factory=dict)
    scales: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_GEMMA2: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}

# One entry for each architecture, under the name that config.json gives it.
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama.py", "decode_step", "large", biases={"attention_bias": (*QKV, *OUT), "mlp_bias": MLP}),
    "MistralForCausalLM": Architecture(
        "llama.py", "decode_step", "large", {"num_key_value_heads": 8, "sliding_window": 4096}, windows="all"
    ),
    "MinistralForCausalLM": Architecture(
        "llama.py", "decode_step", "large", {"num_key_value_heads": 8, "sliding_window": 4096}, windows="typed"
    ),
    "Qwen2ForCausalLM": Architecture(
        "llama.py",
        "decode_step",
        "large",
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"": QKV},
        "typed",
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3.py",
        "decode_step",
        "decode_step",
        {"head_dim": 128, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"attention_bias": (*QKV, *OUT)},
        "typed",
        head_dims=MAPPED_DIMS,
    ),
    "GemmaForCausalLM": Architecture(
        "gemma.py",
        "decode_step",
        "decode_step",
        {"head_dim": 256, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {"attention_bias": (*QKV, *OUT)},
        activations={"gelu": "gelu_tanh"},  # what the first config.json of Gemma say, and do not mean
        scales=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2.py",
        "decode_step",
        "decode_step",
        {**_GEMMA2, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"attention_bias": (*QKV, *OUT)},
        windows="typed",
        scales=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma2.py",
        "gemma3",
        "gemma3",
        {**_GEMMA2, "sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attention_bias": (*QKV, *OUT)},
        windows="typed",
        thetas=(10_000.0, 1_000_000.0),
        head_dims=MAPPED_DIMS,
        scales=True,
    ),
    "Phi3ForCausalLM": Architecture("llama.py", "decode_step", "large", {"rms_norm_eps": 1e-5}, windows="all", rotated=1.0, fused=FUSED),
    "GlmForCausalLM": Architecture(
        "llama.py",
        "decode_step",
        "large",
        {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
        {"attention_bias": QKV},
        rotated=0.5,
        style="interleaved",
        fused=FUSED_MLP,
    ),
}

# What the spec of an architecture would need and does not have, by the key of config.json that it goes by, if there is one.
MISSING = {
    "MixtralForCausalLM": {"num_local_experts": "a choice of experts"},
    "Qwen2MoeForCausalLM": {"num_experts": "a choice of experts"},
    "Qwen3MoeForCausalLM": {"num_experts": "a choice of experts"},
    "DeepseekV3ForCausalLM": {"kv_lora_rank": "attention over a compressed cache", "n_routed_experts": "a choice of experts"},
    "PhiForCausalLM": {"layer_norm_eps": "norms that subtract the mean", "architectures": "attention and MLP side by side"},
    "FalconForCausalLM": {"layer_norm_epsilon": "norms that subtract the mean", "parallel_attn": "attention and MLP side by side"},
    "GPTNeoXForCausalLM": {"layer_norm_eps": "norms that subtract the mean", "use_parallel_residual": "attention and MLP side by side"},
    "StableLmForCausalLM": {"layer_norm_eps": "norms that subtract the mean"},
    "GPT2LMHeadModel": {"layer_norm_epsilon": "norms that subtract the mean", "n_positions": "positions that are learned"},
}

# Names of activations in config.json -> functions of mk.map.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TRAINED, _TRAINED_ON = ("llama3", "yarn", "longrope"), "original_max_position_embeddings"  # by default the longest context
_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_FULL, _SLIDING = "full_attention", "sliding_attention"  # kinds of layers


def is_checkpoint(model: str) -> bool:
    """Whether MODEL names a directory, rather than a registered model or a file."""
    return Path(model).is_dir() and model not in models()


def load_checkpoint(folder: Path, config: Path | None = None) -> tuple[Kernel, dict[str, Any], int | None]:
    """The kernel that runs the checkpoint in ``folder``, its configuration, and the longest context that makes sense by default.

    ``config`` stands in for the folder's config.json. Raises everything that is missing at once:
    MK252, MK253 and MK470 to MK472; MK181 and MK185 when config.json cannot be read.
    """
    path = config or folder / CONFIG
    raw = read_json(path)
    with collecting() as found:
        reader = _Reader(raw, path, found)
        known = reader.architecture()
        values = reader.values(known)
        values["sliding_window"] = reader.window(known)
    assert known is not None, "an architecture that is not known is a finding"
    kernel = known.large if values["hidden_size"] >= LARGE_HIDDEN else known.kernel
    longest = raw.get("max_position_embeddings")
    return kernel_in(resources.models() / known.spec, kernel), values, longest if isinstance(longest, int) and longest > 0 else None


def raw_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint as it is. MK181, MK185."""
    return read_json(folder / CONFIG)


def rope_fields(raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """theta and scaling in a config.json of any age; the scaling is None when there is none. Lists, a value for each layer, of an
    architecture that rotates layers with a window in another way."""
    known, rope = architecture_of(raw), raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if known is None or known.thetas is None:
        return _rotation(raw, rope, raw.get("rope_theta", 10000.0))
    named = isinstance(rope, Mapping) and {_FULL, _SLIDING} & rope.keys()
    nested = {kind: rope.get(kind) or {} for kind in (_FULL, _SLIDING)} if named else {}
    sliding, full = known.thetas
    by_kind = {
        _FULL: _rotation(raw, nested.get(_FULL, rope), raw.get("rope_theta", full)),
        _SLIDING: _rotation(raw, nested.get(_SLIDING, {}), raw.get("rope_local_base_freq", sliding)),
    }
    found = [by_kind.get(kind, by_kind[_FULL]) for kind in layer_types(raw)]
    return [theta for theta, _ in found], [scaling for _, scaling in found]


def _rotation(raw: Mapping[str, Any], rope: Any, theta: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """theta and scaling in a record of a config.json, or where it is none, that of the kind it names."""
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("su", "yarn") and "short_factor" in rope:  # its first names
        kind = "longrope"
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "type", "rope_type")}
    if kind in _TRAINED:
        trained = scaling.get(_TRAINED_ON) or raw.get(_TRAINED_ON) or raw.get("max_position_embeddings")
        scaling = {**scaling, _TRAINED_ON: trained}
        if kind == "longrope" and scaling.get("factor") is None:
            longest = raw.get("max_position_embeddings")
            if isinstance(longest, int) and isinstance(trained, int) and trained > 0:
                scaling["factor"] = longest / trained
    return rope.get("rope_theta", theta), None if kind in UNSCALED else {"rope_type": kind, **scaling}


def layer_types(raw: Mapping[str, Any]) -> list[str]:
    """The kind of each layer."""
    known = architecture_of(raw)
    got = {**(known.defaults if known else {}), **raw}
    if known is not None and known.windows == "all":
        got = {k: v for k, v in got.items() if k not in ("layer_types", "sliding_window_pattern", "max_window_layers")}
    types, pattern, first = (got.get(key) for key in ("layer_types", "sliding_window_pattern", "max_window_layers"))
    layers = got.get("num_hidden_layers")
    if isinstance(types, list) and types:
        return [str(kind) for kind in types]
    numbers = range(layers if isinstance(layers, int) else 0)
    if isinstance(pattern, int) and pattern > 0:
        return [_SLIDING if (i + 1) % pattern else _FULL for i in numbers]
    return [_SLIDING if not isinstance(first, int) or i >= first else _FULL for i in numbers]


def architecture_of(raw: Mapping[str, Any]) -> Architecture | None:
    """The architecture that a config.json names, None when it is not known."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    return ARCHITECTURES.get(name) if isinstance(name, str) else None


def rotated_part(raw: Mapping[str, Any]) -> Any:
    """The part of each head that the checkpoint of a config.json rotates, 1.0 for whole heads."""
    known, rope = architecture_of(raw), raw.get("rope_parameters") or raw.get("rope_scaling")
    default = known.rotated if known is not None and known.rotated is not None else 1.0
    inner = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return raw.get("partial_rotary_factor", default) if inner is None else inner


def stacked_rows(raw: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of each stacked projection in the files of a checkpoint, by name, the rows of the spec's projections in it, in order."""
    known = architecture_of(raw)
    if known is None or not known.fused:
        return {}
    got = {**known.defaults, **raw}
    heads, hidden, inter = (got.get(key) for key in ("num_attention_heads", "hidden_size", "intermediate_size"))
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(inter, int) and heads > 0):
        return {}  # config.json is refused for that elsewhere
    dim, kv_heads = got.get("head_dim") or hidden // heads, got.get("num_key_value_heads") or heads
    rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim, "gate_proj": inter, "up_proj": inter}
    return {stacked: {name: rows[name] for name in names} for stacked, names in known.fused.items()}


def _bf16(value: float) -> float:
    """The bf16 number next to ``value``, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded: float = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]
    return rounded


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
        known = architecture_of(self._raw)
        if known is None:
            names = self._raw.get("architectures")
            name = names[0] if isinstance(names, list) and len(names) == 1 else names
            self._found.add(ARCHITECTURE, self.span("architectures"), value=repr(name), known=", ".join(ARCHITECTURES))
            for key, what in MISSING.get(str(name), {}).items():
                value = name if key == "architectures" else self._raw.get(key, "(absent)")
                self._refuse(
                    key, value, f"{what} {'are' if what.partition(' ')[0].endswith('s') else 'is'} missing", "give a checkpoint without"
                )
        return known

    def values(self, known: Architecture | None) -> dict[str, Any]:
        """What the spec reads. Of an architecture that is not known only the options are looked at: its sizes may have other names."""
        defaults = {**_DEFAULTS, **(known.defaults if known else {})}
        got = {**defaults, **self._raw}
        got["hidden_act"] = got.get("hidden_activation") or got["hidden_act"]
        self._options(got)
        thetas, scaling = self._rope(known)
        if known is None:
            return {}
        sizes = {key: self._size(key, got.get(key)) for key in _SIZES}
        heads = sizes["num_attention_heads"]
        head_dim = self._size("head_dim", sizes["hidden_size"] // heads if got.get("head_dim") is None else got["head_dim"])
        dims = HEAD_DIMS if known.head_dims is None else known.head_dims
        if head_dim not in dims:
            missing = f"the kernels of this architecture have heads of {dims_text(dims)} features"
            self._refuse("head_dim", head_dim, missing, "give a checkpoint with such heads")
        kv_heads = heads if got.get("num_key_value_heads") is None else got["num_key_value_heads"]
        return {
            **sizes,
            "head_dim": head_dim,
            "num_key_value_heads": self._size("num_key_value_heads", kv_heads),
            "rms_norm_eps": self._number("rms_norm_eps", got["rms_norm_eps"]),
            "rope_theta": thetas,
            "rope_scaling": scaling,
            "rope_style": known.style,
            "rotary_dim": self._rotary(head_dim),
            "tie_word_embeddings": bool(got["tie_word_embeddings"]),
            "activation": {**ACTIVATIONS, **known.activations}.get(got["hidden_act"], "silu"),
            "embed_scale": _bf16(sizes["hidden_size"] ** 0.5) if known.scales else None,
            **self._scores(got),
            "biases": [name for key, names in known.biases.items() if not key or got.get(key) for name in names],
        }

    def _scores(self, got: Mapping[str, Any]) -> dict[str, float | None]:
        """What becomes of an attention's scores and of the logits; of architectures that say nothing of it, nothing unusual."""
        keys = {"query_pre_attn_scalar": "attn_scale", "attn_logit_softcapping": "attn_softcap", "final_logit_softcapping": "final_softcap"}
        found = {name: self._number(key, got[key]) for key, name in keys.items() if got.get(key) is not None}
        if "attn_scale" in found:
            found["attn_scale"] **= -0.5
        return {name: found.get(name) for name in keys.values()}

    def window(self, known: Architecture | None) -> int | list[int | None] | None:
        """Tokens that a token sees, itself included, None for all; a list where layers differ."""
        if known is None or not known.windows:
            return None
        got = {**known.defaults, **self._raw}
        if not got.get("use_sliding_window", True) or got.get("sliding_window") is None:
            return None
        size, types = self._size("sliding_window", got["sliding_window"]), layer_types(self._raw)
        layers = got.get("num_hidden_layers")
        if len(types) != layers:
            self._found.add(FIELD, self.span("layer_types"), key="layer_types", value=repr(types), kind=f"list of {layers} kinds of layers")
        windows = [size if kind == _SLIDING else None for kind in types]
        return windows if len(set(windows)) > 1 else next(iter(windows), None)

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
        if other := sorted({str(t) for t in types} - {_FULL, _SLIDING}) if isinstance(types, list) else []:
            mend = f"give a checkpoint whose layers are {_FULL} or {_SLIDING}"
            self._refuse("layer_types", other, "layers of this kind are missing", mend)
        if got.get("use_bidirectional_attention"):
            self._refuse("use_bidirectional_attention", True, "tokens that see later ones are missing", "give a checkpoint without")

    def _rope(self, known: Architecture | None) -> tuple[Any, Any]:
        theta, scaling = rope_fields(self._raw)
        factor = rotated_part(self._raw)
        if known is not None and known.rotated is None and factor != 1.0:
            missing = "this architecture rotates whole heads"
            self._refuse("partial_rotary_factor", factor, missing, "give a checkpoint without it, or set it to 1.0")
        if isinstance(scaling, list):
            kinds = [one for i, one in enumerate(scaling) if one not in scaling[:i]]
            fine = [one for one in kinds if one is None or self._scales(one)]
            return [self._number("rope_theta", one) for one in theta], [one if one in fine else None for one in scaling]
        return self._number("rope_theta", theta), scaling if scaling is not None and self._scales(scaling) else None

    def _scales(self, scaling: Mapping[str, Any]) -> bool:
        """Whether the scaling is one that there is."""
        key = "rope_parameters" if self._raw.get("rope_parameters") else "rope_scaling"
        if scaling["rope_type"] not in SCALINGS:
            missing = "this scaling of the rotary frequencies is missing"
            mend = f"give a checkpoint with one of: none, {', '.join(SCALINGS)}"
            self._refuse(f"{key}.rope_type", scaling["rope_type"], missing, mend, line=key)
            return False
        return rope_scaling(scaling, self._found, self.span(key)) is not None

    def _rotary(self, head_dim: int) -> int:
        """Features of a head that are rotated."""
        factor = rotated_part(self._raw)
        rotary = int(head_dim * factor) if isinstance(factor, int | float) else 0
        if not 0 < rotary <= head_dim or rotary % ROTARY_UNIT:
            missing = f"of {head_dim} features a multiple of {ROTARY_UNIT} is rotated"
            self._refuse("partial_rotary_factor", factor, missing, "give a checkpoint that rotates so many features of a head")
            return head_dim
        return rotary

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
