"""A step whose layers are of several kinds: each has its own window and its own rotation."""

from __future__ import annotations

from typing import Any

import megadsl as mk


@mk.kernel
def step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Llama without norms and MLP. ``cfg``: hidden, heads, kv_heads and vocab; windows, thetas and scalings, lists of all layers'."""
    dim, layers = 64, len(cfg.windows)
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(layers):
        rows = (cfg.heads * dim, cfg.kv_heads * dim, cfg.kv_heads * dim)
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (r, cfg.hidden)) for n, r in zip("qkv", rows, strict=True)))
        q, k = mk.rope(q, k, head_dim=dim, theta=mk.per_layer(cfg.thetas), scaling=mk.per_layer(cfg.scalings))
        kv = layer.kv_cache(cfg.kv_heads, dim).append(k, v)
        a = mk.attention(q, kv, heads=cfg.heads, window=mk.per_layer(cfg.windows))
        x = x + mk.linear(a, layer.weight("o_proj", (cfg.hidden, cfg.heads * dim)))
    return mk.argmax(mk.linear(x, mk.weight("lm_head", (cfg.vocab, cfg.hidden))))
