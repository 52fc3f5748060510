"""Which schedule is used: the one that is asked for, the stored one, the spec's own; and what is said where it cannot be used."""

from __future__ import annotations

import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from dsl_tools import findings, one

from megadsl import resources
from megadsl.diagnostics import MegadslWarning
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.chosen import WORDS, stored
from megadsl.dsl.knobs import statements
from megadsl.dsl.overrides import Overrides
from megadsl.dsl.registry import load, models
from megadsl.dsl.schedule_file import SUFFIX, Head, parse, render, written
from megadsl.dsl.schedule_file import load as read
from megadsl.lower.difference import DECISION_COLUMNS, DERIVED_COLUMNS, PLAN_COLUMNS, difference
from megadsl.machine import DEFAULT_ARCH, MACHINES

MODEL, OTHER_MODEL = "qwen3-tiny", "llama-tiny"  # the first has a schedule of its own
OWN = {"from": "model", "name": None, "sha256": None}


def file_of(folder: Path, name: str, *lines: str) -> Path:
    path = folder / f"{name}{SUFFIX}"
    path.write_text("\n".join([f"arch = {DEFAULT_ARCH}", *lines]) + "\n")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stored schedules of a copy of the models: none yet."""
    copy = tmp_path / "models"
    shutil.copytree(resources.models(), copy, ignore=shutil.ignore_patterns("schedules", "__pycache__"))
    (copy / "schedules").mkdir()
    monkeypatch.setattr(resources, "models", lambda: copy)
    return copy / "schedules"


def from_file(path: Path) -> dict[str, str]:
    return {"from": "file", "name": path.name, "sha256": sha256(path.read_bytes()).hexdigest()}


def test_stored_schedules_are_found(folder: Path) -> None:
    def used(tokens: int = 1, **options: object) -> tuple[object, int]:
        made = compile_model(MODEL, tokens=tokens, check=False, **options)  # type: ignore[arg-type]
        return made.manifest["schedule"], made.schedule.ring("loader").meeting_window

    assert used() == (OWN, 48 << 10)
    general = file_of(folder, f"{MODEL}.{DEFAULT_ARCH}", "", "ring weights: meeting_window = 7 KiB")
    assert used() == used(4) == (from_file(general), 7 << 10)
    special = file_of(folder, f"{MODEL}.{DEFAULT_ARCH}.tokens-4", "tokens = 4", "ring weights: meeting_window = 9 KiB")
    read_digest = from_file(special) | {"sha256": read(special).digest}  # no blank line: it is not as it would be rendered
    assert used() == (from_file(general), 7 << 10) and used(4) == used(4, schedule="default") == (read_digest, 9 << 10)
    assert used(4, blocks=128) == (OWN, 48 << 10), "it was measured on the whole machine"
    assert used(4, schedule="model") == (OWN, 48 << 10)
    assert used(4, schedule="none") == (OWN | {"from": "none"}, 32 << 10)
    assert used(4, schedule=general) == used(4, schedule=str(general)) == used(4, schedule=read(general)) == (from_file(general), 7 << 10)
    assert used(4, schedule=read(general).overrides) == (OWN | {"from": "given"}, 7 << 10)
    assert compile_model(load(MODEL)[0], config=load(MODEL)[1], check=False).manifest["schedule"] == OWN
    assert stored(MODEL, "sm_100a", 1) is None and stored(OTHER_MODEL, DEFAULT_ARCH, 1) is None


def test_a_batch_has_stored_schedules_of_its_own(folder: Path) -> None:
    """It takes none of a single sequence's, and gives it none, nor a batch of another size."""

    def used(tokens: int, sequences: int) -> object:
        return compile_model(MODEL, tokens=tokens, sequences=sequences, check=False).manifest["schedule"]["name"]

    assert stored(MODEL, DEFAULT_ARCH, 4, 2) is None
    file_of(folder, f"{MODEL}.{DEFAULT_ARCH}", "ring weights: meeting_window = 7 KiB")
    file_of(folder, f"{MODEL}.{DEFAULT_ARCH}.tokens-4", "tokens = 4")
    assert stored(MODEL, DEFAULT_ARCH, 4, 2) is None and used(4, 2) is None
    any_tokens = file_of(folder, f"{MODEL}.{DEFAULT_ARCH}.sequences-2", "sequences = 2")
    special = file_of(folder, f"{MODEL}.{DEFAULT_ARCH}.tokens-4.sequences-2", "tokens = 4", "sequences = 2")
    assert used(4, 2) == special.name and used(2, 2) == used(6, 2) == any_tokens.name and used(4, 4) is None
    assert used(4, 1) == f"{MODEL}.{DEFAULT_ARCH}.tokens-4{SUFFIX}" and used(2, 1) == f"{MODEL}.{DEFAULT_ARCH}{SUFFIX}"
    with pytest.warns(MegadslWarning, match="meant for sequences 2, this is 1"):
        compile_model(MODEL, tokens=4, schedule=special, check=False)


