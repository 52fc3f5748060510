"""Fusion: what becomes an epilogue, a prologue, a value; and that the meaning stays."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from dsl_tools import CFG, HIDDEN, graph_of, head, square, start
from spec_meaning import random_weights, run

import megadsl as mk
from megadsl.dsl.registry import load
from megadsl.expr import parse, to_text
from megadsl.ir.expr import Arg
from megadsl.ir.graph import Attention, Fused, Graph, Linear, Rope, Value, ValueRef, WeightRef
from megadsl.lower.fuse import fuse
from megadsl.lower.infer import infer
from megadsl.lower.printer import print_graph
from megadsl.reference import ReferenceModel
from megadsl.source import UNKNOWN

EPS = 1e-5


def linear(graph: Graph, name: str) -> Linear:
    op = graph.op(name)
    assert isinstance(op, Linear)
    return op


def text(fused: Fused | None) -> str | None:
    return None if fused is None else to_text(fused.expr)


def args(fused: Fused | None) -> dict[str, str]:
    """Operands by name; values with their features."""
    assert fused is not None
    return {n: r.name if isinstance(r, WeightRef) else f"{r.value}[{r.begin}:{r.begin + r.features}]" for n, r in fused.args}


def ffn(x: mk.Tensor, layer: mk.Layer, inter: int = 192) -> mk.Tensor:
    gate, up = mk.linear(x, layer.weight("gate_proj", (inter, HIDDEN)), layer.weight("up_proj", (inter, HIDDEN)))
    return mk.linear(mk.map("silu(gate) * up", gate=gate, up=up), layer.weight("down_proj", (HIDDEN, inter)))


def attend(x: mk.Tensor, layer: mk.Layer, rope: dict[str, Any] | None = None) -> mk.Tensor:
    q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (rows, HIDDEN)) for n, rows in (("q", 256), ("k", 128), ("v", 128))))
    if rope:
        q, k = mk.rope(q, k, head_dim=64, **rope)
    return mk.linear(mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=4), layer.weight("o_proj", (HIDDEN, 256)))


@mk.kernel
def no_loop(cfg: Any, tokens: int = 1) -> Any:
    x = start(tokens)
    x = x + mk.linear(mk.rms_norm(x, mk.weight("norm", HIDDEN), eps=EPS), square("mix"))
    logits = mk.linear(x, mk.weight("lm_head", (cfg.vocab, HIDDEN)))
    return mk.logits(logits), mk.argmax(logits)


@mk.kernel
def no_loop_attention(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    q, k, v = mk.linear(x, square("q"), square("k"), square("v"))
    q, k = mk.rope(q, k, head_dim=64, theta=100.0, style="interleaved")
    return head(mk.attention(q, mk.kv_cache(2, 64).append(k, v), heads=2, scale=0.5))


@mk.kernel
def residual_in_prologue(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """o is read twice, so that x + o stays an expression: in the norm, and in the next residual."""
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        o = attend(x, layer, {"theta": 1e4})
        h = x + o
        n = mk.rms_norm(h, layer.weight("norm", HIDDEN), eps=EPS)
        x = h + mk.map("o * 0.5 + f", o=o, f=ffn(n, layer))
    return head(x)


@mk.kernel
def separate_gate_and_up(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        gate = mk.linear(x, layer.weight("gate_proj", (192, HIDDEN)))
        up = mk.linear(x, layer.weight("up_proj", (192, HIDDEN)))
        x = x + mk.linear(mk.map("gelu(gate) * up", gate=gate, up=up), layer.weight("down_proj", (HIDDEN, 192)))
    return head(x)


@mk.kernel
def parallel_block(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        h = mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=EPS)
        x = x + attend(h, layer) + ffn(h, layer)
    return head(x)


@mk.kernel
def sum_of_two_linears(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Neither linear alone: the loop variable has to be a value, so the later one takes the expression."""
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        a = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)))
        b = mk.linear(x, layer.weight("b", (HIDDEN, HIDDEN)))
        x = x + 0.5 * (a + b)
    return head(x)


@mk.kernel
def long_epilogue(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        y = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        y = mk.map("tanh(y)", y=y)
        x = (x - y) * 0.5 + x * x
    return head(2 * x)


@mk.kernel
def two_variables(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    y = mk.linear(x, square("first"))
    for layer in mk.layers(cfg.layers):
        x = x + mk.linear(y, layer.weight("a", (HIDDEN, HIDDEN)))
        y = mk.linear(x, layer.weight("b", (HIDDEN, HIDDEN)))
    return head(x * y)


@mk.kernel
def last_layers_value(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        a, b = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)), layer.weight("b", (HIDDEN, HIDDEN)))
        x = x + mk.linear(a * b, layer.weight("c", (HIDDEN, HIDDEN)))
    return head(x + mk.map("max(a, 0) - b", a=a, b=b))


