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

OnToken = Callable[[int, int, str], None]


@dataclass
class _Running:
    """A text in the making: which prompt it continues, how many tokens it may still get, and what its decode steps took."""

    index: int
    prompt_ids: list[int]
    text: Text
    left: int
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

    ``lengths[i]`` are the rows in the caches of sequence i. Assign a smaller number to take tokens back, 0 to forget the sequence.
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
        return KvCache(self.manifest, self.program.buffers["kv"], sequence)

    def step(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run a step in which sequence i has the new tokens ``ids[i]``, each seeing those before it; without any, it is left alone.

        1 to ``tokens`` of them in all, appended to the caches. Their logits, in the order of the sequences: a (n, vocab) fp32 view that
        the next launch overwrites. Raises MK450, MK451, MK453, MK497, MegakernelHang.
        """
        count = self._launch(ids)
        return self.program.logits[:count]

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Append prompts to sequences, as many tokens a launch as the kernel takes; the ids that it chooses behind them (meaningless
        when it chooses none). Raises MK450 to MK452, MegakernelHang."""
        for prompt in prompts.values():
            self._check_prompt(prompt)
        with collecting() as found:
            for sequence, prompt in prompts.items():
                if len(prompt) > (room := self.manifest["max_kv"] - self.lengths[sequence]):
                    found.add(KV_FULL, max_kv=self.manifest["max_kv"], used=self.lengths[sequence], more=len(prompt), room=room)
        chosen: dict[int, int] = {}
        done = dict.fromkeys(prompts, 0)
        while any(done[i] < len(prompts[i]) for i in prompts):
            new = self._chunk(prompts, done)
            self._launch(new)
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

        There may be more prompts than sequences: the next one takes the place of a text that has ended. ``on_token(index, id, text)``
        is called as tokens of prompt ``index`` arrive. Raises MK410, MK450 to MK452, MK457, MK458, MegakernelHang.
        """
        self._require_choice()
        asked = [self._ids(prompt) for prompt in prompts]
        with collecting() as found:
            for ids in asked:
                if (rows := len(ids) + max(max_new_tokens - 1, 0)) > (most := self.manifest["max_kv"]):
                    found.add(KV_FULL, max_kv=most, used=0, more=rows, room=most)
        self.reset()
        stops, done = self._stops(stop_at_end), dict[int, Generation]()
        waiting = deque(_Running(i, ids, Text(self.tokenizer, _told(on_token, i)), max_new_tokens) for i, ids in enumerate(asked))
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
        new = {i: waiting.popleft() for i in range(self.sequences) if i not in running and waiting}
        if not new:
            return
        self.program.set_steps(1)
        for i, token in self.prefill({i: text.prompt_ids for i, text in new.items()}).items():
            if new[i].left > 0:
                new[i].take(token, stops)
        running.update(new)

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
        counts = [len(own) for own in ids]
        flat = [token for own in ids for token in own]
        if not 1 <= len(flat) <= self.manifest["tokens"]:
            raise error(TOKEN_COUNT, count=len(flat), tokens=self.manifest["tokens"])
        self._check_prompt(flat)
        for used, count in zip(self.lengths, counts, strict=True):
            self._require_free(used, count)
        positions = [used + i for used, count in zip(self.lengths, counts, strict=True) for i in range(count)]
        self.program.control.set_batch(self.lengths, counts, flat, positions, chains(counts))
        self.program.launch()
        self.program.check()
        self.lengths[:] = [used + count for used, count in zip(self.lengths, counts, strict=True)]
        return len(flat)


def _told(on_token: OnToken | None, index: int) -> Callable[[int, str], None] | None:
    return None if on_token is None else lambda token, text: on_token(index, token, text)