def test_shipped_schedules_are_as_they_would_be_rendered() -> None:
    for path in (resources.models() / "schedules").glob(f"*{SUFFIX}"):
        file = read(path)
        head = file.head
        name = f"{head.model}.{head.arch}" + (f".tokens-{head.tokens}" if head.tokens else "")
        name += f".sequences-{head.sequences}" if (head.sequences or 1) > 1 else ""
        assert path.name == f"{name}{SUFFIX}" and render(file) == path.read_text() and head.model in models()
        made = compile_model(str(head.model), arch=head.arch, tokens=head.tokens or 1, sequences=head.sequences or 1)
        assert made.manifest["schedule"] == from_file(path)


def test_what_a_spec_says_may_stand_in_a_file() -> None:
    for name in ("llama-3.2-1b", "smollm2-135m", MODEL):
        own = compile_model(name, check=False, schedule="model")
        file = parse(render(written(Head(DEFAULT_ARCH, name), own.overrides)), "f")
        again = compile_model(name, check=False, schedule=file)
        assert again.plan_text == own.plan_text and again.source == own.source


def test_another_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "sm_90b"
    monkeypatch.setitem(MACHINES, other, replace(MACHINES[DEFAULT_ARCH], arch=other))
    path = tmp_path / "f.schedule"
    path.write_text(f"\narch = {other}\nblocks = 3\n")
    found = one(findings(lambda: compile_model(MODEL, schedule=path)), "MK268")
    assert found.message == f"the schedule is for {other}, the kernel is compiled for {DEFAULT_ARCH}"
    assert (found.span.file, found.span.line, found.span.column) == (str(path), 2, 1) and DEFAULT_ARCH in found.mend
    assert one(findings(lambda: compile_model(MODEL, schedule=Overrides(other, ()))), "MK268").mend == found.mend


