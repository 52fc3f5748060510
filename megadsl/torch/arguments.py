"""What a step may be given, and what is said where it is given something else: at the user's line, all findings at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.dlpack import from_dlpack

from megadsl.diagnostics import Diagnostic, MegadslError, declare, diagnose, error
from megadsl.runtime.generate import ANCESTORS, ID_RANGE, KV_FULL, POSITION_RANGE, TOKEN_COUNT
from megadsl.runtime.kv import NO_PAGE
from megadsl.source import UNKNOWN, Span, is_ours, place
from megadsl.types import ceil_div

NO_TENSOR = declare(
    "MK480",
    "{name} is no tensor but of type {got}",
    "give a torch tensor on {device}, or anything that has __dlpack__; a number as torch.tensor([number], device={device!r}), made once",
)
DLPACK = declare(
    "MK481",
    "{name} cannot be taken over through DLPack: {why}",
    "copy it into a type and an order that DLPack knows, or give a torch tensor",
)
WRONG_DEVICE = declare(
    "MK482",
    "{name} lies on {got}, the step runs on {want}",
    "move it with {name}.to({want!r}); weights and cache of a DecodeStep stay where it was made",
)
WRONG_DTYPE = declare("MK483", "{name} has dtype {got}, the step takes {want}", "give {mend}")
WRONG_SHAPE = declare("MK484", "{name} has shape {got}, the step takes {want}", "give {mend}")
LAYOUT = declare(
    "MK485",
    "{name} is not contiguous memory that begins at a multiple of {align} bytes",
    "give a tensor of its own, as DecodeStep.new_cache() makes it; the kernel works in it and cannot copy it",
)
NO_MEMORY = declare("MK486", "the memory of {name} has been freed", "keep {name} as it is for as long as the step is used")

TABLE = declare("MK492", "{got} of KV pages for a step that {why}", "{mend}")

ENTRY = 4  # bytes of a table's entries
ALIGN = 16  # bytes of what bulk copies and vector accesses move
_INTEGERS = (torch.int64, torch.int32)
_GENERATED = "<eval_with_key>"  # code that torch.fx makes


@runtime_checkable
class SupportsDLPack(Protocol):
    """A tensor of any library that can hand its memory on."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


@dataclass(frozen=True)
class StepInputs:
    """What a step is given beside arenas, as DecodeStep.forward takes it: ids and, where they are given, positions and ancestors (n,),
    kv_len () or (sequences,), counts (sequences,) of a batch; integers."""

    ids: torch.Tensor
    kv_len: torch.Tensor
    counts: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None

    @property
    def number(self) -> int:
        """New tokens."""
        return self.ids.shape[0]


@dataclass(frozen=True)
class Limits:
    """What a compiled step takes: at most ``tokens`` new ones, ids below ``vocab``, ``max_kv`` rows of each of ``sequences``, arenas of so
    many bytes. Where rows lie in pages of ``page_rows``, a table of ``entries`` for each sequence, all below ``pages``."""

    tokens: int
    vocab: int
    max_kv: int
    weight_bytes: int
    cache_bytes: int
    sequences: int = 1
    page_rows: int = 0
    pages: int = 0

    @property
    def entries(self) -> int:
        """Pages that a sequence's rows take at most."""
        return ceil_div(self.max_kv, self.page_rows) if self.page_rows else 0


def tensor_of(name: str, value: object, device: torch.device) -> torch.Tensor:
    """``value`` as a torch tensor over the same memory. Raises MK480 for what is none, MK481 where its library refuses."""
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, SupportsDLPack):
        raise error(NO_TENSOR, users_call(), name=name, got=type(value).__name__, device=str(device))
    try:
        taken: torch.Tensor = from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as reason:
        raise error(DLPACK, users_call(), name=name, why=str(reason)) from reason
    return taken


