"""One step of a model with a timeline (megadsl.trace): random weights and random cached rows, since times depend on neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megadsl.diagnostics import declare, error
from megadsl.runtime.control import even
from megadsl.runtime.kv import KvCache
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import TRACE, Program, resolve_device
from megadsl.runtime.weights import random_weights

TRACE_ROWS = declare(
    "MK462",
    "{rows} cached rows and {tokens} new tokens do not fit a KV cache of {max_kv} rows",
    "give a smaller --kv, or a larger --max-kv",
)


class Compiled(Protocol):
    """What a recording needs of a compilation."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Recording:
    """The timeline of the last of some steps, as the bytes of the trace buffer, and that step's logits (tokens, vocab) fp32."""

    raw: npt.NDArray[np.uint8]
    logits: torch.Tensor


def record(
    compiled: Compiled, device: str, *, tokens: int, rows: int, steps: int = 20, defines: Mapping[str, str] | None = None
) -> Recording:
    """Run the same step ``steps`` times, back to back, of ``tokens`` new tokens after ``rows`` cached ones; the last one's timeline. Of a
    batch, the tokens are dealt out to the sequences in stretches that differ by one at most, and each has ``rows`` of its own.

    ``device`` as Program's; the emulator takes one step. ``defines`` are further compile-time switches. Raises MK462, what Program
    raises, and MegakernelHang.
    """
    manifest = compiled.manifest
    if rows + (most := even(tokens, manifest["sequences"])[0]) > manifest["max_kv"]:
        raise error(TRACE_ROWS, rows=rows, tokens=most, max_kv=manifest["max_kv"])
    where = str(resolve_device(device, manifest["arch"]))
    arena = pack_weights(manifest, random_weights(manifest, device="cpu" if where == "cpu" else where), where, progress=False)
    program = Program(manifest, compiled.source, where, arena, defines={TRACE: "1", **(defines or {})})
    _fill_cache(program, rows)
    vocab = manifest["vocab"]
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    program.set_chain(rows, ids)
    step = program.capture()
    for _ in range(1 if where == "cpu" else steps):
        step.replay()
    program.check()
    return Recording(program.buffers["trace"].cpu().numpy().copy(), program.logits[:tokens].cpu().clone())


def _fill_cache(program: Program, rows: int) -> None:
    if program.kv is None or rows == 0:
        return
    random = torch.Generator(program.device).manual_seed(2)
    for sequence in range(program.manifest["sequences"]):
        kv = KvCache(program.manifest, program.buffers["kv"], sequence)
        for layer in range(program.manifest["layers"]):
            k, v = torch.randn(2, kv.kv_heads, rows, kv.head_dim, generator=random, device=program.device).bfloat16()
            kv.write(layer, k, v)
