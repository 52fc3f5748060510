"""``megadsl tune`` as a command, over the made-up landscape: what it prints and writes, also when it is interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from landscape import Landscape

from megadsl import cli
from megadsl.driver import compile_model
from megadsl.dsl.schedule_file import load
from megadsl.tune import stand

BETTER = {"ring weights: meeting_window = 32 KiB": 0.97, "batch = 4": 0.99}

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``megadsl tune llama-3.2-1b`` with a bench that fails as ``failing`` says: exit code and stdout."""

    def run(*arguments: str, failing: dict[str, BaseException] | None = None) -> tuple[int, str]:
        closed: list[bool] = []

        class Bench(Landscape):
            def close(self) -> None:
                closed.append(True)

        monkeypatch.setattr(stand, "Stand", lambda *_: Bench(BETTER, failing=failing or {}))
        monkeypatch.setattr(
            sys, "argv", ["megadsl", "tune", "llama-3.2-1b", "--schedule", "model", "--device", "cuda", "--processes", "4", *arguments]
        )
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert closed == [True]
        return int(exit_.value.code or 0), capsys.readouterr().out

    return run


def test_what_is_found_is_printed_and_written(command: Command, tmp_path: Path) -> None:
    out, log = tmp_path / "new" / "best.schedule", tmp_path / "logs" / "log.jsonl"
    code, printed = command("--kv", "64,512", "--out", str(out), "--log", str(log))
    assert code == 0, printed
    assert "ring weights: meeting_window = 32 KiB" in printed and "confidence" in printed and f"written to {out}" in printed
    about, *rows = log.read_text().splitlines()
    assert json.loads(about)["kv"] == [64, 512] and f"{len(rows)} candidates" in printed
    file, text = load(out), out.read_text()
    assert (file.head.model, file.head.tokens, file.head.kv, file.head.machine) == ("llama-3.2-1b", 1, (64, 512), "a formula")
    assert "batch = 4" in text and "# +" in text and "op o_proj: sync = sentinel" in text and "together +" in text
    found = compile_model("llama-3.2-1b", schedule=out, check=False).schedule
    assert found.batch == 4 and found.rings[0][1].meeting_window == 32 * 1024
    again = command("--kv", "64,512", "--log", str(log))
    assert again[0] == 0 and log.read_text().splitlines()[1:] == rows, "all of it is known"


def test_another_architecture(command: Command, tmp_path: Path) -> None:
    """Its schedule is found, compiles for it, and a log of a search for another is not gone on with."""
    out, log = tmp_path / "best.schedule", tmp_path / "log.jsonl"
    assert command("--arch", "sm_80", "--out", str(out), "--log", str(log))[0] == 0
    assert load(out).head.arch == "sm_80" and json.loads(log.read_text().splitlines()[0])["arch"] == "sm_80"
    found = compile_model("llama-3.2-1b", schedule=out, arch="sm_80", check=False)
    assert found.schedule.batch == 4 and found.plan.tunables.copies == "lanes"
    assert command("--log", str(log))[0] == 1


def test_a_batch(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schedule is for so many sequences; a log of a search for single ones is not gone on with; each has as many tokens."""
    out, log = tmp_path / "best.schedule", tmp_path / "log.jsonl"
    batch = ("--tokens", "8", "--sequences", "4", "--out", str(out), "--log", str(log))
    assert command(*batch)[0] == 0
    assert (load(out).head.tokens, load(out).head.sequences) == (8, 4) and json.loads(log.read_text().splitlines()[0])["sequences"] == 4
    assert compile_model("llama-3.2-1b", schedule=out, tokens=8, sequences=4, check=False).schedule.batch == 4
    assert command("--tokens", "8", "--log", str(log))[0] == 1
    monkeypatch.setattr(sys, "argv", ["megadsl", "tune", "llama-tiny", "--device", "cpu", "--tokens", "7", "--sequences", "2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "error[MK498]: 7 tokens of 2 sequences" in capsys.readouterr().err


def test_ctrl_c_writes_the_best_so_far(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "best.schedule"
    code, printed = command("--out", str(out), failing={"op qkv_proj: smem = none": KeyboardInterrupt()})
    assert code == 130 and "interrupted" in printed
    assert "batch = 4  # +" in out.read_text()


def test_a_list_that_is_none(command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megadsl", "tune", "llama-tiny", "--kv", "5,x"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2 and "--kv" in capsys.readouterr().err
