"""Kernels that are no Llama: what fusion makes of them, no model of models/ has."""

from __future__ import annotations

from typing import Any

import megadsl as mk


@mk.kernel
def separate(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Layers without attention; gate and up are two matrices, joined in the prologue of the third."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        h = mk.rms_norm(x, layer.weight("norm", cfg.hidden), eps=1e-5)
        gate = mk.linear(h, layer.weight("gate", (cfg.inter, cfg.hidden)))
        up = mk.linear(h, layer.weight("up", (cfg.inter, cfg.hidden)))
        x = x + mk.linear(mk.map("silu(gate) * up", gate=gate, up=up), layer.weight("down", (cfg.hidden, cfg.inter)))
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def flat(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """No layers, no choice of a token: logits only. Rows are divided by their greatest magnitude."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    h = mk.linear(mk.map("x / (max(abs(x)) + 1)", x=x), mk.weight("square", (cfg.hidden, cfg.hidden)))
    return mk.logits(mk.linear(h, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def branches(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Slices of one matrix read apart, and an epilogue of three operands, two of them gathered."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        a, b = mk.linear(x, layer.weight("a", (cfg.inter, cfg.hidden)), layer.weight("b", (cfg.hidden, cfg.hidden)))
        u = mk.linear(mk.map("tanh(a) * scale", a=a, scale=layer.weight("scale", cfg.inter)), layer.weight("u", (cfg.hidden, cfg.inter)))
        v = mk.linear(mk.map("b - mean(b)", b=b), layer.weight("v", (cfg.hidden, cfg.hidden)))
        x = mk.map("x + u * sigmoid(v)", x=x, u=u, v=v)
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def plain(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Layers without norms: the columns of all their linears can be split, folded rows among them."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        gate, up = mk.linear(x, layer.weight("gate", (cfg.inter, cfg.hidden)), layer.weight("up", (cfg.inter, cfg.hidden)))
        h = mk.map("silu(gate) * up", gate=gate, up=up)
        x = x + mk.linear(h, layer.weight("down", (cfg.hidden, cfg.inter)))
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def heads(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Queries are centred and scaled head by head, keys are not; rotated behind it in neighbouring pairs."""
    dim, q_heads, kv_heads = cfg.head_dim, cfg.heads, cfg.kv_heads
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        shapes = {"q": q_heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        q, k, v = mk.linear(x, *(layer.weight(name, (rows, cfg.hidden)) for name, rows in shapes.items()))
        norm = "(q - mean(q)) * rsqrt(mean(square(q - mean(q))) + 0.01) * w + b"
        q = mk.map(norm, head_dim=dim, q=q, w=layer.weight("q_norm", dim), b=layer.weight("q_norm.bias", dim))
        q, k = mk.rope(q, k, head_dim=dim, theta=1e4, style="interleaved")
        a = mk.attention(q, layer.kv_cache(kv_heads, dim).append(k, v), heads=q_heads)
        x = x + mk.linear(a, layer.weight("o", (cfg.hidden, q_heads * dim)))
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))
