"""The stamps buffer as a table: where the microseconds of a step went, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megadsl.diagnostics import declare, error

STAMPS_OFF = declare("MK460", "this kernel has written no stamps", "build it with the define MK_STAMPS=1 and launch it before reading them")


@dataclass(frozen=True)
class StageTime:
    """One stamped stage of an op ("qkv.end"). Microseconds of one execution: median and 90th percentile over blocks and
    layers; ``times`` per step."""

    stage: str
    span: str
    times: int
    median_us: float
    p90_us: float

    @property
    def step_us(self) -> float:
        """Its share of a step."""
        return self.times * self.median_us


def read_stamps(manifest: Mapping[str, Any], stamps: torch.Tensor) -> npt.NDArray[np.uint64]:
    """The buffer of the last launch as [block, stamp, layer] of nanoseconds (globaltimer), 0 where never stamped.

    MK460 when nothing is stamped.
    """
    layout = manifest["stamps"]
    times = stamps.cpu().numpy().view(np.uint64)
    if not times.any():
        raise error(STAMPS_OFF)
    return times.reshape(manifest["blocks"], layout["sites"], layout["layers"])


def stage_times(manifest: Mapping[str, Any], stamps: npt.NDArray[np.uint64]) -> list[StageTime]:
    """In order of execution, the time from the stamp before, in the same block, to the stage's own stamp.

    The first stage of a step has none before it and is left out.
    """
    spent: dict[int, list[float]] = {}
    first: dict[int, int] = {}
    for block in stamps:
        events = sorted((int(block[at]), int(at[0])) for at in zip(*np.nonzero(block), strict=True))
        for (before, _), (after, stamp) in pairwise(events):
            spent.setdefault(stamp, []).append((after - before) / 1e3)
            first[stamp] = min(first.get(stamp, after), after)
    spans = {site["op"]: str(site["span"]) for site in manifest["sites"]}
    names: list[str] = manifest["stamps"]["names"]
    found = []
    for stamp in sorted(spent, key=lambda s: first[s]):
        median, p90 = np.quantile(spent[stamp], (0.5, 0.9))
        times = int(np.count_nonzero(stamps[:, stamp], axis=1).max())
        span = spans.get(names[stamp].rpartition(".")[0], "")
        found.append(StageTime(names[stamp], span, times, float(median), float(p90)))
    return found


def render(times: Sequence[StageTime]) -> str:
    """The table as plain text, one line per stage and a total."""
    total = sum(t.step_us for t in times)
    wide = max([len(t.stage) for t in times] + [5])
    lines = [f"{'stage':<{wide}}  {'times':>5}  {'median us':>9}  {'p90 us':>9}  {'step us':>9}  {'share':>6}  spec"]
    for t in times:
        figures = f"{t.times:>5}  {t.median_us:>9.2f}  {t.p90_us:>9.2f}  {t.step_us:>9.1f}  {t.step_us / (total or 1):>6.1%}"
        lines.append(f"{t.stage:<{wide}}  {figures}  {t.span}".rstrip())
    return "\n".join([*lines, f"{'total':<{wide}}  {'':>5}  {'':>9}  {'':>9}  {total:>9.1f}"])
