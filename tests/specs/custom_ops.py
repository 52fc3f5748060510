"""Kernels with ops of their own: three that people want, and what they mean in torch. Their headers lie in custom/."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megadsl as mk


def hadamard(size: int) -> Tensor:
    """The matrix of that order, a power of two; entries 1 and -1."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@mk.custom_op(header="custom/fwht.cuh", flops=lambda x, head_dim: x[1] * head_dim.bit_length())
def fwht(x: Tensor, signs: Tensor, *, head_dim: int, scale: float) -> Tensor:
    """The Hadamard transform of each head, with random signs: what spreads outliers before a quantised matrix."""
    heads = x.unflatten(-1, (-1, head_dim)) * signs
    return (heads @ hadamard(head_dim).to(x) * scale).flatten(-2)


@mk.custom_op(header="custom/top2.cuh", scratch=lambda: 16 * 16)
def top2(logits: Tensor) -> Tensor:
    """Gates of the two greatest logits, which sum to 1, and zeros."""
    first, index = logits.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(logits).scatter(-1, index[:, :2], first[:, :2].softmax(-1))


@mk.custom_op(header="custom/blend.cuh", features=lambda gates, streams: streams[1] // gates[1], flops=lambda streams: 2 * streams[1])
def blend(gates: Tensor, streams: Tensor, gain: Tensor, *, residual: bool = False) -> Tensor:
    """Experts' outputs, one behind the other in a row, weighted and added."""
    mixed = (gates[:, :, None] * streams.unflatten(-1, (gates.shape[1], -1))).sum(1)
    return mixed + gain[0] * gain[1] if residual else mixed


@mk.custom_op(header="custom/unit_heads.cuh", features=lambda q, k, v: (q[1], k[1], v[1]))
def unit_heads(q: Tensor, k: Tensor, v: Tensor, *, head_dim: int, scale: int, plain_values: bool = True) -> tuple[Tensor, ...]:
    """Cosine attention's operands: queries and keys of length ``scale``."""

    def unit(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, head_dim))
        return (heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * scale).flatten(-2)

    return unit(q), unit(k), v


@mk.kernel
def rotated(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Attention's output is transformed head by head before its projection."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        h = mk.rms_norm(x, layer.weight("norm", cfg.hidden), eps=1e-5)
        q, k, v = mk.linear(h, *(layer.weight(n, (rows, cfg.hidden)) for n, rows in (("q", cfg.hidden), ("k", 64), ("v", 64))))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        a = mk.attention(q, layer.kv_cache(1, 64).append(k, v), heads=cfg.hidden // 64)
        a = fwht(a, layer.weight("signs", 64), head_dim=64, scale=0.125)
        x = x + mk.linear(a, layer.weight("o", (cfg.hidden, cfg.hidden)))
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def experts(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """No attention. A router, all experts' streams, and their mixture, which goes on as the residual stream itself."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        gates = top2(mk.linear(x, layer.weight("router", (cfg.experts, cfg.hidden))))
        streams = mk.linear(x, layer.weight("experts", (cfg.experts * cfg.hidden, cfg.hidden)))
        x = blend(gates, streams, layer.weight("gain", (2, cfg.hidden)), residual=True)
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def cosine(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Attention over what a custom op makes of queries and keys."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(n, (rows, cfg.hidden)) for n, rows in (("q", cfg.hidden), ("k", 64), ("v", 64))))
        q, k, v = unit_heads(q, k, v, head_dim=64, scale=3)
        a = mk.attention(q, layer.kv_cache(1, 64).append(k, v), heads=cfg.hidden // 64)
        x = x + mk.linear(a, layer.weight("o", (cfg.hidden, cfg.hidden)))
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))


@mk.kernel
def twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """No layers; one op called twice, with other parameters, by its own result, and the embedding read by it."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    a = fwht(x, mk.weight("first", 64), head_dim=64, scale=0.125, name="forward")
    b = fwht(a, mk.weight("second", 32), head_dim=32, scale=0.25, name="back")
    return mk.logits(mk.linear(b, mk.weight("head", (cfg.vocab, cfg.hidden))))
