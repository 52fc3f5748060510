"""The command line: what it prints, its exit codes, and how fast its help is. The compiler behind it is a stand-in here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megadsl import cli
from megadsl.build.gpus import Gpu
from megadsl.cli import doctor
from megadsl.diagnostics import declare, error, warn
from megadsl.dsl.knobs import KNOBS
from megadsl.entries import cache_root
from megadsl.machine import MACHINES
from megadsl.source import Span

REFUSED = declare("MK990", "the spec is {how}", "write a better one")
DOUBTED = declare("MK991", "the spec is {how}", "look at it again")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megadsl", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the stand-ins for driver, generator and explain were asked for."""
    calls: dict[str, object] = {}
    driver, generate, batch, explain = (ModuleType(name) for name in ("driver", "generate", "batch", "explain"))

    def compile_model(model: str, **options: object) -> SimpleNamespace:
        calls.update(model=model, **options)
        if model == "refused":
            raise error(REFUSED, Span("spec.py", 3), how="bad")
        if model == "doubted":
            warn(DOUBTED, how="odd")
        return SimpleNamespace(name=model)

    def write_artifacts(compiled: SimpleNamespace, out: Path) -> dict[str, object]:
        out.mkdir()
        (out / "report.txt").write_text(f"report of {compiled.name}\n")
        return {}

    class Generator:
        def __init__(self, compiled: SimpleNamespace, weights: Path | None, device: str, steps_per_launch: int) -> None:
            calls.update(weights=weights, device=device, steps_per_launch=steps_per_launch)

        def generate(self, prompt: str, max_new_tokens: int) -> SimpleNamespace:
            calls.update(max_new_tokens=max_new_tokens)
            return SimpleNamespace(prompt_ids=[1, 2], ids=[3, 4, 5], text=" Paris.", ms_per_token=1.25)

    class BatchGenerator(Generator):
        def generate(self, prompts: list[str], max_new_tokens: int) -> list[SimpleNamespace]:  # type: ignore[override]
            calls.update(prompts=prompts)
            return [SimpleNamespace(prompt_ids=[i], ids=[3], text=f" {i}", ms_per_token=0.5) for i in range(len(prompts))]

    def rows(compiled: SimpleNamespace) -> Sequence[tuple[list[str], list[list[str]]]]:
        ops = [["qkv_proj", "1,234", "consumer [8 warps]"], ["attention", "56", "consumer"]]
        return [(["op", "bytes", "role"], ops), (["edge", "sync"], [["qkv_proj -> attention", "tagged"]])]

    driver.__dict__.update(compile_model=compile_model, write_artifacts=write_artifacts)
    generate.__dict__.update(Generator=Generator)
    batch.__dict__.update(BatchGenerator=BatchGenerator)
    monkeypatch.setitem(sys.modules, "megadsl.runtime.batch", batch)
    explain.__dict__.update(rows=rows)
    monkeypatch.setitem(sys.modules, "megadsl.driver", driver)
    monkeypatch.setitem(sys.modules, "megadsl.runtime.generate", generate)
    monkeypatch.setitem(sys.modules, "megadsl.lower.explain", explain)
    return calls


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['megadsl', '--help']\n"
        "from megadsl.cli import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'numpy', 'jinja2', 'networkx', 'cuda') if m in sys.modules])"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert done.stdout.endswith("[]\n")
    assert min(times) < 1.5


@pytest.mark.parametrize("name", ["compile", "check", "run", "bench", "explain", "trace", "tune", "doctor"])
def test_each_command_has_help_with_an_example(run_cli: Cli, name: str) -> None:
    code, out, _ = run_cli(name, "--help")
    assert code == 0
    assert f"Example: megadsl {name}" in out


def test_no_arguments_shows_the_commands(run_cli: Cli) -> None:
    _, out, err = run_cli()
    assert all(name in out + err for name in ("compile", "check", "run", "bench", "explain", "trace", "tune", "doctor"))


