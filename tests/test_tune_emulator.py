"""A small search in the emulator: compiled, built, measured and verified for real; what the times are says nothing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megadsl.driver import compile_model
from megadsl.dsl.overrides import Decision
from megadsl.dsl.schedule_file import load, render
from megadsl.machine import DEFAULT_ARCH
from megadsl.tune import space
from megadsl.tune.bench import FASTER, SAME, SLOWER, Built, Failed
from megadsl.tune.knobs import TURNS
from megadsl.tune.log import Log
from megadsl.tune.result import about, tuned, write_result
from megadsl.tune.search import Effort, Result, Search, Settings
from megadsl.tune.space import Point, moves
from megadsl.tune.stand import Stand
from megadsl.tune.subject import Build, Subject

LENGTHS = (17,)
STAGES = 6
START = f"arch = {DEFAULT_ARCH}\nring weights: stages = {STAGES}\nring weights: window = 16 KiB\n"


def test_a_search_in_the_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, out, log = (tmp_path / name for name in ("start.schedule", "new/best.schedule", "log.jsonl"))
    start.write_text(START)
    monkeypatch.setattr(space, "TURNS", [turn for turn in TURNS if turn.knob.name == "window"])
    subject = Subject.of("llama-tiny", None, 1, 96, 2, DEFAULT_ARCH, "cpu", str(start))
    stand = Stand(subject, LENGTHS, processes=1, factor=1.5)
    try:
        known = {**about(subject, LENGTHS), **stand.describe()}
        settings = Settings(Effort(2, 4, 0, False), budget_s=1e9, round_size=4, level=0.2)
        result = Search(stand, Log(log, known), settings, time.monotonic).run()
        refused, best = stand.built(Point().but(_changed(result.start, "window", 1 << 20))), result.best
        assert isinstance(refused, Failed) and (refused.outcome, refused.code) == ("refused", "MK166")
        assert stand.verify(result.start, best) is None
    finally:
        stand.close()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert rows[0]["start"] == START.splitlines()[1:] and len(rows) > 2
    assert {row["outcome"] for row in rows[1:]} <= {FASTER, SLOWER, SAME}
    write_result(out, tuned(subject, LENGTHS, result, known))
    again = compile_model("llama-tiny", max_kv=96, blocks=2, schedule=out)
    assert again.schedule == best.scene.schedule and load(out).head.kv == (17, 17)
    assert start.read_text() == START


def test_a_batch_is_searched_as_a_batch() -> None:
    """All that is compiled of it is of its sequences, and its schedule says for how many it is."""
    subject = Subject.of("llama-tiny", None, 4, 96, 2, DEFAULT_ARCH, "cpu", "none", 2)
    narrow = replace(subject, formats="int8")
    assert narrow.compiled().graph.op("o_proj").format == "int8" and about(narrow, LENGTHS)["formats"] == "int8"  # type: ignore[union-attr]
    found = subject.compiled()
    assert found.manifest["sequences"] == found.schedule.sequences == 2 and subject.scene(found).schedule == found.schedule
    refused = Build(replace(subject, sequences=5))(Point())
    assert isinstance(refused, Failed) and (refused.outcome, refused.code) == ("refused", "MK259")
    assert about(subject, LENGTHS)["sequences"] == 2
    built = Built(Point(), "", "", subject.scene(found), None)
    file = tuned(subject, LENGTHS, Result(built, built, (), None, None, 0.001, 0, {}, False), {})
    assert (file.head.tokens, file.head.sequences, file.head.kv) == (4, 2, (17, 17))
    assert "\ntokens = 4\nsequences = 2\nkv = " in render(file)


def test_a_decision_under_another_name_is_replaced(tmp_path: Path) -> None:
    """A ring by its role, a value by another of its producers or by a reader: the file has one line for each."""
    start, out = tmp_path / "start.schedule", tmp_path / "best.schedule"
    lines = ("ring loader: window = 16 KiB", "op embed_tokens: sync = sentinel", "edge o_proj -> gate_up_proj: sync = sentinel")
    start.write_text("\n".join((f"arch = {DEFAULT_ARCH}", *lines)) + "\n")
    subject = Subject.of("llama-tiny", None, 1, 96, 2, DEFAULT_ARCH, "cpu", str(start))
    scene = subject.scene(subject.compiled())
    wanted = ("ring weights: window = 24 KiB", "op down_proj: sync = flag(slots = 2)", "op o_proj: sync = flag(slots = 2)")
    point = Point().but(d for move in moves(scene) if str(move) in wanted for d in move.decisions)
    found = subject.compiled(point.records)
    built = Built(point, "", "", subject.scene(found), None)
    result = Result(built, built, (), None, None, 0.001, 0, {}, False)
    write_result(out, tuned(subject, LENGTHS, result, {}))
    assert [line for line in out.read_text().splitlines() if ": " in line and "#" not in line] == [*wanted]
    assert compile_model("llama-tiny", max_kv=96, blocks=2, schedule=out).schedule == found.schedule


def _changed(start: Built, field: str, value: int) -> tuple[Decision, ...]:
    (found, *_) = next(m.decisions for m in moves(start.scene) if m.decisions[0].field == field)
    return (replace(found, value=value),)
