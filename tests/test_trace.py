"""The timeline: what a traced step leaves in the emulator, read back, aligned, tabled, drawn and written for Perfetto."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
import torch

import megadsl as mk
from megadsl import cli
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.reference import ReferenceModel
from megadsl.runtime.bench import EachSequence
from megadsl.runtime.program import TRACE
from megadsl.runtime.tracing import record
from megadsl.runtime.weights import needed, random_weights
from megadsl.trace.activity import Activity, activities
from megadsl.trace.clocks import tick, unwrapped
from megadsl.trace.handoffs import handoffs
from megadsl.trace.records import Event, Timeline, read_timeline
from megadsl.trace.table import summarise
from megadsl.trace.write import write_timeline
from tests.kernels import Bench, compiled, distance, one_build, steps
from tests.schedules import everywhere, gated, in_two_splits
from tests.test_kernel_columns import SMALL, parts, spec

BYTES_PER_US = 2e3  # of an emulated machine whose copies take as long as its products
LOOPED = ["qkv_proj", "attention", "attention.merge", "o_proj", "gate_up_proj", "down_proj"]
PHASES = ["embed_tokens", *LOOPED, "lm_head", "lm_head.argmax"]
RECORDS_WORD = 8  # of Shape: StepShape::records


def traced_by(out: Path, *options: str) -> Path:
    """What the command writes, with further options."""
    arguments = ["megadsl", "trace", "llama-tiny", "--device", "cpu", "--kv", "40", "--max-kv", "64", "--shown", "2", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*arguments, *options])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert not exit_.value.code
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_by(tmp_path_factory.mktemp("traced") / "out")


def test_another_architecture(tmp_path: Path) -> None:
    out = traced_by(tmp_path / "out", "--arch", "sm_80")
    ops = {row["phase"] for row in json.loads((out / "table.json").read_text())["ops"]}
    assert ops == set(PHASES) and all((out / name).stat().st_size for name in ("trace.json", "table.txt", "layer.svg"))


def test_a_batch(tmp_path: Path) -> None:
    """Two sequences in a launch, each with rows of its own: every op has its times, and logits are what each means by itself."""
    out = traced_by(tmp_path / "out", "--tokens", "4", "--sequences", "2", "--blocks", "3")
    rows = json.loads((out / "table.json").read_text())["ops"]
    assert {row["phase"] for row in rows} == set(PHASES) and all((out / name).stat().st_size for name in ("trace.json", "layer.svg"))
    made = compile_model("llama-tiny", tokens=4, sequences=2, blocks=3, max_kv=64)
    recording = record(made, "cpu", tokens=4, rows=40)
    weights = random_weights(made.manifest, device="cpu")
    batch = EachSequence(ReferenceModel(made.graph, {name: weights.load(name) for name in needed(made.manifest)}, 64, "fp32", "cpu"), 2)
    chance = torch.Generator().manual_seed(2)
    for model in batch.models:
        for keys, values in model.caches.values():
            keys[:, :40], values[:, :40] = torch.randn(2, *keys[:, :40].shape, generator=chance).bfloat16().float()
        model.kv_len = 40
    meant = batch.step(torch.randint(0, made.manifest["vocab"], (4,), generator=torch.Generator().manual_seed(1)).tolist())
    assert distance(recording.logits, meant) < 2e-2 < distance(recording.logits.flip(0), meant)
    with pytest.raises(MegadslError, match="63 cached rows and 2 new tokens do not fit"):
        record(made, "cpu", tokens=4, rows=63)


def two_loaders() -> Compiled:
    """A kernel with two loaders, one of them behind gates. The build without a timeline is other tests' too."""
    return compiled("llama-tiny", tokens=2, blocks=3, configure=in_two_splits(gated))


@cache
def kernels() -> dict[str, Compiled]:
    """One build."""
    return one_build(
        {
            "two loaders": two_loaders(),
            "split columns": spec("integers.py:integers", 4, 5, parts(mk.Flag(2), down=3), SMALL),
            "6 tokens": compiled("llama-tiny", tokens=6, blocks=8, configure=everywhere(mk.Sentinel())),
        }
    )


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(kernels()["two loaders"], defines={TRACE: "1"})