def check_kinds(
    limits: Limits, device: torch.device, inputs: Mapping[str, torch.Tensor | None], arenas: Mapping[str, torch.Tensor]
) -> None:
    """Raise what is wrong with devices, dtypes and shapes: MK453, MK482 to MK485. Reads no values, so that fake tensors will do.

    ``inputs``: ids (n,), kv_len () or (1,) (of a batch (sequences,), and so counts, or None), positions and ancestors (n,) or None;
    ``arenas``: weights and cache.
    """
    found: list[Diagnostic] = []
    ids = inputs["ids"]
    assert ids is not None
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        if tensor.device != device:
            found.append(diagnose(WRONG_DEVICE, name=name, got=tensor.device, want=str(device)))
        if tensor.dtype not in _INTEGERS:
            found.append(diagnose(WRONG_DTYPE, name=name, got=tensor.dtype, want="int64 or int32", mend=f"{name}.to(torch.int64)"))
        right = tensor.ndim == 1 if name == "ids" else _fits(name, tensor, ids, limits)
        if not right:
            found.append(_wrong_shape(name, tensor, ids, limits))
    if ids.ndim == 1 and not 1 <= ids.shape[0] <= limits.tokens:
        found.append(diagnose(TOKEN_COUNT, count=ids.shape[0], tokens=limits.tokens))
    for (name, arena), size in zip(arenas.items(), (limits.weight_bytes, limits.cache_bytes), strict=True):
        found += _arena(name, arena, size, device)
    raise_all(found)


def _fits(name: str, tensor: torch.Tensor, ids: torch.Tensor, limits: Limits) -> bool:
    if name in ("kv_len", "counts") and limits.sequences > 1:
        return tuple(tensor.shape) == (limits.sequences,)
    if name == "kv_len":
        return tensor.ndim == 0 or (tensor.ndim == 1 and tensor.shape[0] == 1)
    return tensor.shape == ids.shape


def _wrong_shape(name: str, tensor: torch.Tensor, ids: torch.Tensor, limits: Limits) -> Diagnostic:
    if name in ("kv_len", "counts") and limits.sequences > 1:
        mend = f"one number for each of the {limits.sequences} sequences"
        return diagnose(WRONG_SHAPE, name=name, got=tuple(tensor.shape), want=f"({limits.sequences},)", mend=mend)
    want, mend = {
        "ids": ("(n,)", "the new ids of one text: a step has no batch dimension"),
        "kv_len": ("() or (1,)", "one number: the rows of the cache that count"),
    }.get(name, (f"({ids.numel()},)", "one entry per new token"))
    return diagnose(WRONG_SHAPE, name=name, got=tuple(tensor.shape), want=want, mend=mend)


def _arena(name: str, arena: torch.Tensor, size: int, device: torch.device) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    mend = "what new_cache() of the step makes" if name == "cache" else f"the step's own {name}"
    if arena.device != device:
        found.append(diagnose(WRONG_DEVICE, name=name, got=arena.device, want=str(device)))
    if arena.dtype != torch.uint8:
        found.append(diagnose(WRONG_DTYPE, name=name, got=arena.dtype, want="uint8", mend=mend))
    if tuple(arena.shape) != (size,):
        found.append(diagnose(WRONG_SHAPE, name=name, got=tuple(arena.shape), want=f"({size},)", mend=mend))
    elif not arena.is_contiguous():
        found.append(diagnose(LAYOUT, name=name, align=ALIGN))
    return found


def check_table(limits: Limits, device: torch.device, table: torch.Tensor | None) -> None:
    """Raise what is wrong with a table of pages as a tensor: MK482 to MK485, MK492."""
    if (table is None) == bool(limits.entries):
        why, mend = ("has none", "give none") if table is not None else ("needs one", "give the step's own, DecodeStep.pages, or your own")
        raise_all([diagnose(TABLE, got="a table" if table is not None else "no table", why=why, mend=mend)])
    if table is None:
        return
    found: list[Diagnostic] = []
    shape, mend = (limits.sequences, limits.entries), "the numbers of each sequence's pages, in the order of its rows"
    if table.device != device:
        found.append(diagnose(WRONG_DEVICE, name="pages", got=table.device, want=str(device)))
    if table.dtype != torch.int32:
        found.append(diagnose(WRONG_DTYPE, name="pages", got=table.dtype, want="int32", mend="pages.to(torch.int32)"))
    if tuple(table.shape) != shape:
        found.append(diagnose(WRONG_SHAPE, name="pages", got=tuple(table.shape), want=str(shape), mend=mend))
    elif not table.is_contiguous():
        found.append(diagnose(LAYOUT, name="pages", align=ENTRY))
    raise_all(found)


