"""A spec run as it is written, op by op in fp32: what fusion must not change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megadsl.ir.graph import Rope
from megadsl.ir.spec import Node, Spec
from megadsl.reference import meaning
from megadsl.types import Lifetime


def random_weights(spec: Spec, seed: int = 1) -> dict[str, Tensor]:
    """fp32 weights for every layer, scaled so that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    layers = spec.loops[0].count if spec.loops else 1
    found = {}
    for t in spec.tensors.values():
        if t.lifetime is Lifetime.WEIGHT:
            for layer in range(layers if t.per_layer else 1):
                w = torch.randn(t.shape, generator=generator)
                scale = 1.0 if t.name == "embed.weight" else t.shape[-1] ** -0.5
                found[t.name.replace("{layer}", str(layer))] = w * scale if len(t.shape) == 2 else 1 + 0.1 * w
    return found


def run(spec: Spec, weights: Mapping[str, Tensor], token_ids: list[int]) -> Tensor:
    """Logits, fp32 (tokens, vocabulary), of a first step."""
    values: dict[str, Tensor] = {"input_ids": torch.tensor(token_ids)}
    body = [n for n in spec.nodes if n.loop]
    loop = spec.loops[0] if spec.loops else None
    before = spec.nodes[: spec.nodes.index(body[0])] if body else spec.nodes
    after = spec.nodes[len(before) + len(body) :]
    _all(spec, before, values, weights, 0)
    if loop:
        entering = {c.body_in: values[c.initial] for c in loop.carried}
        for layer in range(loop.count):
            values.update(entering)
            _all(spec, tuple(body), values, weights, layer)
            entering = {c.body_in: values[c.body_out] for c in loop.carried}
    _all(spec, after, values, weights, 0)
    return values["logits"]


def _all(spec: Spec, nodes: tuple[Node, ...], values: dict[str, Tensor], weights: Mapping[str, Tensor], layer: int) -> None:
    for name, t in spec.tensors.items():
        if t.lifetime is Lifetime.WEIGHT:
            values[name] = weights[name.replace("{layer}", str(layer))]
    for node in nodes:
        values.update(zip(node.outputs, _node(spec, node, [values.get(name, torch.empty(0)) for name in node.inputs]), strict=True))
        if node.op == "argmax":
            values["logits"] = values[node.inputs[0]]


def _node(spec: Spec, node: Node, inputs: list[Tensor]) -> list[Tensor]:
    match node.op:
        case "embed":
            return [meaning.embed(inputs[1], inputs[0])]
        case "linear":
            weights, biases = inputs[1 : 1 + len(node.outputs)], inputs[1 + len(node.outputs) :]
            return [meaning.linear(inputs[0], w) + b for w, b in zip(weights, biases or [0.0] * len(weights), strict=True)]
        case "map":
            args = dict(zip(node.attrs["args"], inputs, strict=True))
            tokens, features = max((tuple(t.shape) for t in inputs if t.dim() == 2), default=(1, 1))
            return [meaning.evaluate(node.attrs["expr"], args, (tokens, features))]
        case "rope":
            rope = Rope(node.attrs["head_dim"], node.attrs["theta"], node.attrs["style"], node.attrs.get("scaling"))
            cos, sin = meaning.rope_table(torch.arange(len(inputs[0])), rope.frequencies)
            return [meaning.rope(_heads(t, node.attrs["head_dim"]), cos, sin, node.attrs["style"]).flatten(1) for t in inputs]
        case "kv_append":
            return [torch.stack([inputs[0], inputs[1]])]
        case "attention":
            q, (k, v) = inputs[0], inputs[1]
            _, head_dim = spec.tensors[node.inputs[1]].shape
            keys, rows = (_heads(t, head_dim).transpose(0, 1) for t in (k, v))
            visible = torch.ones(len(q), len(q)).tril().bool()
            return [meaning.attention(_heads(q, head_dim), keys, rows, visible, node.attrs["scale"]).flatten(1)]
        case _:
            return [torch.empty(0)]


def _heads(t: Tensor, head_dim: int) -> Tensor:
    return t.view(len(t), -1, head_dim)