@mk.kernel
def biased(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """A vector weight keeps an expression out of the epilogue; a slice of several rows is read as such."""
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        a, b = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)), layer.weight("b", (HIDDEN, HIDDEN)))
        h = mk.map("b + bias", b=b, bias=layer.weight("b.bias", HIDDEN))
        x = x + mk.linear(mk.rms_norm(h, layer.weight("norm", HIDDEN), eps=EPS), layer.weight("c", (HIDDEN, HIDDEN)))
        x = x + mk.linear(a, layer.weight("d", (HIDDEN, HIDDEN)))
    return head(x)


KERNELS = [
    *(no_loop, no_loop_attention, residual_in_prologue, separate_gate_and_up, parallel_block, sum_of_two_linears, long_epilogue),
    *(two_variables, last_layers_value, biased),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_fusion_keeps_the_meaning(kernel: mk.Kernel) -> None:
    spec = infer(kernel.trace(CFG, tokens=3))
    weights = random_weights(spec)
    ids = [3, 200, 17]
    ours = ReferenceModel(fuse(spec), weights, 8, "fp32").step(ids)
    wanted = run(spec, weights, ids)
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_no_loop() -> None:
    graph = graph_of(no_loop, tokens=2)
    assert (graph.tokens, graph.layers, graph.vocab) == (2, 0, 256)
    assert [(v.name, v.producer, v.initial) for v in graph.values] == [("embed", "embed", None), ("mix", "mix", None)]
    mix, lm_head = linear(graph, "mix"), linear(graph, "lm_head")
    assert text(mix.prologue) == "embed * rsqrt(mean(embed * embed) + 1e-05) * norm"
    assert args(mix.prologue) == {"embed": "embed[0:128]", "norm": "norm.weight"}
    assert text(mix.epilogue) == "embed + mix" and args(mix.epilogue) == {"embed": "embed[0:128]", "mix": "mix[0:128]"}
    assert (lm_head.sink, lm_head.out, lm_head.epilogue) == ("argmax", None, None)
    assert lm_head.prologue == Fused(Arg("x"), (("x", ValueRef("mix", 0, 128)),))


def test_logits_alone() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        return mk.logits(mk.linear(start(), mk.weight("lm_head", (cfg.vocab, HIDDEN))))

    assert linear(graph_of(k), "lm_head").sink == "logits"


def test_rope_goes_to_the_parts_and_to_attention() -> None:
    graph = graph_of(no_loop_attention)
    op = graph.op("attention")
    rope = Rope(64, 100.0, "interleaved")
    assert isinstance(op, Attention) and (op.rope, op.scale, op.cache) == (rope, 0.5, "kv")
    assert [op.q, op.k, op.v] == [ValueRef("q_k_v", begin, 128) for begin in (0, 128, 256)]
    assert [p.rope for p in linear(graph, "q_k_v").parts] == [rope, rope, None]


def test_attention_without_rope() -> None:
    op = graph_of(parallel_block).op("attention")
    assert isinstance(op, Attention) and op.rope is None


def test_residual_in_prologue() -> None:
    graph = graph_of(residual_in_prologue)
    assert linear(graph, "o_proj").epilogue is None
    assert text(linear(graph, "gate_up_proj").prologue) == "(x + o_proj) * rsqrt(mean((x + o_proj) * (x + o_proj)) + 1e-05) * norm"
    assert text(linear(graph, "down_proj").epilogue) == "x + o_proj + (o_proj * 0.5 + down_proj)"
    assert args(linear(graph, "down_proj").epilogue)["o_proj"] == "o_proj[0:128]"


def test_separate_gate_and_up() -> None:
    down = linear(graph_of(separate_gate_and_up), "down_proj")
    assert text(down.prologue) == "gelu(gate_proj) * up_proj"
    assert args(down.prologue) == {"gate_proj": "gate_proj[0:192]", "up_proj": "up_proj[0:192]"}


def test_parallel_block() -> None:
    graph = graph_of(parallel_block)
    assert text(linear(graph, "o_proj").epilogue) == "x + o_proj"
    assert text(linear(graph, "down_proj").epilogue) == "o_proj + down_proj"
    assert args(linear(graph, "qkv_proj").prologue) == args(linear(graph, "gate_up_proj").prologue)


def test_sum_of_two_linears() -> None:
    graph = graph_of(sum_of_two_linears)
    assert linear(graph, "a").epilogue is None
    assert text(linear(graph, "b").epilogue) == "x + 0.5 * (a + b)"


def test_long_epilogue() -> None:
    graph = graph_of(long_epilogue)
    assert text(linear(graph, "w").epilogue) == "(x - tanh(w)) * 0.5 + x * x"
    assert text(linear(graph, "lm_head").prologue) == "2 * x"
    assert [(v.name, v.producer, v.initial) for v in graph.values] == [("x", "w", "embed")]


def test_two_variables() -> None:
    graph = graph_of(two_variables)
    assert {v.name: (v.initial, v.producer) for v in graph.values} == {"x": ("embed", "a"), "y": ("first", "b")}


def test_a_value_of_the_body_read_after_the_loop() -> None:
    graph = graph_of(last_layers_value)
    prologue = linear(graph, "lm_head").prologue
    assert text(prologue) == "x + (max(a, 0) - b)"
    assert args(prologue) == {"x": "x[0:128]", "a": "a_b[0:128]", "b": "a_b[128:256]"}


def test_vector_weights_stay_out_of_epilogues() -> None:
    graph = graph_of(biased)
    assert linear(graph, "a_b").epilogue is None
    c = linear(graph, "c").prologue
    assert args(c) == {"b": "a_b[128:256]", "bias": "model.layers.{layer}.b.bias", "norm": "model.layers.{layer}.norm.weight"}


def test_a_value_read_twice_is_one_operand() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(mk.map("a * b + a", a=x, b=x))

    assert linear(graph_of(k), "lm_head").prologue == Fused(graph_text("embed * embed + embed"), (("embed", ValueRef("embed", 0, 128)),))


def graph_text(expr: str) -> Any:

    return parse(expr, UNKNOWN, ("embed",))


def test_a_linear_whose_output_is_a_loop_variable_by_itself() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            x = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    graph = graph_of(k)
    (x,) = graph.values
    assert x == Value("x", 128, "w", "embed", x.span) and linear(graph, "w").epilogue is None


def test_a_loop_variable_named_like_an_op() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        w = start()
        for layer in mk.layers(cfg.layers):
            w = w + mk.linear(w, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(w)

    graph = graph_of(k)
    assert [v.name for v in graph.values] == ["w_2"]
    assert args(linear(graph, "w").epilogue) == {"w_2": "w_2[0:128]", "w": "w[0:128]"}


def test_a_part_named_like_a_value() -> None:
    """An epilogue's operand is a part when its name is one, so no value may take a part's name there."""

    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = mk.linear(start(), square("w"))
        y = mk.linear(x, square("b.w"), name="other")
        return head(x + y)

    other = linear(graph_of(k), "other")
    assert text(other.epilogue) == "w + w_2"
    assert args(other.epilogue) == {"w": "w[0:128]", "w_2": "w_2[0:128]"}
    assert [p.name for p in other.parts] == ["w_2"]


LLAMA = """\
graph decode_step tokens=4 layers=2 vocab=512
  value x [128] from embed_tokens, then down_proj
  value qkv_proj [512] from qkv_proj
  value attention [256] from attention
  value o_proj [128] from o_proj
  value gate_up_proj [192] from gate_up_proj
  embed embed_tokens -> x
    table model.embed_tokens.weight [512, 128]
  loop layers x 2
    linear qkv_proj [512 x 128] -> qkv_proj
      prologue x * rsqrt(mean(x * x) + 1e-05) * input_layernorm where x = x[0:128], input_layernorm = L.input_layernorm.weight [128]
      part q_proj L.self_attn.q_proj.weight [256, 128] rope half head_dim=64 theta=10000
      part k_proj L.self_attn.k_proj.weight [128, 128] rope half head_dim=64 theta=10000
      part v_proj L.self_attn.v_proj.weight [128, 128]
    attention attention heads=4 kv_heads=2 head_dim=64 scale=0.125 -> attention
      q qkv_proj[0:256], k qkv_proj[256:384], v qkv_proj[384:512], cache kv rope half head_dim=64 theta=10000
    linear o_proj [128 x 256] -> o_proj
      prologue x where x = attention[0:256]
      part o_proj L.self_attn.o_proj.weight [128, 256]
      epilogue x + o_proj where x = x[0:128], o_proj = o_proj[0:128]
    linear gate_up_proj [384 x 128] -> gate_up_proj
      prologue o_proj * rsqrt(mean(o_proj * o_proj) + 1e-05) * N where o_proj = o_proj[0:128], N = L.N.weight [128]
      part gate_proj L.mlp.gate_proj.weight [192, 128]
      part up_proj L.mlp.up_proj.weight [192, 128]
      epilogue silu(gate_proj) * up_proj where gate_proj = gate_proj[0:192], up_proj = up_proj[0:192]
    linear down_proj [128 x 192] -> x
      prologue x where x = gate_up_proj[0:192]
      part down_proj L.mlp.down_proj.weight [128, 192]
      epilogue o_proj + down_proj where o_proj = o_proj[0:128], down_proj = down_proj[0:128]
  linear lm_head [512 x 128] -> argmax
    prologue x * rsqrt(mean(x * x) + 1e-05) * norm where x = x[0:128], norm = model.norm.weight [128]
    part embed_tokens model.embed_tokens.weight [512, 128]
"""


def test_llama() -> None:

    kernel, config = load("llama-tiny")
    printed = print_graph(graph_of(kernel, config, tokens=4))
    assert re.search(r"embed embed_tokens -> x  # llama\.py:\d+\n", printed)
    short = re.sub(r"  # llama\.py:\d+", "", printed).replace("model.layers.{layer}", "L").replace("post_attention_layernorm", "N")
    assert short == LLAMA
