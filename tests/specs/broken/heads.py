"""Maps over heads that do not fit. How to read the comments: tests/test_broken_specs.py."""

from typing import Any

from dsl_tools import HIDDEN, head, start

import megadsl as mk


def out(layer: mk.Layer, a: mk.Tensor) -> mk.Tensor:
    return mk.linear(a, layer.weight("o_proj", (HIDDEN, a.shape[1])))


def three(layer: mk.Layer, x: mk.Tensor) -> tuple[mk.Tensor, ...]:
    return mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))


@mk.kernel
def two_activations(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q = mk.map("q * sigmoid(k)", head_dim=64, q=q, k=k)
        # MK233 `mk.map(` | a map over heads of 64 takes one activation, here are 2: q_proj, k_proj | map each of them by itself
        # mend: "q * sigmoid(k)", head_dim=64, q=q, k=k => "q * sigmoid(q)", head_dim=64, q=q
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def parts_of_heads(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        rows = 96
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (r, HIDDEN)) for n, r in (("q", rows), ("k", HIDDEN), ("v", HIDDEN))))
        q = mk.rms_norm(q, layer.weight("q_norm", 64), eps=1e-6, head_dim=64)
        # MK227 `mk.rms_norm(` | 'q_proj' of shape [1, 96] does not hold whole heads of 64 features | features must be heads * head_dim
        # mend: rows = 96 => rows = 128
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK122 `mk.attention(` | q 'q_norm' has shape [1, 96], but 2 heads of 64 are 128 features | heads * head_dim = 128
    return head(x)


@mk.kernel
def vector_of_all_features(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        k = mk.rms_norm(k, layer.weight("k_norm", HIDDEN), eps=1e-6, head_dim=64)
        # MK228 `mk.rms_norm(` | has shape [128], but a map over heads of 64 takes vectors of 64 elements | the length of one head, (64,)
        # mend: layer.weight("k_norm", HIDDEN) => layer.weight("k_norm", «(64,)»)
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def unsupported_heads(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q = mk.rms_norm(q, layer.weight("q_norm", 32), eps=1e-6, head_dim=32)
        # MK120 `mk.rms_norm(` | q_norm: head_dim 32 is not supported | a head dimension of 64 or 128
        # mend: 32), eps=1e-6, head_dim=32 => 64), eps=1e-6, head_dim=64
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def norm_behind_the_rotation(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        q = mk.rms_norm(q, layer.weight("q_norm", 64), eps=1e-6, head_dim=64)
        # MK229 `mk.rms_norm(` | 'q_norm', a map over heads, reads 'q_proj.rope', which is computed by rope 'rope' | rotate behind the map
        # mend:         q, k = mk.rope(q, k, head_dim=64, theta=1e4)\n =>
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK190 `mk.attention(` | q is computed by head_map 'q_norm' | feed attention from mk.linear
        # MK194 `mk.attention(` | q is not rotated, k is rotated by 64 | rotate q and k alike
    return head(x)


@mk.kernel
def mapped_values(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        v = mk.map("v * rsqrt(sum(v * v))", head_dim=64, v=v)
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK190 `mk.attention(` | v is computed by head_map 'map' | feed attention from mk.linear
        # mend:         v = mk.map("v * rsqrt(sum(v * v))", head_dim=64, v=v)\n =>
    return head(x)


@mk.kernel
def reader_of_mapped_rows(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        w = layer.weight("w", (HIDDEN, HIDDEN))
        q, k, v = three(layer, x)
        q = mk.rms_norm(q, layer.weight("q_norm", 64), eps=1e-6, head_dim=64)
        a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)
        x = x + a * mk.linear(q, w)
        # MK230 `mk.linear(` | 'w' reads 'q_norm', which is mapped head by head | to mk.rope, to attention (q) and to the cache (k) only
        # mend: mk.linear(q, w) => mk.linear(v, w)
    return head(x)


@mk.kernel
def mapped_and_not(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        n = mk.rms_norm(q, layer.weight("q_norm", 64), eps=1e-6, head_dim=64)
        # MK231 `mk.rms_norm(` | 'q_proj' is mapped head by head and read unmapped as well | or a second linear for the other use
        # mend: a * q => a * mk.linear(x, layer.weight("other", (HIDDEN, HIDDEN)))
        a = mk.attention(n, layer.kv_cache(2, 64).append(k, v), heads=2)
        x = x + mk.linear(a * q, layer.weight("o", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def heads_of_two_widths(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q = mk.rms_norm(q, layer.weight("q_norm", 128), eps=1e-6, head_dim=128)
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK232 `mk.attention(` | q is mapped over heads of 128 features, the cache has heads of 64 | the cache's head_dim=64 in the map
        # mend: 128), eps=1e-6, head_dim=128 => 64), eps=1e-6, «head_dim=64»
    return head(x)
