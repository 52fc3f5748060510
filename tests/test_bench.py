"""``megadsl bench`` in the emulator: the arithmetic, the verdicts and what is said of baselines; times mean nothing here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megadsl import cli, driver
from megadsl.build.gpus import gpus
from megadsl.diagnostics import MegadslError, error
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.ops.cost import total_cost
from megadsl.reference.compare import Agreement, Error, Gate, gate
from megadsl.runtime import bench, bench_baselines
from megadsl.runtime.bench import NO_ROOM, BaselineRow, Row, Subject, forced_rows
from megadsl.runtime.bench_baselines import Prepared, Task, at_most, prepare
from megadsl.runtime.bench_kinds import Baseline
from megadsl.runtime.bench_timing import WALL, Clock, Contestant, Spread
from tests.kernels import compiled
from tests.schedules import alone

FACTOR = 1.5
ROW_KEYS = {
    *("tokens", "sequences", "kv", "gate", "error", "error_max", "error_bf16", "error_bf16_max", "tokens_equal", "tokens_compared"),
    *("ms", "ms_p10", "ms_p90", "of_floor", "floor_ms", "replays", "replays_that_differ", "host_us_per_launch"),
    *(
        "baselines",
        "best_baseline",
        "best_baseline_over_ours",
        "one_step_a_launch",
        "one_layer_a_launch",
        "one_op_a_launch",
        "several_steps_a_launch",
    ),
}
ABOUT_KEYS = {"model", "arch", "weights", "device", "torch", "cuda", "kv_page", "clock", "l2_cleared", "rows"}
BASELINE_KEYS = {"name", "attention", "prepare_s", "ms", "ms_p10", "ms_p90", "of_floor", "error", "failure"}


@pytest.fixture(autouse=True)
def _lenient_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of 32 tokens of a tiny model is luck, and torch's bf16 products differ from CPU to CPU."""
    monkeypatch.setattr(bench, "gate", partial(gate, factor=FACTOR))


@pytest.fixture(scope="module")
def subject() -> Subject:
    """One kernel for all tests: each starts with Subject.fill."""
    return Subject(compiled("llama-tiny", tokens=2, blocks=2, max_kv=96), "cpu")


def layered(s: ScheduleBlock) -> None:
    s.launch("layer")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``megadsl bench llama-tiny`` with the kernels that other tests build too: exit code, stdout, stderr."""

    def compile_model(
        model: str, *, tokens: int, max_kv: int, blocks: int, scope: str = "step", sequences: int = 1, kv_page: int = 0, **options: object
    ) -> driver.Compiled:
        configure = alone if scope == "op" else layered if scope == "layer" else None
        made = compiled(model, tokens=tokens, max_kv=max_kv, blocks=blocks, sequences=sequences, kv_page=kv_page, configure=configure)
        return replace(made, manifest={**made.manifest, "model": model})

    monkeypatch.setattr(driver, "compile_model", compile_model)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megadsl", "bench", "llama-tiny", "--device", "cpu", "--replays", "2", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return run


def test_the_command_writes_what_it_measured(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench.json"
    code, printed, _ = command(
        "--tokens", "2", "--kv", "17,20", "--max-kv", "96", "--steps", "3", "--baseline", "eager-graph", "--out", str(out)
    )
    assert code == 0, printed
    found = json.loads(out.read_text())
    assert found.keys() == ABOUT_KEYS and found["clock"] == WALL and found["model"] == "llama-tiny" and found["l2_cleared"] is False
    assert [(row["tokens"], row["kv"]) for row in found["rows"]] == [(2, 17), (2, 20)]
    for row in found["rows"]:
        assert row.keys() == ROW_KEYS and row["gate"] is True and row["replays_that_differ"] == 0
        assert 0 < row["error"] < FACTOR * row["error_bf16"] and row["ms_p10"] <= row["ms"] <= row["ms_p90"]
        several = row["several_steps_a_launch"]
        assert several["failure"] is None and several["steps"] == 3 and several["ms"] > 0 < several["ms_in_launches_of_one"]
        apart = row["one_op_a_launch"]
        assert apart["failure"] is None and apart["name"].startswith("one op a launch (14)") and apart["ms"] > 0
        apart = row["one_layer_a_launch"]
        assert apart["failure"] is None and apart["name"].startswith("one layer a launch (3)") and row["one_step_a_launch"] is None
        (baseline,) = row["baselines"]
        assert baseline.keys() == BASELINE_KEYS and baseline["failure"] is None and row["best_baseline"] == baseline["name"]
        assert row["best_baseline_over_ours"] == pytest.approx(baseline["ms"] / row["ms"])
        graph = compiled("llama-tiny", tokens=row["tokens"], blocks=2).graph
        assert row["floor_ms"] == pytest.approx(1e3 * total_cost(graph, row["tokens"], row["kv"]).hbm_bytes / machine("sm_90a").bandwidth)
        assert row["of_floor"] == pytest.approx(row["ms"] / row["floor_ms"])
    assert WALL in printed and printed.count("gate passed") == 2 and printed.count("3 steps a launch") == 2 and printed.count("x ours") == 6


def test_a_batch(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Judged sequence by sequence, beside torch's step of the same batch; the floor counts all their rows."""
    out, how = tmp_path / "bench.json", ("--kv", "17", "--max-kv", "96", "--steps", "2", "--baseline", "eager-graph")
    code, printed, _ = command("--tokens", "4", "--sequences", "2", *how, "--out", str(out))
    assert code == 0, printed
    (row,) = json.loads(out.read_text())["rows"]
    assert row["gate"] is True and (row["tokens"], row["sequences"]) == (4, 2) and row["several_steps_a_launch"]["failure"] is None
    graph = compiled("llama-tiny", tokens=4, blocks=2, sequences=2).graph
    assert row["floor_ms"] == pytest.approx(1e3 * total_cost(graph, 4, 2 * 17).hbm_bytes / machine("sm_90a").bandwidth)
    assert row["baselines"][0]["failure"] is None and "cannot serve 2 sequences" in row["one_op_a_launch"]["failure"]
    code, _, err = command("--tokens", "3", "--sequences", "2", *how)
    assert code == 1 and "MK498" in err


