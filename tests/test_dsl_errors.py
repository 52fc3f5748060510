"""Every mistake that tracing can see: code, line, message and mend."""

from __future__ import annotations

from typing import Any

import pytest
from dsl_tools import CFG, HIDDEN, check, findings, head, line_of, one, square, start, trace_finds

import megadsl as mk
from megadsl.diagnostics import CATALOGUE


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


def test_tokens_are_to_be_passed_on() -> None:
    def k(cfg: Any, tokens: int = 1) -> mk.Tensor:
        ids = mk.input_ids(2)  # here
        return head(mk.embed(mk.weight("e", (256, HIDDEN)), ids))

    trace_finds(body(k), "MK137", "traced for tokens=4, but mk.input_ids asks for 2", "mk.input_ids(tokens)", tokens=4)


def test_a_kernel_without_tokens() -> None:
    @mk.kernel  # here
    def k(cfg: Any) -> mk.Tensor:
        return head(start())

    assert k.trace(CFG).tokens == 1
    trace_finds(k, "MK187", "kernel 'k' takes no tokens", "`def k(cfg, tokens=1):`", tokens=2)


def test_weight_twice() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = mk.linear(start(), square("w"))
        return head(mk.linear(x, mk.weight("w", (64, HIDDEN))))  # here

    trace_finds(body(k), "MK103", "'w.weight' is declared with shape [64, 128], but before with [128, 128]", "the same shape")


@pytest.mark.parametrize("size", [0, -4, 64.0, "64", True])
def test_dimensions(size: Any) -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start(), mk.weight("w", (size, HIDDEN))))  # here

    trace_finds(body(k), "MK104", f"weight 'w.weight': dimension {size!r}", "positive integers")


def test_not_a_tensor() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start(), "w"))  # type: ignore[call-overload]  # here

    trace_finds(body(k), "MK105", "expected a tensor, got str 'w'", "mk.linear")


def test_operand_of_an_operator() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(start() + "x")  # type: ignore[operator]  # here

    trace_finds(body(k), "MK139", "add: the other operand is str 'x'", "number")


def test_cache_appended_twice() -> None:
    def k(cfg: Any) -> mk.Tensor:
        q, k, v = mk.linear(start(), *(square(f"{n}_proj") for n in "qkv"))
        kv = mk.kv_cache(2, 64).append(k, v)
        kv.append(k, v)  # here
        return head(mk.attention(q, kv, heads=2))

    trace_finds(body(k), "MK106", "cache 'kv' is appended to twice", "second cache")


def test_layer_after_its_loop() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=1e-5))  # here

    trace_finds(body(k), "MK107", "outside the loop's body", "into the body")


def test_tensor_of_another_kernel() -> None:
    kept: list[mk.Tensor] = []

    def first(cfg: Any) -> mk.Tensor:
        kept.append(start())
        return head(kept[0])

    def k(cfg: Any) -> mk.Tensor:
        return head(start() + kept[0])  # here

    body(first).trace(CFG)
    trace_finds(body(k), "MK108", "'embed' belongs to another kernel", "inside the function")


def test_op_name_twice() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = mk.linear(start(), square("a"), name="mix")
        return head(mk.linear(x, square("b"), name="mix"))  # here

    trace_finds(body(k), "MK109", "two ops are called 'mix'", "name=")


@pytest.mark.parametrize(("result", "shown"), [(None, "nothing"), (3, "3, which is no tensor of it"), ((), "(), which is no tensor")])
def test_no_output(result: Any, shown: str) -> None:
    @mk.kernel  # here
    def k(cfg: Any) -> Any:
        head(start())
        return result

    trace_finds(k, "MK126", f"returns {shown}", "return the logits")


def test_break() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(2):  # here
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
            break
        return head(x)

    trace_finds(body(k), "MK127", "left by break or return", "run to its end")


def test_unbound_name() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(2):
            x = x + h  # type: ignore[has-type] # noqa: F821  # here
            h = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))  # noqa: F841
        return head(x)

    trace_finds(body(k), "MK128", "'h'", "before mk.layers")


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


def test_unused_weight() -> None:
    def k(cfg: Any) -> mk.Tensor:
        mk.weight("spare", (HIDDEN, HIDDEN))  # here
        return head(start())

    trace_finds(body(k), "MK131", "weight 'spare.weight' is declared and never used", "delete the declaration")


