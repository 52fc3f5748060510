"""What a search leaves: the best schedule, with where and how it was found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megadsl.tune.search import Result
from megadsl.tune.space import as_json
from megadsl.tune.stand import Subject


def about(subject: Subject, lengths: Sequence[int]) -> dict[str, Any]:
    """What a search is about: the model, the steps that are timed, and the schedule to start from."""
    start = [repr(record) for record in subject.records]
    return {"model": subject.model, "tokens": subject.tokens, "kv": list(lengths), "max_kv": subject.max_kv, "start": start}


def write_result(out: Path, subject: Subject, result: Result, known: Mapping[str, Any]) -> None:
    """Write the best schedule to ``out``."""
    steps = [{"decisions": step.text, "gain": vars(step.gain)} for step in result.steps]
    total = None if result.total is None else vars(result.total)
    found = {"about": dict(known), "knobs": as_json(result.best.point), "steps": steps, "total": total, "ms": result.medians}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
