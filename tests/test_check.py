"""The plan checker finds nothing in the compiler's own plans, quickly; its command; and its contract with the headers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from check_tools import PIECES, by_block, chunked, plan, prefetched, split, without
from schedules import everywhere, gated, kv_loader

import megadsl as mk
from megadsl import cli
from megadsl.check.areas import JOINT
from megadsl.check.checker import check_plan
from megadsl.check.clocks import unrolled
from megadsl.check.model import Device, attention_unit, evaluate
from megadsl.check.report import Report
from megadsl.diagnostics import MegadslError
from megadsl.driver import compile_model
from megadsl.lower.programs import instructions

HEADERS = Path(__file__).resolve().parent.parent / "templates" / "include" / "megadsl"
SPECS = Path(__file__).parent / "specs"
FIELDS = {"vocab": 203, "hidden": 72, "inter": 104, "layers": 5}
TINY = ("llama-tiny", "llama-tiny-odd", "llama-tiny-wide", "llama-tiny-interleaved")
SYNCS = (mk.Tagged(2), mk.Tagged(8), mk.Sentinel(4), mk.Sentinel(8), mk.Flag(2), mk.Flag(4))


@pytest.mark.parametrize("name", [*TINY, "smollm2-135m", "llama-3.2-1b"])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_the_models_hold(name: str, tokens: int) -> None:
    report = check_plan(plan(name, tokens=tokens))
    assert [str(found) for found in report.findings] == []
    assert len(report.proved) == 13
    assert report.seconds < 10


@pytest.mark.parametrize("sync", SYNCS, ids=str)
@pytest.mark.parametrize(("name", "blocks"), [("llama-tiny", 5), ("llama-tiny-odd", 132), ("smollm2-135m", None), ("llama-3.2-1b", 132)])
def test_every_sync_holds(name: str, blocks: int | None, sync: mk.Tagged) -> None:
    assert check_plan(plan(name, everywhere(sync), 2, blocks=blocks)).findings == ()


@pytest.mark.parametrize("decide", [kv_loader, gated, prefetched, chunked], ids=lambda d: d.__name__)
@pytest.mark.parametrize(("name", "blocks"), [("llama-tiny", 1), ("llama-tiny-wide", 7), ("smollm2-135m", None), ("llama-3.2-1b", None)])
def test_every_placement_holds(name: str, blocks: int | None, decide: object) -> None:
    assert check_plan(plan(name, decide, blocks=blocks)).findings == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(("blocks", "tokens", "sync"), [(7, 1, mk.Sentinel(4)), (8, 16, mk.Flag(2)), (132, 16, mk.Tagged(2))], ids=str)
@pytest.mark.parametrize("ways", [{"down_proj": 8}, {"down_proj": 4, "o_proj": 2}], ids=str)
def test_split_columns_hold(ways: dict[str, int], blocks: int, tokens: int, sync: mk.Tagged) -> None:
    """Blocks with one part, with two, with several; fewer blocks than parts; more than row groups."""
    made = plan("llama-3.2-1b", split(sync, **ways), tokens, blocks=blocks, fields={"num_hidden_layers": 4, "hidden_size": 2048})
    assert [str(found) for found in check_plan(made).findings] == []


@pytest.mark.parametrize("name", ["separate", "flat", "branches"])
@pytest.mark.parametrize("sync", [None, mk.Sentinel(4), mk.Flag(2)], ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 132])
def test_other_specs_hold(name: str, sync: mk.Sentinel | None, blocks: int) -> None:
    """Slices of a value, a value gathered for an epilogue, no layers: other chains between blocks than a Llama's."""
    spec = f"{SPECS / 'shapes.py'}:{name}"
    producers = [op.name for op in plan(spec, fields=FIELDS).graph.ops if getattr(op, "out", None)]
    made = plan(spec, lambda s: [s[op].sync(sync) for op in producers if sync] and None, 3, fields=FIELDS, blocks=blocks)
    assert [str(found) for found in check_plan(made).findings] == []


def test_compile_checks_unless_told_not_to() -> None:
    checked = compile_model("llama-tiny", blocks=3)
    assert checked.manifest["checked"] is True and checked.report is not None and checked.report.findings == ()
    skipped = compile_model("llama-tiny", blocks=3, check=False)
    assert skipped.manifest["checked"] is False and skipped.report is None
    assert skipped.source == checked.source


def found_something() -> Report:
    made = plan("llama-tiny", blocks=5)
    return check_plan(without("publish", "o_proj")(made))


