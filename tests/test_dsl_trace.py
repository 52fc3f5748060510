"""Tracing: names, spans, attributes, and the variables that go from layer to layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dsl_tools import CFG, HIDDEN, head, line_of, square, start

import megadsl as mk
from megadsl.dsl.naming import joint_stem
from megadsl.expr import to_text
from megadsl.ir.spec import Carried, Node, Spec
from megadsl.source import is_ours
from megadsl.types import DType, Lifetime


def nodes(spec: Spec) -> dict[str, Node]:
    return {n.name: n for n in spec.nodes}


def test_a_small_kernel_is_recorded_as_written() -> None:
    @mk.kernel
    def k(cfg: Any, tokens: int = 1) -> mk.Tensor:
        """Doc."""
        x = mk.embed(mk.weight("table", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
        return mk.argmax(mk.logits(mk.linear(x, mk.weight("lm_head", (cfg.vocab, cfg.hidden)))))

    spec = k.trace({"vocab": 256, "hidden": 128, "unused": "kept"}, tokens=4)
    assert (spec.name, spec.tokens, spec.outputs, spec.loops) == ("k", 4, ("next_ids",), ())
    assert [(n.op, n.name, n.inputs, n.outputs) for n in spec.nodes] == [
        ("embed", "table", ("input_ids", "table.weight"), ("table",)),
        ("linear", "lm_head", ("table", "lm_head.weight"), ("lm_head",)),
        ("argmax", "argmax", ("lm_head",), ("next_ids",)),
    ]
    assert {n: (t.shape, t.dtype, t.lifetime) for n, t in spec.tensors.items()} == {
        "table.weight": ((256, 128), DType.BF16, Lifetime.WEIGHT),
        "input_ids": ((4,), DType.I32, Lifetime.INPUT),
        "table": ((4, 128), DType.BF16, Lifetime.ACTIVATION),
        "lm_head.weight": ((256, 128), DType.BF16, Lifetime.WEIGHT),
        "lm_head": ((4, 256), DType.BF16, Lifetime.ACTIVATION),
        "next_ids": ((4,), DType.I32, Lifetime.OUTPUT),
    }
    assert dict(spec.config) == {"vocab": 256, "hidden": 128, "unused": "kept"}
    assert nodes(spec)["table"].span.line == line_of(k, "x = mk.embed")
    assert nodes(spec)["table"].span.file == __file__
    assert k.__doc__ == "Doc." and repr(k).startswith("Kernel('k' at test_dsl_trace.py:")


def test_tokens_come_from_the_function_unless_given() -> None:
    @mk.kernel
    def k(cfg: Any, tokens: int = 7) -> mk.Tensor:
        return head(start(tokens))

    assert k.trace(CFG).tokens == 7
    assert [k.trace(CFG, tokens=n).tokens for n in (1, 16)] == [1, 16]


def test_an_object_as_configuration_keeps_the_plain_fields_that_were_read() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        assert getattr(cfg, "style", "default") == "default"
        assert cfg.table == [1, 2]
        return head(mk.embed(mk.weight("e", (cfg.vocab, 128)), mk.input_ids()))

    spec = k.trace(SimpleNamespace(vocab=256, table=[1, 2], other=3))
    assert dict(spec.config) == {"vocab": 256}


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (["a.{layer}.o_proj.weight"], "o_proj"),
        (["q_proj.weight", "k_proj.weight", "v_proj.weight"], "qkv_proj"),
        (["m.gate_proj.weight", "m.up_proj.weight"], "gate_up_proj"),
        (["first", "second"], "first_second"),
        (["w1.weight", "w-3.weight"], "w1_w_3"),
        (["a_x", "b_y"], "a_x_b_y"),
    ],
)
def test_names_of_linears(weights: list[str], name: str) -> None:
    assert joint_stem(weights) == name


def test_names_are_made_unique() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.linear(x, square("a.proj"))
        z = mk.linear(y + y, square("b.proj"))
        return head(z + x + y)

    spec = k.trace(CFG)
    assert [n.name for n in spec.nodes if n.op == "linear"] == ["proj", "proj_2", "lm_head"]
    assert len({n.name for n in spec.nodes}) == len(spec.nodes)


def test_operators_become_maps() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        a = mk.linear(x, square("a"))
        w = mk.weight("scale", HIDDEN)
        y = (((x + a) * w - 1) / 2 + 3 * a - (1.5 - x)) * (1 / (x * x)) + (2 + -a)
        return head(y)

    texts = [to_text(n.attrs["expr"]) for n in k.trace(CFG).nodes if n.op == "map"]
    assert texts == [
        *("a + b", "a * b", "a - 1", "a / 2", "3 * a", "a + b", "1.5 - a", "a - b", "a * a", "1 / a", "a * b", "-a", "2 + a", "a + b")
    ]


def test_map_takes_tensors_and_numbers() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(mk.map("alpha * silu(x) + b", x=x, b=mk.weight("b.bias", HIDDEN), alpha=2))

    node = next(n for n in k.trace(CFG).nodes if n.op == "map")
    assert to_text(node.attrs["expr"]) == "2 * silu(x) + b"
    assert node.attrs["args"] == ("x", "b") and node.inputs == ("embed", "b.bias")


def test_rms_norm_is_its_expression() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.rms_norm(start(), mk.weight("norm", HIDDEN), eps=1e-6))

    node = nodes(k.trace(CFG))["norm"]
    assert node.op == "map" and to_text(node.attrs["expr"]) == "x * rsqrt(mean(x * x) + 1e-06) * w"


@mk.kernel
def looped(cfg: Any) -> mk.Tensor:
    x = start()
    fixed = mk.linear(x, square("fixed"))
    for layer in mk.layers(cfg.layers, prefix="blocks"):
        h = mk.linear(x + fixed, layer.weight("proj", (HIDDEN, HIDDEN)))
        x = x + h
    return head(x)


def test_a_variable_that_is_rebound_after_it_was_read_is_carried() -> None:
    spec = looped.trace(CFG)
    (loop,) = spec.loops
    assert (loop.count, loop.span.line) == (2, line_of(looped, "mk.layers"))
    assert loop.carried == (Carried("x", "embed", "x.in", "add_2"),)
    by = nodes(spec)
    assert by["add"].inputs == ("x.in", "fixed")  # what the loop only reads stays what it is
    assert by["add_2"].inputs == ("x.in", "proj")
    assert by["lm_head"].inputs[0] == "add_2"
    assert [n.name for n in spec.nodes if n.loop == loop.name] == ["add", "proj", "add_2"]
    assert spec.tensors["x.in"].shape == (1, HIDDEN)
    weight = spec.tensors["blocks.{layer}.proj.weight"]
    assert weight.per_layer and not spec.tensors["fixed.weight"].per_layer


def test_variables_of_the_body_alone_are_not_carried() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        h = mk.linear(x, square("first"))
        x = x + h
        for layer in mk.layers(cfg.layers):
            h = mk.linear(x, layer.weight("proj", (HIDDEN, HIDDEN)))
            x = x + h
        return head(x + h)

    (loop,) = k.trace(CFG).loops
    assert [c.variable for c in loop.carried] == ["x"]


def test_reads_through_functions_and_swaps_are_seen() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        new = start()
        old = mk.linear(new, square("first"))

        def block(value: mk.Tensor, layer: mk.Layer) -> mk.Tensor:
            return mk.linear(value, layer.weight("proj", (HIDDEN, HIDDEN)))

        for layer in mk.layers(cfg.layers):
            old, new = new, block(new + old, layer)
        return head(new)

    (loop,) = k.trace(CFG).loops
    assert {c.variable: (c.initial, c.body_out) for c in loop.carried} == {"new": ("embed", "proj"), "old": ("first", "new.in")}


def test_caches_and_attention() -> None:
    @mk.kernel
    def k(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = start(tokens)
        for layer in mk.layers(cfg.layers):
            shapes = (("q", 256), ("k", 128), ("v", 128))
            weights = [layer.weight(f"{n}_proj", (rows, HIDDEN)) for n, rows in shapes]
            q, k, v = mk.linear(x, *weights)
            q, k = mk.rope(q, k, head_dim=64, theta=1e4, style="interleaved")
            kv = layer.kv_cache(2, 64)
            kv.append(k, v)
            x = x + mk.linear(mk.attention(q, kv, heads=4), layer.weight("o_proj", (HIDDEN, 256)))
        return head(x)

    spec = k.trace(CFG, tokens=3)
    by = nodes(spec)
    assert by["rope"].attrs == {"head_dim": 64, "theta": 1e4, "style": "interleaved"}
    assert by["kv_append"].inputs == ("k_proj.rope", "v_proj", "kv") and by["kv_append"].outputs == ("kv.new",)
    assert by["attention"].inputs == ("q_proj.rope", "kv.new")
    assert by["attention"].attrs == {"heads": 4, "scale": 0.125}
    assert spec.tensors["kv"].lifetime is Lifetime.STATE and spec.tensors["kv"].per_layer
    assert spec.tensors["attention"].shape == (3, 256)


def test_a_weight_declared_twice_alike_is_one_weight() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = mk.linear(start(), square("w"))
        return head(mk.linear(x, square("w"), name="again"))

    spec = k.trace(CFG)
    assert [n.inputs[1] for n in spec.nodes if n.op == "linear"] == ["w.weight", "w.weight", "lm_head.weight"]


def test_tensors_show_themselves() -> None:
    @mk.kernel
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        assert repr(x) == "Tensor('embed', shape=[1, 128], dtype=bf16)"
        assert x.dtype is DType.BF16
        return head(x)

    k.trace(CFG)


def test_specs_that_ship_with_the_package_are_the_users_code() -> None:
    package = Path(mk.__file__).parent
    assert is_ours(str(package / "dsl" / "loop.py"))
    assert not is_ours(str(package / "_models" / "llama.py"))
    assert not is_ours(str(package.with_name("megadsl_specs") / "mine.py"))
