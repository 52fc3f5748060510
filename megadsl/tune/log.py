"""What was tried, a line of JSON for each candidate; a search that is begun again takes from it what it need not measure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from megadsl.diagnostics import declare, error
from megadsl.tune.decide import Gain

LOG_OTHER = declare(
    "MK493",
    "the log {path} is of another search: {differ}",
    "give another --log, or delete it; to go on with it, repeat the command that began it",
)
LOG_BROKEN = declare("MK494", "line {line} of {path} is no entry of a search's log", "give another --log, or delete it")


Spreads: TypeAlias = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Trial:
    """A candidate, ``point``, measured against ``base``, both as statements of a schedule file. ``ms`` and ``base_ms`` have the 10th,
    50th and 90th percentile for each number of cached rows; none where nothing was measured. ``kernel`` is the built candidate's key."""

    base: str
    point: str
    outcome: str
    text: str = ""
    code: str = ""
    kernel: str = ""
    gain: Gain | None = None
    ms: Spreads = ()
    base_ms: Spreads = ()
    registers: int = 0
    spill_bytes: int = 0
    seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        """As JSON; what is empty is left out."""
        gain = None if self.gain is None else {k: None if math.isinf(v) else v for k, v in vars(self.gain).items()}
        found = {
            "base": self.base, "point": self.point, "outcome": self.outcome, "code": self.code, "text": self.text,
            "gain": gain, "ms": self.ms, "base_ms": self.base_ms, "registers": self.registers, "spill_bytes": self.spill_bytes,
            "kernel": self.kernel, "seconds": round(self.seconds, 3),
        }  # fmt: skip
        return {k: v for k, v in found.items() if v or k in ("base", "point")}


def percentiles(times: Sequence[Sequence[float]]) -> Spreads:
    """10th, 50th and 90th of each row of at least two times."""
    found = []
    for row in times:
        deciles = statistics.quantiles(row, n=10, method="inclusive")
        found.append((round(deciles[0], 6), round(statistics.median(row), 6), round(deciles[-1], 6)))
    return tuple(found)


class Log:
    """A file of Trials behind a line that says of which search they are; no file where ``path`` is None.

    ``about`` is that line. Entries that are there are kept; a last line that was cut off is dropped. Raises MK493 where the file is of
    another search, MK494 where it is no log.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._path = path
        self._known: dict[tuple[str, str], Trial] = {}
        about = json.loads(json.dumps(about))
        lines = _whole_lines(path) if path is not None and path.exists() else []
        if path is None:
            return
        if lines:
            _same(path, json.loads(lines[0]), about)
            for number, line in enumerate(lines[1:], 2):
                self._remember(_read(path, number, line))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines or [json.dumps(about)]))

    @property
    def entries(self) -> int:
        return len(self._known)

    def find(self, base: str, point: str) -> Trial | None:
        """What came of this candidate against this base, if that is known."""
        return self._known.get((base, point))

    def add(self, trial: Trial) -> None:
        """On disk before this returns."""
        self._remember(trial)
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(json.dumps(trial.fields()) + "\n")

    def _remember(self, trial: Trial) -> None:
        self._known[trial.base, trial.point] = trial


def _whole_lines(path: Path) -> list[str]:
    """All lines that are JSON objects up to their ends, but for a last one that is not."""
    lines = path.read_text().splitlines()
    try:
        if lines:
            json.loads(lines[-1])
    except json.JSONDecodeError:
        lines.pop()
    return lines


def _same(path: Path, was: Any, about: Mapping[str, Any]) -> None:
    if not isinstance(was, dict):
        raise error(LOG_BROKEN, path=path, line=1)
    differing = [key for key in sorted({*was, *about}) if was.get(key) != about.get(key)]
    if differing:
        differ = "; ".join(f"{key} was {was.get(key)!r} and is {about.get(key)!r}" for key in differing)
        raise error(LOG_OTHER, path=path, differ=differ)


def _read(path: Path, number: int, line: str) -> Trial:
    try:
        fields: dict[str, Any] = json.loads(line)
        for key in {"ms", "base_ms"} & fields.keys():
            fields[key] = tuple(tuple(row) for row in fields[key])
        if "gain" in fields:
            known: dict[str, Any] = {k: v for k, v in fields["gain"].items() if v is not None}
            fields["gain"] = Gain(**{"least": -math.inf, "most": math.inf, **known})
        return Trial(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as broken:
        raise error(LOG_BROKEN, path=path, line=number) from broken
