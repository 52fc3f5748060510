"""``megadsl::decode_step``, one launch as an operator of torch: for eager code, torch.compile, and CUDA graphs of the user."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from weakref import WeakValueDictionary

import torch

from megadsl.diagnostics import MegadslError, declare, error
from megadsl.runtime.control import ANCESTORS, FLAGS, KV_LEN, MOST_TOKENS, N_TOKENS, NEXT_IDS, POSITIONS, TOKEN_IDS
from megadsl.runtime.generate import SEQUENCE_COUNT
from megadsl.runtime.program import Program
from megadsl.torch.arguments import Limits, StepInputs, check_entries, check_kinds, check_memory, check_table, check_values, users_call
from megadsl.torch.batch import COUNTS, BatchInputs, check_batch

NO_STEP = declare(
    "MK487",
    "the step of {model} has been freed",
    "keep its DecodeStep for as long as graphs, compiled functions or programs of yours call it",
)

_WORDS = (KV_LEN, NEXT_IDS)  # the inputs of a launch lie within [first, second)
_ANY = (-(1 << 31), (1 << 31) - 1)

_loaded: WeakValueDictionary[str, LoadedStep] = WeakValueDictionary()
_numbers = count()


class LoadedStep:
    """A program that the operator launches. ``name`` is what the operator is told: it depends on the kernel's text and on how many steps
    the process has made before, so that what torch caches across processes is never taken for another kernel's.

    It is found by ``name`` for as long as somebody holds it.
    """

    def __init__(self, program: Program, chooses: bool, source: str) -> None:
        manifest, sizes = program.manifest, program.manifest["buffers"]
        self.program, self.chooses = program, chooses
        self.limits = Limits(
            manifest["tokens"],
            manifest["vocab"],
            manifest["max_kv"],
            sizes["weights"],
            sizes["kv"],
            manifest["sequences"],
            manifest["kv_page"],
            manifest["kv_pages"],
        )
        digest = hashlib.sha256(source.encode() + json.dumps(manifest, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.name = f"{manifest['model']}-{digest}-{next(_numbers)}"
        # a GPU's queue has a lock, which turn() gives to the user: a second one could be taken in another order
        self._alone: AbstractContextManager[object] = threading.RLock() if program.device.type == "cpu" else nullcontext()
        # made once: nothing of this may be copied from the host while a graph is captured
        least, most = self._bounds()
        words, numbers = program.control.words, range(MOST_TOKENS + 1)
        self._inputs = [_Inputs(words, number, least, most[number]) for number in numbers]
        self._batch = [BatchInputs(words, number, self.limits) for number in numbers] if self.limits.sequences > 1 else []
        _loaded[self.name] = self

    def check(self, given: StepInputs, weights: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor | None) -> None:
        """Raise what can be said without reading values."""
        check_kinds(self.limits, self.program.device, vars(given), {"weights": weights, "cache": cache})
        check_table(self.limits, self.program.device, pages)
        if given.counts is None and self.limits.sequences > 1 and given.number != self.limits.sequences:
            raise error(COUNTS, users_call(), counts=None, number=given.number)
        if given.counts is not None and self.limits.sequences == 1:
            raise error(SEQUENCE_COUNT, users_call(), model=self.program.manifest["model"], sequences=1, mend="give no counts")

    def run(
        self, given: StepInputs, weights: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue a launch and what brings its inputs, on torch's current stream, without waiting for the host."""
        program, number = self.program, given.number
        check_memory({"weights": weights, "cache": cache})
        table = {} if pages is None else {"pages": pages.view(-1).view(torch.uint8)}
        batch = self.limits.sequences > 1
        if program.device.type == "cpu" and batch:
            check_batch(self.limits, given)
        elif program.device.type == "cpu":
            check_values(self.limits, given)
        if program.device.type == "cpu" and pages is not None:
            check_entries(self.limits, pages, self._ends(given.kv_len, given.counts, given.number))
        # the kernel writes the rows of all tokens that it is compiled for
        logits = torch.empty(self.limits.tokens, self.limits.vocab, dtype=torch.float32, device=program.device)
        inputs = self._inputs[number]
        with self._alone, program.using(weights=weights, kv=cache, logits=logits.view(-1).view(torch.uint8), **table):
            if batch:
                self._batch[number].stage(given)
            else:
                inputs.stage(given)
            program.launch()
            chosen = inputs.chosen.to(torch.int64) if self.chooses else torch.empty(0, dtype=torch.int64, device=program.device)
        return logits[:number], chosen

    def _ends(self, kv_len: torch.Tensor, counts: torch.Tensor | None, number: int) -> list[int]:
        """Rows of each sequence behind a step; 0 of those that have no part in it. Of values in host memory."""
        if self.limits.sequences == 1:
            return [int(kv_len) + number]
        own = [1] * self.limits.sequences if counts is None else counts.tolist()
        return [kv + count if count else 0 for kv, count in zip(kv_len.tolist(), own, strict=True)]

    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least values of the words, and the greatest ones for each number of new tokens."""
        first, end = _WORDS
        least = torch.full((end - first,), _ANY[0], dtype=torch.int32)
        most = torch.full((MOST_TOKENS + 1, end - first), _ANY[1], dtype=torch.int32)
        for word, room, last in ((TOKEN_IDS, MOST_TOKENS, self.limits.vocab - 1), (POSITIONS, MOST_TOKENS, self.limits.max_kv - 1)):
            least[word - first : word - first + room] = 0
            most[:, word - first : word - first + room] = last
        least[KV_LEN - first] = 0
        most[:, KV_LEN - first] = (self.limits.max_kv - torch.arange(MOST_TOKENS + 1)).clamp(min=0)
        return least.to(self.program.device), most.to(self.program.device)


class _Inputs:
    """Where ``number`` new tokens lie in the control block's ``words``; ``least`` and ``most`` bound the words that are inputs."""

    def __init__(self, words: torch.Tensor, number: int, least: torch.Tensor, most: torch.Tensor) -> None:
        def of(first: int) -> torch.Tensor:
            return words[first : first + number]

        self.chosen = of(NEXT_IDS)
        self._all, self._least, self._most = words[slice(*_WORDS)], least, most
        self._rows, self._positions = words[KV_LEN : KV_LEN + 1], of(POSITIONS)
        self._into = [self._rows, words[N_TOKENS : FLAGS + 1], of(TOKEN_IDS), of(ANCESTORS), self._positions]
        self._counts = torch.tensor([number, 0], device=words.device)
        self._chain = torch.tensor([(2 << i) - 1 for i in range(number)], device=words.device)
        self._ahead = torch.arange(number, dtype=torch.int32, device=words.device)

    def stage(self, given: StepInputs) -> None:
        """The inputs into the control block, in two or three small kernels. Values on a GPU cannot be refused without waiting for it, so
        they are kept within what the kernel can address."""
        values = [given.kv_len.reshape(1), self._counts, given.ids, self._chain if given.ancestors is None else given.ancestors]
        if given.positions is not None:
            values.append(given.positions)
        torch._foreach_copy_(self._into[: len(values)], values)
        torch.clamp(self._all, self._least, self._most, out=self._all)
        if given.positions is None:
            torch.add(self._rows, self._ahead, out=self._positions)


