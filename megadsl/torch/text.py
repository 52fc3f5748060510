"""A continuation, token by token: prompts in chunks, one launch and one draw a token, read behind the GPU's back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from megadsl.diagnostics import declare, error
from megadsl.runtime.generate import EMPTY_PROMPT
from megadsl.runtime.program import Program
from megadsl.torch.arguments import check_ids, check_room, users_call
from megadsl.torch.op import LoadedStep
from megadsl.torch.sampling import Sampling

NO_CHOICE = declare("MK490", "sample gave {got}", "return an integer tensor of one element on {device}: the id of the chosen token")

_AHEAD = 2  # steps enqueued on a GPU before the first one's token is read, so that it never waits for the host


class Output(Protocol):
    """What a call of a step gives."""

    @property
    def logits(self) -> torch.Tensor: ...

    @property
    def next_ids(self) -> torch.Tensor: ...


class Step(Protocol):
    """What is needed of a DecodeStep."""

    @property
    def loaded(self) -> LoadedStep: ...

    @property
    def program(self) -> Program: ...

    def __call__(self, ids: torch.Tensor, kv_len: torch.Tensor, *, cache: torch.Tensor) -> Output: ...


class Continuation:
    """One sequence of ``step``: its next token and the rows that count, as tensors on the device, where a graph can advance them.

    ``prefill`` reads the prompt, ``choose`` is a Sampling, drawn with ``generator``, or the user's own.
    """

    def __init__(
        self,
        step: Step,
        prefill: Step,
        choose: Sampling | Callable[[torch.Tensor], torch.Tensor],
        generator: torch.Generator | None,
        cache: torch.Tensor,
    ) -> None:
        self._step, self._prefill, self._program, self._limits = step, prefill, step.program, step.loaded.limits
        self._choose, self._generator, self._cache = choose, generator, cache
        self._token, self._rows = (torch.zeros(1, dtype=torch.int64, device=self._program.device) for _ in range(2))

    def tokens(self, prompt: Sequence[int], count: int, kv_len: int) -> Iterator[int]:
        """Up to ``count`` new tokens, as they become known; whoever stops early leaves the rest undone."""
        self._check(prompt, count, kv_len)
        self._read_prompt(prompt, kv_len)
        if count == 0:
            return
        pending = deque([self._reader()])
        ahead = _AHEAD if self._program.device.type == "cuda" else 1
        advance: Callable[[], None] | None = None
        for _ in range(count - 1):
            if len(pending) == ahead:
                yield pending.popleft()()
            advance = advance or self._advancer()
            advance()
            pending.append(self._reader())
        while pending:
            yield pending.popleft()()

    def _check(self, prompt: Sequence[int], count: int, kv_len: int) -> None:
        if not prompt:
            raise error(EMPTY_PROMPT, users_call())
        check_ids(prompt, self._limits.vocab)
        rows = len(prompt) + max(count - 1, 0)
        check_room(kv_len, rows, self._limits.max_kv)
        if self._program.pages is not None:
            self._program.pages.grow({0: kv_len + rows})

    def _read_prompt(self, prompt: Sequence[int], kv_len: int) -> None:
        ids = torch.tensor(prompt, dtype=torch.int64).to(self._program.device)
        self._rows.fill_(kv_len)
        for part in ids.split(self._prefill.loaded.limits.tokens):
            out = self._prefill(part, self._rows, cache=self._cache)
            self._rows.add_(part.shape[0])
        if self._prefill is not self._step:
            self._prefill.program.check()  # the reads of tokens ask the other program
        self._token.copy_(self._chosen(out))

    def _advance(self) -> None:
        out = self._step(self._token, self._rows, cache=self._cache)
        self._rows.add_(1)
        self._token.copy_(self._chosen(out))

    def _chosen(self, out: Output) -> torch.Tensor:
        """The token behind the last new one, (1,)."""
        if isinstance(self._choose, Sampling):
            if self._choose.greedy and out.next_ids.numel():
                return out.next_ids[-1:]
            return self._choose(out.logits[-1:], self._generator)
        token = self._choose(out.logits[-1])
        device = self._program.device
        if not isinstance(token, torch.Tensor):
            raise error(NO_CHOICE, users_call(), got=type(token).__name__, device=device)
        if token.numel() != 1 or token.dtype.is_floating_point or token.device != device:
            raise error(NO_CHOICE, users_call(), got=f"{token.dtype} of shape {tuple(token.shape)} on {token.device}", device=device)
        return token.reshape(1)

    def _advancer(self) -> Callable[[], None]:
        """What advances by one token: on a GPU a graph, unless the user's own code chooses."""
        program = self._program
        if program.device.type == "cpu" or not isinstance(self._choose, Sampling):
            return self._advance
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        with torch.cuda.device(program.device), torch.cuda.graph(graph):
            self._advance()

        def replay() -> None:
            with program.using():
                graph.replay()

        return replay

    def _reader(self) -> Callable[[], int]:
        """Copies the token as it will be behind what is enqueued; the call waits for it, and raises what went wrong."""
        program = self._program
        if program.device.type == "cpu":
            token = int(self._token)
            return lambda: token
        copy = torch.empty(1, dtype=torch.int64, pin_memory=True)
        with program.using():
            copy.copy_(self._token, non_blocking=True)
            snapshot = program.snapshot()

        def read() -> int:
            program.check(snapshot)
            return int(copy)

        return read
