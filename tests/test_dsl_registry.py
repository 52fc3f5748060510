"""Models by name, by file and by function; broken files are reported with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from dsl_tools import findings

import megadsl as mk
from megadsl import resources
from megadsl.diagnostics import Diagnostic
from megadsl.dsl.registry import load, models

KERNELS = """import megadsl as mk

@mk.kernel
def first(cfg, tokens=1):
    return mk.argmax(mk.linear(mk.embed(mk.weight("e", (cfg.vocab, 128)), mk.input_ids(tokens)), mk.weight("h", (cfg.vocab, 128))))
"""
SECOND = "\n@mk.kernel\ndef second(cfg):\n    return None\n"


def finding(model: str, config: Path | None = None) -> Diagnostic:
    (found,) = findings(lambda: load(model, config))
    return found


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_registered_models() -> None:
    assert {"smollm2-135m", "llama-3.2-1b", "llama-tiny"} <= models().keys()
    kernel, config = load("llama-tiny")
    assert isinstance(kernel, mk.Kernel) and config["hidden_size"] == 128
    config["hidden_size"] = 1
    assert load("llama-tiny")[1]["hidden_size"] == 128


def test_a_configuration_file_replaces_the_models_own(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", '{"vocab": 300}')
    assert load("llama-tiny", path)[1] == {"vocab": 300}


def test_a_file_with_one_kernel(tmp_path: Path) -> None:
    path = write(tmp_path, "spec.py", KERNELS)
    kernel, config = load(str(path), write(tmp_path, "c.json", '{"vocab": 300}'))
    spec = kernel.trace(config, tokens=2)
    assert spec.name == "first" and spec.tensors["e.weight"].shape == (300, 128)
    assert load(f"{path}:first") == (kernel, {})


def test_unknown_model() -> None:
    found = finding("smolm2-135m")
    assert found.code == "MK180" and "'smolm2-135m'" in found.message
    assert found.mend.startswith("did you mean 'smollm2-135m'?") and "file.py[:function]" in found.mend


def test_missing_files(tmp_path: Path) -> None:
    found = finding(str(tmp_path / "none.py"))
    assert found.code == "MK181" and "model file" in found.message and "check the path" in found.mend
    found = finding("llama-tiny", tmp_path / "none.json")
    assert found.code == "MK181" and "configuration" in found.message


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [("import megadsl\n\ndef f(:\n", 3, "invalid syntax"), ("import no_such_module_of_anyone\n", 1, "No module named")],
)
def test_files_that_do_not_load(tmp_path: Path, text: str, line: int, why: str) -> None:
    path = write(tmp_path, "broken.py", text)
    found = finding(str(path))
    assert (found.code, found.span.file, found.span.line) == ("MK182", str(path), line)
    assert why in found.message and found.mend == "mend the line"


def test_an_exception_of_the_users_own_is_shown_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "raises.py", "x = 1\ny = x / 0\n")
    for _ in range(2):  # nothing half-loaded is kept
        found = finding(str(path))
        assert (found.code, found.span.line, found.span.column) == ("MK182", 2, 5)
        assert "ZeroDivisionError: division by zero" in found.message


def test_a_schedule_in_a_file_is_refused_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "scheduled.py", KERNELS + "\nwith mk.schedule(first) as s:\n    s.ring('weights', stages=0)\n")
    found = finding(str(path))
    assert (found.code, found.span.file, found.span.line, found.span.column) == ("MK150", str(path), 8, 5)


@pytest.mark.parametrize(("suffix", "known"), [("", "none"), (":other", "none")])
def test_no_kernel(tmp_path: Path, suffix: str, known: str) -> None:
    found = finding(f"{write(tmp_path, 'empty.py', 'x = 1')}{suffix}")
    assert found.code == "MK183" and f"the file has: {known}" in found.mend and "@mk.kernel" in found.mend


def test_unknown_and_ambiguous_kernels(tmp_path: Path) -> None:
    path = write(tmp_path, "two.py", KERNELS + SECOND)
    found = finding(f"{path}:third")
    assert found.code == "MK183" and "'third'" in found.message and "first, second" in found.mend
    found = finding(str(path))
    assert found.code == "MK184" and "2 kernels" in found.message and f"{path}:second" in found.mend
    assert load(f"{path}:second")[0].name == "second"


@pytest.mark.parametrize(
    ("text", "line", "column", "why"),
    [('{"a": 1,\n "b": }', 2, 7, "Expecting value"), ("[1]", 1, 0, "top level is a list"), ("", 1, 1, "Expecting value")],
)
def test_broken_configuration(tmp_path: Path, text: str, line: int, column: int, why: str) -> None:
    found = finding("llama-tiny", write(tmp_path, "c.json", text))
    assert (found.code, found.span.line, found.span.column) == ("MK185", line, column)
    assert why in found.message and "one JSON object" in found.mend


def test_configuration_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b"\xff\xfe\x00")
    found = finding("llama-tiny", path)
    assert found.code == "MK185" and "UTF-8" in found.message


@pytest.mark.parametrize("entries", ["3", "{'m': 1}", "{'m': (first, 2)}"])
def test_broken_models_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: str) -> None:
    path = write(tmp_path, "mine.py", f"{KERNELS}\nMODELS = {entries}\n")
    monkeypatch.setattr(resources, "models", lambda: tmp_path)
    found = finding("m")
    assert (found.code, found.span.file) == ("MK186", str(path))
    assert 'MODELS = {"name": (kernel, {...})}' in found.mend
