"""Tensors of files, read ahead of whoever takes them.

Some threads read pieces into pinned memory, and each piece goes on to the device while the next ones are read. So a checkpoint is
loaded about as fast as its disk is read, whatever is done with the tensors on the device.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megadsl.diagnostics import declare, error

FILE_SHORT = declare(
    "MK477",
    "{path} has become shorter: it ends at byte {end}, before a tensor does",
    "wait until whatever writes it is done, or fetch the file again",
)

THREADS = 8  # disks are fastest with several requests under way
PIECE = 16 << 20  # bytes of a request
SLOTS = 2 * THREADS  # pieces that are read or copied at a time


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its bytes, as they are, from ``offset`` of a file on."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Slot:
    """Memory of one piece, and what the device still has to copy out of it."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device, self._copied = device, torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, file: int, path: Path, offset: int, size: int) -> None:
        """Read; in a thread of its own. Raises MK477."""
        if self._copied is not None:
            self._copied.synchronize()
        view, done = self._bytes.numpy().data, 0
        while done < size:
            got = os.preadv(file, [view[done:size]], offset + done)
            if got == 0:
                raise error(FILE_SHORT, path=path, end=os.fstat(file).st_size)
            done += got

    def copy_to(self, target: torch.Tensor) -> None:
        """Enqueue the copy on the current stream."""
        target.copy_(self._bytes[: target.numel()], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


def read_ahead(wanted: Sequence[Stored], device: torch.device) -> Generator[torch.Tensor]:
    """Each tensor in its turn, on ``device``, in order with torch's current stream there.

    Takes 256 MB of pinned memory, and on the device the tensor that is handed out and the one that is being filled. Raises MK477 where
    a file has become shorter, OSError where it cannot be read.
    """
    if not wanted:
        return
    pieces = deque((stored, begin) for stored in wanted for begin in range(0, stored.bytes, PIECE))
    free = deque(_Slot(device, min(PIECE, max(s.bytes for s in wanted))) for _ in range(min(SLOTS, len(pieces))))
    reads: deque[tuple[_Slot, Future[None]]] = deque()
    with _opened({stored.path for stored in wanted}) as files, _threads() as pool:

        def begin_reads() -> None:
            while free and pieces:
                (stored, begin), slot = pieces.popleft(), free.popleft()
                size = min(PIECE, stored.bytes - begin)
                reads.append((slot, pool.submit(slot.fill, files[stored.path], stored.path, stored.offset + begin, size)))

        for stored in wanted:
            tensor = torch.empty(stored.bytes, dtype=torch.uint8, device=device)
            for target in tensor.split(PIECE) if stored.bytes else ():
                begin_reads()
                slot, done = reads.popleft()
                done.result()
                slot.copy_to(target)
                free.append(slot)
            begin_reads()  # what follows, while this one is used
            yield tensor.view(stored.dtype).view(stored.shape)


@contextmanager
def _opened(paths: set[Path]) -> Iterator[dict[Path, int]]:
    with ExitStack() as stack:
        found = {}
        for path in sorted(paths):
            found[path] = os.open(path, os.O_RDONLY)
            stack.callback(os.close, found[path])
        yield found


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """They end with the block, also where nobody wants the rest."""
    pool = ThreadPoolExecutor(THREADS, "megadsl read")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
