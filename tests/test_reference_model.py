"""The reference model: a hand-made Llama graph against transformers, and its roundings against the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megadsl.expr import parse
from megadsl.ir.graph import Attention, Embed, Fused, Graph, Linear, Part, Rope, Value, ValueRef, WeightRef
from megadsl.ir.verify_graph import verify_graph
from megadsl.reference import EagerModel, ReferenceModel, gate
from megadsl.reference.compare import Error, relative_l2
from megadsl.reference.meaning import argmax, round_bf16
from megadsl.source import Span

transformers = pytest.importorskip("transformers")

SPAN = Span("llama.py", 1)
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, EPS, THETA = 97, 84, 176, 6, 2, 16, 2, 1e-5, 10000.0
PROMPT = [3, 96, 0, 41, 41, 7, 88, 15, 60, 22, 9]


def weight(name: str, *shape: int) -> WeightRef:
    per_layer = name.startswith("layers.")
    return WeightRef(f"model.{name.replace('layers.', 'layers.{layer}.')}.weight", shape, per_layer)


def fused(text: str, **args: ValueRef | WeightRef) -> Fused:
    constants = {"eps": EPS} if "eps" in text else {}
    return Fused(parse(text, SPAN, args, constants), tuple(args.items()))


def norm(value: str, name: str) -> Fused:
    return fused("x * rsqrt(mean(x * x) + eps) * w", x=ValueRef(value, 0, HIDDEN), w=weight(name, HIDDEN))


def residual(value: str, part: str) -> Fused:
    return fused("x + y", x=ValueRef(value, 0, HIDDEN), y=ValueRef(part, 0, HIDDEN))


def plain(value: str, features: int) -> Fused:
    return fused("x", x=ValueRef(value, 0, features))


def llama_graph(style: str = "half") -> Graph:
    """A Llama step as lower/ builds it: x is carried by the loop, norms are prologues, residuals epilogues."""
    q, kv = HEADS * DIM, KV_HEADS * DIM
    rope = Rope(DIM, THETA, style)
    ops = (
        Embed("embed", weight("embed_tokens", VOCAB, HIDDEN), "x", None, SPAN),
        Linear(
            "qkv",
            norm("x", "layers.input_layernorm"),
            HIDDEN,
            (
                Part("q", weight("layers.self_attn.q_proj", q, HIDDEN), q, rope),
                Part("k", weight("layers.self_attn.k_proj", kv, HIDDEN), kv, rope),
                Part("v", weight("layers.self_attn.v_proj", kv, HIDDEN), kv),
            ),
            None, "qkv_out", None, "layer", SPAN,
        ),
        Attention(
            "attention",
            ValueRef("qkv_out", 0, q), ValueRef("qkv_out", q, kv), ValueRef("qkv_out", q + kv, kv),
            HEADS, KV_HEADS, DIM, DIM**-0.5, rope, "kv", "attended", "layer", SPAN,
        ),
        Linear(
            "o_proj", plain("attended", q), q, (Part("o", weight("layers.self_attn.o_proj", HIDDEN, q), HIDDEN),),
            residual("x", "o"), "h", None, "layer", SPAN,
        ),
        Linear(
            "gate_up",
            norm("h", "layers.post_attention_layernorm"),
            HIDDEN,
            (
                Part("gate", weight("layers.mlp.gate_proj", INNER, HIDDEN), INNER),
                Part("up", weight("layers.mlp.up_proj", INNER, HIDDEN), INNER),
            ),
            fused("silu(g) * u", g=ValueRef("gate", 0, INNER), u=ValueRef("up", 0, INNER)),
            "activated", None, "layer", SPAN,
        ),
        Linear(
            "down_proj", plain("activated", INNER), INNER, (Part("down", weight("layers.mlp.down_proj", HIDDEN, INNER), HIDDEN),),
            residual("h", "down"), "x", None, "layer", SPAN,
        ),
        Linear(
            "lm_head", norm("x", "norm"), HIDDEN, (Part("head", WeightRef("lm_head.weight", (VOCAB, HIDDEN), False), VOCAB),),
            None, None, "argmax", None, SPAN,
        ),
    )  # fmt: skip
    values = (
        Value("x", HIDDEN, "down_proj", "embed", SPAN),
        Value("qkv_out", q + 2 * kv, "qkv", None, SPAN),
        Value("attended", q, "attention", None, SPAN),
        Value("h", HIDDEN, "o_proj", None, SPAN),
        Value("activated", INNER, "gate_up", None, SPAN),
    )
    return Graph("llama", 16, LAYERS, ops, values, VOCAB, SPAN)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' Llama with random bf16-rounded weights, fp32 arithmetic."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=EPS,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones say nothing about whether the weight is used
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(round_bf16(parameter))
    return model


@pytest.fixture(scope="module")
def weights(theirs: Any) -> dict[str, Tensor]:
    return dict(theirs.state_dict())


def their_logits(model: Any, ids: list[int], positions: list[int] | None = None) -> Tensor:
    with torch.no_grad():
        where = None if positions is None else torch.tensor([positions])
        logits: Tensor = model(torch.tensor([ids]), position_ids=where).logits[0].float()
    return logits


def close(ours: Tensor, wanted: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_hand_made_graph_is_legal(style: str) -> None:
    verify_graph(llama_graph(style))


def test_whole_prompt_equals_transformers(theirs: Any, weights: Mapping[str, Tensor]) -> None:
    logits = ReferenceModel(llama_graph(), weights, 32, "fp32").step(PROMPT)
    assert logits.dtype == torch.float32 and logits.shape == (len(PROMPT), VOCAB)
    assert logits.std() > 0.5  # else any model would agree
    close(logits, their_logits(theirs, PROMPT))


def test_chunks_and_decode_equal_transformers(theirs: Any, weights: Mapping[str, Tensor]) -> None:
    model = ReferenceModel(llama_graph(), weights, len(PROMPT), "fp32")
    parts = [model.step(PROMPT[begin:end]) for begin, end in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 11))]
    assert model.kv_len == len(PROMPT)
    close(torch.cat(parts), their_logits(theirs, PROMPT))


def test_far_positions_equal_transformers(theirs: Any, weights: Mapping[str, Tensor]) -> None:
    # scores depend on distances only, so the far token must be far from the others
    positions = [0, 1, 2, 9000, 9001]
    logits = ReferenceModel(llama_graph(), weights, 8, "fp32").step(PROMPT[:5], positions)
    close(logits, their_logits(theirs, PROMPT[:5], positions), atol=1e-3)  # theirs has fp32 angles: off by up to 5e-4
    assert (logits - their_logits(theirs, PROMPT[:5])).abs().max() > 0.05


def test_tree_equals_each_path(theirs: Any, weights: Mapping[str, Tensor]) -> None:
    context = PROMPT[:4]
    #       50 -> 51 -> 53
    #       50 -> 52 -> 54
    tree = {50: [50], 51: [50, 51], 52: [50, 52], 53: [50, 51, 53], 54: [50, 52, 54]}
    ids = list(tree)
    ancestors = [sum(1 << ids.index(token) for token in path) for path in tree.values()]
    positions = [len(context) + len(path) - 1 for path in tree.values()]
    model = ReferenceModel(llama_graph(), weights, 16, "fp32")
    model.step(context)
    logits = model.step(ids, positions, ancestors)
    for row, path in zip(logits, tree.values(), strict=True):
        close(row, their_logits(theirs, context + path)[-1])


def test_interleaved_rope_equals_half_after_permuting_rows(weights: Mapping[str, Tensor]) -> None:
    pairs = torch.arange(DIM).view(2, DIM // 2).T.flatten()

    def permuted(name: str, w: Tensor) -> Tensor:
        return w.view(-1, DIM, HIDDEN)[:, pairs].reshape(w.shape) if "q_proj" in name or "k_proj" in name else w

    half = ReferenceModel(llama_graph(), weights, 32, "fp32").step(PROMPT)
    interleaved = ReferenceModel(llama_graph("interleaved"), {n: permuted(n, w) for n, w in weights.items()}, 32, "fp32")
    close(interleaved.step(PROMPT), half)
    assert (ReferenceModel(llama_graph("interleaved"), weights, 32, "fp32").step(PROMPT) - half).abs().max() > 0.05


def test_padded_inputs_and_rewinding(weights: Mapping[str, Tensor]) -> None:
    model = ReferenceModel(llama_graph(), weights, 8, "fp32")
    whole = model.step(PROMPT[:6])
    model.kv_len = 3
    again = model.step([*PROMPT[3:6], -1, -1], positions=[3, 4, 5, 0, 0], ancestors=[1, 3, 7, 0, 0], n=3)
    assert model.kv_len == 6
    close(again, whole[3:])


def test_bf16_mode_rounds_every_value_and_no_logit(weights: Mapping[str, Tensor]) -> None:
    model = ReferenceModel(llama_graph(), weights, 16, "bf16")
    seen: list[tuple[str, int]] = []

    def observe(name: str, layer: int, content: Tensor) -> None:
        seen.append((name, layer))
        assert torch.equal(content, round_bf16(content))

    model.observe = observe
    logits = model.step(PROMPT)
    body = ["qkv_out", "attended", "h", "activated", "x"]
    assert seen == [("x", 0), *((name, layer) for layer in range(LAYERS) for name in body)]
    assert not torch.equal(logits, round_bf16(logits))
    oracle = ReferenceModel(llama_graph(), weights, 16, "fp32").step(PROMPT)
    assert 1e-4 < relative_l2(logits, oracle).max() < 2e-2


def test_bf16_mode_passes_the_gate_and_worse_does_not(weights: Mapping[str, Tensor]) -> None:
    ids = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(1))
    oracle = ReferenceModel(llama_graph(), weights, 64, "fp32").step(ids)
    ours = ReferenceModel(llama_graph(), weights, 64, "bf16").step(ids)
    bf16 = EagerModel(llama_graph(), weights, 64).step(ids)
    assert torch.equal(bf16, round_bf16(bf16))
    assert gate(ours, bf16, oracle).passed
    assert not gate(oracle + 2 * (bf16 - oracle), bf16, oracle).passed


def test_eager_is_no_weaker_than_transformers_in_bf16(theirs: Any, weights: Mapping[str, Tensor]) -> None:
    ids = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    oracle = ReferenceModel(llama_graph(), weights, 64, "fp32").step(ids)
    eager = Error.of(EagerModel(llama_graph(), weights, 64).step(ids), oracle)
    narrow = transformers.LlamaForCausalLM(theirs.config).bfloat16().eval()
    narrow.load_state_dict(weights)
    other = Error.of(their_logits(narrow, ids), oracle)
    assert 0.5 * other.mean < eager.mean < 1.05 * other.mean


def test_greedy_decode_equals_transformers(theirs: Any, weights: Mapping[str, Tensor]) -> None:
    model = ReferenceModel(llama_graph(), weights, 16, "fp32")
    ids, new = list(PROMPT[:4]), PROMPT[:4]
    for _ in range(6):
        new = [int(argmax(model.step(new))[-1])]
        assert new == [int(their_logits(theirs, ids)[-1].argmax())]
        ids += new


def test_graph_without_sink_returns_its_last_value(weights: Mapping[str, Tensor]) -> None:
    whole = llama_graph()
    headless = Graph("layers", 16, LAYERS, whole.ops[:-1], whole.values, VOCAB, SPAN)
    contents: list[Tensor] = []
    model = ReferenceModel(whole, weights, 16, "bf16")
    model.observe = lambda name, layer, content: contents.append(content)
    model.step(PROMPT)
    assert torch.equal(ReferenceModel(headless, weights, 16, "bf16").step(PROMPT), contents[-1])


def test_all_wrong_weights_are_listed(weights: Mapping[str, Tensor]) -> None:
    wrong = dict(weights)
    del wrong["model.layers.1.mlp.up_proj.weight"]
    wrong["model.norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is missing; model\.norm\.weight has shape \(3,\), not \(84,\)"):
        ReferenceModel(llama_graph(), wrong, 16, "fp32")


def test_bad_steps_are_refused_and_leave_no_trace(weights: Mapping[str, Tensor]) -> None:
    model = ReferenceModel(llama_graph(), weights, 4, "fp32")
    with pytest.raises(ValueError, match="room for 4"):
        model.step(PROMPT[:5])
    with pytest.raises(ValueError, match=r"vocabulary of 97: \[97\]"):
        model.step([1, VOCAB])
    with pytest.raises(ValueError, match="own bit"):
        model.step([1, 2], ancestors=[1, 1])
    assert model.kv_len == 0
    with pytest.raises(ValueError, match="'fp16'"):
        ReferenceModel(llama_graph(), weights, 4, "fp16")
