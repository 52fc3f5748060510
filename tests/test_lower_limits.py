"""What today's kernels cannot run is refused at the user's line, with the way out."""

from __future__ import annotations

from typing import Any

from dsl_tools import HIDDEN, check, findings, head, one, square, start
from lower_tools import lowered

import megadsl as mk
from megadsl.diagnostics import Diagnostic


def refused(kernel: mk.Kernel, code: str) -> Diagnostic:
    return one(findings(lambda: lowered(kernel, blocks=2)), code)


def qkv(x: mk.Tensor, layer: Any) -> tuple[mk.Tensor, ...]:
    return mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))


def test_three_activations_in_one_prologue() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        x = start()
        a, b, c = (mk.linear(x, square(n)) for n in "abc")
        return head(mk.map("a * b + c + x", a=a, b=b, c=c, x=x))  # here

    found = findings(lambda: lowered(kernel, blocks=2))
    assert found[0].code == "MK171", [str(d) for d in found]
    assert "one expression; a prologue gathers at most 2" in found[0].message
    assert "come from a linear" in found[0].mend and found[0].span.line > 0


def test_three_matrices_folded_row_by_row() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        a, b, c = mk.linear(start(), square("a"), square("b"), square("c"))  # here
        return head(mk.map("a * b + c", a=a, b=b, c=c))

    found = refused(kernel, "MK172")
    check(found, kernel, "# here", "combines 3 matrices row by row; at most 2", "split it into two expressions")


def test_queries_keys_and_values_of_different_linears() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            q = mk.linear(x, layer.weight("q_proj", (HIDDEN, HIDDEN)))
            k, v = mk.linear(x, layer.weight("k_proj", (HIDDEN, HIDDEN)), layer.weight("v_proj", (HIDDEN, HIDDEN)))
            a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)  # here
            x = x + mk.linear(a, layer.weight("o_proj", (HIDDEN, HIDDEN)))
        return head(x)

    check(refused(kernel, "MK173"), kernel, "# here", "come from different linears", "one linear of several weights")


def test_a_part_that_begins_inside_a_group_of_features() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        a, b = mk.linear(start(), mk.weight("a", (HIDDEN + 4, HIDDEN)), mk.weight("b", (HIDDEN, HIDDEN)))
        y = mk.linear(b, square("w"))  # here
        z = mk.linear(a, mk.weight("v", (HIDDEN, HIDDEN + 4)))
        return head(y + z)

    found = refused(kernel, "MK159")
    check(found, kernel, "# here", f"from feature {HIDDEN + 4} on, which is no multiple of 8", "a multiple of 8 rows")


def test_two_kinds_of_rotary_heads() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        x = start()
        for layer in mk.layers(cfg.layers):
            for block, theta in (("a", 1e4), ("b", 1e5)):
                names = (f"{block}.{n}_proj" for n in "qkv")
                q, k, v = mk.linear(x, *(layer.weight(n, (HIDDEN, HIDDEN)) for n in names))
                q, k = mk.rope(q, k, head_dim=64, theta=theta)
                a = mk.attention(q, layer.kv_cache(2, 64, name=f"kv_{block}").append(k, v), heads=2)
                x = x + mk.linear(a, layer.weight(f"{block}.o_proj", (HIDDEN, HIDDEN)))
        return head(x)

    check(refused(kernel, "MK174"), kernel, "@mk.kernel", "rotary heads of 2 different kinds", "one head_dim, theta and style")


def test_a_loop_that_does_not_start_from_an_embedding() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        x = mk.linear(start(), square("first"))
        for layer in mk.layers(cfg.layers):
            x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        return head(x)

    found = refused(kernel, "MK175")
    assert "begins as the result of 'first', which is no embedding" in found.message
    assert found.mend == "start the loop from mk.embed(...)" and found.span.line > 0


def test_an_attention_outside_the_loop() -> None:
    @mk.kernel
    def kernel(cfg: Any) -> mk.Tensor:
        q, k, v = mk.linear(start(), square("q_proj"), square("k_proj"), square("v_proj"))
        return head(mk.attention(q, mk.kv_cache(2, 64).append(k, v), heads=2))  # here

    check(refused(kernel, "MK176"), kernel, "# here", "is an attention outside mk.layers", "inside the layer loop")
