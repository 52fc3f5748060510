"""Whether an emulated kernel computes what its graph means in torch, custom ops' own functions included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megadsl.ir.graph import Graph
from megadsl.reference import ReferenceModel
from megadsl.reference.model import GraphModel
from megadsl.runtime.control import even
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource, needed, random_weights

SEED = 5
FACTOR = 3  # of the error that the kernel's rounding points make by themselves; a wrong function shows as ten times that and more
SLACK = 2e-3  # relative


def wrong_logits(graph: Graph, manifest: Mapping[str, Any], source: str) -> str:
    """What is wrong with the logits of two emulated launches with random weights, "" for nothing.

    The first takes as many tokens as the kernel can, on an empty cache, of a batch dealt out to its sequences, the second one more. Their
    error against the graph in fp32 may be FACTOR times that of the graph rounded where the kernel rounds. Raises what Program raises, and
    MK281.
    """
    given = random_weights(dict(manifest), SEED)
    weights = {name: given.load(name) for name in needed(manifest)}
    program = Program(manifest, source, "cpu", pack_weights(manifest, TensorSource(weights), "cpu", progress=False))
    rows = int(manifest["max_kv"])
    exact = _each(ReferenceModel(graph, {name: w.float() for name, w in weights.items()}, rows, "fp32"), manifest)
    rounded = _each(ReferenceModel(graph, weights, rows, "bf16"), manifest)
    random = torch.Generator().manual_seed(SEED)
    for count in (graph.tokens, 1):
        cached, counts = [model.kv_len for model in exact], even(count, len(exact))
        if any(kv + own > rows for kv, own in zip(cached, counts, strict=True)):
            break
        ids = torch.randint(0, graph.vocab, (count,), generator=random).tolist()
        program.set_chain(cached, ids)
        program.launch()
        program.check()
        wanted = _step(exact, ids, counts)
        found, most = _error(program.logits[:count], wanted), FACTOR * _error(_step(rounded, ids, counts), wanted) + SLACK
        if not found <= most:  # nor NaN
            return f"{count} tokens: logits are {found:.1e} of their size off from what the graph means in torch, more than {most:.1e}"
    return ""


def _each(model: GraphModel, manifest: Mapping[str, Any]) -> list[GraphModel]:
    """A model for each sequence of the kernel."""
    return [model, *(model.another() for _ in range(int(manifest["sequences"]) - 1))]


def _step(models: Sequence[GraphModel], ids: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Logits of a step of each sequence that has tokens, one behind the other."""
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return torch.cat([m.step(ids[first : first + n]) for m, first, n in zip(models, firsts, counts, strict=True) if n])


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())
