"""``megadsl::decode_step``, one launch as an operator of torch: for eager code, torch.compile, and CUDA graphs of the user."""

from __future__ import annotations

import hashlib
import json
from itertools import count
from weakref import WeakValueDictionary

import torch

from megadsl.diagnostics import declare, error
from megadsl.runtime.control import ANCESTORS, FLAGS, KV_LEN, MOST_TOKENS, N_TOKENS, NEXT_IDS, POSITIONS, TOKEN_IDS
from megadsl.runtime.program import Program
from megadsl.torch.arguments import Limits, check_kinds, check_memory, check_values, users_call

NO_STEP = declare(
    "MK487", "the step {step} has been freed", "keep its DecodeStep for as long as graphs, compiled functions or programs of yours call it"
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
        self.limits = Limits(manifest["tokens"], manifest["vocab"], manifest["max_kv"], sizes["weights"], sizes["kv"])
        digest = hashlib.sha256(source.encode() + json.dumps(manifest, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.name = f"{manifest['model']}-{digest}-{next(_numbers)}"
        self._words = program.control.words
        # made once: nothing of this may be copied from the host while a graph is captured
        self._counts = torch.tensor([[n, 0] for n in range(MOST_TOKENS + 1)], device=program.device)
        self._chain = torch.tensor([(2 << i) - 1 for i in range(MOST_TOKENS)], device=program.device)
        self._ahead = torch.arange(MOST_TOKENS, dtype=torch.int32, device=program.device)
        self._least, self._most = self._bounds()
        _loaded[self.name] = self

    def check(
        self,
        ids: torch.Tensor,
        kv_len: torch.Tensor,
        positions: torch.Tensor | None,
        ancestors: torch.Tensor | None,
        weights: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Raise what can be said without reading values."""
        inputs = {"ids": ids, "kv_len": kv_len, "positions": positions, "ancestors": ancestors}
        check_kinds(self.limits, self.program.device, inputs, {"weights": weights, "cache": cache})

    def run(
        self,
        ids: torch.Tensor,
        kv_len: torch.Tensor,
        positions: torch.Tensor | None,
        ancestors: torch.Tensor | None,
        weights: torch.Tensor,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue a launch and what brings its inputs, on torch's current stream, without waiting for the host."""
        program, number = self.program, ids.shape[0]
        check_memory({"weights": weights, "cache": cache})
        if program.device.type == "cpu":
            check_values(self.limits, ids, kv_len, positions, ancestors)
        # the kernel writes the rows of all tokens that it is compiled for
        logits = torch.empty(self.limits.tokens, self.limits.vocab, dtype=torch.float32, device=program.device)
        with program.using(weights=weights, kv=cache, logits=logits.view(-1).view(torch.uint8)):
            self._stage(number, ids, kv_len, positions, ancestors)
            program.launch()
            chosen = self._words[NEXT_IDS : NEXT_IDS + (number if self.chooses else 0)].to(torch.int64)
        return logits[:number], chosen

    def _stage(
        self, number: int, ids: torch.Tensor, kv_len: torch.Tensor, positions: torch.Tensor | None, ancestors: torch.Tensor | None
    ) -> None:
        """The inputs into the control block, in two or three small kernels: values on a GPU cannot be refused without waiting for it, so
        they are kept within what the kernel can address."""
        words = self._words
        pairs = [
            (words[KV_LEN : KV_LEN + 1], kv_len.reshape(1)),
            (words[N_TOKENS : FLAGS + 1], self._counts[number]),
            (words[TOKEN_IDS : TOKEN_IDS + number], ids),
            (words[ANCESTORS : ANCESTORS + number], self._chain[:number] if ancestors is None else ancestors),
        ]
        if positions is not None:
            pairs.append((words[POSITIONS : POSITIONS + number], positions))
        torch._foreach_copy_([into for into, _ in pairs], [given for _, given in pairs])
        inputs = words[slice(*_WORDS)]
        torch.clamp(inputs, self._least, self._most[number], out=inputs)
        if positions is None:
            torch.add(words[KV_LEN : KV_LEN + 1], self._ahead[:number], out=words[POSITIONS : POSITIONS + number])

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


@torch.library.custom_op(
    "megadsl::decode_step",
    mutates_args=("cache",),
    schema="(Tensor ids, Tensor kv_len, Tensor? positions, Tensor? ancestors, Tensor weights, Tensor(a!) cache, str step)"
    " -> (Tensor, Tensor)",
)
def decode_step(
    ids: torch.Tensor,
    kv_len: torch.Tensor,
    positions: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    weights: torch.Tensor,
    cache: torch.Tensor,
    step: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of the step named ``step``: logits fp32 (n, vocab), and the chosen ids int64 (n,), or (0,) where the kernel chooses none.

    As DecodeStep.forward, which is what to call; the arenas ``weights`` and ``cache`` are uint8. Raises MK450 to MK455, MK482 to MK487.
    """
    loaded = _find(step)
    loaded.check(ids, kv_len, positions, ancestors, weights, cache)
    return loaded.run(ids, kv_len, positions, ancestors, weights, cache)


@decode_step.register_fake
def _decode_step_fake(
    ids: torch.Tensor,
    kv_len: torch.Tensor,
    positions: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    weights: torch.Tensor,
    cache: torch.Tensor,
    step: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    loaded = _find(step)
    loaded.check(ids, kv_len, positions, ancestors, weights, cache)
    number = ids.shape[0]
    logits = ids.new_empty((number, loaded.limits.vocab), dtype=torch.float32)
    return logits, ids.new_empty((number if loaded.chooses else 0,), dtype=torch.int64)


def _find(step: str) -> LoadedStep:
    loaded = _loaded.get(step)
    if loaded is None:
        raise error(NO_STEP, users_call(), step=step)
    return loaded
