"""``megadsl check --seeds``: emulated schedules beside the proof."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megadsl.cli import app
from megadsl.driver import compile_model
from megadsl.emulate.explore import explore
from megadsl.runtime.explore import Subject


def test_seeds_are_run_and_counted() -> None:
    done = CliRunner().invoke(app, ["check", "llama-tiny", "--tokens", "4", "--max-kv", "64", "--seeds", "2", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["seeds"] == 2 and result["schedules"] == [] and result["findings"] == [] and result["proved"]


def test_a_lost_signal_is_a_finding_of_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang under the detector's build is reported with its seed; the plain build, which gives the expected results, is whole."""
    compiled = compile_model("llama-tiny", tokens=4, blocks=3, max_kv=64)
    publish = next(s["id"] for s in compiled.manifest["sites"] if s["kind"] == "publish" and s["op"] == "o_proj")
    lost = f"#if defined(MK_DETECT)\n#define MK_LOST_SIGNAL {publish}\n#endif\n"
    spoilt = compiled.source.replace('#include "megadsl/kernel.h"', lost + '#include "megadsl/kernel.h"')
    result = explore(Subject(compiled.manifest, spoilt), range(2))
    assert [f.seed for f in result.findings] == [0, 1]
    assert all(f.kind == "MegakernelHang" and "o_proj" in f.text for f in result.findings)