def test_pages(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Scattered ones, of both sequences in one pool: judged as rows that lie together are."""
    out, how = tmp_path / "bench.json", ("--kv", "17", "--max-kv", "96", "--steps", "2", "--baseline", "none", "--kv-page", "32")
    code, printed, _ = command("--tokens", "4", "--sequences", "2", *how, "--out", str(out))
    assert code == 0, printed
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert found["kv_page"] == 32 and row["gate"] is True and row["several_steps_a_launch"]["failure"] is None


def test_a_planted_error_fails_the_gate(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill = Subject.fill

    def spoilt(self: Subject, rows: int) -> None:
        fill(self, rows)
        weights = self.program.buffers["weights"].view(torch.bfloat16)
        weights[: len(weights) // 50] *= 1.5  # a fiftieth of the kernel's weights, and of nobody else's

    monkeypatch.setattr(Subject, "fill", spoilt)
    out = tmp_path / "bench.json"
    code, printed, _ = command("--tokens", "2", "--kv", "0", "--max-kv", "96", "--baseline", "none", "--out", str(out))
    assert code == 1 and "gate FAILED" in printed
    (row,) = json.loads(out.read_text())["rows"]
    assert row["gate"] is False and row["baselines"] == [] and row["best_baseline"] is None


def test_what_does_not_compile_is_listed(command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = driver.compile_model

    def refuse(model: str, *, scope: str = "step", **options: Any) -> driver.Compiled:
        if scope == "op":
            raise error(NO_ROOM, kv=1, forced=2, max_kv=3, most=0)
        return whole(model, **options)

    monkeypatch.setattr(driver, "compile_model", refuse)
    code, printed, _ = command("--tokens", "2", "--kv", "17", "--max-kv", "96", "--baseline", "launches")
    assert code == 0 and "one op a launch: failed: it does not compile: 1 cached rows and the 2 tokens" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "0"], "0"),
        (["--kv", "1;2"], "1;2"),
        (["--kv", "-1"], "-1"),
        (["--baseline", "jax"], "jax"),
        (["--tokens", ""], "--tokens"),
    ],
)
def test_wrong_usage_exits_with_two(command: Callable[..., tuple[int, str, str]], arguments: list[str], complaint: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and complaint in err


@pytest.mark.skipif(any(gpu.runs(DEFAULT_ARCH) for gpu in gpus()), reason="here the GPU would do")
def test_a_gpu_that_is_not_there_is_a_diagnostic(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = command("--device", "cuda", "--blocks", "2")
    assert (code, out) == (1, "") and "error[MK44" in err


def test_a_cache_without_room_is_a_diagnostic(subject: Subject) -> None:
    with pytest.raises(MegadslError, match=r"MK461.*65 cached rows and the 32 tokens .* do not fit a cache of 96 rows") as refused:
        subject.measure(65, 2, Baseline.NONE, 0)
    assert "measure at most 64 cached rows" in str(refused.value)


def test_forced_rows() -> None:
    assert [forced_rows(count) for count in (1, 2, 5, 16)] == [32, 32, 35, 32]


def test_a_replay_with_other_bits_is_counted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = subject.program.launch
    launched = []

    def flaky() -> None:
        launch()
        launched.append(1)
        if len(launched) > 19:  # the 16 steps that are judged, the first replay and the warm-up are sound
            subject.program.logits[0, 0] += 1e-3

    monkeypatch.setattr(subject.program, "launch", flaky)
    row = subject.measure(3, 4, Baseline.NONE, 0)
    assert row.gate.passed and row.differ == len(launched) - 19 > 0 and not row.passed
    assert "gate FAILED" in next(row.lines())


def verdict(error: float) -> Gate:
    return Gate(Error(error, error), Error(0.01, 0.01), 1.05, Agreement(8, 0, ()))


def baseline(name: str, ms: float | None, failure: str | None = None) -> BaselineRow:
    times = None if ms is None else Spread(ms - 1, ms, ms + 1)
    return BaselineRow(Prepared(name, "gqa", 1.0, failure), times)


def test_the_best_baseline_is_one_that_ran_and_was_right() -> None:
    rivals = (baseline("slow", 9.0), baseline("wrong", None, "its logits are wrong"), baseline("late", None, "late"), baseline("good", 6.0))
    row = Row(1, 0, verdict(0.01), Spread(1.5, 2.0, 2.5), 1.0, 10, 0, 21.0, rivals)
    assert row.best == ("good", 6.0) and row.fields()["best_baseline_over_ours"] == 3.0
    head, slow, wrong, late, good = row.lines()
    assert "2.0000 ms (1.5000-2.5000), 2.000 x floor, host 21.0 us per launch; gate passed" in head
    assert "4.500 x ours" in slow and "failed: its logits are wrong" in wrong and "failed: late" in late and "3.000 x ours" in good
    assert not replace(row, gate=verdict(0.02)).passed and not replace(row, differ=1).passed and row.passed


def task(subject: Subject) -> Task:
    """A step on an empty cache."""
    subject.fill(0)
    subject.plain.set_inputs([3, 4], 0)
    return Task(subject.plain, 2, subject.bf16.step([3, 4]), subject.oracle.step([3, 4]))


def test_a_baseline_with_wrong_logits_does_not_count(subject: Subject) -> None:
    right = task(subject)
    for factor in (1.5, 2.5):
        error, wrong = right.judge(right.fp32 + factor * (right.bf16 - right.fp32))
        assert error.mean > 0 and (wrong is None) is (factor < 2)
    other = replace(right, fp32=right.fp32.flip(0), bf16=right.bf16.flip(0))
    found = prepare(other, Baseline.EAGER_GRAPH, 0, subject.clock, 2)
    assert len(found) == 3 and all(each.run is None and "its logits are wrong" in str(each.failure) for each in found)


def refuses(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    raise NotImplementedError("not this one")


def sleeps(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    time.sleep(60)


def traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    return graph.forward


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets what torch.compile is tried with: backends that cost no time, by name."""
    yield lambda **backends: monkeypatch.setattr(bench_baselines, "MODES", {name: {"backend": b} for name, b in backends.items()})
    torch._dynamo.reset()


def test_compiled_baselines_run_whole_or_say_why_not(subject: Subject, modes: Callable[..., None]) -> None:
    modes(traced=traced, broken=refuses)
    row = subject.measure(17, 2, Baseline.COMPILE, 120.0)
    plain, *tried = row.baselines
    assert plain.times is not None and plain.name.startswith("eager") and row.passed
    assert {each.name.partition(",")[0] for each in tried} == {"traced", "broken"}
    for each in tried:
        if each.name.startswith("traced"):
            assert each.of.failure is None and each.times is not None and each.of.error is not None
        else:
            assert "NotImplementedError: not this one" in str(each.of.failure) and each.times is None


def test_compiling_ends_with_its_budget(subject: Subject, modes: Callable[..., None]) -> None:
    modes(endless=sleeps, late=traced)
    began = time.monotonic()
    _, endless, late, *_ = prepare(task(subject), Baseline.COMPILE, 3.0, subject.clock, 2)
    assert time.monotonic() - began < 30
    assert endless.failure == "not compiled in 3 s" and late.failure == "not tried: the time for compiling was used up"


def test_a_form_that_fails_is_reported(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    step = subject.plain.step

    def fails(rows: int, form: str) -> Any:
        if form != "grouped":
            raise_ = RuntimeError(f"no {form} here\nand more")

            def broken() -> None:
                raise raise_

            return broken
        return step(rows, form)

    monkeypatch.setattr(subject.plain, "step", fails)
    best, *others = prepare(task(subject), Baseline.EAGER_GRAPH, 0, subject.clock, 2)
    assert best.failure is None and best.attention == "grouped"
    assert [other.failure for other in others] == ["RuntimeError: no gqa here and more", "RuntimeError: no matmul here and more"]
    assert prepare(task(subject), Baseline.NONE, 0, subject.clock, 2) == []


def test_the_time_limit_ends_what_takes_longer() -> None:
    began = time.monotonic()
    with pytest.raises(bench_baselines._OutOfTimeError), at_most(0.2):
        time.sleep(30)
    assert time.monotonic() - began < 10
    with at_most(0.2):
        pass
    time.sleep(0.3)


def test_rounds_are_interleaved() -> None:
    seen: list[str] = []
    clock = Clock(torch.device("cpu"), machine("sm_90a"), 0)
    rivals = [Contestant(name, lambda name=name: seen.append(name), lambda: seen.append(".")) for name in "ab"]  # type: ignore[misc]
    times = clock.times(rivals, 4, rounds=2)
    assert "".join(seen) == "a.b." + 2 * "a.a.b.b." and times.keys() == {"a", "b"}
    assert not clock.clears_l2 and clock.name == WALL


def test_spread() -> None:
    spread = Spread.of([float(n) for n in range(1, 100)])
    assert (spread.p10, spread.median, spread.p90) == pytest.approx((10.8, 50.0, 89.2))
    assert Spread.of([1.0, 2.0]).p10 >= 1, "no percentile lies outside of what was seen"
