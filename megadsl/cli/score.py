"""The mutation score of ``megadsl check --mutants``, counted and printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megadsl.check.mutants import score_plan
from megadsl.ir.plan import Plan
from megadsl.machine import Machine

if TYPE_CHECKING:
    from megadsl.driver import Compiled

CHECKER = "checker"
NOTICED_BY = (CHECKER, "detector", "deadlock", "result")


@dataclass(frozen=True)
class Row:
    """One mutant: what noticed it, "" for nothing, and then why it may go unnoticed, "" for no reason."""

    name: str
    killed_by: str
    argument: str
    blocks: int | None = None  # of the grid in which a kernel's was noticed


@dataclass
class Score:
    """All mutants so far."""

    rows: list[Row] = field(default_factory=list)

    def add_plan(self, plan: Plan, on: Machine, *, quiet: bool) -> None:
        """Every mutant of the plan, judged by the checker."""
        with _bar("plan mutants", quiet=quiet) as progress:
            verdicts = score_plan(plan, on, progress)
        self.rows += [Row(v.name, CHECKER if v.code else "", v.argument) for v in verdicts]

    def add_kernel(self, compiled: Compiled, more: Compiled, seeds: Sequence[int], processes: int, *, quiet: bool) -> None:
        """Every mutant of the emulated kernel, under ``seeds`` until one shows it; ``more``: the same kernel for more blocks, where those
        that nobody has noticed are tried, too."""
        from megadsl.runtime.mutants import score

        with _bar("kernel mutants", quiet=quiet) as progress:
            verdicts = score(compiled.manifest, compiled.plan, seeds, processes, progress, (more.manifest, more.plan))
        self.rows += [Row(v.name, v.killed_by, v.argument, v.blocks) for v in verdicts]

    @property
    def survivors(self) -> list[str]:
        return [row.name for row in self.rows if not row.killed_by and not row.argument]

    def counts(self) -> dict[str, object]:
        """total, killed, equivalent, by_checker, by_detector, by_deadlock, by_result, survivors, arguments: [mutant, why it is none]."""
        equivalent = [row for row in self.rows if not row.killed_by and row.argument]
        noticed = {f"by_{who}": sum(row.killed_by == who for row in self.rows) for who in NOTICED_BY}
        counts: dict[str, object] = {"total": len(self.rows), "killed": sum(noticed.values()), "equivalent": len(equivalent)}
        return {**counts, **noticed, "survivors": self.survivors, "arguments": [[row.name, row.argument] for row in equivalent]}

    def lines(self) -> Iterator[str]:
        """A line a survivor, equivalents by their argument, and the sum."""
        for name in self.survivors:
            yield f"unnoticed: {name}"
        for argument in dict.fromkeys(row.argument for row in self.rows if row.argument):
            yield f"equivalent, since {argument}:"
            yield from (f"    {row.name}" for row in self.rows if row.argument == argument)
        counts = self.counts()
        noticed = ", ".join(f"{counts[f'by_{who}']} by {who}" for who in NOTICED_BY)
        yield (
            f"{counts['total']} mutants: {counts['killed']} noticed ({noticed}), {counts['equivalent']} equivalent,"
            f" {len(self.survivors)} unnoticed"
        )


@contextmanager
def _bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
