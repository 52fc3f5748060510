"""The control block: what host and kernel tell each other between launches; and the exception for a kernel that hung."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megadsl.emulate.abi import SITE_BARRIER, SITE_CLUSTER
from megadsl.ir.plan import FIRST_EPOCH

# u32 words of mk::Control
ERROR, EPOCH, KV_LEN, N_TOKENS, FLAGS, TIMEOUT_US, STEPS, ABORT = range(8)
TOKEN_IDS, POSITIONS, ANCESTORS, NEXT_IDS, RECORD, CHAOS = 8, 24, 40, 56, 72, 80
NUM_STEPS, STOP_IDS, STEPS_MADE, CHOSEN = 81, 82, 90, 91
WORDS = 128
MOST_SEQUENCES = 8
BATCH_KV_LEN, BATCH_TOKENS, BATCH_CHOSEN = 128, 136, 144  # of mk::BatchControl, behind it, in kernels of a batch
MOST_TOKENS = 16
MOST_STEPS = 32  # of one launch
MOST_STOP_IDS = 8
NO_ID = -1

ADVANCE = 1  # flag bit: the kernel itself prepares the next step, with the token that it chose

_RECORD_NAMES = ("site", "block", "warp", "layer", "tile", "expected", "observed")

# what the emulator reports for waits that are no mk::wait
_BARRIER_SITES = {
    SITE_BARRIER: {"kind": "barrier", "expects": "all threads of the block's barrier (tile is its number)"},
    SITE_CLUSTER: {"kind": "cluster barrier", "expects": "all threads of the cluster"},
}


@dataclass(frozen=True)
class Wait:
    """One wait that never ended. ``expects`` says in words what it waited for; ``expected`` and ``observed`` are u32 words."""

    site: int
    role: str
    op: str
    kind: str
    span: str
    expects: str
    block: int
    warp: int
    layer: int
    tile: int
    expected: int
    observed: int

    def __str__(self) -> str:
        return (
            f"role {self.role}, op {self.op} ({self.span}), layer {self.layer}, tile {self.tile}:"
            f" site {self.site} [{self.kind}] waited for {self.expects};"
            f" expected {self.expected:#x}, observed {self.observed:#x} (block {self.block}, warp {self.warp})"
        )


class MegakernelHang(Exception):
    """A launch was aborted because waits did not end. ``waits`` has the one that timed out first, or, from the emulator,
    all that were parked. The program has been re-initialised: the launch may be repeated."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self.waits = tuple(waits)
        head = "the megakernel hung" if len(self.waits) == 1 else f"the megakernel hung with {len(self.waits)} waits parked"
        super().__init__("\n".join([head, *(f"    {wait}" for wait in self.waits)]))


def describe_wait(manifest: Mapping[str, Any], words: Mapping[str, int]) -> Wait:
    """A wait in the spec's words. ``words``: site, block, warp, layer, tile, expected, observed."""
    sites: dict[int, Mapping[str, Any]] = {site["id"]: site for site in manifest["sites"]}
    site = sites.get(words["site"]) or _BARRIER_SITES.get(words["site"], {})
    fields: dict[str, Any] = {key: str(site.get(key) or "?") for key in ("role", "op", "kind", "span", "expects")}
    fields |= {key: words[key] for key in _RECORD_NAMES}
    return Wait(**fields)


def recorded_wait(manifest: Mapping[str, Any], words: Sequence[int]) -> Wait:
    """The wait in the error record of a control block's 128 words."""
    record = words[RECORD : RECORD + len(_RECORD_NAMES)]
    return describe_wait(manifest, {name: word & 0xFFFFFFFF for name, word in zip(_RECORD_NAMES, record, strict=True)})


