"""kv_append and attention: grouped-query attention over a cache that this step's k and v were appended to."""

from __future__ import annotations

from megadsl.diagnostics import Collector, declare
from megadsl.ir import graph
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Cost, Family, Outline, shape_text
from megadsl.ops.rope import check_head_dim
from megadsl.types import DType, Lifetime, all_layers, at_layer

KV_FEATURES = declare(
    "MK121",
    "kv append: {which} {tensor!r} has shape {shape}, but the cache takes {kv_heads} heads of {head_dim}: {features} features",
    "make the {which} projection's rows kv_heads * head_dim = {features}, or change the cache's shape",
)
Q_FEATURES = declare(
    "MK122",
    "attention {name!r}: q {tensor!r} has shape {shape}, but {heads} heads of {head_dim} are {features} features",
    "make the q projection's rows heads * head_dim = {features}, or change heads=",
)
GQA_RATIO = declare(
    "MK123",
    "attention {name!r}: {heads} query heads do not divide among {kv_heads} KV heads",
    "heads must be a positive multiple of kv_heads (1 for plain multi-head attention)",
)


WINDOW = declare(
    "MK254",
    "attention {name!r}: a window of {window} rows is shorter than a step of {tokens} tokens",
    "compile for at most {window} tokens a step, or give a longer window",
)


def _append(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    k, v, cache = inputs
    kv_heads, head_dim = cache.shape
    for which, t in (("k", k), ("v", v)):
        if t.shape[-1] != kv_heads * head_dim:
            found.add(
                KV_FEATURES,
                node.span,
                which=which,
                tensor=t.name,
                shape=shape_text(t.shape),
                kv_heads=kv_heads,
                head_dim=head_dim,
                features=kv_heads * head_dim,
            )
    return (Outline(cache.shape, DType.BF16, Lifetime.STATE),)


def _attention(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    q, cache = inputs
    kv_heads, head_dim = cache.shape
    heads = node.attrs["heads"]
    check_head_dim(node, head_dim, found)
    if heads < kv_heads or heads % kv_heads:
        found.add(GQA_RATIO, node.span, name=node.name, heads=heads, kv_heads=kv_heads)
    window = min((w for w in all_layers(node.attrs.get("window")) if w is not None), default=None)
    if window is not None and window < q.shape[0]:
        found.add(WINDOW, node.span, name=node.name, window=window, tokens=q.shape[0])
    if q.shape[-1] != heads * head_dim:
        found.add(
            Q_FEATURES,
            node.span,
            name=node.name,
            tensor=q.name,
            shape=shape_text(q.shape),
            heads=heads,
            head_dim=head_dim,
            features=heads * head_dim,
        )
    return (Outline(q.shape),)


KV_APPEND = Family("kv_append", _append)
ATTENTION = Family("attention", _attention)


def kv_row_bytes(op: graph.Attention) -> int:
    """Bytes of one cached token in one layer: K and V of all KV heads."""
    return 2 * op.kv_heads * op.cache_dim * DType.BF16.bytes


def cost(op: graph.Attention, tokens: int, kv_len: int, layer: int) -> Cost:
    """Old KV rows that a layer sees are read once, new ones written once; scores and products over both; vectors of maps once."""
    window = at_layer(op.window, layer)
    rows = (kv_len if window is None else min(kv_len, window - 1)) + tokens
    features = (op.heads * 2 + op.kv_heads * 2) * op.head_dim  # q, out; k, v
    vectors = sum(ref.shape[0] for _, fused in op.maps for _, ref in fused.args if isinstance(ref, graph.WeightRef))
    return Cost(
        weight_bytes=vectors * DType.BF16.bytes,
        flops=4 * tokens * rows * op.heads * op.head_dim,
        kv_bytes=rows * kv_row_bytes(op),
        exchange_bytes=tokens * features * DType.BF16.bytes,
    )