def traced(bench: Bench, seed: int = 0) -> tuple[Timeline, list[Activity]]:
    bench.program.seed = seed
    bench.play(steps(bench.made, [(0, 2), (70, 1)]))
    timeline = read_timeline(bench.program.manifest, bench.program.buffers["trace"].numpy())
    return timeline, activities(timeline, BYTES_PER_US)


def events_of(written: Path, *kinds: str) -> list[dict[str, Any]]:
    return [e for e in json.loads((written / "trace.json").read_text())["traceEvents"] if e["ph"] in kinds]


def test_slices_nest(written: Path) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for e in events_of(written, "X"):
        tracks[e["pid"], e["tid"]].append((e["ts"], round(e["ts"] + e["dur"], 3), e["name"]))
    assert len(tracks) >= 4
    for slices in tracks.values():
        open_until: list[float] = []
        for begin, end, name in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], name
            open_until.append(end)
    names = {e["name"] for e in events_of(written, "X")}
    assert {*PHASES, "wait", "tiles", "ring full"} <= names


def test_arrows_lead_from_signals_to_waits(written: Path) -> None:
    starts, ends = ({e["id"]: e for e in events_of(written, kind)} for kind in "sf")
    assert starts.keys() == ends.keys() and len(starts) == len(events_of(written, "s")) == len(events_of(written, "f"))
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] and ends[number]["bp"] == "e"
    slices = events_of(written, "X")

    def around(e: dict[str, Any], category: str) -> set[str]:
        track = (e["pid"], e["tid"])
        inside = [s for s in slices if (s["pid"], s["tid"]) == track and s["cat"] == category and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]]
        return {s["name"] for s in inside}

    readers = {"x": {"qkv_proj", "lm_head"}, "qkv_proj": {"attention"}, "attention.parts": {"attention.merge"}, "attention": {"o_proj"}}
    readers |= {"o_proj": {"gate_up_proj"}, "gate_up_proj": {"down_proj"}, "lm_head.best": {"lm_head.argmax"}}
    writers = {
        "x": {"embed_tokens", "down_proj"},
        "attention.parts": {"attention"},
        "attention": {"attention.merge"},
        "lm_head.best": {"lm_head"},
    }
    assert {s["name"] for s in starts.values()} == readers.keys()
    for number, start in starts.items():
        assert around(start, "op") & writers.get(start["name"], {start["name"]})
        assert around(ends[number], "op") & readers[start["name"]] and around(ends[number], "wait") == {"wait"}


def test_counters(written: Path) -> None:
    counters = events_of(written, "C")
    held = [e["args"]["stages"] for e in counters if e["name"] == "ring of loader, stages"]
    flight = [e["args"]["bytes"] for e in counters if e["name"] == "in flight of loader, bytes"]
    assert max(held) > 1 and min(held) >= 0 and max(flight) > 16384 and min(flight) == 0
    loads = [e for e in events_of(written, "i") if e["name"] == "load"]
    assert {e["args"]["op"] for e in loads} == {"qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"}


def test_the_table(written: Path) -> None:
    table = json.loads((written / "table.json").read_text())
    assert [row["phase"] for row in table["ops"]] == PHASES
    assert [row["times"] for row in table["ops"]] == [1, *[2] * len(LOOPED), 1, 1]
    assert sum(row["share"] for row in table["ops"]) == pytest.approx(1)
    for row in table["ops"]:
        assert row["exposed"]["median"] <= row["wait"]["median"] and row["span"].startswith("llama.py:")
        assert all(row[part]["p10"] <= row[part]["median"] <= row[part]["p90"] for part in ("gap", "wait", "work"))
    assert [layer["layer"] for layer in table["layers"]] == [None, 0, 1, None] and table["lost"] == 0
    assert 0 < table["first_load"]["median"] < table["step_us"] / 4 and 0 <= table["exit"]["median"] < table["step_us"] / 4
    text = (written / "table.txt").read_text()
    assert "to a block's first load" in text and "last result to its end" in text
    assert all(name in text for name in PHASES) and "records lost: 0" in text and "exposed" in text