def test_unused_cache() -> None:
    def k(cfg: Any) -> mk.Tensor:
        mk.kv_cache(2, 64)  # here
        return head(start())

    trace_finds(body(k), "MK132", "cache 'kv' is declared and never read", "mk.attention")


def test_carried_shape() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(2):
            x = mk.linear(x, layer.weight("w", (64, HIDDEN)))  # here
        return head(x)

    trace_finds(body(k), "MK136", "'x' enters with shape [1, 128] and leaves with shape [1, 64]", "keeps its shape")


def test_no_input() -> None:
    kept: list[mk.Tensor] = []

    @mk.kernel  # here
    def k(cfg: Any) -> mk.Tensor:
        kept.append(mk.weight("w", (HIDDEN, HIDDEN)))
        return kept[-1]

    trace_finds(k, "MK138", "never calls mk.input_ids", "mk.embed(table, mk.input_ids(tokens))")


def test_ids_twice() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        y = mk.embed(mk.weight("other", (256, HIDDEN)), mk.input_ids())  # here
        return head(x + y)

    trace_finds(body(k), "MK140", "called twice", "keep the tensor")


def test_linear_without_weight() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start()))  # type: ignore[call-overload]  # here

    trace_finds(body(k), "MK141", "no weight", "mk.linear(x, w)")


def test_stale_initial() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        kept = {id(x): x}.values()  # out of sight of the loop
        for layer in mk.layers(2):
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x + next(iter(kept)))  # here

    trace_finds(body(k), "MK142", "the value that 'x' had before the loop", "before the loop")


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


def test_layer_weight_outside() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(2):
            w = layer.weight("w", (HIDDEN, HIDDEN))
            x = x + mk.linear(x, w)
        return head(mk.linear(x, w))  # here

    trace_finds(body(k), "MK144", "which exists once per layer, outside the loop", "mk.weight")


def test_two_loops() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(2):
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        for layer in mk.layers(2, prefix="more"):  # here
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    trace_finds(body(k), "MK145", "used a second time", "one loop")


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


def test_empty_loop() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        layers = list(mk.layers(2))  # here
        return head(mk.linear(x, layers[0].weight("w", (HIDDEN, HIDDEN))))

    trace_finds(body(k), "MK146", "records no op", "for layer in mk.layers(n)")


def test_carried_type() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x: Any = start()
        for layer in mk.layers(2):  # here
            x = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)), layer.weight("b", (HIDDEN, HIDDEN)))
        return head(x[0] + x[1])

    trace_finds(body(k), "MK147", "'x' is a tensor before the loop and a tuple after its body", "leave the variable a tensor")


@pytest.mark.parametrize("hide", [False, True])
def test_carried_alias(hide: bool) -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        first = [x] if hide else x
        for layer in mk.layers(2):  # here
            x = x + mk.linear(first[0] if isinstance(first, list) else first, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    trace_finds(body(k), "MK148", f"'x' and {'first[0]' if hide else 'first'!r} are the same tensor", "drop")


def test_attention_without_cache() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(mk.attention(x, x, heads=2))  # type: ignore[arg-type]  # here

    trace_finds(body(k), "MK149", "kv is a Tensor", "layer.kv_cache(...).append(k, v)")


def test_attention_on_an_empty_cache() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.attention(start(), mk.kv_cache(2, 64), heads=2))  # here

    trace_finds(body(k), "MK149", "to which nothing was appended", "append(k, v)")


def test_expression_errors_have_a_caret() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(mk.map("silu(x) * y", x=x))  # here

    found = one(findings(lambda: body(k).trace(CFG)), "MK206")
    check(found, k, "# here", "unknown name 'y'", "known names: x")
    assert found.detail.splitlines() == ["    silu(x) * y", "    " + " " * 10 + "^"]


def test_operands_that_the_expression_does_not_use() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(mk.map("silu(x)", x=x, y=x))  # here

    trace_finds(body(k), "MK209", "'y' is given but the expression does not use it", "do not pass it")


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
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body(bare).trace(CFG)


def test_every_code_has_a_mend() -> None:
    mine = {code: entry for code, entry in CATALOGUE.items() if "MK100" <= code <= "MK160"}
    assert len(mine) > 50
    assert all(entry.mend and entry.message for entry in mine.values())