def even(count: int, sequences: int) -> list[int]:
    """New tokens of each sequence where all have as many, or the first ones one more."""
    return [count // sequences + (i < count % sequences) for i in range(sequences)]


def chains(counts: Sequence[int]) -> list[int]:
    """Ancestor masks of a step in which each sequence's tokens see those before them, and no other's."""
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return [((2 << i) - 1) << first for first, count in zip(firsts, counts, strict=True) for i in range(count)]


class Control:
    """Host access to a control block. ``words`` is its int32 tensor of 128 words (in kernels of a batch more), where the kernel reads it.

    Every method writes inside ``turn()``, which orders it among the launches.
    """

    def __init__(self, words: torch.Tensor, timeout_us: int, turn: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.words = words
        self._timeout_us = timeout_us
        self._turn = turn
        self.reset()

    def reset(self) -> None:
        """As before the first launch: epoch 1, an empty KV cache, no error."""
        fresh = torch.zeros(self.words.shape, dtype=torch.int32)
        fresh[EPOCH], fresh[TIMEOUT_US], fresh[NUM_STEPS] = FIRST_EPOCH, self._timeout_us, 1
        fresh[STOP_IDS:STEPS_MADE] = NO_ID
        with self._turn():
            self.words.copy_(fresh)

    def clear_error(self) -> None:
        """Forget an aborted launch: epoch 1, no error; the inputs stay, so that the launch can be repeated."""
        with self._turn():
            now = self.words.cpu()
            for word in (ERROR, STEPS, ABORT):
                now[word] = 0
            now[EPOCH] = FIRST_EPOCH
            now[RECORD:CHAOS] = 0
            self.words.copy_(now)

    def set_chaos(self, seed: int) -> None:
        """The seed (0 to 2**31 - 1) of the delays of the next launches, in a build with MK_CHAOS; 0: none."""
        with self._turn():
            self.words[CHAOS] = seed

    def set_steps(self, count: int, stop_ids: Iterable[int] = ()) -> None:
        """How many steps each of the next launches makes (1 to 32), and up to 8 ids that end a launch of several."""
        words = torch.full((1 + MOST_STOP_IDS,), NO_ID, dtype=torch.int32)
        words[0] = count
        for index, token in enumerate(stop_ids, 1):
            words[index] = token
        with self._turn():
            self.words[NUM_STEPS:STEPS_MADE].copy_(words)

    def set_inputs(self, kv_len: int, ids: Sequence[int], positions: Iterable[int], ancestors: Iterable[int], flags: int = 0) -> None:
        """What the next launch reads: up to 16 token ids, their positions and ancestor masks, the rows in the KV cache."""
        head = torch.tensor([kv_len, len(ids), flags, self._timeout_us], dtype=torch.int32)
        lists = torch.zeros(3, MOST_TOKENS, dtype=torch.int32)
        for row, values in zip(lists, (ids, positions, ancestors), strict=True):
            row[: len(ids)] = torch.tensor(list(values), dtype=torch.int32)
        with self._turn():
            self.words[KV_LEN : TIMEOUT_US + 1].copy_(head)
            self.words[TOKEN_IDS:NEXT_IDS].copy_(lists.flatten())

    def set_batch(
        self,
        kv_lens: Sequence[int],
        counts: Sequence[int],
        ids: Sequence[int],
        positions: Iterable[int],
        ancestors: Iterable[int],
        flags: int = 0,
    ) -> None:
        """What the next launch of a batch reads: per sequence (1 to 8) its rows in the cache and how many of the new tokens are its own,
        then what :meth:`set_inputs` takes of all tokens, ordered by sequence. Bits of ``ancestors`` count the step's tokens."""
        batch = torch.zeros(2, MOST_SEQUENCES, dtype=torch.int32)
        batch[0, : len(kv_lens)], batch[1, : len(counts)] = torch.tensor(kv_lens), torch.tensor(counts)
        with self._turn():
            self.set_inputs(0, ids, positions, ancestors, flags)
            self.words[BATCH_KV_LEN:BATCH_CHOSEN].copy_(batch.flatten())