def test_the_picture(written: Path) -> None:
    svg = ElementTree.fromstring((written / "layer.svg").read_text())
    texts = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [t for t in texts if t in PHASES] == LOOPED and "layer 1" in str(texts[0])
    assert sum(line.get("stroke") == "#3a7d44" for line in svg.iter("{http://www.w3.org/2000/svg}line")) > len(LOOPED)


def test_every_byte_is_there_once(bench: Bench) -> None:
    timeline, found = traced(bench)
    made: Compiled = bench.made
    loaded: dict[str, int] = defaultdict(int)
    for activity in found:
        for load in activity.loads:
            for phase, size in zip(load.phases, load.issues.bytes, strict=True):
                loaded[phase] += int(size)
    for op in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"):
        records = [r for r in made.manifest["pack"] if r["name"].split(".")[0] == op]
        want = sum(r["bytes"] * (made.graph.layers if r["per_layer"] else 1) * (3 if r["kind"] == "vector" else 1) for r in records)
        assert loaded[op] == want, op
    summary = summarise(timeline, found, BYTES_PER_US)
    assert sum(layer.bytes for layer in summary.layers) == sum(loaded.values())
    assert summary.handoff_us[0] >= 0, "nobody has what is not published"
    assert {s.event for a in found for load in a.loads for s in load.stalls} >= {Event.FULL, Event.GATE}


def test_executions_fill_each_block(bench: Bench) -> None:
    for seed in (0, 3):
        timeline, found = traced(bench, seed)
        for activity in found:
            runs = activity.executions
            assert [r.phase for r in runs if r.phase != "attention"] == [
                p for p in (PHASES[0], *LOOPED * 2, *PHASES[-2:]) if p != "attention"
            ]
            own = [r for r in runs if r.role == timeline.consumer()]
            assert all(a.end <= b.previous <= b.began for a, b in pairwise(own))
            assert runs[0].previous == activity.block.begin and max(r.result for r in runs) <= activity.block.end
            assert {r.phase for r in runs if r not in own} == {"attention.merge", "lm_head.argmax"}
            assert {r.phase for r in own if r.sent is not None} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
            for run in runs:
                assert run.end <= run.result and (run in own or run.previous == run.began)
                assert 0 <= run.exposed <= run.wait + 1e-9 and run.work >= -1e-9
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(activity.idle))
        waits = [h for h in handoffs(timeline.layout, found) if h.whole]
        assert {h.waiter.phase for h in waits} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "lm_head.argmax"}
        assert all(len(h.sources.blocks) == 3 for h in waits)


def test_no_bit_changes(bench: Bench) -> None:
    some = steps(bench.made, [(0, 2), (70, 1), (33, 2)])
    bench.program.seed = 0
    plain = Bench(two_loaders()).play(some)
    assert all(a.same(b) for a, b in zip(bench.play(some), plain, strict=True))


def test_bench_says_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--kv", "40", "--replays", "2", "--baseline", "none", "--trace", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["megadsl", "bench", "llama-tiny", *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    printed = capsys.readouterr().out
    assert not exit_.value.code and "with the timeline" in printed and "logits have the same bits" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"trace.json", "table.txt", "table.json", "layer.svg"}


