"""The processes of a search: many that build, and one that holds weights and caches on the GPU and measures.

Ctrl-C is the search's own to hear: its processes ignore it, and end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.pool import AsyncResult
from typing import Any, Generic, TypeVar

from megadsl.runtime.contest_kinds import CRASHED, HUNG, Unfit

Item = TypeVar("Item")
Result = TypeVar("Result")

_SPAWN = multiprocessing.get_context("spawn")
NICENESS = 10  # of processes that build
_GRACE_S = 2.0  # for a process to end by itself


class Worker:
    """A process with a tool that takes long to make. It is replaced when a call does not return in time or the process dies, and then only.

    ``factory`` and all arguments have to be what pickle can send. ``start_s``: seconds that the factory may take.
    """

    def __init__(self, factory: Callable[[], Any], start_s: float = 600.0) -> None:
        self._factory, self._start_s = factory, start_s
        self._process: Any = None
        self._end: Connection | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Of the process that is there."""
        return None if self._process is None else int(self._process.pid)

    def call(self, method: str, *arguments: object, timeout_s: float) -> Any:
        """``tool.method(*arguments)``. Raises Unfit: the tool's own; HUNG when it takes longer than ``timeout_s``; CRASHED when the
        process dies of it, with what it raised."""
        if self._end is None:
            self._start()
        assert self._end is not None
        try:
            self._end.send((method, arguments))
        except OSError as dead:
            raise self._died() from dead
        return self._answer(timeout_s)

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._end is not None:
            self._end.close()
        if self._process is not None:
            self._process.join(_GRACE_S)
            self._process.kill()
            self._process.join()
        self._process = self._end = None

    def _start(self) -> None:
        self._end, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, self._factory), daemon=True)
        self._process.start()
        theirs.close()
        self.starts += 1
        self._answer(self._start_s)

    def _answer(self, timeout_s: float) -> Any:
        assert self._end is not None
        try:
            if not self._end.poll(timeout_s):
                self._kill()
                raise Unfit(HUNG, f"no answer for {timeout_s:g} s: the process was ended")
            kind, *content = self._end.recv()
        except (EOFError, OSError) as dead:
            raise self._died() from dead
        if kind == "unfit":
            raise Unfit(*content)
        if kind == "crashed":
            self.close()
            raise Unfit(CRASHED, content[0])
        return content[0]

    def _died(self) -> Unfit:
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        self._kill()
        return Unfit(CRASHED, f"the measuring process died with {code}")

    def _kill(self) -> None:
        self._process.kill()
        self.close()


def _serve(end: Connection, factory: Callable[[], Any]) -> None:
    """In the worker's process: answer until the other end is closed, or until something fails that is no Unfit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tool = factory()
        end.send(("done", None))
        while True:
            try:
                method, arguments = end.recv()
            except EOFError:
                return
            try:
                end.send(("done", getattr(tool, method)(*arguments)))
            except Unfit as unfit:
                end.send(("unfit", unfit.outcome, unfit.text, unfit.code))
    except Exception as problem:
        with suppress(OSError):  # where nobody listens any more there is nobody to tell
            end.send(("crashed", f"{type(problem).__name__}: {problem}"))


class Builders(Generic[Item, Result]):
    """Results of ``build(item)``, made ahead in ``processes`` processes; each once.

    ``build`` has to be what pickle finds by name, or its instance, and must not raise. ``lost`` is the result of an item whose process
    does not answer for ``patience_s``.
    """

    def __init__(self, build: Callable[[Item], Result], processes: int, lost: Callable[[str], Result], patience_s: float = 600.0) -> None:
        self._build, self._lost, self._patience_s, self._processes = build, lost, patience_s, processes
        self._pool = _SPAWN.Pool(processes, _step_back)
        self._results: dict[Item, AsyncResult[Result]] = {}
        self._waiting: list[Item] = []
        self._running = 0
        self._lock = threading.RLock()

    def ahead(self, items: Sequence[Item]) -> None:
        """Build these next, in this order, in place of what waits from before."""
        with self._lock:
            self._waiting = [item for item in dict.fromkeys(items) if item not in self._results]
            self._fill()

    def get(self, item: Item) -> Result:
        """The result, when it is there."""
        with self._lock:
            if item not in self._results:
                self._submit(item)
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:  # in slices, so that Ctrl-C is heard
            self._results[item].wait(0.2)
            if self._results[item].ready():
                return self._results[item].get()
        return self._lost(f"its process has not answered for {self._patience_s:g} s")

    def close(self) -> None:
        """End all processes, whatever they are at."""
        self._pool.terminate()
        self._pool.join()

    def _fill(self) -> None:
        while self._waiting and self._running < self._processes:
            item = self._waiting.pop(0)
            if item not in self._results:
                self._submit(item)

    def _submit(self, item: Item) -> None:
        self._running += 1
        self._results[item] = self._pool.apply_async(self._build, (item,), callback=self._ended, error_callback=self._ended)

    def _ended(self, _: object) -> None:
        with self._lock:
            self._running -= 1
            self._fill()


def _step_back() -> None:
    """Compilers must not keep the process that measures from a core: what it enqueues late would be measured as slow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
