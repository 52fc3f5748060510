"""What a program enqueues on a GPU: in one order over all streams, and waited for with an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from megadsl.diagnostics import MegadslError, declare, error

GPU_BUSY = declare(
    "MK449",
    "launches are queued, and for {patience:g} s none has ended: other work keeps the GPU from starting them (one that has started"
    " gives up by itself after {timeout:g} s)",
    "end the other work (nvidia-smi lists processes), then call check() again: the launches are still queued; for work that is meant"
    " to take longer, give a larger patience_s",
)

_SPIN_S = 0.02  # a step is shorter than that; who waits longer can afford to sleep
_READ_S = 1.0  # for a copy of four bytes


class LaunchQueue:
    """The order in which one program's work runs.

    ``steps`` is the int32 word on ``device`` that counts launches. :meth:`wait` goes on while it changes within ``patience_s``;
    ``timeout_s``, after which a launch gives up by itself, is for the message. ``admit(stream)`` is asked before the first work
    on another stream, by its raw handle, and raises where the kernel cannot run there.
    """

    def __init__(self, device: torch.device, steps: torch.Tensor, patience_s: float, timeout_s: float) -> None:
        self.admit: Callable[[int], None] = lambda stream: None
        self._device, self._index, self._steps = device, device.index, steps
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._lock = threading.RLock()
        self._last, self._thread = torch.cuda.current_stream(device), threading.get_ident()
        self._handle: int = self._last.cuda_stream
        self._overdue: torch.cuda.Event | None = None
        self._side = torch.cuda.Stream(device, priority=-1)
        self._ended = torch.empty(1, dtype=torch.int32, pin_memory=True)

    def turn(self) -> LaunchQueue:
        """For a ``with`` around anything that enqueues on torch's current stream, whose raw handle it gives: it will run after all
        that was enqueued so far.

        Inside a capture nothing is done: a graph keeps its own order, and who replays it takes a turn for that. Raises MK444
        where the stream has too few SMs, and MK449 while launches that :meth:`wait` gave up on are still queued: to enqueue
        more could then block.
        """
        return self

    def __enter__(self) -> int:
        self._lock.acquire()
        try:
            return self._begin()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *failure: object) -> None:
        self._lock.release()

    def _begin(self) -> int:
        """In each launch's way: no context manager and no second question to torch unless something has changed."""
        if self._overdue is not None:
            if not self._overdue.query():
                raise self._busy()
            self._overdue = None
        # what torch's own generated code asks: torch.cuda.current_stream() makes an object and takes 4 us
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        if threading.get_ident() != self._thread:
            torch.cuda.Event().record(torch.cuda.current_stream(self._device))  # makes CUDA's context current, for calls of the driver
            self._thread = threading.get_ident()
        if handle != self._handle:
            self._follow(torch.cuda.current_stream(self._device))
        return handle

    def _follow(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
        self.admit(stream.cuda_stream)
        stream.wait_stream(self._last)
        self._last, self._handle = stream, stream.cuda_stream

    def wait(self, event: torch.cuda.Event) -> None:
        """Return when ``event``, recorded behind launches, is done. Raises MK449 when no launch ends for ``patience_s``."""
        began = since = time.monotonic()
        count: int | None = None
        while not event.query():
            now = time.monotonic()
            if now < began + _SPIN_S:
                time.sleep(0)
                continue
            time.sleep(1e-3)
            if count is not None and now < since + self._patience_s:
                continue
            before, count, since = count, self._count(), now
            if count == before:
                self._overdue = event
                raise self._busy()

    def settle(self) -> None:
        """Wait anew for launches that :meth:`wait` has given up on."""
        if self._overdue is not None:
            self.wait(self._overdue)

    def _count(self) -> int:
        """Launches that have ended, read beside the stream on which they are queued; -1 when the copy does not end either."""
        self._ended[0] = -1
        with torch.cuda.stream(self._side):
            self._ended.copy_(self._steps, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        until = time.monotonic() + _READ_S
        while not done.query() and time.monotonic() < until:
            time.sleep(1e-3)
        return int(self._ended[0])

    def _busy(self) -> MegadslError:
        return error(GPU_BUSY, patience=self._patience_s, timeout=self._timeout_s)