def test_split_columns_and_no_attention(tmp_path: Path) -> None:
    """Parts of columns are a phase of their own; some blocks multiply two of them, and nobody gathers all that they need at once."""
    made = kernels()["split columns"]
    bench = Bench(made, defines={TRACE: "1"})
    bench.play(steps(made, [(0, 4)]))
    raw = bench.program.buffers["trace"].numpy()
    timeline = read_timeline(bench.program.manifest, raw)
    found = activities(timeline, BYTES_PER_US)
    (split,) = [p for p in timeline.layout["phases"] if p["name"] == "down.merge"]
    assert split["looped"] and timeline.lost == 0
    waits = [h for h in handoffs(timeline.layout, found) if h.value == "down.parts"]
    assert {h.waiter.phase for h in waits} == {"down.merge"} and {r.phase for h in waits for r in h.sources.executions} == {"down"}
    assert max(len(r.waits) for a in found for r in a.executions if r.phase == "down") == 2
    assert [row.phase for row in write_timeline(bench.program.manifest, raw, tmp_path).ops] == [
        p["name"] for p in timeline.layout["phases"]
    ]


def test_what_has_no_room_is_counted(bench: Bench, tmp_path: Path) -> None:
    whole, _ = traced(bench)
    manifest = bench.program.manifest
    room = 40
    bench.program.manifest = {
        **manifest,
        "shape": [room if i == RECORDS_WORD else word for i, word in enumerate(manifest["shape"])],
        "trace": {**manifest["trace"], "records": room},
    }
    try:
        bench.run(steps(bench.made, [(70, 1)])[0])
        raw = bench.program.buffers["trace"].numpy()[: 3 * len(manifest["trace"]["roles"]) * (2 + room) * 16]
        timeline = read_timeline(bench.program.manifest, raw)
        for block, same in zip(timeline.blocks, whole.blocks, strict=True):
            for role, records in block.roles.items():
                count = len(records.events)
                assert 2 < count <= len(same.roles[role].events) and records.events.tolist() == same.roles[role].events[:count].tolist()
        assert timeline.lost > 100
        assert write_timeline(bench.program.manifest, raw, tmp_path, layer=0).lost == timeline.lost
        assert f"records lost: {timeline.lost}" in (tmp_path / "table.txt").read_text()
    finally:
        bench.program.manifest = manifest


def restamped(bench: Bench, change: Callable[[int, int], int]) -> npt.NDArray[np.uint8]:
    """The bench's trace buffer with each time t of block b as change(b, t): its low word, and odd, as trace.h stamps."""
    layout = bench.program.manifest["trace"]
    raw: npt.NDArray[np.uint8] = bench.program.buffers["trace"].numpy().copy()
    words = raw.view(np.uint32).reshape(-1, len(layout["roles"]), 2 + layout["records"], 4)
    for block, roles in enumerate(words):
        for slots in roles:
            at, end = 1, 1 + int(slots[0, 0])
            while at < end:
                runs = int(slots[at, 1]) & 15 in (Event.RUN, Event.OPEN)
                for slot, word in [(at, 0), *([(at, 3), *((at + 1, i) for i in range(4))] if runs else [])]:
                    if (time := int(slots[slot, word])) != 0:
                        assert time % 2 == 1, "0 means that a moment has not come"
                        slots[slot, word] = change(block, time) % 2**32 | 1
                at += 2 if runs else 1
    return raw


def test_a_wrap_of_the_clock_changes_nothing(bench: Bench) -> None:
    whole, _ = traced(bench)
    middle = round(whole.step_us * 500)
    moved = read_timeline(bench.program.manifest, restamped(bench, lambda _, time: time - middle))
    for block, same in zip(moved.blocks, whole.blocks, strict=True):
        for role, records in block.roles.items():
            assert records.times.tolist() == same.roles[role].times.tolist(), (block.number, role)
    assert moved.tick_ns == whole.tick_ns == 16, "a resumed warp"


