"""What fused ops cannot express is refused at the user's line; broken specs and graphs are refused by their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from dsl_tools import CFG, HIDDEN, findings, fuse_finds, graph_of, head, one, square, start

import megadsl as mk
from megadsl.diagnostics import Diagnostic
from megadsl.ir.expr import Arg, Reduce
from megadsl.ir.graph import Attention, Factored, Fused, Graph, Linear, Rope, ValueRef, WeightRef
from megadsl.ir.spec import Node, Spec
from megadsl.ir.verify_graph import InternalError, verify_graph
from megadsl.lower.fuse import fuse
from megadsl.lower.infer import infer
from megadsl.source import Span


def projections(x: mk.Tensor) -> tuple[mk.Tensor, ...]:
    return mk.linear(x, square("q_proj"), square("k_proj"), square("v_proj"))


def cache() -> mk.KVCache:
    return mk.kv_cache(2, 64)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_map_into_attention(which: str) -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        rows = dict(zip("qkv", projections(start()), strict=True))
        rows[which] = rows[which] * 2
        kv = cache().append(rows["k"], rows["v"])
        return head(mk.attention(rows["q"], kv, heads=2))  # here

    fuse_finds(kernel, "MK190", f"attention 'attention': {which} is computed by map 'mul'", "mk.linear")


def test_folded_linear_into_attention() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        q, (key, value) = mk.linear(x, square("q")) * 2, mk.linear(x, square("k"), square("v"))
        return head(mk.attention(q, cache().append(key, value), heads=2))  # here

    fuse_finds(k, "MK190", "q is computed by map 'mul'", "mk.linear")


@pytest.mark.parametrize(
    ("rotated", "message"),
    [
        ("q", "q is rotated by 64, theta 10000, half, k is not rotated, v is not rotated"),
        ("kv", "q is not rotated, k is rotated by 64, theta 10000, half, v is rotated"),
        ("qkv", "v is rotated by 64, theta 10000, half"),
        ("wide", "q is rotated by 128, theta 10000, half, k is rotated by 128"),
    ],
)
def test_ropes_that_do_not_match(rotated: str, message: str) -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        x = start()
        q, k, v = projections(x)
        spare, other = mk.linear(x, square("s"), square("o"))
        if rotated == "q":
            q, spare = mk.rope(q, spare, head_dim=64, theta=1e4)
        elif rotated == "kv":
            k, v = mk.rope(k, v, head_dim=64, theta=1e4)
        elif rotated == "qkv":
            q, k = mk.rope(q, k, head_dim=64, theta=1e4)
            v, spare = mk.rope(v, spare, head_dim=64, theta=1e4)
        else:
            q, k = mk.rope(q, k, head_dim=128, theta=1e4)
        y = mk.linear(mk.attention(q, cache().append(k, v), heads=2), square("y"))  # here
        return head(y + spare + other)

    fuse_finds(kernel, "MK194", message, "one mk.rope")


OUTPUTS: list[tuple[Callable[[mk.Tensor], Any], str]] = [
    (lambda x: x, "not plain logits: embed 'embed'"),
    (lambda x: mk.linear(x, square("w")) + x, "not plain logits: map 'add'"),
    (lambda x: mk.argmax(x + x), "not plain logits: map 'add'"),
    (lambda x: mk.argmax(sum_of(mk.linear(x, square("a"), square("b")))), "not plain logits: map 'add'"),
    (lambda x: mk.linear(x, square("a"), square("b")), "one of several outputs of linear 'a_b'"),
    (lambda x: tuple(mk.linear(x, square(n)) for n in "ab"), "beside the logits of 'a'"),
    (lambda x: with_reader(mk.linear(x, square("w"))), "read by 'other' as well"),
]


def sum_of(pair: tuple[mk.Tensor, ...]) -> mk.Tensor:
    return pair[0] + pair[1]


def with_reader(x: mk.Tensor) -> Any:
    return x, mk.argmax(mk.linear(x, square("v"), name="other"))


@pytest.mark.parametrize(("finish", "message"), OUTPUTS)
def test_outputs_that_are_no_logits(finish: Callable[[mk.Tensor], Any], message: str) -> None:
    @mk.kernel
    def k(cfg: Any) -> Any:
        return finish(start())

    spec = infer(k.trace(CFG))
    found = findings(lambda: fuse(spec))
    assert {d.code for d in found} == {"MK195"} and message in found[0].message and "mk.argmax" in found[0].mend
    assert {d.span for d in found} <= {n.span for n in spec.nodes if set(n.outputs) & set(spec.outputs)}


def test_logits_of_a_layer() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            y = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))  # here
        return y

    fuse_finds(k, "MK195", "computed inside the layer loop", "outside the loop")


def test_loop_variable_that_enters_as_an_expression() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = mk.map("x / max(abs(x))", x=start())
        for layer in mk.layers(cfg.layers):
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))  # here
        return head(x)

    fuse_finds(k, "MK196", "'x' enters the loop as map 'map'", "mk.embed")


def test_loop_variable_that_is_a_part() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            x, y = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)), layer.weight("b", (HIDDEN, HIDDEN)))  # here
        return head(x + y)

    fuse_finds(k, "MK196", "one of several outputs of linear 'a_b'", "mk.linear")


def test_loop_variables_that_swap() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.linear(x, square("first"))
        for layer in mk.layers(cfg.layers):
            x, y = y, mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(y)

    found = findings(lambda: fuse(infer(k.trace(CFG))))
    assert "'x' leaves the loop as an unchanged variable" in one(found, "MK196").message


def test_two_loop_variables_of_one_tensor() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.linear(x, square("first"))
        for layer in mk.layers(cfg.layers):
            x = y = mk.linear(x + y, layer.weight("w", (HIDDEN, HIDDEN)))  # here
        return head(x)

    fuse_finds(k, "MK196", "the same tensor as another loop variable", "mk.linear")


def test_loop_variable_made_before_the_loop() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.linear(x, square("first"))  # here
        for layer in mk.layers(cfg.layers):
            h = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
            x = y
        return head(x + h)

    fuse_finds(k, "MK196", "on the other side of the loop's begin", "mk.linear")


def test_stale_read_through_an_expression() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        twice = 2 * x
        for layer in mk.layers(cfg.layers):
            x = x + mk.linear(twice, layer.weight("a", (HIDDEN, HIDDEN)))  # here
        return head(x)

    fuse_finds(k, "MK197", "'a' reads the value that 'x' had before", "in the loop body")


def test_stale_read_after_the_loop() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            y = 2 * x
            x = x + mk.linear(y, layer.weight("a", (HIDDEN, HIDDEN)))
        return mk.argmax(mk.linear(y + x, mk.weight("lm_head", (cfg.vocab, HIDDEN))))  # here

    fuse_finds(k, "MK197", "'lm_head' reads the value that 'x' had before 'a'", "in the loop body")


@mk.kernel
def sound(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)
        x = x + mk.linear(a, layer.weight("o_proj", (HIDDEN, HIDDEN)))
    return head(mk.rms_norm(x, mk.weight("norm", HIDDEN), eps=1e-5))


# Specs that no function gives


def broken_spec(**changes: Any) -> list[Diagnostic]:
    spec = sound.trace(CFG)
    return findings(lambda: infer(replace(spec, **changes)))


def edited(spec: Spec, name: str, **changes: Any) -> tuple[Node, ...]:
    return tuple(replace(n, **changes) if n.name == name else n for n in spec.nodes)


def test_infer_gives_the_spec_back() -> None:
    spec = sound.trace(CFG)
    assert infer(spec) is spec


def test_a_read_before_its_write() -> None:
    nodes = list(sound.trace(CFG).nodes)
    late = next(i for i, n in enumerate(nodes) if n.op == "embed")
    found = one(broken_spec(nodes=(*nodes[:late], *nodes[late + 1 : -2], nodes[late], *nodes[-2:])), "MK133")
    assert "'qkv_proj' reads 'embed' before it has a value" in found.message
    assert "move the producer in front" in found.mend


def test_a_tensor_that_nothing_makes() -> None:
    spec = sound.trace(CFG)
    found = one(broken_spec(nodes=edited(spec, "o_proj", inputs=("ghost", "model.layers.{layer}.o_proj.weight"))), "MK133")
    assert "'o_proj' reads 'ghost'" in found.message
    assert found.span == next(n.span for n in spec.nodes if n.name == "o_proj")


def test_a_cycle() -> None:
    spec = sound.trace(CFG)
    weights = next(n for n in spec.nodes if n.name == "qkv_proj").inputs[1:]
    found = one(broken_spec(nodes=edited(spec, "qkv_proj", inputs=("o_proj", *weights))), "MK134")
    assert "qkv_proj -> " in found.message and found.message.endswith("-> attention -> o_proj -> qkv_proj")
    assert "before mk.layers" in found.mend


def test_recorded_shapes_are_checked() -> None:
    spec = sound.trace(CFG)
    tensors = {**spec.tensors, "attention": replace(spec.tensors["attention"], shape=(1, 64))}
    found = broken_spec(tensors=tensors)
    assert {d.code for d in found} == {"MK113", "MK135"}
    assert "'attention' is recorded with shape [1, 64], but 'attention' gives [1, 128]" in one(found, "MK135").message


def test_carried_shapes_are_checked() -> None:
    spec = sound.trace(CFG)
    (loop,) = spec.loops
    carried = (replace(loop.carried[0], body_out="lm_head"),)
    assert "[1, 128] and leaves with shape [1, 256]" in one(broken_spec(loops=(replace(loop, carried=carried),)), "MK136").message


def test_an_unknown_op() -> None:
    found = one(broken_spec(nodes=edited(sound.trace(CFG), "o_proj", op="conv")), "MK125")
    assert "'conv'" in found.message and "linear, map, rope" in found.mend


# Graphs that fusion does not give


def op(graph: Graph, name: str, **changes: Any) -> Graph:
    return replace(graph, ops=tuple(replace(o, **changes) if o.name == name else o for o in graph.ops))


def part(graph: Graph, **changes: Any) -> Graph:
    o_proj = graph.op("o_proj")
    assert isinstance(o_proj, Linear)
    return op(graph, "o_proj", parts=(replace(o_proj.parts[0], **changes),))


def qkv_bias(graph: Graph) -> Graph:
    qkv = graph.op("qkv_proj")
    assert isinstance(qkv, Linear)
    first, *others = qkv.parts
    return op(graph, "qkv_proj", parts=(replace(first, bias=WeightRef("b.bias", (first.rows,), True)), *others))


def value(graph: Graph, name: str, **changes: Any) -> Graph:
    return replace(graph, values=tuple(replace(v, **changes) if v.name == name else v for v in graph.values))


def twice(graph: Graph, name: str) -> Graph:
    return replace(graph, ops=(*graph.ops, graph.op(name)))


def epilogue(graph: Graph, expr: Any, *refs: Any) -> Graph:
    return op(graph, "o_proj", epilogue=Fused(expr, refs))


O_PROJ = ("o", ValueRef("o_proj", 0, HIDDEN))
NORM = ("w", WeightRef("norm.weight", (HIDDEN,), False))
BREACHES: list[tuple[Callable[[Graph], Graph], str]] = [
    (lambda g: twice(g, "lm_head"), "op name 'lm_head' is used twice"),
    (lambda g: twice(g, "lm_head"), "more than one sink: ['lm_head', 'lm_head']"),
    (lambda g: replace(g, values=(*g.values, g.value("x"))), "value name 'x' is used twice"),
    (lambda g: op(g, "attention", loop=None), "the loop's ops do not stand together"),
    (lambda g: replace(g, layers=0), "layers is 0, ops in the loop: 3"),
    (lambda g: value(g, "qkv_proj", producer="attention"), "lists producers ['attention'], written by ['qkv_proj']"),
    (lambda g: op(g, "o_proj", prologue=Fused(Arg("x"), (("x", ValueRef("x", 0, HIDDEN)),))), "value 'attention' is never read"),
    (lambda g: value(g, "x", producer="embed", initial="o_proj"), "do not stand before and in the loop"),
    (lambda g: replace(g, ops=g.ops[::-1]), "lm_head reads 'x' before anything has written it"),
    (lambda g: op(g, "attention", q=ValueRef("ghost", 0, HIDDEN)), "reads unknown value 'ghost'"),
    (lambda g: op(g, "attention", v=ValueRef("qkv_proj", 300, HIDDEN)), "reads features [300, 428) of 'qkv_proj', which has 384"),
    (lambda g: op(g, "attention", out="ghost"), "writes unknown value 'ghost'"),
    (lambda g: op(g, "embed", table=WeightRef("e", (256, 64), False)), "gives 64 features into a value of 128"),
    (lambda g: op(g, "lm_head", out="x"), "either an out value or a sink"),
    (lambda g: op(g, "lm_head", sink="topk"), "unknown sink 'topk'"),
    (lambda g: value(g, "qkv_proj", features=400), "gives 384 features into a value of 400"),
    (lambda g: op(g, "o_proj", parts=g.op("o_proj").parts * 2), "parts of the same name"),  # type: ignore[union-attr]
    (lambda g: part(g, rows=64), "has weight shape (128, 128), not (64, 128)"),
    (lambda g: part(g, rope=Rope(96, 1.0, "half")), "is rotated but holds no whole heads"),
    (lambda g: part(g, rope=Rope(64, 1.0, "half")), "has an epilogue beside a rope"),
    (lambda g: part(g, bias=WeightRef("b.bias", (64,), True)), "has bias shape (64,), not (128,)"),
    (qkv_bias, "has a bias for some parts only"),
    (lambda g: op(g, "qkv_proj", epilogue=Fused(Arg("q"), (("q", ValueRef("q_proj", 0, 128)),))), "epilogue does not use parts ['k_proj'"),
    (lambda g: epilogue(g, Reduce("sum", Arg("o")), O_PROJ), "reduces in its epilogue"),
    (lambda g: epilogue(g, Arg("o"), O_PROJ, NORM), "epilogue binds ['o', 'w'], its expression reads ['o']"),
    (lambda g: epilogue(g, Arg("o"), O_PROJ, NORM), "epilogue reads a weight"),
    (lambda g: op(g, "o_proj", factored=Factored(Arg("x"), Arg("x"))), "one that is the same along a row"),
    (lambda g: op(g, "o_proj", factored=Factored(Arg("ghost"), Reduce("sum", Arg("x")))), "of other arguments than its prologue's"),
    (lambda g: epilogue(g, Arg("o"), ("o", ValueRef("o_proj", 0, 64))), "operand 'o' does not have 128 features"),
    (lambda g: op(g, "attention", k=ValueRef("qkv_proj", 128, 64)), "k has 64 features, not 128"),
    (lambda g: op(g, "attention", kv_heads=3), "2 heads over 3 KV heads"),
    (lambda g: value(g, "attention", features=256), "gives 128 features into a value of 256"),
]


@pytest.mark.parametrize(("damage", "breach"), BREACHES)
def test_verify_graph_finds(damage: Callable[[Graph], Graph], breach: str) -> None:
    graph = graph_of(sound)
    verify_graph(graph)
    with pytest.raises(InternalError) as raised:
        verify_graph(damage(graph))
    assert breach in str(raised.value)


def test_epilogue_parts_have_equal_rows() -> None:
    graph = graph_of(sound)
    o_proj = graph.op("o_proj")
    assert isinstance(o_proj, Linear) and isinstance(graph.op("attention"), Attention)
    narrow = replace(o_proj.parts[0], name="n", weight=WeightRef("n.weight", (64, 128), True), rows=64)
    with pytest.raises(InternalError, match="epilogue over parts of different rows"):
        verify_graph(op(graph, "o_proj", parts=(*o_proj.parts, narrow)))


def test_spans_of_fused_ops_are_the_users() -> None:
    graph = graph_of(sound)
    assert all(isinstance(o.span, Span) and o.span.file == __file__ for o in graph.ops if o.name not in ("embed", "lm_head"))
