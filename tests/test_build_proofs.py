"""Proofs that are kept: found again for the very same plan, machine and checker, and for nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from check_tools import plan, without
from lower_tools import GPU

import megadsl
from megadsl import cli
from megadsl.build import proofs
from megadsl.build.proofs import prove, sources_digest
from megadsl.check import checker
from megadsl.check.mutants import plan_mutants
from megadsl.check.report import Report
from megadsl.driver import compile_model
from megadsl.entries import cache_root
from megadsl.ir.plan import Plan
from megadsl.machine import Machine

NAME = "llama-tiny"


@pytest.fixture
def proved(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every plan that the checker is asked about, by way of ``prove`` or not, in a cache that was empty."""
    asked: list[Plan] = []
    real = checker.check_plan

    def check_plan(plan: Plan, on: Machine | None = None) -> Report:
        asked.append(plan)
        return real(plan, on)

    monkeypatch.setattr(checker, "check_plan", check_plan)
    return asked


def test_a_plan_that_held_is_not_proved_again(proved: list[Plan]) -> None:
    made = plan(NAME)
    first, second = prove(made, GPU), prove(plan(NAME), GPU)
    assert len(proved) == 1 and not first.kept and second == replace(first, kept=True)
    assert len(second.proved) > 10 and second.seconds > 0


def test_any_other_plan_or_machine_is_proved_anew(proved: list[Plan]) -> None:
    """Among them what plan.txt does not show: a single feature of the machine, an argument, a word, a place in the spec."""
    made = plan(NAME)
    prove(made, GPU)
    for features in (GPU.features - {"cluster"}, GPU.features | {"more"}):
        prove(made, replace(GPU, features=features))
    prove(made, replace(GPU, sms=GPU.sms + 1))
    prove(replace(made, records=made.records + 1), GPU)
    prove(replace(made, exchanges=(replace(made.exchanges[0], words=not made.exchanges[0].words), *made.exchanges[1:])), GPU)
    prove(plan(NAME, tokens=2), GPU)
    assert len(proved) == 7


def test_no_mutant_of_a_plan_passes_for_it() -> None:
    made = plan(NAME, blocks=5)
    keys = {proofs._key(mutant.plan, GPU) for mutant in plan_mutants(made)}
    assert len(keys) > 150 and None not in keys and proofs._key(made, GPU) not in keys


def test_findings_are_not_kept(proved: list[Plan]) -> None:
    broken = without("gather", "gate_up_proj")(plan(NAME))
    first, second = prove(broken, GPU), prove(broken, GPU)
    assert len(proved) == 2 and first.findings and str(first.findings[0]) == str(second.findings[0]) and not second.kept


def test_the_key_has_every_source_of_the_package(tmp_path: Path) -> None:
    """So the checker's own, and whatever it imports of ours."""
    package = shutil.copytree(Path(megadsl.__file__).parent, tmp_path / "megadsl", ignore=shutil.ignore_patterns("__pycache__"))
    found = {sources_digest(package)}
    assert found == {sources_digest()}
    changed = [*sorted((package / "check").glob("*.py")), package / "lower" / "shape.py", package / "ir" / "plan.py"]
    for path in changed:
        path.write_text(path.read_text() + "\n")
        found.add(sources_digest(package))
    (package / "check" / "wires.py").rename(package / "check" / "wire.py")
    found.add(sources_digest(package))
    assert len(found) == len(changed) + 2
    (tmp_path / "archive").mkdir()
    assert sources_digest(tmp_path / "archive") is None


def test_a_checker_that_is_not_the_one_on_the_disk_keeps_nothing(proved: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources were changed after this process began: which of the two was loaded, nobody can say."""
    made = plan(NAME)
    monkeypatch.setattr(proofs, "_SOURCES", "of another day")
    prove(made, GPU)
    prove(made, GPU)
    monkeypatch.setattr(proofs, "_SOURCES", None)
    prove(made, GPU)
    assert len(proved) == 3 and list(cache_root().glob("*.proof.json")) == []


def test_a_plan_that_cannot_be_written_down_is_proved_anew(proved: list[Plan]) -> None:
    made = plan(NAME)
    odd = replace(made, buffers={**made.buffers, "more": lambda: 0})  # type: ignore[dict-item]
    assert not prove(odd, GPU).findings and not prove(odd, GPU).kept and len(proved) == 2


def test_what_lies_in_the_cache_under_its_name_but_is_not_it(proved: list[Plan]) -> None:
    made, other = plan(NAME), plan(NAME, tokens=2)
    prove(made, GPU)
    (entry,) = cache_root().glob("*.proof.json")
    prove(other, GPU)
    (of_other,) = set(cache_root().glob("*.proof.json")) - {entry}
    whole = entry.read_bytes()
    for content in (of_other.read_bytes(), whole[:-9], whole.replace(b"proved", b"PROVED"), b""):
        entry.write_bytes(content)
        assert not prove(made, GPU).kept
    assert len(proved) == 6 and prove(made, GPU).kept


def test_compiling_keeps_and_checking_proves(proved: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    reports = [compile_model(NAME).report for _ in range(2)]
    assert [report is not None and report.kept for report in reports] == [False, True] and len(proved) == 1
    for expected in (2, 3):
        cli.app(["check", NAME], standalone_mode=False)
        assert len(proved) == expected and "0 findings" in capsys.readouterr().out
    assert compile_model(NAME, check=False).report is None and len(proved) == 3
