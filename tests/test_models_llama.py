"""models/llama.py: its configurations, its weights' names, and that it computes what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from dsl_tools import graph_of
from torch import Tensor

from megadsl.dsl.registry import load, models
from megadsl.ir.graph import Attention, Embed, Graph, Linear, WeightRef
from megadsl.ops import kv_bytes_per_token, total_cost
from megadsl.reference import ReferenceModel

NAMES = sorted(name for name in models() if name.startswith(("llama", "smollm2")))
TINY = [name for name in NAMES if name.startswith("llama-tiny")]
PROMPT = [3, 400, 71, 5, 18, 222, 19, 7, 101]


def weight_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Every weight of the checkpoint that the graph reads."""
    found: dict[str, tuple[int, ...]] = {}
    for op in graph.ops:
        refs: list[Any] = []
        if isinstance(op, Embed):
            refs = [op.table]
        elif isinstance(op, Linear):
            refs = [
                *(p.weight for p in op.parts),
                *(p.bias for p in op.parts if p.bias),
                *(r for _, r in op.prologue.args if isinstance(r, WeightRef)),
            ]
        for ref in refs:
            for layer in range(graph.layers if ref.per_layer else 1):
                found[ref.name.replace("{layer}", str(layer))] = ref.shape
    return found


def their_model(config: dict[str, Any]) -> Any:
    torch.manual_seed(11)
    fields = {k: v for k, v in config.items() if k not in ("rope_style", "biases")}
    fields |= {"attention_bias": True, "mlp_bias": True} if "biases" in config else {}
    llama = transformers.LlamaConfig(**fields, max_position_embeddings=4096, initializer_range=0.12)
    model: Any = transformers.LlamaForCausalLM(llama)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # ones and zeros say nothing about whether the weight is used
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 16])
def test_models_lower_to_five_kinds_of_work(name: str, tokens: int) -> None:
    kernel, config = load(name)
    graph = graph_of(kernel, config, tokens)
    ops = ["embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    assert ([op.name for op in graph.ops], graph.tokens, graph.layers) == (ops, tokens, config["num_hidden_layers"])
    assert graph.vocab == config["vocab_size"]
    assert graph.value("x").initial == "embed_tokens" and graph.value("x").producer == "down_proj"


def test_published_sizes() -> None:
    smollm2 = graph_of(*load("smollm2-135m"))
    assert sum(torch.Size(s).numel() for s in weight_shapes(smollm2).values()) == 134_515_008
    assert kv_bytes_per_token(smollm2) == 30 * 2 * 3 * 64 * 2
    llama = graph_of(*load("llama-3.2-1b"))
    assert sum(torch.Size(s).numel() for s in weight_shapes(llama).values()) == 1_235_814_400
    assert total_cost(llama, 1, 0).weight_bytes == 2 * 1_235_814_400 + 2 * 2048  # tied: a row of the table comes on top
    rope = {graph.name: op.rope.theta for graph in (smollm2, llama) for op in graph.ops if isinstance(op, Attention) and op.rope}
    assert rope == {"decode_step": 500000.0}


@pytest.mark.parametrize("name", TINY)
def test_weights_are_called_as_in_the_checkpoint(name: str) -> None:
    kernel, config = load(name)
    theirs = {n: tuple(w.shape) for n, w in their_model(config).state_dict().items()}
    if config["tie_word_embeddings"]:
        theirs.pop("lm_head.weight", None)
    assert weight_shapes(graph_of(kernel, config)) == theirs


def in_pairs(name: str, w: Tensor, head_dim: int) -> Tensor:
    """Rows of q and k in the order in which interleaved rope means what half-split rope means of the others."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return w
    pairs = torch.arange(head_dim).view(2, head_dim // 2).T.flatten()
    return w.view(-1, head_dim, w.shape[1])[:, pairs].reshape(w.shape)


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_transformers(name: str) -> None:
    kernel, config = load(name)
    theirs = their_model(config)
    weights = dict(theirs.state_dict())
    if config.get("rope_style") == "interleaved":
        weights = {n: in_pairs(n, w, config["head_dim"]) for n, w in weights.items()}
    ours = ReferenceModel(graph_of(kernel, config, 4), weights, 32, "fp32")
    logits = torch.cat([ours.step(PROMPT[:4]), ours.step(PROMPT[4:8]), ours.step(PROMPT[8:])])
    with torch.no_grad():
        wanted = theirs(torch.tensor([PROMPT])).logits[0].float()
    assert wanted.std() > 0.5
    torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-5)
