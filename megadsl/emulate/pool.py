"""Work on many items with something that takes long to make, in one process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Tool = TypeVar("Tool")
Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(
    factory: Callable[[], Tool],
    work: Callable[[Tool, Item], Result],
    items: Sequence[Item],
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """``work(tool, item)`` of every item, in their order; ``factory`` makes the tool, once a process.

    With more than one process both must be what pickle finds by name, or its instances. ``progress`` is told how many items are
    done. Raises what the two raise.
    """
    done: dict[int, Result] = {}

    def note(index: int, result: Result) -> None:
        done[index] = result
        if progress is not None:
            progress(len(done))

    if processes <= 1:
        tool = factory()
        for index, item in enumerate(items):
            note(index, work(tool, item))
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_make, initargs=(factory,)) as pool:
            running = {pool.submit(_work, work, item): index for index, item in enumerate(items)}
            for future in as_completed(running):
                note(running[future], future.result())
    return [done[index] for index in range(len(items))]


_made: list[Any] = []  # one per worker process


def _make(factory: Callable[[], Any]) -> None:
    _made.append(factory())


def _work(work: Callable[[Any, Item], Result], item: Item) -> Result:
    return work(_made[0], item)
