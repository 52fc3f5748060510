"""Every op's own rules about shapes: code, line, message and mend."""

from __future__ import annotations

from typing import Any

import pytest
from dsl_tools import HIDDEN, head, square, start, trace_finds

import megadsl as mk


def test_embed_table() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.embed(mk.weight("e", HIDDEN), mk.input_ids()))  # here

    trace_finds(mk.kernel(k), "MK110", "the table 'e.weight' has shape [128]", "two dimensions")


def test_embed_ids() -> None:
    def k(cfg: Any) -> mk.Tensor:
        ids, e = mk.input_ids(), mk.weight("e", (256, HIDDEN))
        x = mk.embed(e, ids)
        return head(mk.embed(e, x))  # here

    trace_finds(mk.kernel(k), "MK111", "'e' is bf16 of shape [1, 128]", "mk.input_ids(tokens)")


def test_linear_weight_rank() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start(), mk.weight("w", HIDDEN)))  # here

    trace_finds(mk.kernel(k), "MK112", "weight 'w.weight' has shape [128]", "(out_features, in_features)")


def test_linear_columns() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.linear(start(), mk.weight("w", (HIDDEN, 64))))  # here

    message = "the input has 128 features (shape [1, 128]), weight 'w.weight' has 64 columns (shape [128, 64])"
    trace_finds(mk.kernel(k), "MK113", message, "second dimension 128")


def test_linear_input() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(x + mk.linear(square("v"), square("w")))  # here

    trace_finds(mk.kernel(k), "MK114", "'v.weight' of shape [128, 128] is not an activation", "first argument")


def test_map_features() -> None:
    def k(cfg: Any) -> mk.Tensor:
        x = start()
        return head(x + mk.linear(x, mk.weight("w", (64, HIDDEN))))  # here

    trace_finds(mk.kernel(k), "MK115", "'embed' has shape [1, 128], 'w' has shape [1, 64]", "same number of features")


def test_norm_weight_features() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(mk.rms_norm(start(), mk.weight("norm", 64), eps=1e-5))  # here

    trace_finds(mk.kernel(k), "MK115", "'norm.weight' has shape [64]", "one element per feature")


def test_map_operand() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return head(start() * square("w"))  # here

    trace_finds(mk.kernel(k), "MK116", "operand 'w.weight' of shape [128, 128]", "mk.linear")


def test_map_without_activation() -> None:
    def k(cfg: Any) -> mk.Tensor:
        w = mk.map("a + b", a=mk.weight("a", HIDDEN), b=mk.weight("b", HIDDEN))  # here
        return head(start() + w)

    trace_finds(mk.kernel(k), "MK117", "all operands are weights", "at least one activation")


def roped(**changes: Any) -> mk.Kernel:
    arguments: dict[str, Any] = {"head_dim": 64, "theta": 1e4, **changes}

    def k(cfg: Any) -> mk.Tensor:
        a, b = mk.linear(start(), square("a"), square("b"))
        a, b = mk.rope(a, b, **arguments)  # here
        return head(a + b)

    return mk.kernel(k)


def test_rope_style() -> None:
    trace_finds(roped(style="neox"), "MK118", "unknown style 'neox'", 'style="half"')


def test_rope_features() -> None:
    def k(cfg: Any) -> mk.Tensor:
        a, b = mk.linear(start(), square("a"), mk.weight("b", (96, HIDDEN)))
        a, b = mk.rope(a, b, head_dim=64, theta=1e4)  # here
        return head(mk.linear(a, square("c")) + mk.linear(b, mk.weight("d", (HIDDEN, 96))))

    trace_finds(mk.kernel(k), "MK119", "'b' of shape [1, 96]", "heads * head_dim")


def attention(q_rows: int, kv_rows: int, heads: Any, kv_heads: int, head_dim: int) -> mk.Kernel:
    def k(cfg: Any) -> mk.Tensor:
        q, k, v = mk.linear(start(), mk.weight("q", (q_rows, HIDDEN)), mk.weight("k", (kv_rows, HIDDEN)), mk.weight("v", (kv_rows, HIDDEN)))
        kv = mk.kv_cache(kv_heads, head_dim)
        kv.append(k, k)
        kv = mk.kv_cache(kv_heads, head_dim).append(k, v)  # append
        return head(mk.attention(q, kv, heads=heads))  # attention

    return mk.kernel(k)


def test_head_dim_of_rope() -> None:
    trace_finds(roped(head_dim=32), "MK120", "rope: head_dim 32", "64 or 128")


def test_head_dim_of_attention() -> None:
    trace_finds(attention(128, 64, 4, 2, 32), "MK120", "attention: head_dim 32", "64 or 128", "# attention")


def test_kv_features() -> None:
    def k(cfg: Any) -> mk.Tensor:
        q, k, v = mk.linear(start(), square("q"), square("k"), mk.weight("v", (64, HIDDEN)))
        kv = mk.kv_cache(2, 64).append(k, v)  # here
        return head(mk.attention(q, kv, heads=2))

    message = "v 'v' has shape [1, 64], but the cache takes 2 heads of 64: 128 features"
    trace_finds(mk.kernel(k), "MK121", message, "kv_heads * head_dim = 128")


def test_q_features() -> None:
    trace_finds(attention(192, 128, 4, 2, 64), "MK122", "4 heads of 64 are 256 features", "heads * head_dim = 256", "# attention")


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (1, 2)])
def test_gqa_ratio(heads: int, kv_heads: int) -> None:
    kernel = attention(heads * 64, kv_heads * 64, heads, kv_heads, 64)
    trace_finds(kernel, "MK123", f"{heads} query heads do not divide among {kv_heads} KV heads", "multiple of kv_heads", "# attention")


def test_attention_heads() -> None:
    trace_finds(attention(128, 128, 0, 2, 64), "MK104", "attention heads: dimension 0", "positive", "# attention")


def test_argmax_input() -> None:
    def k(cfg: Any) -> mk.Tensor:
        return mk.argmax(mk.argmax(mk.linear(start(), square("w"))))  # here

    trace_finds(mk.kernel(k), "MK124", "'next_ids' of shape [1]", "last mk.linear")
