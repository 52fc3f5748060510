"""What a search leaves: the best schedule as a schedule file, with where and how it was found in its comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megadsl.dsl.knobs import statements
from megadsl.dsl.overrides import Decision, Overrides, SetRing, decided, recorded
from megadsl.dsl.schedule_file import Head, Note, ScheduleFile, render, written
from megadsl.tune.bench import Built
from megadsl.tune.search import Result
from megadsl.tune.space import side_of
from megadsl.tune.subject import Subject


def about(subject: Subject, lengths: Sequence[int]) -> dict[str, Any]:
    """What a search is about: the model, the steps that are timed, and the schedule to start from."""
    start = [f"{left} = {right}" for left, right in statements(Overrides(subject.arch, subject.records))]
    asked = {"model": subject.model, "arch": subject.arch, "tokens": subject.tokens, "sequences": subject.sequences}
    formats = {} if subject.formats is None else {"formats": subject.formats}
    return {**asked, **formats, "kv": list(lengths), "max_kv": subject.max_kv, "start": start}


def tuned(subject: Subject, lengths: Sequence[int], result: Result, known: Mapping[str, Any]) -> ScheduleFile:
    """The best schedule: what the search started from and what it decided, each decision with its gain. ``known`` goes into the comments on
    top."""
    decisions = [d for record in (*subject.records, *result.best.point.records) for d in decided(record)]
    records = tuple(recorded(_as_decided(d, result.best)) for d in decisions)
    beside = {side_of(d): f"{step.gain.median:+.2%}" for step in result.steps for d in step.decisions}
    head = Head(
        subject.arch, subject.model, subject.tokens, (min(lengths), max(lengths)), str(known.get("gpu", "")) or None, subject.sequences
    )
    file = written(head, Overrides(subject.arch, records), beside)
    top = Note(above=tuple(f"# {line}" for line in _top(result, known)))
    return replace(file, notes=MappingProxyType({**file.notes, ScheduleFile.TOP: top}))


def write_result(out: Path, file: ScheduleFile) -> None:
    """Write a schedule file, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    part.write_text(render(file))
    part.replace(out)


def _as_decided(decision: Decision, best: Built) -> Decision:
    """``as many as fit`` is a number by now."""
    if decision.record is not SetRing or decision.value != 0:
        return decision
    ring = next(ring for role, ring in best.scene.schedule.rings if decision.subject[0] in (role, ring.name))
    return replace(decision, value=getattr(ring, decision.field))


def _top(result: Result, known: Mapping[str, Any]) -> Iterator[str]:
    yield f"found by megadsl tune in {result.trials} candidates"
    yield ", ".join(f"{key} {value}" for key, value in known.items() if key not in ("start", "model", "tokens", "sequences"))
    yield f"gains from {result.floor:.2%} on were taken"
    for base, best in result.medians:
        yield f"{base:.4f} ms to start from, {best:.4f} ms with this schedule"
    if result.total is not None:
        yield f"together {result.total}"
