"""A compiled decode step as a torch module, with its weights and a KV cache as buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from megadsl.diagnostics import declare, error
from megadsl.ir.graph import Linear
from megadsl.runtime.generate import SEQUENCE_COUNT, Compiled, check_rope, weight_source
from megadsl.runtime.kv import KvCache, PagedCache, sequence_arena
from megadsl.runtime.pack import cache_key, pack_weights
from megadsl.runtime.pages import Pages, page_table
from megadsl.runtime.program import Program, resolve_device
from megadsl.runtime.weights import TensorSource, WeightSource
from megadsl.torch.arguments import SupportsDLPack, tensor_of, users_call
from megadsl.torch.op import LoadedStep, decode_step, gone
from megadsl.torch.sampling import Sampling
from megadsl.torch.text import Continuation

OTHER_LAYOUT = declare(
    "MK489",
    "{what} of the step of {other} cannot be shared with one of {this}: {why}",
    "compile both from one spec, with the same configuration and max_kv, for the same device; only tokens and schedule may differ",
)

NO_COPY = declare(
    "MK491",
    "a DecodeStep can be neither copied nor pickled: it is a kernel loaded on a device",
    "make another: DecodeStep(compiled, step) shares the weights; new_cache() makes another cache",
)

Tensors = Mapping[str, SupportsDLPack]
_HOST = torch.device("cpu")


class StepOutput(NamedTuple):
    """``logits``: fp32 (n, vocab), memory of their own; ``next_ids``: int64 (n,), the kernel's greedy choice after each new token, or (0,)
    where the spec returns logits alone."""

    logits: torch.Tensor
    next_ids: torch.Tensor


class DecodeStep(torch.nn.Module):
    """One step of a compiled model. Calls are one launch each, in the order of torch's current streams, and wait for nothing.

    ``weights``: a GGUF file, a Hugging Face directory, a torch module, a mapping of names to tensors of any library with DLPack, a
    WeightSource, None (the demo's), or another DecodeStep, with which weights and cache are then shared: one compiled for few and one for
    many tokens. Of steps of another number of sequences, weights alone; a step of one has a batch's first sequence as its cache.
    ``device``: "cuda", "cuda:N", or "cpu" for the emulator; None: the shared step's, else "cuda". ``options`` go to Program.

    The buffers ``weights`` (packed, uint8) and ``cache`` (uint8, the default KV cache) stay out of state_dict(). Where cached rows lie in
    pages, so does ``pages``, int32 (sequences, entries): the default table, which ``pool`` fills. Raises MK400 to MK448, MK480, MK481,
    MK489.
    """

    weights: torch.Tensor
    cache: torch.Tensor
    pages: torch.Tensor | None

    def __init__(
        self,
        compiled: Compiled,
        weights: Path | str | Tensors | WeightSource | torch.nn.Module | DecodeStep | None = None,
        device: str | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        manifest = compiled.manifest
        shared = weights if isinstance(weights, DecodeStep) else None
        where = str(resolve_device(device or (str(shared.program.device) if shared else "cuda"), manifest["arch"]))
        if shared is not None:
            shared.require_shareable(manifest, where)
            arena = shared.weights
        else:
            source = _source(manifest["model"], weights)
            check_rope(manifest, source)
            arena = pack_weights(manifest, source, where, progress=progress)
        chooses = any(isinstance(op, Linear) and op.sink == "argmax" for op in compiled.graph.ops)
        self._loaded: LoadedStep | None = LoadedStep(Program(manifest, compiled.source, where, arena, **options), chooses, compiled.source)
        self.name = self._loaded.name
        self._device = self.program.device
        if shared is not None and manifest["kv"]:
            if manifest["sequences"] == shared.loaded.limits.sequences:
                self.program.share_cache(shared.cache, shared.pool)
            elif manifest["sequences"] == 1:
                self.program.share_cache(shared.sequence_cache(0), shared.pool)
        self.register_buffer("weights", arena, persistent=False)
        self.register_buffer("cache", self.program.buffers["kv"], persistent=False)
        table = page_table(manifest, self.program.buffers["pages"]) if manifest["kv_page"] else None
        self.register_buffer("pages", table, persistent=False)

    def forward(
        self,
        ids: SupportsDLPack,
        kv_len: SupportsDLPack,
        *,
        counts: SupportsDLPack | None = None,
        positions: SupportsDLPack | None = None,
        ancestors: SupportsDLPack | None = None,
        cache: SupportsDLPack | None = None,
        pages: SupportsDLPack | None = None,
    ) -> StepOutput:
        """Append ``ids`` (n,), 1 to ``tokens`` of them, at rows [kv_len, kv_len + n) of ``cache``, and give what follows each.

        ``kv_len`` () or (1,): the rows that count so far; a smaller number takes tokens back. ``positions`` (n,) default to the new rows.
        ``ancestors`` (n,): bit j of entry i is set where new token i sees new token j (itself included); by default a chain. All of
        them int64 or int32, on the step's device. ``cache``: one of :meth:`new_cache`, by default the buffer; it is written.

        Of a batch, ``kv_len`` (sequences,) are the rows of each sequence, and ``counts`` (sequences,) says how many of the ids are its own,
        which stand in the order of the sequences; by default one of each. Masks speak of the step's tokens, each of its own sequence's.

        Where cached rows lie in pages, row r of sequence i is row r % kv_page of page ``pages[i, r // kv_page]``: int32 (sequences,
        entries), by default the buffer. Rows of pages that are none are not written, and read as anything. Pages that are appended to are
        one sequence's alone; full ones may be in several sequences' rows of the table.

        Raises MK450 to MK455, MK478, MK492, MK496, MK499, MK480 to MK487; values only in the emulator, since a GPU cannot be asked without
        waiting: there ids, rows and positions are clamped to what exists. A launch that hangs raises in the emulator, on a GPU in
        :meth:`check`.
        """
        logits, chosen = decode_step(
            tensor_of("ids", ids, self._device),
            tensor_of("kv_len", kv_len, self._device),
            None if counts is None else tensor_of("counts", counts, self._device),
            None if positions is None else tensor_of("positions", positions, self._device),
            None if ancestors is None else tensor_of("ancestors", ancestors, self._device),
            self.weights,
            self.cache if cache is None else tensor_of("cache", cache, self._device),
            self.pages if pages is None else tensor_of("pages", pages, self._device),
            self.name,
        )
        return StepOutput(logits, chosen)

    def generate(
        self,
        prompt: Sequence[int] | SupportsDLPack,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        sample: Callable[[torch.Tensor], torch.Tensor] | None = None,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int], object] | None = None,
        kv_len: int = 0,
        cache: SupportsDLPack | None = None,
        prefill: DecodeStep | None = None,
    ) -> torch.Tensor:
        """The tokens that continue ``prompt``, int64 (m,) on the step's device; the last may be one of ``stop_ids``.

        Drawn as Sampling says, greedily by default, with ``generator`` (of the step's device); or chosen by ``sample``, which gets fp32
        logits (vocab,) and gives an integer tensor of one element. ``on_token(id)`` is called as tokens arrive. ``kv_len`` rows of the
        cache count already; afterwards it holds kv_len + len(prompt) + m - 1. ``prefill``: a step for more tokens that shares this one's
        weights and cache, for the prompt. Pages for all rows are taken from ``pool`` first. On a GPU one captured graph replays for
        every token, unless ``sample`` is given.

        Raises MK450 to MK452, MK469, MK496 for a batch, MK480 to MK482, MK487 to MK489, MK490, MegakernelHang.
        """
        if self.loaded.limits.sequences > 1:
            mend = "use BatchGenerator, or a step of one sequence on sequence_cache() of this one"
            raise error(
                SEQUENCE_COUNT, users_call(), model=self.program.manifest["model"], sequences=self.loaded.limits.sequences, mend=mend
            )
        first = self if prefill is None else prefill
        self._require_same_weights(first)
        choose = Sampling(temperature, top_k, top_p) if sample is None else sample
        given = tensor_of("prompt", prompt, _HOST).tolist() if isinstance(prompt, SupportsDLPack) else prompt
        run = Continuation(self, first, choose, generator, self.cache if cache is None else tensor_of("cache", cache, self._device))
        new: list[int] = []
        for token in run.tokens([int(i) for i in given], max_new_tokens, kv_len):
            new.append(token)
            if on_token is not None:
                on_token(token)
            if token in stop_ids:
                break
        return torch.tensor(new, dtype=torch.int64, device=self._device)

    def new_cache(self) -> torch.Tensor:
        """Another KV cache, empty: for one more sequence (or batch of them) with the same weights. Of pages, another pool."""
        return torch.zeros(self.loaded.limits.cache_bytes, dtype=torch.uint8, device=self._device)

    def rows(self, cache: torch.Tensor | None = None, sequence: int = 0) -> KvCache:
        """Reads and writes K and V rows of ``cache`` (default: the buffer), as (kv_heads, rows, head_dim) bf16; of a batch those of one
        sequence. In pages, those that the default table gives it."""
        if self.pool is not None:
            return PagedCache(self.program.manifest, self.cache if cache is None else cache, self.pool.table, sequence)
        return KvCache(self.program.manifest, self.cache if cache is None else cache, sequence)

    def sequence_cache(self, sequence: int, cache: torch.Tensor | None = None) -> torch.Tensor:
        """The part of ``cache`` (default: the buffer) that one sequence of a batch has: what a step of one sequence takes as its cache. Of
        pages all of it, together with ``pages[sequence : sequence + 1]``."""
        if self.pool is not None:
            return self.cache if cache is None else cache
        return sequence_arena(self.program.manifest, self.cache if cache is None else cache, sequence)

    @property
    def pool(self) -> Pages | None:
        """Who has which pages of the default cache, where rows lie in pages: ``step.pool.hold({0: rows})`` gives sequence 0 those that it
        needs, before the calls that append them."""
        return self.program.pages

    def turn(self) -> AbstractContextManager[None]:
        """For a ``with`` around the replay of a graph that you captured: it then runs behind all calls before, on whichever streams, and
        before all that follow."""
        return self.program.using()

    def check(self) -> None:
        """Wait for the calls so far. Raises MegakernelHang when one gave up (the step can then be called again), MK449 when none ends."""
        self.program.check()

    def close(self) -> None:
        """Wait, then let go of weights, cache and kernel. Later calls raise MK487; graphs that were captured must not be replayed."""
        program = self.program
        program.check()
        if program.kernel is not None:
            with torch.cuda.device(self._device):
                program.kernel.close()
        self._loaded = None
        self.pages = None
        self.weights = self.cache = torch.empty(0, dtype=torch.uint8, device=self._device)

    @property
    def loaded(self) -> LoadedStep:
        """What the operator launches. Raises MK487 behind :meth:`close`."""
        if self._loaded is None:
            raise gone(self.name)
        return self._loaded

    @property
    def program(self) -> Program:
        """The program below: its queue, control block and manifest."""
        return self.loaded.program

    def require_shareable(self, manifest: Mapping[str, Any], device: str) -> None:
        """Raise MK489 unless a kernel of ``manifest`` on ``device`` reads the very arenas of this step."""
        own = self.program.manifest
        names = {"other": own["model"], "this": manifest["model"]}
        if device != str(self._device):
            raise error(OTHER_LAYOUT, users_call(), what="weights and cache", **names, why=f"they are on {self._device} and {device}")
        if cache_key(own, "") != cache_key(manifest, ""):
            raise error(OTHER_LAYOUT, users_call(), what="weights", **names, why="they are packed otherwise")
        for key in ("kv", "max_kv", "rope"):
            if own[key] != manifest[key]:
                raise error(OTHER_LAYOUT, users_call(), what="cache", **names, why=f"{key} is {own[key]} and {manifest[key]}")

    def _require_same_weights(self, other: DecodeStep) -> None:
        self.require_shareable(other.program.manifest, str(other.program.device))
        names = {"other": self.program.manifest["model"], "this": other.program.manifest["model"]}
        if other.weights.data_ptr() != self.weights.data_ptr():
            raise error(OTHER_LAYOUT, users_call(), what="weights", **names, why="each has its own in memory")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise error(NO_COPY, users_call())

    def extra_repr(self) -> str:
        limits = None if self._loaded is None else self._loaded.limits
        return f"{self.name}, {self._device}, closed" if limits is None else f"{self.name}, {self._device}, {limits}"


def _source(model: str, weights: Path | str | Tensors | WeightSource | torch.nn.Module | None) -> WeightSource:
    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict()
    if isinstance(weights, Mapping):
        # memory is taken over as it is; packing is the one copy
        return TensorSource({name: tensor_of(name, value, _HOST) for name, value in weights.items()})
    return weight_source(model, Path(weights) if isinstance(weights, str) else weights)