def test_compile(run_cli: Cli, asked: dict[str, object], tmp_path: Path) -> None:
    code, out, _ = run_cli("compile", "smollm2-135m", "--tokens", "4", "--out", str(tmp_path / "out"))
    assert code == 0
    assert out == f"report of smollm2-135m\nkernels for sm_90a: run on H200\nwritten to {tmp_path / 'out'}\n"
    options = {
        "config": None,
        "arch": "sm_90a",
        "tokens": 4,
        "max_kv": None,
        "sequences": 1,
        "kv_page": 0,
        "kv_pages": 0,
        "blocks": None,
        "schedule": None,
        "formats": None,
        "check": True,
    }
    assert asked == {"model": "smollm2-135m", **options}


def test_compile_can_skip_the_check(run_cli: Cli, asked: dict[str, object], tmp_path: Path) -> None:
    assert run_cli("compile", "smollm2-135m", "--no-check", "--out", str(tmp_path / "out"))[0] == 0
    assert asked["check"] is False


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["compile", "m"], "--out"),
        (["compile", "m", "--out", "o", "--tokens", "0"], "--tokens"),
        (["run", "m", "--prompt", "p", "--weights", "no/such/file"], "no/such/file"),
        (["run", "m", "--prompt", "p", "--device", "tpu"], "tpu"),
        (["explain", "f.py", "--config", "no.json"], "no.json"),
        (["fly"], "fly"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_wrong_usage_exits_with_two(run_cli: Cli, arguments: list[str], complaint: str) -> None:
    code, out, err = run_cli(*arguments)
    assert code == 2
    assert out == ""
    assert complaint in err


def test_all_wrong_options_are_named_at_once(run_cli: Cli, asked: dict[str, object], tmp_path: Path) -> None:
    code, _, err = run_cli("compile", "m", "--tokens", "0", "--blocks", "many", "--out", str(tmp_path / "out"), "--max-kv", "-1")
    assert code == 2 and err.count("Invalid value for") == 3
    assert all(option in err for option in ("--tokens", "--blocks", "--max-kv"))
    code, _, err = run_cli("compile", "--tokens", "0")
    assert code == 2 and all(name in err for name in ("MODEL", "--out", "--tokens"))
    assert not asked and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("asked")
def test_a_diagnostic_is_printed_plainly(run_cli: Cli, tmp_path: Path) -> None:
    code, out, err = run_cli("compile", "refused", "--out", str(tmp_path / "out"))
    assert code == 1
    assert out == ""
    assert err == "spec.py:3: error[MK990]: the spec is bad\n    mend: write a better one\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("asked")
@pytest.mark.filterwarnings("default")
def test_a_warning_is_printed_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # pytest records warnings, so the hook is called the way Python would.
    cli._show_warning(cli.MegadslWarning("warning[MK991]: odd"), cli.MegadslWarning, "cache.py", 7)
    cli._show_warning(UserWarning("theirs"), UserWarning, "lib.py", 7)
    assert capsys.readouterr().err.splitlines() == ["warning[MK991]: odd", "lib.py:7: UserWarning: theirs"]


def gpu(arch: str) -> Gpu:
    return Gpu("GPU", arch, 100, 2**30, True)


@pytest.mark.parametrize(
    ("present", "arch", "device"),
    [(["sm_90"], "sm_80", "cuda"), (["sm_86"], "sm_86", "cuda"), (["sm_80"], "sm_86", "cpu"), (["sm_90"], "sm_100a", "cpu")],
)
def test_kernels_run_on_their_own_and_later_gpus(
    run_cli: Cli, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch, present: list[str], arch: str, device: str
) -> None:
    monkeypatch.setattr("megadsl.build.gpus.gpus", lambda: [gpu(each) for each in present])
    assert run_cli("run", "smollm2-135m", "--arch", arch, "--prompt", "The capital")[0] == 0
    assert (asked["arch"], asked["device"]) == (arch, device)


@pytest.mark.parametrize(("present", "device"), [([], "cpu"), ([gpu("sm_80")], "cpu"), ([gpu("sm_80"), gpu("sm_90")], "cuda")])
def test_run_picks_the_device(
    run_cli: Cli, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch, present: list[Gpu], device: str
) -> None:
    monkeypatch.setattr("megadsl.build.gpus.gpus", lambda: present)
    code, out, err = run_cli("run", "smollm2-135m", "--prompt", "The capital of France is", "--max-new-tokens", "3")
    assert code == 0
    assert out == "The capital of France is Paris.\n"
    assert "3 tokens" in err
    assert asked["device"] == device
    assert asked["max_new_tokens"] == 3
    assert asked["weights"] is None
    assert asked["blocks"] == (None if device == "cuda" else 2)


def test_run_json_is_one_object_and_nothing_else(run_cli: Cli, asked: dict[str, object], tmp_path: Path) -> None:
    weights = tmp_path / "w.gguf"
    weights.touch()
    code, out, _ = run_cli("run", "m", "--prompt", "p", "--json", "--device", "cpu", "--weights", str(weights), "--blocks", "4")
    assert code == 0
    assert json.loads(out) == {"prompt_ids": [1, 2], "ids": [3, 4, 5], "text": " Paris.", "ms_per_token": 1.25}
    assert asked["weights"] == weights
    assert asked["blocks"] == 4


@pytest.mark.parametrize("name", ["compile", "check", "run", "bench", "explain", "trace", "tune"])
def test_every_command_that_compiles_takes_an_architecture(run_cli: Cli, name: str, tmp_path: Path) -> None:
    rest = {"compile": ["--out", str(tmp_path / "out")], "run": ["--prompt", "p"], "trace": ["--out", str(tmp_path / "out")]}
    code, _, err = run_cli(name, "llama-tiny", "--arch", "sm_70", *rest.get(name, []))
    assert code == 1 and "error[MK001]: unknown architecture 'sm_70'" in err and "mend: " in err


@pytest.mark.parametrize("name", ["trace", "tune"])
def test_a_gpu_that_cannot_run_the_architecture(run_cli: Cli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.runtime.cuda.bindings_installed", lambda: True)
    monkeypatch.setattr("megadsl.runtime.cuda.driver_version", lambda: 13000)
    monkeypatch.setattr("megadsl.runtime.cuda.gpus", lambda: [gpu("sm_80")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    code, _, err = run_cli(name, "llama-tiny", "--arch", "sm_86", "--device", "cuda", "--out", str(tmp_path / "out"))
    assert code == 1 and "error[MK443]: the kernel is built for sm_86, this GPU is sm_80" in err and not (tmp_path / "out").exists()


def test_run_of_several_prompts_is_a_batch(run_cli: Cli, asked: dict[str, object]) -> None:
    code, out, _ = run_cli("run", "m", "--prompt", "a", "--prompt", "b", "--prompt", "c", "--device", "cpu")
    assert code == 0 and out == "a 0\nb 1\nc 2\n"
    assert (asked["sequences"], asked["tokens"], asked["prompts"]) == (3, 3, ["a", "b", "c"])
    many = [word for i in range(11) for word in ("--prompt", str(i))]
    code, out, _ = run_cli("run", "m", *many, "--tokens", "16", "--device", "cpu", "--json")
    assert code == 0 and len(json.loads(out)) == 11
    assert (asked["sequences"], asked["tokens"]) == (8, 16)


@pytest.mark.parametrize("name", ["compile", "check", "run", "bench", "explain", "trace"])
def test_schedules_are_for_every_command_that_compiles(run_cli: Cli, name: str) -> None:
    assert "--schedule" in run_cli(name, "--help")[1]


@pytest.mark.parametrize("command", [("compile", "m", "--out"), ("run", "m", "--device", "cpu", "--prompt"), ("explain", "m", "--arch")])
def test_a_schedule_is_handed_on(run_cli: Cli, asked: dict[str, object], command: tuple[str, ...], tmp_path: Path) -> None:
    assert run_cli(*command, str(tmp_path / "out"), "--schedule", "a.schedule")[0] == 0
    assert asked["schedule"] == "a.schedule"


def test_check_reads_a_schedule(run_cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.schedule"
    path.write_text("arch = sm_90a\nop o_proj: residual = exchange\n")
    code, out, _ = run_cli("check", "llama-tiny", "--blocks", "3", "--schedule", str(path))
    assert code == 0 and "0 findings" in out
    path.write_text("arch = sm_90a\nop o_prj: residual = exchange\nop o_proj: residual = nowhere\nring weights: stages = 4 KiB\n")
    code, out, err = run_cli("check", "llama-tiny", "--schedule", str(path))
    assert code == 1 and out == ""
    assert f"{path}:3:23: error[MK264]" in err and f"{path}:4:24: error[MK265]" in err
    code, _, err = run_cli("check", "llama-tiny", "--schedule", str(tmp_path / "none.schedule"))
    assert code == 1 and "MK181" in err


def test_explain_shows_a_difference(run_cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.schedule"
    path.write_text("arch = sm_90a\nring weights: meeting_window = 48 KiB\n")
    code, out, _ = run_cli("explain", "llama-tiny", "--diff", "default", str(path))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["A:", "default"] in lines and ["B:", str(path)] in lines
    assert ["ring", "weights:", "meeting_window", "-", "48", "KiB"] in lines
    assert ["ring", "weights:", "meeting_window", "32", "KiB", "48", "KiB"] in lines
    assert ["kernel", "code", "the", "same", "the", "same"] in lines


def test_explain_lists_the_knobs(run_cli: Cli) -> None:
    code, out, _ = run_cli("explain", "--knobs")
    shown = [line.split() for line in out.splitlines()]
    assert code == 0 and all(any(line[:2] == [knob.of, knob.name] for line in shown) for knob in KNOBS)
    code, _, err = run_cli("explain")
    assert code == 2 and "MODEL|CODE" in err


@pytest.mark.usefixtures("asked")
def test_explain_prints_every_table_whole(run_cli: Cli) -> None:
    code, out, _ = run_cli("explain", "llama-tiny")
    lines = [line.split() for line in out.splitlines() if line.strip(" ─")]
    assert code == 0
    assert lines[0] == ["op", "bytes", "role"]
    assert lines[1] == ["qkv_proj", "1,234", "consumer", "[8", "warps]"]
    assert lines[-1] == ["qkv_proj", "->", "attention", "tagged"]


def test_doctor_without_gpu(run_cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("megadsl.build.gpus.driver_version", lambda: None)
    code, out, _ = run_cli("doctor")
    assert code == 0
    assert "no NVIDIA driver on this machine" in out
    assert f"{doctor.CUDA}: no" in out
    assert f"{doctor.CPU}: yes" in out
    assert f"{doctor.COMPILE}: yes" in out


def test_doctor_beside_a_process_that_builds(run_cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is in the cache may be gone once it has been listed."""
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(tmp_path))
    (cache_root() / "entry").mkdir(parents=True)
    (cache_root() / "entry" / "stays").write_bytes(bytes(3 << 20))
    walk = os.walk

    def listed_too_early(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        yield from walk(root)
        yield str(root / "gone"), [], ["file"]

    monkeypatch.setattr(os, "walk", listed_too_early)
    code, out, _ = run_cli("doctor")
    assert code in (0, 1) and re.search(r"cache.* 3 MiB", out)


def test_doctor_with_a_gpu(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.build.gpus.driver_version", lambda: 13000)
    monkeypatch.setattr("megadsl.build.gpus.gpus", lambda: [gpu("sm_80"), gpu("sm_90")])
    code, out, _ = run_cli("doctor")
    assert code == 0
    assert "GPU, sm_80, 100 SMs, 1 GiB: kernels for sm_90a do not run on it" in out
    assert f"{doctor.CUDA}: yes" in out


def test_doctor_says_what_has_run(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.build.gpus.driver_version", lambda: 13000)
    monkeypatch.setattr("megadsl.build.gpus.gpus", lambda: [gpu("sm_86")])
    code, out, _ = run_cli("doctor")
    assert code == 0
    assert "kernels for sm_90a do not run on it, those for sm_86 do: --arch sm_86" in out and f"{doctor.CUDA}: yes" in out
    assert all(re.search(rf"kernels for {arch} +{re.escape(its.proof)}\n", out) for arch, its in MACHINES.items())
    monkeypatch.setattr("megadsl.build.gpus.gpus", lambda: [gpu("sm_75")])
    assert "none that runs any of sm_80, " in run_cli("doctor")[1]


def test_doctor_with_an_old_driver_and_no_host_compiler(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.build.gpus.driver_version", lambda: 12040)
    monkeypatch.setattr("megadsl.build.gpus.gpus", lambda: [gpu("sm_90")])
    monkeypatch.setenv("PATH", "")
    code, out, _ = run_cli("doctor")
    assert code == 1
    assert "supports CUDA 12.4" in out
    assert "install a driver for CUDA 13.0 or newer" in out
    assert "apt-get install g++" in out
