"""llama-tiny on three blocks by its wires: kernels of several test files, as two libraries, one with the race detector."""

from __future__ import annotations

from functools import cache

import megadsl as mk
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.schedule import Sync
from tests.kernels import Configure, compiled, one_build
from tests.schedules import VALUES, everywhere, in_two_splits

SYNCS: dict[str, Sync] = {"Tagged": mk.Tagged(2), "Sentinel": mk.Sentinel(4), "Flag": mk.Flag(2)}


def mixed(s: ScheduleBlock) -> None:
    """Every kind of synchronisation in one kernel."""
    syncs = (mk.Sentinel(8), mk.Flag(4), mk.Sentinel(4), mk.Tagged(4), mk.Flag(2), mk.Sentinel(8))
    for op, sync in zip(VALUES, syncs, strict=True):
        s[op].sync(sync)


def _made(some: dict[tuple[str, int], Configure]) -> dict[tuple[str, int], Compiled]:
    return one_build({of: compiled("llama-tiny", tokens=of[1], blocks=3, configure=configure) for of, configure in some.items()})


@cache
def wires() -> dict[tuple[str, int], Compiled]:
    """By wire and tokens. Those of 1 and 4 tokens have cached rows in two splits."""
    split = [("Tagged", 1), ("Sentinel", 1), ("Flag", 1), ("Tagged", 4)]
    whole = [("Sentinel", 2), ("Flag", 2)]
    return _made({of: in_two_splits(everywhere(SYNCS[of[0]])) for of in split} | {of: everywhere(SYNCS[of[0]]) for of in whole})


@cache
def watched() -> dict[tuple[str, int], Compiled]:
    """Those that run under the race detector. Those with one kind of wire have cached rows in two splits; tags are the default."""
    split = [("Tagged", 1), ("Tagged", 4), ("Flag", 1)]
    return _made({of: in_two_splits(everywhere(SYNCS[of[0]])) for of in split} | {("mixed", 4): mixed})
