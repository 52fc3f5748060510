"""Tiny random checkpoints as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

FAR = 16384  # positions that the models are said to know
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": FAR}
LLAMA = SHAPE | {
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}  # llama-tiny: tests share its kernels
ODD = SHAPE | {"hidden_size": 80, "intermediate_size": 1100, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64}
QWEN3 = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WIDE = SHAPE | {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "pad_token_id": 0}
GEMMA = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
QWEN2 = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = LLAMA3 | {"original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
PAIRS = range(32)
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.5}
LONG |= {"short_factor": [1.0 + i / 40 for i in PAIRS], "long_factor": [1.0 + i * i / 30 for i in PAIRS]}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def plain(theta: float = 1e4) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# Class in transformers and fields of its configuration.
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", LLAMA | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", LLAMA | {"rope_parameters": LINEAR}),
    "llama-biased": (
        "Llama",
        ODD | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh", "rope_parameters": plain()},
    ),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None, "rope_parameters": plain(1e6)}),
    "llama-yarn": ("Llama", LLAMA | {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", QWEN2 | {"tie_word_embeddings": True, "rope_parameters": plain(1e6)}),
    "mistral-window": ("Mistral", LLAMA | {"sliding_window": 16, "rope_parameters": plain(1e6)}),
    "ministral": (
        "Ministral",
        LLAMA | {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": plain(1e6)},
    ),
    "qwen2-mixed": (
        "Qwen2",
        QWEN2 | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "rope_parameters": plain(1e6)},
    ),
    "llama2": ("Llama", LLAMA | {"num_key_value_heads": 4, "rope_parameters": plain()}),
    "qwen2-untied": ("Qwen2", QWEN2 | {"tie_word_embeddings": False, "rope_parameters": plain(1e6)}),
    "phi3": ("Phi3", WIDE | {"rope_parameters": plain() | {"partial_rotary_factor": 0.5}, "sliding_window": 24}),
    "phi3-long": ("Phi3", WIDE | {"rope_parameters": LONG, "original_max_position_embeddings": 4096, "sliding_window": None}),
    "gemma": ("Gemma", SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "rope_parameters": plain()}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"sliding_window": 24, "query_pre_attn_scalar": 64, "rope_parameters": plain()},
    ),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {"sliding_window": 16, "sliding_window_pattern": 2, "num_hidden_layers": 3, "query_pre_attn_scalar": 100}
        | {"rope_parameters": {"sliding_attention": plain(), "full_attention": LINEAR | {"rope_theta": 1e6, "factor": 8.0}}},
    ),
    "mistral-80": ("Mistral", LLAMA | {"head_dim": 80, "sliding_window": None, "rope_parameters": plain()}),
    "glm": ("Glm", WIDE | {"attention_bias": True, "rope_parameters": plain() | {"partial_rotary_factor": 0.5}}),
    "qwen3": ("Qwen3", QWEN3 | {"tie_word_embeddings": True, "rope_parameters": plain(1e6)}),
    "qwen3-mixed": (
        "Qwen3",
        QWEN3
        | {"use_sliding_window": True, "sliding_window": 40, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": YARN | {"rope_theta": 1e6, "mscale": 0.707, "mscale_all_dim": 1.0}},
    ),
    "qwen3-biased": ("Qwen3", QWEN3 | {"attention_bias": True, "rope_parameters": LLAMA3}),
}


def saved(family: str, folder: Path, **options: Any) -> Any:
    """The fp32 model, of weights that are bf16 numbers, which stands in ``folder`` as bf16; ``options`` go to save_pretrained."""
    name, fields = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(initializer_range=0.15, **fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("norm.weight", ".bias")):  # transformers begins with ones and zeros
                weight += 0.3 * torch.randn_like(weight)
    model.bfloat16().save_pretrained(folder, **options)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()  # anew, for bfloat16() rounds rotary frequencies too
