"""Text from a compiled model: prompts in chunks, greedy decoding with several tokens a launch, or logits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megadsl.diagnostics import Collector, collecting, declare, error
from megadsl.dsl.checkpoints import rope_fields, rotated_part
from megadsl.ir.graph import Graph, Linear
from megadsl.ops.rope import rope_scaling
from megadsl.runtime.control import ADVANCE, CHOSEN, MOST_STOP_IDS, NEXT_IDS, STEPS_MADE
from megadsl.runtime.gguf import demo_weights
from megadsl.runtime.kv import rope_of
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program, Snapshot, resolve_device
from megadsl.runtime.tokenizer import Tokenizer, tokenizer_in, tokenizer_known, tokenizer_of
from megadsl.runtime.weights import GgufSource, SafetensorsSource, WeightSource, open_weights
from megadsl.source import UNKNOWN
from megadsl.types import PerLayer, all_layers

KV_FULL = declare(
    "MK450",
    "the KV cache is full: it holds {max_kv} rows, {used} are used and {more} more are needed",
    "ask for at most {room} more tokens, reset the generator, or compile with a larger max_kv",
)
ID_RANGE = declare(
    "MK451", "token id {token} at index {index} is out of range", "use ids from 0 to {last}: the model's vocabulary has {vocab}"
)
EMPTY_PROMPT = declare("MK452", "the prompt is empty", "give at least one token; the kernel needs one to predict the next")
TOKEN_COUNT = declare("MK453", "a step of {count} tokens", "give 1 to {tokens} tokens a step, or compile with more tokens (at most 16)")
POSITION_RANGE = declare("MK454", "position {position} of new token {index} is out of range", "use positions from 0 to {last}")
ANCESTORS = declare(
    "MK455",
    "ancestor mask {mask:#x} of new token {index} is not possible in a step of {count} tokens",
    "set the token's own bit ({own:#x}), and only bits below 1 << {count}",
)
PER_TOKEN = declare("MK456", "{what} has {got} entries for {count} tokens", "give one per new token, or leave it out")
NO_ARGMAX = declare(
    "MK457", "kernel {model} returns logits, it does not choose a token", "return mk.argmax(...) from the spec, or use Generator.step"
)
NO_TOKENIZER = declare(
    "MK458",
    "text needs a tokenizer, and these weights bring none",
    "give a GGUF file or a directory with a tokenizer.json, or pass token ids instead of text",
)
NO_WEIGHTS = declare("MK459", "no weights were given for {model}", "give a GGUF file or a checkpoint's directory with --weights PATH")
SEQUENCE_COUNT = declare("MK496", "kernel {model} serves {sequences} sequences", "{mend}")
PER_SEQUENCE = declare(
    "MK497", "new tokens of {got} sequences", "give a list for each of the {sequences} sequences, an empty one for those that wait"
)
THETA = declare("MK424", "the spec rotates with {spec}, the checkpoint was trained with {checkpoint}", "use {checkpoint} in mk.rope")

STEPS_PER_LAUNCH = 8  # what launches cost beside their steps is then an eighth, and text still flows

_DEMO_MODEL = "smollm2-135m"


class Compiled(Protocol):
    """What the generator needs of a compilation."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def source(self) -> str: ...

    @property
    def graph(self) -> Graph: ...