def check_entries(limits: Limits, table: torch.Tensor, ends: Sequence[int]) -> None:
    """Raise MK478 for each sequence with a row before ``ends[i]`` whose entry is no page of the pool; reads values."""
    found: list[Diagnostic] = []
    for sequence, (entries, end) in enumerate(zip(table.tolist(), ends, strict=True)):
        used = entries[: ceil_div(end, limits.page_rows)]
        wrong = next((i for i, page in enumerate(used) if not 0 <= page < limits.pages), None)
        if wrong is not None:
            row = wrong * limits.page_rows
            found.append(diagnose(NO_PAGE, row=row, sequence=sequence, page=used[wrong], count=limits.pages))
    raise_all(found)


def check_memory(arenas: Mapping[str, torch.Tensor]) -> None:
    """Raise MK485 for an arena that begins at an odd address, MK486 for one whose storage is gone."""
    found: list[Diagnostic] = []
    for name, arena in arenas.items():
        if arena.numel() and arena.untyped_storage().nbytes() < arena.numel():
            found.append(diagnose(NO_MEMORY, name=name))
        elif arena.data_ptr() % ALIGN:
            found.append(diagnose(LAYOUT, name=name, align=ALIGN))
    raise_all(found)


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise MK451 for each id that is outside the vocabulary."""
    last = vocab - 1
    wrong = [(index, token) for index, token in enumerate(ids) if not 0 <= token <= last]
    raise_all([diagnose(ID_RANGE, token=token, index=index, last=last, vocab=vocab) for index, token in wrong])


def check_room(used: int, rows: int, max_kv: int) -> None:
    """Raise MK450 unless ``rows`` more rows fit a cache of which ``used`` are used."""
    if not 0 <= used <= max_kv - rows:
        raise_all([diagnose(KV_FULL, max_kv=max_kv, used=used, more=rows, room=max(0, min(max_kv, max_kv - used)))])


def check_values(limits: Limits, given: StepInputs) -> None:
    """Raise what is wrong with values in host memory: MK450, MK451, MK454, MK455."""
    count, positions, ancestors = given.number, given.positions, given.ancestors
    check_ids(given.ids.tolist(), limits.vocab)
    check_room(int(given.kv_len), count, limits.max_kv)
    found: list[Diagnostic] = []
    for index, position in enumerate([] if positions is None else positions.tolist()):
        if not 0 <= position < limits.max_kv:
            found.append(diagnose(POSITION_RANGE, position=position, index=index, last=limits.max_kv - 1))
    for index, mask in enumerate([] if ancestors is None else ancestors.tolist()):
        if not mask >> index & 1 or not 0 <= mask < 1 << count:
            found.append(diagnose(ANCESTORS, mask=mask, index=index, count=count, own=1 << index))
    raise_all(found)


def raise_all(found: Sequence[Diagnostic]) -> None:
    """Raise all of them, if there are any, at the user's call."""
    if found:
        span = users_call()
        raise MegadslError([Diagnostic(d.code, d.message, d.mend, span, d.detail, d.severity) for d in found])


def users_call() -> Span:
    """The innermost call that is neither in megadsl nor in torch, nor in code that torch generates."""
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        if not is_ours(file) and package not in ("torch", "megadsl") and not file.startswith(_GENERATED):
            return place(frame.f_code, frame.f_lasti, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return UNKNOWN
