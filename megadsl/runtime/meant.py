"""Whether an emulated kernel computes what its graph means in torch, custom ops' own functions included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megadsl.ir.graph import Graph
from megadsl.reference import ReferenceModel
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource, needed, random_weights

SEED = 5
FACTOR = 3  # of the error that the kernel's rounding points make by themselves; a wrong function shows as ten times that and more
SLACK = 2e-3  # relative


def wrong_logits(graph: Graph, manifest: Mapping[str, Any], source: str) -> str:
    """What is wrong with the logits of two emulated launches with random weights, "" for nothing.

    The first takes as many tokens as the kernel can, on an empty cache, the second one more. Their error against the graph in fp32 may be
    FACTOR times that of the graph rounded where the kernel rounds. Raises what Program raises, and MK281.
    """
    given = random_weights(dict(manifest), SEED)
    weights = {name: given.load(name) for name in needed(manifest)}
    program = Program(manifest, source, "cpu", pack_weights(manifest, TensorSource(weights), "cpu", progress=False))
    rows = int(manifest["max_kv"])
    exact = ReferenceModel(graph, {name: w.float() for name, w in weights.items()}, rows, "fp32")
    rounded = ReferenceModel(graph, weights, rows, "bf16")
    random = torch.Generator().manual_seed(SEED)
    cached = 0
    for count in (graph.tokens, 1):
        if cached + count > rows:
            break
        ids = torch.randint(0, graph.vocab, (count,), generator=random).tolist()
        program.control.set_inputs(cached, ids, range(cached, cached + count), [(2 << i) - 1 for i in range(count)])
        program.launch()
        program.check()
        wanted = exact.step(ids)
        found, most = _error(program.logits[:count], wanted), FACTOR * _error(rounded.step(ids), wanted) + SLACK
        if not found <= most:  # nor NaN
            return f"{count} tokens: logits are {found:.1e} of their size off from what the graph means in torch, more than {most:.1e}"
        cached += count
    return ""


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())
