"""Several texts at once from one compiled model: each sequence of a batch has KV caches of its own and its own length."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megadsl.diagnostics import collecting, error
from megadsl.runtime.control import ADVANCE, BATCH_CHOSEN, MOST_SEQUENCES, MOST_STOP_IDS, STEPS_MADE, chains
from megadsl.runtime.generate import KV_FULL, PER_SEQUENCE, TOKEN_COUNT, Generation, LoadedModel, Text
from megadsl.runtime.kv import KvCache
from megadsl.runtime.pages import OUT_OF_PAGES

OnToken = Callable[[int, int, str], None]


@dataclass
class _Running:
    """A text in the making: which prompt it continues, how many tokens it may still get, and what its decode steps took."""

    index: int
    prompt_ids: list[int]
    text: Text
    left: int
    most_rows: int  # that its caches may come to hold
    last: int = 0
    steps: int = 0
    seconds: float = 0.0

    def take(self, token: int, stops: frozenset[int]) -> None:
        self.text.add(token)
        self.last, self.left = token, 0 if token in stops else self.left - 1

    def generation(self) -> Generation:
        ms = 1e3 * self.seconds / self.steps if self.steps else 0.0
        return Generation(self.prompt_ids, self.text.ids, self.text.whole(), ms)


class BatchGenerator(LoadedModel):
    """A model with its weights and the KV caches of as many sequences as its kernel serves; made as LoadedModel is.

    ``lengths[i]`` are the rows in the caches of sequence i. Assign a smaller number to take tokens back, 0 to forget the sequence. Where
    rows lie in pages, a sequence has as many as its rows need: more are taken before a launch, and what it does not need is given back
    then.
    """

    batch = True

    @property
    def sequences(self) -> int:
        """How many the kernel serves."""
        return int(self.manifest["sequences"])

    @cached_property
    def lengths(self) -> list[int]:
        """Rows in the caches of each sequence; live."""
        return [0] * self.sequences

    def reset(self) -> None:
        """Forget all sequences."""
        self.program.reset()
        self.lengths[:] = [0] * self.sequences

    def rows(self, sequence: int) -> KvCache:
        """Reads and writes K and V rows of a sequence."""
        return self.program.rows(sequence)

    def step(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run a step in which sequence i has the new tokens ``ids[i]``, each seeing those before it; without any, it is left alone.

        1 to ``tokens`` of them in all, appended to the caches. Their logits, in the order of the sequences: a (n, vocab) fp32 view that
        the next launch overwrites. Raises MK450, MK451, MK453, MK469, MK497, MegakernelHang.
        """
        count = self._launch(ids)
        return self.program.logits[:count]

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Append prompts to sequences, as many tokens a launch as the kernel takes; the ids that it chooses behind them (meaningless
        when it chooses none). Raises MK450 to MK452, MK469, MegakernelHang; nothing has been appended then."""
        for prompt in prompts.values():
            self._check_prompt(prompt)
        with collecting() as found:
            for sequence, prompt in prompts.items():
                if len(prompt) > (room := self.manifest["max_kv"] - self.lengths[sequence]):
                    found.add(KV_FULL, max_kv=self.manifest["max_kv"], used=self.lengths[sequence], more=len(prompt), room=room)
        self._reserve({i: len(prompt) for i, prompt in prompts.items()})
        chosen: dict[int, int] = {}
        done = dict.fromkeys(prompts, 0)
        while any(done[i] < len(prompts[i]) for i in prompts):
            new = self._chunk(prompts, done)
            self._run(new)
            words = self.program.check()
            for i, own in enumerate(new):
                if own:
                    done[i] += len(own)
                    chosen[i] = words[BATCH_CHOSEN + i]
        return chosen

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int,
        *,
        stop_at_end: bool = True,
        on_token: OnToken | None = None,
    ) -> list[Generation]:
        """Continue all prompts greedily from empty caches, each until ``max_new_tokens`` or (``stop_at_end``) an end token.

        There may be more prompts than sequences: the next one takes the place of a text that has ended. Where rows lie in pages, it waits
        until the pool has all that it may come to need beside what the running ones may. ``on_token(index, id, text)`` is called as
        tokens of prompt ``index`` arrive. Raises MK410, MK450 to MK452, MK457, MK458, MK469 for a prompt that needs more pages than there
        are, MegakernelHang.
        """
        self._require_choice()
        asked = [self._ids(prompt) for prompt in prompts]
        with collecting() as found:
            for index, ids in enumerate(asked):
                if (rows := len(ids) + max(max_new_tokens - 1, 0)) > (most := self.manifest["max_kv"]):
                    found.add(KV_FULL, max_kv=most, used=0, more=rows, room=most)
                elif (need := self._pages_for(rows)) > self.manifest["kv_pages"]:
                    every = self.manifest["kv_pages"]
                    found.add(OUT_OF_PAGES, sequence=f"of prompt {index}", pages=need, rows=rows, have=0, free=every, count=every)
        self.reset()
        stops, done = self._stops(stop_at_end), dict[int, Generation]()
        rows = max(max_new_tokens - 1, 0)  # of a text, behind its prompt
        texts = (Text(self.tokenizer, _told(on_token, i)) for i in range(len(asked)))
        waiting = deque(_Running(i, *of, max_new_tokens, len(of[0]) + rows) for i, of in enumerate(zip(asked, texts, strict=True)))
        running: dict[int, _Running] = {}
        while waiting or running:
            self._admit(waiting, running, stops)
            if alive := {i: text for i, text in running.items() if text.left > 0}:
                self._decode(alive, stops)
            for i in [i for i, text in running.items() if text.left <= 0]:
                text, self.lengths[i] = running.pop(i), 0
                done[text.index] = text.generation()
        self.program.set_steps(1)
        return [done[i] for i in range(len(asked))]

    def _admit(self, waiting: deque[_Running], running: dict[int, _Running], stops: frozenset[int]) -> None:
        """Give free sequences to texts that wait, and fill their caches."""
        new: dict[int, _Running] = {}
        for i in [i for i in range(self.sequences) if i not in running]:
            if waiting and self._promised([*running.values(), *new.values(), waiting[0]]):
                new[i] = waiting.popleft()
        if not new:
            return
        self.program.set_steps(1)
        for i, token in self.prefill({i: text.prompt_ids for i, text in new.items()}).items():
            if new[i].left > 0:
                new[i].take(token, stops)
        running.update(new)

    def _promised(self, texts: Sequence[_Running]) -> bool:
        """Whether the pool has all pages that these texts may come to need."""
        return sum(self._pages_for(text.most_rows) for text in texts) <= int(self.manifest["kv_pages"])

    def _pages_for(self, rows: int) -> int:
        return 0 if self.program.pages is None else self.program.pages.needed(rows)

    def _reserve(self, more: Mapping[int, int]) -> None:
        """Pages for the rows that there are and so many ``more``; others are given back. MK469."""
        self.program.reserve([used + more.get(i, 0) for i, used in enumerate(self.lengths)])

    def _decode(self, texts: dict[int, _Running], stops: frozenset[int]) -> None:
        """Launches until one of the texts ends. The kernel feeds itself; all of them get as many tokens."""
        order = sorted(texts)
        positions = [self.lengths[i] for i in order]
        counts = [int(i in texts) for i in range(self.sequences)]
        masks = [1 << at for at in range(len(order))]
        self.program.control.set_batch(self.lengths, counts, [texts[i].last for i in order], positions, masks, flags=ADVANCE)
        asked = 0
        while all(text.left > 0 for text in texts.values()):
            steps = min(self.steps_per_launch, *(text.left for text in texts.values()))
            if steps != asked:
                self.program.set_steps(asked := steps, sorted(stops)[:MOST_STOP_IDS])
            self._reserve(dict.fromkeys(order, steps))
            began = time.perf_counter()
            self._replay.replay()
            words = self.program.check()
            made, spent = words[STEPS_MADE], time.perf_counter() - began
            for i in order:
                self.lengths[i] += made
                texts[i].steps, texts[i].seconds = texts[i].steps + made, texts[i].seconds + spent
                for at in range(made):
                    if texts[i].left > 0:
                        texts[i].take(words[BATCH_CHOSEN + at * MOST_SEQUENCES + i], stops)

    def _chunk(self, prompts: Mapping[int, Sequence[int]], done: Mapping[int, int]) -> list[list[int]]:
        """The next tokens of each prompt, those of the first ones first."""
        room, new = int(self.manifest["tokens"]), [list[int]() for _ in range(self.sequences)]
        for i in sorted(prompts):
            new[i] = list(prompts[i][done[i] : done[i] + room])
            room -= len(new[i])
        return new

    def _launch(self, ids: Sequence[Sequence[int]]) -> int:
        """One step; how many new tokens it had."""
        if len(ids) != self.sequences:
            raise error(PER_SEQUENCE, got=len(ids), sequences=self.sequences)
        counts, flat = [len(own) for own in ids], [token for own in ids for token in own]
        if not 1 <= len(flat) <= self.manifest["tokens"]:
            raise error(TOKEN_COUNT, count=len(flat), tokens=self.manifest["tokens"])
        self._check_prompt(flat)
        for used, count in zip(self.lengths, counts, strict=True):
            self._require_free(used, count)
        self._reserve(dict(enumerate(counts)))
        return self._run(ids)

    def _run(self, ids: Sequence[Sequence[int]]) -> int:
        """A step for which there is room."""
        counts, flat = [len(own) for own in ids], [token for own in ids for token in own]
        positions = [used + i for used, count in zip(self.lengths, counts, strict=True) for i in range(count)]
        self.program.control.set_batch(self.lengths, counts, flat, positions, chains(counts))
        self.program.launch()
        self.program.check()
        self.lengths[:] = [used + count for used, count in zip(self.lengths, counts, strict=True)]
        return len(flat)


def _told(on_token: OnToken | None, index: int) -> Callable[[int, str], None] | None:
    return None if on_token is None else lambda token, text: on_token(index, token, text)