@torch.library.custom_op(
    "megadsl::decode_step",
    mutates_args=("cache",),
    schema="(Tensor ids, Tensor kv_len, Tensor? counts, Tensor? positions, Tensor? ancestors, Tensor weights, Tensor(a!) cache,"
    " Tensor? pages, str step) -> (Tensor, Tensor)",
)
def decode_step(
    ids: torch.Tensor,
    kv_len: torch.Tensor,
    counts: torch.Tensor | None,
    positions: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    weights: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor | None,
    step: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of the step named ``step``: logits fp32 (n, vocab), and the chosen ids int64 (n,), or (0,) where the kernel chooses none.

    As DecodeStep.forward, which is what to call; the arenas ``weights`` and ``cache`` are uint8, ``pages`` int32. Raises MK450 to MK455,
    MK478, MK482 to MK487, MK492.
    """
    loaded = _find(step)
    given = StepInputs(ids, kv_len, counts, positions, ancestors)
    loaded.check(given, weights, cache, pages)
    return loaded.run(given, weights, cache, pages)


@decode_step.register_fake
def _decode_step_fake(
    ids: torch.Tensor,
    kv_len: torch.Tensor,
    counts: torch.Tensor | None,
    positions: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    weights: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor | None,
    step: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    loaded = _find(step)
    loaded.check(StepInputs(ids, kv_len, counts, positions, ancestors), weights, cache, pages)
    number = ids.shape[0]
    logits = ids.new_empty((number, loaded.limits.vocab), dtype=torch.float32)
    return logits, ids.new_empty((number if loaded.chooses else 0,), dtype=torch.int64)


def _find(step: str) -> LoadedStep:
    loaded = _loaded.get(step)
    if loaded is None:
        raise gone(step)
    return loaded


def gone(step: str) -> MegadslError:
    """MK487 for the step of that name."""
    return error(NO_STEP, users_call(), model=step.rsplit("-", 2)[0])
