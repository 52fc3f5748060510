"""models/qwen3.py: its configurations, its weights' names, and that it computes what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from dsl_tools import graph_of
from test_models_llama import PROMPT, weight_shapes

from megadsl.dsl.registry import load, models
from megadsl.ir.graph import Attention
from megadsl.ops import kv_bytes_per_token
from megadsl.reference import ATTENTION_FORMS, EagerModel, PlainModel, ReferenceModel
from megadsl.reference.compare import Error

NAMES = sorted(name for name in models() if name.startswith("qwen3"))
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "narrow heads": {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 3, "rms_norm_eps": 1e-2},
}


def tiny(variant: str) -> dict[str, Any]:
    return load("qwen3-tiny")[1] | VARIANTS[variant]


def their_model(config: dict[str, Any]) -> Any:
    torch.manual_seed(11)
    made = transformers.Qwen3Config(**config, max_position_embeddings=4096, initializer_range=0.12)
    model: Any = transformers.Qwen3ForCausalLM(made)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones say nothing about whether the weight is used
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.mark.parametrize("name", NAMES)
def test_norms_of_heads_belong_to_the_attention(name: str) -> None:
    kernel, config = load(name)
    graph = graph_of(kernel, config, 2)
    ops = ["embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    assert [op.name for op in graph.ops] == ops
    (attention,) = (op for op in graph.ops if isinstance(op, Attention))
    assert [which for which, _ in attention.maps] == ["q", "k"] and attention.rope is not None


def test_published_sizes() -> None:
    """Parameters of the checkpoints Qwen/Qwen3-0.6B (the tied head counted once) and Qwen/Qwen3-8B."""
    counts = {}
    for name in ("qwen3-0.6b", "qwen3-8b"):
        graph = graph_of(*load(name))
        counts[name] = sum(torch.Size(shape).numel() for shape in weight_shapes(graph).values())
        assert kv_bytes_per_token(graph) == graph.layers * 2 * 8 * 128 * 2
    assert counts == {"qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360}


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_called_as_in_the_checkpoint(variant: str) -> None:
    config = tiny(variant)
    theirs = {n: tuple(w.shape) for n, w in their_model(config).state_dict().items()}
    if config["tie_word_embeddings"]:
        theirs.pop("lm_head.weight", None)
    assert weight_shapes(graph_of(load("qwen3-tiny")[0], config)) == theirs


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str) -> None:
    config = tiny(variant)
    theirs = their_model(config)
    ours = ReferenceModel(graph_of(load("qwen3-tiny")[0], config, 4), dict(theirs.state_dict()), 32, "fp32")
    logits = torch.cat([ours.step(PROMPT[:4]), ours.step(PROMPT[4:8]), ours.step(PROMPT[8:])])
    with torch.no_grad():
        wanted = theirs(torch.tensor([PROMPT])).logits[0].float()
    assert wanted.std() > 0.5
    torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("variant", ["as it is", "narrow heads"])
def test_torch_baselines_compute_it(variant: str) -> None:
    """The bf16 program op by op, and the one that is written for speed, are about as far from fp32."""
    config = tiny(variant)
    weights = dict(their_model(config).state_dict())
    graph = graph_of(load("qwen3-tiny")[0], config, 3)
    exact = ReferenceModel(graph, weights, 32, "fp32").step(PROMPT[:3])
    eager = EagerModel(graph, weights, 32).step(PROMPT[:3])
    plain = PlainModel(graph, weights, 32, 3)
    plain.set_inputs(PROMPT[:3], 0)
    for form in ATTENTION_FORMS:
        logits, _ = plain.step(3, form)()
        assert Error.of(logits.float(), exact).within(2.0, Error.of(eager, exact)), form
    assert Error.of(eager, exact).mean < 0.1