def test_a_file_that_is_meant_otherwise(tmp_path: Path) -> None:
    path = file_of(tmp_path, "f", "model = llama-tiny", "tokens = 4")
    with pytest.warns(MegadslWarning) as warned:
        compile_model(MODEL, schedule=path, check=False)
    shown = [str(w.message) for w in warned]
    assert shown[0].startswith(f"{path}:2:1: warning[MK269]: the schedule is meant for model llama-tiny, this is qwen3-tiny")
    assert shown[1].startswith(f"{path}:3:1: warning[MK269]: the schedule is meant for tokens 4, this is 1\n    tokens = 4")
    assert "write `tokens = any` in its head" in shown[1]
    path.write_text(f"arch = {DEFAULT_ARCH}\nmodel = any\ntokens = any\n")
    compile_model(MODEL, schedule=path, check=False)  # a warning would be an error


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ring weights: stages = 60"], [("MK170", 2)]),
        (["op o_prj: l2 = 4 KiB", "op o_proj: split_kv = 3", "op attention: loader = lodr"], [("MK152", 2), ("MK158", 3), ("MK153", 4)]),
        (["batch = 99", "blocks = 900", "op o_proj: l2 = 1000 B"], [("MK163", 3), ("MK166", 2), ("MK188", 4)]),
        (["ring kv: stages = 3"], [("MK155", 2)]),
        (["role kv: kind = loader", "ring kv: stages = 3", "ring kv: window = 4 KiB"], [("MK156", 3)]),
        (["role kv: warps = 1"], [("MK153", 2)]),
        (["role kv: kind = loader"], [("MK178", 2)]),
        (["role loader: warps = 2"], [("MK179", 2)]),
        (["op down_proj: registers = 99"], [("MK243", 2)]),
        (["op down_proj: gather = registers"], [("MK244", 2)]),
        (["op down_proj: scale = after", "op down_proj: columns = 7"], [("MK242", 3), ("MK241", 2)]),
        (["edge qkv_proj -> o_proj: sync = flag", "edge attention -> attention: sync = tagged(slots = 3)"], [("MK154", 2), ("MK165", 3)]),
        (["ring weights: stages = 4", "ring loader: stages = 5"], [("MK260", 3)]),
    ],
    ids=lambda given: given[0] if isinstance(given[0], str) else "",
)
def test_what_lowering_finds_stands_at_the_files_line(tmp_path: Path, lines: list[str], expected: list[tuple[str, int]]) -> None:
    path = file_of(tmp_path, "f", *lines)
    found = findings(lambda: compile_model("llama-tiny", schedule=path))
    assert sorted((d.code, d.span.line) for d in found) == sorted(expected)
    assert all(d.span.file == str(path) and d.span.column == 1 for d in found)


def made(lines: str) -> Compiled:
    return compile_model("llama-3.2-1b", check=False, schedule=parse(f"arch = {DEFAULT_ARCH}\n{lines}", "f"))


def test_a_difference() -> None:
    a = made("ring weights: window = 64 KiB\nop o_proj: registers = 0\nop o_proj: residual = block")
    b = made("ring weights: window = 48 KiB\nop o_proj: registers = 4\nop o_proj: residual = block\nop down_proj: sync = sentinel")
    decisions, derived, plan = difference(a, b)
    assert decisions == (
        DECISION_COLUMNS,
        [
            ["ring weights: window", "64 KiB", "48 KiB"],
            ["op o_proj: registers", "0", "4"],
            ["op down_proj: sync", "-", "sentinel(slots = 4)"],
        ],
    )
    columns, lines = derived
    follows = {line[0]: tuple(line[1:]) for line in lines}
    assert columns == DERIVED_COLUMNS and follows["ring weights: window"] == ("64 KiB", "48 KiB")
    assert follows["op o_proj: registers"] == ("0", "4") and follows["kernel code"] == ("its own", "its own")
    assert follows["exchange x"][0].startswith("Tagged, gpu, 2 slots") and follows["exchange x"][1].startswith("Sentinel, gpu, 4 slots")
    assert "op o_proj: residual" not in follows and "hops per layer" not in follows
    columns, lines = plan
    assert columns == PLAN_COLUMNS and {"schedule", "exchanges", "role consumer"} <= {line[0] for line in lines}
    assert all(int(gone) <= int(size) and int(come) <= int(size) for _, size, gone, come in lines)


def test_no_difference() -> None:
    a, b = made("op o_proj: hint = evict_first"), made("")  # what the compiler chooses in any case
    decisions, derived, plan = difference(a, b)
    assert decisions[1] == [["op o_proj: hint", "evict_first", "-"]]
    assert derived[1] == [["kernel code", "the same", "the same"]] and plan[1] == []
    gated = {line[0]: line[1:] for line in difference(made("op o_proj: smem = none"), b)[1][1]}
    assert gated["op o_proj: smem"] == ["none", "ring"]
    more = dict(line[:2] for line in difference(made("op down_proj: columns = 8"), b)[1][1])
    assert more["hops per layer"] == "7" and more["exchange down_proj.parts"]


def test_the_words_are_no_files() -> None:
    assert WORDS == ("default", "model", "none")
    own = compile_model("qwen3-tiny", check=False, schedule="default").overrides
    assert ("op o_proj: sync", "sentinel(slots = 4)") in list(statements(own))
