"""Every mistake that tracing can see: code, line, message and mend."""

from __future__ import annotations

from typing import Any

import pytest
from dsl_tools import CFG, HIDDEN, check, findings, head, line_of, one, square, start, trace_finds

import megadsl as mk


def body(run: Any) -> mk.Kernel:
    """A kernel whose function is ``run(cfg)``; marks are looked up in ``run``."""
    return mk.kernel(run)


def test_outside_a_kernel() -> None:
    def call() -> None:
        mk.input_ids(1)  # here

    check(one(findings(call), "MK100"), call, "# here", "mk.input_ids is called outside a kernel", "@mk.kernel")


@pytest.mark.parametrize(("dtype", "shown"), [("bf17", "'bf17'"), ("f32", "'f32'"), (mk.DType.I32, "'i32'")])
def test_dtype(dtype: Any, shown: str) -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start(), mk.weight("w", (HIDDEN, HIDDEN), dtype=dtype)))  # here

    trace_finds(body(k), "MK101", f"unknown dtype {shown}", 'dtype="bf16"')


@pytest.mark.parametrize("tokens", [0, 17, -1, True, 1.5, "2"])
def test_tokens_range(tokens: Any) -> None:
    def k(cfg: Any, tokens: Any) -> mk.Tensor:
        ids = mk.input_ids(tokens)  # here
        return head(mk.embed(mk.weight("e", (256, HIDDEN)), ids))

    trace_finds(body(k), "MK102", f"tokens = {tokens!r} is out of range", "1 to 16", tokens=tokens)


def test_a_kernel_without_tokens() -> None:
    @mk.kernel  # here
    def k(cfg: Any) -> mk.Tensor:
        return head(start())

    assert k.trace(CFG).tokens == 1
    trace_finds(k, "MK187", "kernel 'k' takes no tokens", "`def k(cfg, tokens=1):`", tokens=2)


@pytest.mark.parametrize("size", [0, -4, 64.0, "64", True])
def test_dimensions(size: Any) -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start(), mk.weight("w", (size, HIDDEN))))  # here

    trace_finds(body(k), "MK104", f"weight 'w.weight': dimension {size!r}", "positive integers")


def test_tensor_of_another_kernel() -> None:
    kept: list[mk.Tensor] = []

    def first(cfg: Any) -> mk.Tensor:
        kept.append(start())
        return head(kept[0])

    def k(cfg: Any) -> mk.Tensor:
        return head(start() + kept[0])  # here

    body(first).trace(CFG)
    trace_finds(body(k), "MK108", "'embed' belongs to another kernel", "inside the function")


@pytest.mark.parametrize(("result", "shown"), [(None, "nothing"), (3, "3, which is no tensor of it"), ((), "(), which is no tensor")])
def test_no_output(result: Any, shown: str) -> None:
    @mk.kernel  # here
    def k(cfg: Any) -> Any:
        head(start())
        return result

    trace_finds(k, "MK126", f"returns {shown}", "return the logits")


@pytest.mark.parametrize("cfg", [{"hiden": 1, "vocab": 2}, type("C", (), {})()])
def test_config_field(cfg: Any) -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.embed(mk.weight("e", (256, cfg.hidden)), mk.input_ids()))  # here

    trace_finds(body(k), "MK129", "no field 'hidden'", "hiden, vocab" if isinstance(cfg, dict) else "it has: nothing", cfg=cfg)


def test_unused_tensor() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.linear(x, square("w"))
        y + 1  # here
        return head(x)

    found = findings(lambda: body(k).trace(CFG))
    assert [d.code for d in found] == ["MK130"]  # only the end of the dead chain
    check(found[0], k, "# here", "'add', computed by 'add', is never used", "delete the line")


def test_unused_rows() -> None:
    def k(cfg: Any) -> mk.Tensor:
        a, _ = mk.linear(start(), square("a"), square("b"))  # here
        return head(a)

    trace_finds(body(k), "MK130", "'b', computed by 'a_b', is never used", "delete")


