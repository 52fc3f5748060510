"""Every op's own rules about shapes: code, line, message and mend."""

from __future__ import annotations

from typing import Any

import pytest
from dsl_tools import HIDDEN, head, square, start, trace_finds

import megadsl as mk


def roped(**changes: Any) -> mk.Kernel:
    arguments: dict[str, Any] = {"head_dim": 64, "theta": 1e4, **changes}

    def k(cfg: Any) -> mk.Tensor:
        a, b = mk.linear(start(), square("a"), square("b"))
        a, b = mk.rope(a, b, **arguments)  # here
        return head(a + b)

    return mk.kernel(k)


def attention(q_rows: int, kv_rows: int, heads: Any, kv_heads: int, head_dim: int) -> mk.Kernel:
    def k(cfg: Any) -> mk.Tensor:
        q, k, v = mk.linear(start(), mk.weight("q", (q_rows, HIDDEN)), mk.weight("k", (kv_rows, HIDDEN)), mk.weight("v", (kv_rows, HIDDEN)))
        kv = mk.kv_cache(kv_heads, head_dim)
        kv.append(k, k)
        kv = mk.kv_cache(kv_heads, head_dim).append(k, v)  # append
        return head(mk.attention(q, kv, heads=heads))  # attention

    return mk.kernel(k)


def test_head_dim_of_rope() -> None:
    trace_finds(roped(head_dim=32), "MK120", "rope: head_dim 32", "a multiple of 16 from 64 to 256")


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (1, 2)])
def test_gqa_ratio(heads: int, kv_heads: int) -> None:
    kernel = attention(heads * 64, kv_heads * 64, heads, kv_heads, 64)
    trace_finds(kernel, "MK123", f"{heads} query heads do not divide among {kv_heads} KV heads", "multiple of kv_heads", "# attention")


def test_attention_heads() -> None:
    trace_finds(attention(128, 128, 0, 2, 64), "MK104", "attention heads: dimension 0", "positive", "# attention")