@pytest.mark.parametrize("ns", [32, 1000])
def test_a_coarse_clock(bench: Bench, ns: int) -> None:
    """Even if it went on at another time on each SM, no value would seem to arrive more than a tick before it was sent."""
    exact, before = traced(bench)
    raw = restamped(bench, lambda block, time: (time + block * ns // 3) // ns * ns)
    timeline = read_timeline(bench.program.manifest, raw)
    found = activities(timeline, BYTES_PER_US)
    assert timeline.tick_ns == ns and abs(timeline.step_us - exact.step_us) <= 2e-3 * ns
    assert all(load.stalls for a in found for load in a.loads)
    assert all(a.end <= b.previous for f in found for a, b in pairwise([r for r in f.executions if r.role == timeline.consumer()]))
    for coarse, fine in zip(handoffs(timeline.layout, found), handoffs(exact.layout, before), strict=True):
        assert not coarse.whole or (fine.latency >= 0 and coarse.latency >= -1e-3 * ns - 1e-9)


def test_times_near_a_wrap() -> None:
    first = unwrapped(np.array([2**32 - 11, 5, 31], np.uint32), 2**32 - 11)
    assert first.tolist() == [2**32 - 11, 2**32 + 5, 2**32 + 31]
    assert unwrapped(np.array([3, 9], np.uint32), int(first[0])).tolist() == [2**32 + 3, 2**32 + 9]
    assert unwrapped(np.array([2**32 - 5], np.uint32), 3).tolist() == [-5]
    assert tick(np.array([-5, 91, 27, 27])) == 32 and tick(np.array([7, 7])) == 0


def test_whom_the_first_warp_polls() -> None:
    """Of an input in registers a warp has some panels of 32 columns. Of 18 the first of 8 warps has 0, 8 and 16; a block owns 24 columns of
    an attention that a cluster adds, or 8 rows. Of more tokens the warp that has the first panels is another in each block."""
    waits = {w["phase"]: w for w in compile_model("smollm2-135m").manifest["trace"]["waits"]}
    assert waits["o_proj"]["whole"] and waits["o_proj"]["polled"] == [[0, 1, 10, 11, 21, 22]]
    assert waits["gate_up_proj"]["polled"] == [[*range(4), *range(32, 36), *range(64, 68)]]
    bench = Bench(kernels()["6 tokens"], defines={TRACE: "1"})
    waits = {w["phase"]: w for w in bench.made.manifest["trace"]["waits"]}
    assert waits["o_proj"]["polled"] == [[i] for i in range(8)], "one panel of 32 columns per block"
    assert waits["qkv_proj"]["polled"] == [[0, 1], [2, 3], [4, 5], [6, 7], [], [], [], []], "four panels, of two blocks each"
    for seed in range(4):
        timeline, found = traced(bench, seed)
        waits = {w["phase"]: w for w in timeline.layout["waits"]}
        seen = 0
        for handoff in handoffs(timeline.layout, found):
            if polled := waits[handoff.waiter.phase]["polled"]:
                mine = polled[handoff.activity.block.number % len(polled)]
                assert set(handoff.sources.blocks) == set(mine)
                for run in handoff.sources.of(mine[:1]).executions:  # that the warp's first lane has polled itself
                    seen += 1
                    assert max([taken for _, taken, _ in run.tiles], default=run.began) < handoff.waiter.waits[0][1]
        assert seen == 48


def test_refusals(bench: Bench, tmp_path: Path) -> None:
    traced(bench)
    raw = bench.program.buffers["trace"].numpy()
    torn = raw.copy()
    torn[8] += 1
    for code, words, action in (
        ("MK460", "MK_TRACE=1", lambda: read_timeline(bench.program.manifest, np.zeros_like(raw))),
        ("MK460", "no timeline", lambda: read_timeline(bench.program.manifest, raw[:0])),
        ("MK464", "epochs 2, 3", lambda: read_timeline(bench.program.manifest, torn)),
        ("MK462", "128 cached rows and 2 new tokens", lambda: record(bench.made, "cpu", tokens=2, rows=128)),
        ("MK463", "no layer 2", lambda: write_timeline(bench.program.manifest, raw, tmp_path / "none", layer=2)),
    ):
        with pytest.raises(MegadslError) as caught:
            action()
        assert caught.value.code == code and words in str(caught.value) and "mend:" in str(caught.value)
    assert not (tmp_path / "none").exists(), "nothing was half done"