def test_unused_loop_variable() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.linear(x, square("first"))
        for layer in mk.layers(2):
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
            y = y * 2  # here
        return head(x)

    trace_finds(body(k), "MK130", "'mul', computed by 'mul', is never used", "delete")


@pytest.mark.parametrize("inside", [True, False])
def test_cache_on_the_wrong_side(inside: bool) -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        outer = mk.kv_cache(2, 64, name="outer")
        for layer in mk.layers(2):
            q, k, v = mk.linear(x, *(layer.weight(n, (HIDDEN, HIDDEN)) for n in "qkv"))
            inner = layer.kv_cache(2, 64)
            kv = outer.append(k, v) if not inside else inner  # in
            x = x + mk.attention(q, inner.append(k, v) if not inside else kv.append(k, v), heads=2)
        return head(mk.attention(x, outer if not inside else layer_cache(inner, x), heads=2))

    def layer_cache(cache: mk.KVCache, x: mk.Tensor) -> mk.KVCache:
        return cache.append(x, x)  # after

    found = findings(lambda: body(k).trace(CFG))
    finding = one(found, "MK143")
    assert f"is declared {'inside' if inside else 'outside'} mk.layers" in finding.message
    assert finding.span.line == (line_of(layer_cache, "# after") if inside else line_of(k, "# in"))
    assert "layer.kv_cache(...)" in finding.mend


def test_nested_loops() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(2):
            for _ in mk.layers(2):  # here
                x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    trace_finds(body(k), "MK145", "nested in another mk.layers", "one loop")


def test_layers_count() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(0):  # here
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    trace_finds(body(k), "MK104", "mk.layers: dimension 0", "positive")


@pytest.mark.parametrize("hide", [False, True])
def test_carried_alias(hide: bool) -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        first = [x] if hide else x
        for layer in mk.layers(2):  # here
            x = x + mk.linear(first[0] if isinstance(first, list) else first, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    trace_finds(body(k), "MK148", f"'x' and {'first[0]' if hide else 'first'!r} are the same tensor", "drop")


def test_expression_errors_have_a_caret() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(mk.map("silu(x) * y", x=x))  # here

    found = one(findings(lambda: body(k).trace(CFG)), "MK206")
    check(found, k, "# here", "unknown name 'y'", "known names: x")
    assert found.detail.splitlines() == ["    silu(x) * y", "    " + " " * 10 + "^"]


def test_several_mistakes_are_reported_at_once() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        a = mk.linear(x, mk.weight("a", (64, 64)))
        b = mk.linear(x, mk.weight("b", (64, HIDDEN), dtype="fp7"))
        square("spare")
        return head(x + a * b)

    found = findings(lambda: body(k).trace(CFG, tokens=None))
    assert [d.code for d in found] == ["MK113", "MK101", "MK115", "MK131"]


def test_a_consequence_of_a_mistake_does_not_hide_it() -> None:
    def k(cfg: Any) -> mk.Tensor:
        mk.linear(start(), mk.weight("a", (64, 64)))
        raise ZeroDivisionError

    assert [d.code for d in findings(lambda: body(k).trace(CFG))] == ["MK113"]

    def bare(cfg: Any) -> mk.Tensor:
        raise ZeroDivisionError  # here

    with pytest.raises(mk.MegadslError) as raised:
        body(bare).trace(CFG)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    check(one(raised.value.diagnostics, "MK220"), bare, "# here", "ZeroDivisionError: no more is said", "mend this line")


def test_columns_count_characters_and_have_a_caret() -> None:
    def k(cfg: Any) -> mk.Tensor:
        é = "ééé"; return head(mk.linear(start(), mk.weight(é, (HIDDEN, 64))))  # fmt: skip # noqa: E702  # here

    found = one(findings(lambda: body(k).trace(CFG)), "MK113")
    line = found.span.text
    assert found.span.column == line.index("mk.linear") + 1
    shown, caret = str(found).splitlines()[1:3]
    assert shown.strip() == line.strip() and caret.index("^") == shown.index("mk.linear")
    assert str(found).startswith(f"{__file__}:{found.span.line}:{found.span.column}: error[MK113]")