@dataclass(frozen=True)
class Generation:
    """``ids`` are the new tokens, the end token included when one came; ``text`` is theirs without control tokens.

    ``ms_per_token`` is the mean wall time of the decode steps, prefill excluded (0 when there was none).
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str
    ms_per_token: float


class LoadedModel:
    """A model with its weights and KV caches, ready to be launched: what generators share.

    ``weights``: a GGUF file, a Hugging Face directory, a source, or None for the demo's (smollm2-135m only). ``device``: "cuda",
    "cuda:N", or "cpu" for the emulator. ``steps_per_launch``: how many tokens a launch decodes greedily, by default 8 where the kernel
    can make several steps. Raises MK465 and MK466 as Program.set_steps does, MK400 to MK448 for what is wrong with weights or machine,
    all weights at once; MK496 where the kernel is not for ``batch``.
    """

    batch = False

    def __init__(
        self,
        compiled: Compiled,
        weights: Path | WeightSource | None = None,
        device: str = "cuda",
        *,
        progress: bool = True,
        steps_per_launch: int | None = None,
        **options: Any,
    ) -> None:
        self.manifest = compiled.manifest
        if self.batch != (self.manifest["sequences"] > 1):
            mend = (
                "use a BatchGenerator, or compile with sequences=1" if not self.batch else "use a Generator, or compile with more sequences"
            )
            raise error(SEQUENCE_COUNT, model=self.manifest["model"], sequences=self.manifest["sequences"], mend=mend)
        source = weight_source(self.manifest["model"], weights)
        check_rope(self.manifest, source)
        self._file = source.file if isinstance(source, GgufSource) else None
        self.tokenizer = _tokenizer(source)
        where = str(resolve_device(device, self.manifest["arch"]))
        arena = pack_weights(self.manifest, source, where, progress=progress)
        self.program = Program(self.manifest, compiled.source, where, arena, **options)
        self._chooses = any(isinstance(op, Linear) and op.sink == "argmax" for op in compiled.graph.ops)
        self.steps_per_launch = steps_per_launch or (STEPS_PER_LAUNCH if self.manifest["several_steps"] else 1)
        self.program.set_steps(self.steps_per_launch)  # or refuses
        self.program.set_steps(1)
        self._replay = self.program.capture()

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self.tokenizer or (None if self._file is None else tokenizer_of(self._file))
            if tokenizer is None:
                raise error(NO_TOKENIZER)
            ids = tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        self._check_prompt(ids)
        return ids

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise error(EMPTY_PROMPT)
        vocab = self.manifest["vocab"]
        with collecting() as found:
            for index, token in enumerate(ids):
                if not 0 <= token < vocab:
                    found.add(ID_RANGE, token=token, index=index, last=vocab - 1, vocab=vocab)

    def _require_choice(self) -> None:
        if not self._chooses:
            raise error(NO_ARGMAX, model=self.manifest["model"])

    def _stops(self, stop_at_end: bool) -> frozenset[int]:
        """Ids behind which a text ends."""
        return frozenset(self.tokenizer.stop_ids) if self.tokenizer and stop_at_end else frozenset()

    def _require_free(self, used: int, rows: int) -> None:
        room = self.manifest["max_kv"] - used
        if rows > room:
            raise error(KV_FULL, max_kv=self.manifest["max_kv"], used=used, more=rows, room=room)


class Generator(LoadedModel):
    """A model with its weights and one KV cache, for one text at a time; made as LoadedModel is."""

    _kv_len = 0

    @property
    def kv_len(self) -> int:
        """Rows in the KV cache. Assign a smaller number to take tokens back, and give back their pages."""
        return self._kv_len

    @kv_len.setter
    def kv_len(self, rows: int) -> None:
        if not 0 <= rows <= self.manifest["max_kv"]:
            raise error(KV_FULL, max_kv=self.manifest["max_kv"], used=0, more=rows, room=self.manifest["max_kv"])
        if self.program.pages is not None:
            self.program.pages.hold({0: rows})
        self._kv_len = rows

    def reset(self) -> None:
        """Forget the text so far."""
        self.program.reset()
        self._kv_len = 0

    def step(self, ids: Sequence[int], positions: Sequence[int] | None = None, ancestors: Sequence[int] | None = None) -> torch.Tensor:
        """Run 1 to ``tokens`` new tokens and append them to the KV cache; their logits, a (n, vocab) fp32 view that the next
        launch overwrites.

        ``positions`` default to the rows after the cache; ``ancestors[i]`` has bit j set where token i sees token j of the
        step (itself included), by default a chain. Raises MK450 to MK456, MK469, MegakernelHang.
        """
        self._launch(ids, positions, ancestors)
        return self.program.logits[: len(ids)]

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Append a prompt, in chunks of up to ``tokens``; the (vocab,) fp32 logits after its last token, as :meth:`step` gives."""
        self._prefill(ids)
        last = (len(ids) - 1) % self.manifest["tokens"]
        return self.program.logits[last]

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        stop_at_end: bool = True,
        on_token: Callable[[int, str], None] | None = None,
    ) -> Generation:
        """Continue ``prompt`` greedily from an empty cache, until ``max_new_tokens`` or (``stop_at_end``) an end token.

        ``on_token(id, text)`` is called as tokens arrive; ``text`` is what they add, held back while UTF-8 is incomplete.
        Raises MK410, MK450 to MK452, MK457, MK458, MK469, MegakernelHang.
        """
        self._require_choice()
        prompt_ids = self._ids(prompt)
        self.reset()
        self._require_room(len(prompt_ids) + max(max_new_tokens - 1, 0))
        stops = self._stops(stop_at_end)
        text = Text(self.tokenizer, on_token)
        first = self._prefill(prompt_ids)
        if max_new_tokens > 0:
            text.add(first)
        steps, began = 0, time.perf_counter()
        if max_new_tokens > 1 and first not in stops:
            for token in self._decode(first, max_new_tokens - 1, sorted(stops)[:MOST_STOP_IDS]):
                steps += 1
                text.add(token)
                if token in stops:
                    break
            self.program.set_steps(1)
        spent = time.perf_counter() - began
        self.kv_len = len(prompt_ids) + steps
        return Generation(prompt_ids, text.ids, text.whole(), 1e3 * spent / steps if steps else 0.0)

    def _prefill(self, ids: Sequence[int]) -> int:
        """Append a prompt; the id the kernel chooses after it (meaningless when it chooses none)."""
        self._check_prompt(ids)
        self._require_room(len(ids))
        chunk, following = self.manifest["tokens"], 0
        for begin in range(0, len(ids), chunk):
            following = self._launch(ids[begin : begin + chunk])
        return following

    def _require_room(self, rows: int) -> None:
        """Room for so many new rows, and the pages for them."""
        self._require_free(self._kv_len, rows)
        if self.program.pages is not None:
            self.program.pages.grow({0: self._kv_len + rows})

    def _launch(self, ids: Sequence[int], positions: Sequence[int] | None = None, ancestors: Sequence[int] | None = None) -> int:
        count = len(ids)
        if not 1 <= count <= self.manifest["tokens"]:
            raise error(TOKEN_COUNT, count=count, tokens=self.manifest["tokens"])
        self._check_prompt(ids)
        self._require_room(count)
        positions = range(self._kv_len, self._kv_len + count) if positions is None else positions
        ancestors = [(2 << i) - 1 for i in range(count)] if ancestors is None else ancestors
        self._check_places(count, positions, ancestors)
        self.program.control.set_inputs(self._kv_len, ids, positions, ancestors)
        self.program.launch()
        words = self.program.check()
        self._kv_len += count
        return words[NEXT_IDS + count - 1]

    def _check_places(self, count: int, positions: Sequence[int], ancestors: Sequence[int]) -> None:
        with collecting() as found:
            for what, values in (("positions", positions), ("ancestors", ancestors)):
                if len(values) != count:
                    found.add(PER_TOKEN, what=what, got=len(values), count=count)
            for index, position in enumerate(positions):
                if not 0 <= position < self.manifest["max_kv"]:
                    found.add(POSITION_RANGE, position=position, index=index, last=self.manifest["max_kv"] - 1)
            for index, mask in enumerate(ancestors):
                if not mask >> index & 1 or not 0 <= mask < 1 << count:
                    found.add(ANCESTORS, mask=mask, index=index, count=count, own=1 << index)

    def _decode(self, token: int, count: int, stops: Sequence[int]) -> Iterator[int]:
        """Up to ``count`` greedy tokens after ``token``. The kernel feeds itself; the host reads behind it."""
        self.program.control.set_inputs(self._kv_len, [token], [self._kv_len], [1], flags=ADVANCE)
        # on a GPU the next launch is enqueued before this one's tokens are read, so that the GPU never waits for the host
        behind = 2 if self.program.device.type == "cuda" else 1
        pending: deque[Snapshot] = deque()
        steps = 0
        for begin in range(0, count, self.steps_per_launch):
            if steps != (steps := min(self.steps_per_launch, count - begin)):
                self.program.set_steps(steps, stops)
            self._replay.replay()
            pending.append(self.program.snapshot())
            if len(pending) == behind:
                yield from self._chosen(pending.popleft())
        while pending:
            yield from self._chosen(pending.popleft())

    def _chosen(self, snapshot: Snapshot) -> list[int]:
        words = self.program.check(snapshot)
        return words[CHOSEN : CHOSEN + words[STEPS_MADE]]