def test_compile_refuses_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.driver.prove", lambda *_: found_something())
    with pytest.raises(MegadslError) as refused:
        compile_model("llama-tiny", blocks=5)
    assert refused.value.code == "MK500"
    assert "mend: publish the value" in str(refused.value)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_the_command_exits_with_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    monkeypatch.setattr("megadsl.check.checker.check_plan", lambda *_: found_something())
    monkeypatch.setattr(sys, "argv", ["megadsl", "check", "llama-tiny", *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    out = capsys.readouterr().out
    if options:
        shown = json.loads(out)
        assert shown["proved"] == [] and shown["findings"][0]["code"] == "MK500" and "llama.py" in shown["findings"][0]["span"]
    else:
        assert "error[MK500]" in out and re.search(r"[1-9] findings in", out)


def test_the_command_prints_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megadsl", "check", "llama-tiny", "--blocks", "3", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["findings"] == [] and found["seconds"] < 10 and len(found["proved"]) == 13


def test_more_layers_show_nothing_new() -> None:
    """What is checked in a few layers is what all of them would show."""
    device = Device(plan("smollm2-135m"))
    assert unrolled(device) == 4 < device.plan.graph.layers


BARRIERS = {  # function in the headers -> (header, its block.sync() and barrier() in all, the instruction that lists them)
    "bring": ("linear.h", 1, "matrix"),
    "run_tiles": ("linear.h", 2, "matrix"),
    "add_parts": ("parts.h", 1, "add_parts"),
    "publish_all": ("attention.h", 1, "attention"),
    "run_attention": ("attention.h", 6, "attention"),
    "run_merge": ("merge.h", 1, "merge"),
    "run_embed": ("embed.h", 1, "embed"),
    "publish": ("block.h", 2, "publish"),
    "reduce_best": ("sample.h", 2, "argmax"),
    "take_token": ("sample.h", 1, "argmax"),
    "choose_tokens": ("sample.h", 1, "argmax"),
}


@pytest.mark.parametrize("function", BARRIERS)
def test_the_headers_meet_as_the_plan_says(function: str) -> None:
    header, count, _ = BARRIERS[function]
    text = (HEADERS / header).read_text()
    begin = re.search(rf"MK_DEV (void|bool) {function}\(", text)
    assert begin is not None
    end = "\n  }\n" if text[: begin.start()].endswith("\n  ") else "\n}\n"  # a method ends where its class does not
    body = text[begin.start() : text.index(end, begin.start())]
    assert len(re.findall(r"\bblock\.(sync|meet_all)\(\);|\bbarrier\(\);", body)) == count


def test_plans_list_all_of_them_where_they_are_passed() -> None:
    flags = plan("llama-tiny", by_block(everywhere(mk.Flag(2))), blocks=3)
    many = plan("llama-tiny", blocks=3, tokens=16, fields={"num_attention_heads": 16, "num_key_value_heads": 1})
    units = plan("llama-tiny", by_block(), blocks=1)
    parts = plan("llama-tiny", split(mk.Flag(2), down_proj=3), blocks=3, fields=PIECES)
    mapped = plan("qwen3-tiny", by_block(), blocks=1)
    made = (flags, many, units, parts, mapped, plan("llama-tiny", chunked, tokens=16, blocks=3, fields={"intermediate_size": 4096}))
    listed: dict[str, set[str]] = {}
    for one in made:
        for i in instructions(one.program("consumer").body):
            listed.setdefault(i.call, set()).update(i.syncs)
    counted: dict[str, int] = {}
    for _, count, call in BARRIERS.values():
        counted[call] = counted.get(call, 0) + count
    assert {call: len(names) for call, names in listed.items() if names} == counted
    assert not any("next" in i.syncs or "again" in i.syncs for i in instructions(flags.program("consumer").body))


def test_where_the_teams_meet() -> None:
    """A finisher and those who multiply: before an input, behind each batch of products, behind an attention, for the next token."""
    listed: dict[str, set[str]] = {}
    for made in (plan("llama-tiny", blocks=1), plan("qwen3-tiny", kv_loader, blocks=7), plan("smollm2-135m")):
        for i in instructions(made.program("consumer").body):
            listed.setdefault(i.call, set()).update(name for name in i.syncs if name in JOINT)
    assert {call: names for call, names in listed.items() if names} == {
        "matrix": {"input", "partials"},
        "meet_finisher": {"input"},
        "attention": {"input", "merge"},
        "argmax": {"token"},
    }
    meets = {"finish.h": 2, "direct.h": 1, "linear.h": 2, "attention.h": 3, "heads.h": 3, "merge.h": 2, "sample.h": 1}
    assert {name: len(re.findall(r"block\.meet(_paused)?\(", (HEADERS / name).read_text())) for name in meets} == meets


def test_split_of_cached_rows() -> None:
    assert [attention_unit(3, u, 0)[1:3] for u in range(3)] == [(0, 0)] * 3
    assert [attention_unit(3, u, 17) for u in range(3, 6)] == [(1, 0, 1, False), (1, 1, 1, False), (1, 1, 2, True)]


def test_rounds_are_integers_over_names() -> None:
    assert evaluate("epoch * (layers + 1) + layer - 2", {"epoch": 3, "layers": 4, "layer": 1}) == 14
    with pytest.raises(AssertionError, match="no round"):
        evaluate("f(epoch)", {"epoch": 3})
