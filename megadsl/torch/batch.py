"""The inputs of a batch's step on their way into the control block, without waiting for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megadsl.diagnostics import Diagnostic, declare, diagnose
from megadsl.runtime.control import (
    ANCESTORS,
    BATCH_KV_LEN,
    BATCH_TOKENS,
    FLAGS,
    MOST_SEQUENCES,
    N_TOKENS,
    NEXT_IDS,
    POSITIONS,
    TOKEN_IDS,
    chains,
)
from megadsl.runtime.generate import ANCESTORS as NO_ANCESTORS
from megadsl.runtime.generate import KV_FULL, POSITION_RANGE
from megadsl.torch.arguments import Limits, StepInputs, check_ids, raise_all

COUNTS = declare(
    "MK499",
    "counts {counts} for {number} new tokens",
    "give for each sequence how many of the tokens are its own, {number} in all; without counts a step has one token of each sequence",
)


class BatchInputs:
    """Where ``number`` new tokens of a batch lie in the control block's ``words``."""

    def __init__(self, words: torch.Tensor, number: int, limits: Limits) -> None:
        def of(first: int, count: int) -> torch.Tensor:
            return words[first : first + count]

        device, sequences = words.device, limits.sequences
        self.chosen = of(NEXT_IDS, number)
        self._limits, self._number = limits, number
        self._lens, self._counts = of(BATCH_KV_LEN, sequences), of(BATCH_TOKENS, sequences)
        self._unused = words[BATCH_TOKENS + sequences : BATCH_TOKENS + MOST_SEQUENCES]
        self._ids, self._positions, self._ancestors = of(TOKEN_IDS, number), of(POSITIONS, number), of(ANCESTORS, number)
        self._head = words[N_TOKENS : FLAGS + 1]
        self._head_words = torch.tensor([number, 0], dtype=torch.int32, device=device)
        self._ones = torch.ones(sequences, dtype=torch.int32, device=device)
        self._at = torch.arange(number, dtype=torch.int32, device=device)
        self._upto = torch.tensor(chains([number]), dtype=torch.int32, device=device)  # bits of all tokens up to each
        self._bit = torch.tensor([1 << i for i in range(number)], dtype=torch.int32, device=device)

    def stage(self, given: StepInputs) -> None:
        """The inputs into the control block. Values that are out of range are kept within what the kernel can address."""
        positions, ancestors, counts = given.positions, given.ancestors, self._ones if given.counts is None else given.counts
        torch._foreach_copy_([self._lens, self._counts, self._head, self._ids], [given.kv_len, counts, self._head_words, given.ids])
        self._counts.clamp_(0, self._number)
        self._lens.clamp_(min=0)
        torch.minimum(self._lens, self._limits.max_kv - self._counts, out=self._lens)
        self._ids.clamp_(0, self._limits.vocab - 1)
        if positions is None or ancestors is None:
            ends = self._counts.cumsum(0, dtype=torch.int32)
            owner = torch.searchsorted(ends, self._at, right=True).clamp_(max=self._limits.sequences - 1)
            first = (ends - self._counts)[owner]
        if positions is None:
            torch.add(self._lens[owner], self._at - first, out=self._positions)
        else:
            self._positions.copy_(positions)
        self._positions.clamp_(0, self._limits.max_kv - 1)
        if ancestors is None:
            torch.bitwise_and(self._upto, -self._bit[first], out=self._ancestors)  # from the sequence's first token on
        else:
            self._ancestors.copy_(ancestors)


def check_batch(limits: Limits, given: StepInputs) -> None:
    """Raise what is wrong with values in host memory: MK450, MK451, MK454, MK455, MK499."""
    positions, ancestors = given.positions, given.ancestors
    check_ids(given.ids.tolist(), limits.vocab)
    own = [1] * limits.sequences if given.counts is None else given.counts.tolist()
    found: list[Diagnostic] = []
    if min(own) < 0 or sum(own) != given.number:
        raise_all([diagnose(COUNTS, counts=own, number=given.number)])
    for used, count in zip(given.kv_len.tolist(), own, strict=True):
        if not 0 <= used <= limits.max_kv - count:
            room = max(0, min(limits.max_kv, limits.max_kv - used))
            found.append(diagnose(KV_FULL, max_kv=limits.max_kv, used=used, more=count, room=room))
    for index, position in enumerate([] if positions is None else positions.tolist()):
        if not 0 <= position < limits.max_kv:
            found.append(diagnose(POSITION_RANGE, position=position, index=index, last=limits.max_kv - 1))
    found += _masks(own, [] if ancestors is None else ancestors.tolist())
    raise_all(found)


def _masks(counts: Sequence[int], masks: Sequence[int]) -> list[Diagnostic]:
    """Those that do not have the token's own bit, or bits of another sequence's tokens."""
    owners = [range(sum(counts[:i]), sum(counts[: i + 1])) for i, n in enumerate(counts) for _ in range(n)]
    wrong = [
        (index, mask)
        for index, (own, mask) in enumerate(zip(owners, masks, strict=False))
        if not mask >> index & 1 or mask & ~sum(1 << i for i in own)
    ]
    return [diagnose(NO_ANCESTORS, mask=mask, index=index, count=sum(counts), own=1 << index) for index, mask in wrong]