class Text:
    """Ids as they arrive, and the text they add."""

    def __init__(self, tokenizer: Tokenizer | None, on_token: Callable[[int, str], None] | None) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._on_token = on_token
        self._shown = ""

    def add(self, token: int) -> None:
        self.ids.append(token)
        if self._on_token is None:
            return
        whole = self.whole()
        piece = "" if whole.endswith("\ufffd") else whole[len(self._shown) :]
        self._shown += piece
        self._on_token(token, piece)

    def whole(self) -> str:
        return self._tokenizer.decode(self.ids) if self._tokenizer else ""


def weight_source(model: str, weights: Path | WeightSource | None) -> WeightSource:
    """Where a model's weights come from: ``weights`` as they were given, None for the demo's. MK459 when there are none."""
    if isinstance(weights, WeightSource):
        return weights
    if weights is None and model != _DEMO_MODEL:
        raise error(NO_WEIGHTS, model=model)
    return open_weights(weights or demo_weights())


def _tokenizer(source: WeightSource) -> Tokenizer | None:
    match source:
        case GgufSource():
            return tokenizer_of(source.file) if tokenizer_known(source.file) else None
        case SafetensorsSource():
            return tokenizer_in(source.folder)
        case _:
            return None


def check_rope(manifest: Mapping[str, Any], source: WeightSource) -> None:
    """A wrong rotation changes few tokens of a short text, so it is refused here, not left to be noticed."""
    if manifest["rope"] is None or not isinstance(source, GgufSource | SafetensorsSource):
        return
    spec = rope_of(manifest["rope"])
    theta, scaling = (source.file.config["rope_theta"], None) if isinstance(source, GgufSource) else rope_fields(source.config)
    thetas: list[float] = theta if isinstance(theta, list) else [theta]
    scalings: list[Any] = scaling if isinstance(scaling, list) else [scaling]
    found = Collector()
    trained = [rope_scaling(one, found, UNKNOWN) for one in scalings]
    rotary = spec.head_dim if isinstance(source, GgufSource) else int(spec.head_dim * rotated_part(source.config))
    same = replace(spec, theta=PerLayer(tuple(thetas)).alike(), scaling=PerLayer(tuple(trained)).alike(), rotary_dim=rotary)
    same = same.within(manifest["max_kv"])
    if spec != same or found.found:
        parts = (None, None) if spec.rotary_dim == rotary else (spec.rotary_dim, rotary)
        own = [None if one is None else asdict(one) for one in all_layers(spec.scaling)]
        raise error(THETA, spec=_rotation(all_layers(spec.theta), own, parts[0]), checkpoint=_rotation(thetas, scalings, parts[1]))


def _rotation(thetas: Iterable[float], scalings: Iterable[object], rotary_dim: int | None) -> str:
    theta = " or ".join(dict.fromkeys(f"theta={one:g}" for one in thetas))
    scaled = " or ".join(dict.fromkeys(f", scaling={one}" for one in scalings if one is not None))
    return f"{theta}{scaled}" + (f", rotary_dim={rotary_dim}" if rotary_dim is not None else "")
