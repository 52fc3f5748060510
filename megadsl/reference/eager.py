"""The torch bf16 baseline: the graph as an ordinary torch program runs it, every op's output rounded to bf16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from megadsl.ir.expr import Expr
from megadsl.ir.graph import Graph
from megadsl.reference import meaning
from megadsl.reference.model import GraphModel


class EagerArithmetic:
    """One bf16 torch op after another, nothing fused but what torch itself fuses."""

    dtype = torch.bfloat16
    as_scheduled = False  # the baseline knows no schedule

    def store(self, x: Tensor) -> Tensor:
        return x.bfloat16()

    def evaluate(self, e: Expr, args: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        return meaning.evaluate(e, args, shape, meaning.round_bf16).bfloat16()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        return meaning.rope(x, cos, sin, style).bfloat16()

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
        if softcap is not None:  # torch's fused operator has none
            return meaning.attention(q, keys, values, visible, scale, meaning.round_bf16, softcap).bfloat16()
        group = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
        out = functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], attn_mask=visible, scale=scale)
        return out[0].transpose(0, 1)


class EagerModel(GraphModel):
    """The graph as a torch bf16 program, on the CPU or a GPU; its error is what the fidelity gate compares ours with.

    Weights are rounded to bf16. See GraphModel for arguments, errors and ``step``; logits are bf16 values as fp32.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, Tensor], max_kv: int, device: str = "cpu") -> None:
        super().__init__(graph, weights, max_kv, EagerArithmetic(), device)
