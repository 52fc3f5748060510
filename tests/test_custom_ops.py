"""Custom ops: their own headers in generated kernels, in the emulator, against what they mean in torch."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dsl_tools import findings
from lower_tools import GPU
from typer.testing import CliRunner

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.build.nvcc import build_cubin
from megadsl.check.mutants import score_plan
from megadsl.cli import app
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate.races import Race
from megadsl.ir.graph import Custom
from megadsl.lower.explain import rows
from megadsl.machine import ARCHES, machine
from megadsl.reference import EagerModel, ReferenceModel
from megadsl.reference.plain import PlainModel
from megadsl.resources import include
from megadsl.runtime.control import ADVANCE, CHOSEN, NEXT_IDS
from megadsl.runtime.program import TRACE
from megadsl.trace.activity import activities
from megadsl.trace.records import read_timeline
from megadsl.trace.write import write_timeline
from tests.kernels import Bench, bits, check, check_races, compiled, distance, one_build, steps, weights_for

SPECS = Path(__file__).parent / "specs"
CONFIG = {"vocab": 203, "hidden": 128, "layers": 2, "experts": 16}
SIZES = {1: [(0, 1), (17, 1)], 3: [(0, 3), (16, 2), (0, 1)], 16: [(0, 16), (31, 5)]}
NAMES = ("rotated", "experts", "cosine")
Configure = Callable[[ScheduleBlock], None]


def made(name: str, tokens: int, blocks: int, configure: Configure | None = None, folder: Path = SPECS, **options: Any) -> Compiled:
    kernel = load(f"{folder / 'custom_ops.py'}:{name}")[0]
    return compiled(kernel, tokens=tokens, blocks=blocks, fields=CONFIG, configure=configure, max_kv=64, **options)


def with_comments(name: str, folder: Path = SPECS, **options: Any) -> Compiled:
    """As it is emitted: comments name ops and lines of the spec."""
    return compile_model(load(f"{folder / 'custom_ops.py'}:{name}")[0], config=CONFIG, max_kv=64, **options)


def whole_units(s: ScheduleBlock) -> None:
    """Sentinels before and behind the ops, one of them dense; and weights that wait for their op."""
    for op in ("router", "top2", "blend"):
        s[op].sync(mk.Sentinel(4))
    s["blend"].prefetch(smem=None)


def flags(s: ScheduleBlock) -> None:
    for op in ("q_k_v", "unit_heads"):
        s[op].sync(mk.Flag(2))


def clustered(s: ScheduleBlock) -> None:
    """The value that the op reads is owned by the blocks of a cluster alone."""
    s["attention"].split(kv=2).merge("cluster")
    s["attention"].sync(mk.Sentinel(4))


def launched_alone(s: ScheduleBlock) -> None:
    s.launch("op")
    s.ring("weights", stages=5)


@cache
def kernels() -> dict[tuple[str, int, int], Compiled]:
    return one_build({key: made(*key) for key in product(NAMES, SIZES, (2, 3, 5))})


@pytest.mark.parametrize("blocks", [2, 3, 5])
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("name", NAMES)
def test_against_torch(name: str, tokens: int, blocks: int) -> None:
    check(kernels()[name, tokens, blocks], SIZES[tokens], seeds=(1, 2) if blocks == 3 else ())


SCHEDULES: dict[str, Callable[[], Compiled]] = {
    "whole units, gated": lambda: made("experts", 3, 2, whole_units),
    "whole units by one warp": lambda: made("experts", 1, 3, whole_units),
    "flags": lambda: made("cosine", 3, 3, flags),
    "by the block": lambda: made("rotated", 1, 3, lambda s: s.finish("block")),
    "more blocks than groups": lambda: made("experts", 1, 20),
    "lanes copy": lambda: made("experts", 3, 3, arch="sm_80"),
    "flags and a finisher": lambda: made("cosine", 1, 3, flags),
    "behind a cluster": lambda: made("rotated", 1, 4, clustered),
    "one op twice": lambda: made("twice", 3, 2),
}


@cache
def scheduled() -> dict[str, Compiled]:
    return one_build({name: make() for name, make in SCHEDULES.items()})


@pytest.mark.parametrize("name", SCHEDULES)
def test_under_a_schedule(name: str) -> None:
    found = scheduled()[name]
    check(found, SIZES[found.manifest["tokens"]], seeds=(1,))


@pytest.mark.parametrize(("how", "entry"), [(launched_alone, "blend"), (lambda s: s.launch("layer", start="blend"), "last")])
def test_other_launches(how: Callable[[ScheduleBlock], None], entry: str) -> None:
    """The same bits: a launch for each custom op, and launches of layers that begin with one."""
    whole, parts = kernels()["experts", 3, 3], made("experts", 3, 3, how)
    some = steps(whole, SIZES[3])
    assert all(a.same(b) for a, b in zip(Bench(whole).play(some), Bench(parts).play(some), strict=True))
    assert f"megakernel_{entry}" in parts.manifest["entries"]


@pytest.mark.parametrize("name", ["rotated", "experts"])
def test_several_steps_a_launch(name: str) -> None:
    """The ids of a launch of four steps, and the last one's logits, are those of four launches."""
    program = Bench(kernels()[name, 1, 3]).program

    def begin() -> None:
        program.reset()
        program.control.set_inputs(0, (7,), (0,), (1,), ADVANCE)

    begin()
    ids = []
    for _ in range(4):
        program.launch()
        ids.append(program.check()[NEXT_IDS])
    logits = program.logits.clone()
    begin()
    program.set_steps(4)
    program.launch()
    assert program.check()[CHOSEN : CHOSEN + 4] == ids and bits(program.logits).equal(bits(logits))


@pytest.mark.parametrize(("name", "tokens"), [("experts", 3), ("rotated", 1)])
def test_under_the_race_detector(name: str, tokens: int) -> None:
    """Two ops behind each other, one with a barrier of its own; and one beside a warp that finishes."""
    found = kernels()[name, tokens, 3]
    check_races(found, steps(found, [(0, tokens), (17, 1)]))


# -- functions that are wrong


def spoilt(tmp_path: Path, header: str, old: str, new: str) -> Path:
    """A copy of the specs, with another text in a header."""
    shutil.copytree(SPECS / "custom", tmp_path / "custom")
    shutil.copy(SPECS / "custom_ops.py", tmp_path)
    path = tmp_path / "custom" / header
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return tmp_path


def races(found: Compiled) -> tuple[Race, ...]:
    bench = Bench(found, defines={DETECT: "1"}, seed=1)
    bench.play(steps(found, [(0, found.manifest["tokens"])]))
    assert bench.program.report is not None
    return bench.program.report.races


def test_a_missing_barrier_is_a_race(tmp_path: Path) -> None:
    """Scratch that is read where nothing says that it has been written: reported at the line of the user's header and of the spec."""
    folder = spoilt(tmp_path, "top2.cuh", "  op.sync();\n", "\n")
    found = races(with_comments("experts", folder, tokens=3, blocks=3))
    assert found and {race.kind for race in found} == {"data race"}
    line = next(i for i, text in enumerate((folder / "custom" / "top2.cuh").read_text().splitlines(), 1) if "ld_shared" in text)
    sides = [side for race in found for side in (race.now, race.before)]
    assert ("top2.cuh", line) in {(frame.file, frame.line) for side in sides for frame in side.frames}
    assert {side.op for side in sides} == {"top2"} and all(side.span.startswith("custom_ops.py:") for side in sides)


def test_reads_outside_are_found(tmp_path: Path) -> None:
    """By a pointer of its own, into a stage that a copy fills."""
    areas = {area.name: area.offset for area in kernels()["experts", 3, 3].plan.areas}
    line = "    const float gate = mk::math::sigmoid(most.value - next.value);\n"
    far = f"mk::ptx::ld_shared<mk::u32>(op.scratch.template at<mk::u32>({areas['ring.loader'] - areas['top2.scratch']} + 16384 * 5))"
    folder = spoilt(tmp_path, "top2.cuh", line, f"{line}    {far};\n")
    found = races(with_comments("experts", folder, tokens=3, blocks=3))
    assert found and all({"read", "copy write"} == {race.before.how, race.now.how} for race in found)
    assert all("top2" in (race.now.op, race.before.op) for race in found)


def test_a_view_knows_its_end(tmp_path: Path) -> None:
    folder = spoilt(tmp_path, "blend.cuh", "op.gates(token, e)", "op.gates(token, e + 1)")
    with pytest.raises(MegadslError, match=r"MK360.*a view of 16 is accessed at 16"):
        Bench(made("experts", 1, 2, folder=folder)).play(steps(kernels()["experts", 1, 2], [(0, 1)]))


def test_a_result_outside_of_what_the_block_owns(tmp_path: Path) -> None:
    folder = spoilt(tmp_path, "blend.cuh", "out.put8(token, feature, sum)", "out.put8(token, feature + 64, sum)")
    with pytest.raises(MegadslError, match=r"MK360.*a view of 64 is accessed at"):
        Bench(made("experts", 1, 2, folder=folder)).play(steps(kernels()["experts", 1, 2], [(0, 1)]))


def test_another_function_than_the_meaning_is_found(tmp_path: Path) -> None:
    """By ``megadsl check --seeds``: all schedules agree, and none with torch."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    folder = spoilt(tmp_path, "top2.cuh", "1.0f - gate : 0.0f", "gate : 0.0f")
    options = ["--config", str(config), "--max-kv", "64", "--blocks", "2", "--seeds", "1", "--json"]
    done = CliRunner().invoke(app, ["check", f"{folder / 'custom_ops.py'}:experts", *options])
    assert done.exit_code == 1
    (found,) = json.loads(done.stdout)["schedules"]
    assert found["kind"] == "WrongResult" and "off from what the graph means in torch" in found["text"]


def test_a_meaning_that_is_not_what_was_declared(tmp_path: Path) -> None:
    found = kernels()["experts", 3, 3]
    op = found.graph.op("blend")
    assert isinstance(op, Custom)
    wrongs: dict[str, Callable[..., Any]] = {
        r"\(2, 2048\)": lambda gates, streams, gain, *, residual: streams,
        "torch.int64": lambda gates, *_, residual: gates.argmax(-1),
        "a NoneType": lambda *_, residual: None,
    }
    for words, wrong in wrongs.items():
        graph = replace(found.graph, ops=tuple(replace(o, call=replace(op.call, meaning=wrong)) if o is op else o for o in found.graph.ops))
        with pytest.raises(MegadslError, match=rf"MK281.*'blend'.*{words}.*\(2, 128\)"):
            ReferenceModel(graph, weights_for(found), 64, "fp32").step([1, 2])


# -- declarations and headers that are wrong (one of each kind: tests/specs/broken/user_ops.py)


def traced(op: mk.CustomOp, **params: Any) -> list[str]:
    """What tracing finds in a kernel that calls the op on an embedding."""

    @mk.kernel
    def step(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = mk.embed(mk.weight("embed", (64, 64)), mk.input_ids(tokens))
        return mk.argmax(mk.linear(op(x, **params), mk.weight("head", (64, 64))))

    return [str(found) for found in findings(lambda: step.trace({}))]


@pytest.mark.parametrize(
    ("code", "words", "mend"),
    [
        ('asm volatile("");', "has `asm`", "wrappers of mk::ptx"),
        ("const unsigned i = threadIdx.x;", "has `threadIdx`", "use op.thread()"),
        ("__syncthreads();", "has `__syncthreads`", "use op.sync()"),
        ("__shfl_xor_sync(~0u, 1, 2);", "has `__shfl_xor_sync`", "wrappers of mk::ptx"),
        ("atomicAdd(&total, 1.0f);", "has `atomicAdd`", "one writer"),
        ("extern __shared__ float area[];", "has `__shared__`", "op.scratch"),
    ],
)
def test_what_runs_on_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str, mend: str) -> None:
    (tmp_path / "own.cuh").write_text(
        f"// asm\ntemplate <class Op, class Out>\nMK_DEV void own(const Op& op, const Out& out) {{\n{code}\n}}\n"
    )

    @mk.custom_op(header=str(tmp_path / "own.cuh"))
    def own(x: Any) -> Any:
        return x

    (found,) = traced(own)
    assert "MK272" in found and f"own.cuh, line 4, {words}" in found and mend in found


def test_signatures() -> None:
    def defaults(x: Any, y: Any = None) -> Any: ...
    def several(*x: Any) -> Any: ...
    def taken(x: Any, *, double: int) -> Any: ...
    def nothing(*, scale: int) -> Any: ...
    def layer(x: Any) -> Any: ...

    shown = {f: traced(mk.custom_op(header="custom/scale.cuh")(f))[-1] for f in (defaults, several, taken, nothing, layer)}
    assert all("MK274" in text for text in shown.values())
    for function in (defaults, several, nothing):
        assert "name its tensors one by one, without defaults" in shown[function]
    assert "the name 'double' means something else" in shown[taken] and "the name 'layer' means" in shown[layer]


def test_a_header_that_a_compiler_refuses(tmp_path: Path) -> None:
    """The compiler's own words name the header's line."""
    folder = spoilt(tmp_path, "fwht.cuh", "float v[kEach];", "floot v[kEach];")
    line = next(i for i, text in enumerate((folder / "custom" / "fwht.cuh").read_text().splitlines(), 1) if "floot" in text)
    with pytest.raises(MegadslError, match=rf"MK312(.|\n)*fwht\.cuh:{line}:"):
        Bench(made("rotated", 1, 2, folder=folder))
    with pytest.raises(MegadslError, match=rf"MK302(.|\n)*fwht\.cuh\({line}\)"):
        build_cubin(with_comments("rotated", folder).source, "sm_90a", [include()], {})


# -- what else is made of a kernel with custom ops


def test_the_checker_notices_every_mistake() -> None:
    """Mutants of plans with custom ops: whom they ask, which barriers they pass, how often they take their weights."""
    for name, blocks in (("experts", 5), ("rotated", 3)):
        found = kernels()[name, 3 if name == "experts" else 1, blocks]
        verdicts = [v for v in score_plan(found.plan, GPU) if any(op in v.name for op in ("top2", "blend", "fwht"))]
        assert len(verdicts) > 30 and [v.name for v in verdicts if v.survived] == []


def test_words_of_its_shape() -> None:
    found = kernels()["experts", 3, 3]
    areas = {area.name: area for area in found.plan.areas}
    words = {r.name: (r.type, r.words) for r in found.plan.shape}
    assert words["blend"] == ("mk::CustomShape", (128, areas["blend.scratch"].offset, 16, 0))
    assert words["blend_gain_elements"] == ("mk::i32", (256,))
    assert words["blend_streams_rows"] == ("mk::RowsShape", (0, 2048, areas["blend.streams.rows"].offset))
    assert areas["blend.streams.rows"].bytes == 3 * 2048 * 2 and areas["top2.scratch"].bytes == 256
    sliced = {r.name: r.words[:2] for r in kernels()["cosine", 3, 3].plan.shape if r.type == "mk::RowsShape"}
    assert sliced == {"unit_heads_q_rows": (0, 128), "unit_heads_k_rows": (128, 64), "unit_heads_v_rows": (192, 64)}


def test_explained() -> None:
    ops, edges = rows(kernels()["experts", 3, 3])
    line = next(dict(zip(ops[0], row, strict=True)) for row in ops[1] if row[0] == "blend")
    assert line["tiles"] == "blend of blend.cuh" and line["bytes per run"] == str(2 * 128 * 2) and line["roles"] == "loader -> consumer"
    assert line["largest share"] == "48 of 128 features"
    polled = {row[0]: row[-1] for row in edges[1]}
    # of each block: the units of 3 tokens, and as many vectors of last elements as the busiest block fills
    assert polled["top2"] == f"{(2 * 3 + 3 * 1) * 16:,}"
    assert polled["experts"] == f"{(256 * 3 + 3 * -(-86 * 3 // 7)) * 16:,}"
    gathers = next(row for row in ops[1] if row[0] == "top2")
    assert gathers[ops[0].index("placement")] == ""


def test_traced(tmp_path: Path) -> None:
    """Each custom op is a phase of the timeline that waits, has its input, and ends."""
    found = kernels()["experts", 3, 3]
    bench = Bench(found, defines={TRACE: "1"})
    bench.play(steps(found, [(0, 3)]))
    raw = bench.program.buffers["trace"].numpy()
    timeline = read_timeline(bench.program.manifest, raw)
    ran = [r for a in activities(timeline, 2e3) for r in a.executions if r.phase in ("top2", "blend")]
    assert len(ran) == 2 * 2 * 3 and all(r.began <= r.waits[0][0] <= r.waits[0][1] <= r.end for r in ran)
    ops = {row.phase: row for row in write_timeline(bench.program.manifest, raw, tmp_path).ops}
    assert ops["blend"].times == 2 and ops["blend"].blocks == 3


def test_torch_meanings_agree() -> None:
    """The bf16 baselines, eager and for speed, are near the fp32 graph."""
    for name in NAMES:
        found = kernels()[name, 3, 3]
        weights = weights_for(found)
        exact = ReferenceModel(found.graph, {k: v.float() for k, v in weights.items()}, 64, "fp32").step([5, 6, 7])
        assert distance(EagerModel(found.graph, weights, 64).step([5, 6, 7]), exact) < 0.05
        plain = PlainModel(found.graph, weights, 64, 3)
        plain.set_inputs([5, 6, 7], 0)
        assert distance(plain.step(3, "grouped")()[0].float(), exact) < 0.05


def test_the_header_is_a_part_of_the_kernel(tmp_path: Path) -> None:
    """So that whatever is cached by the kernel's text is another entry when the header changes."""
    found = with_comments("rotated")
    text = (SPECS / "custom" / "fwht.cuh").read_text()
    assert '#line 1 "fwht.cuh"' in found.source and text.replace("#pragma once", "").strip() in found.source
    lines = found.source.splitlines()
    at = next(i for i, line in enumerate(lines, 1) if line.startswith("#line") and "kernel.cu" in line)
    assert lines[at - 1] == f'#line {at + 1} "kernel.cu"'
    folder = spoilt(tmp_path, "fwht.cuh", "Op::scale", "1.0f")
    assert with_comments("rotated", folder).source != found.source


def test_plans_are_data() -> None:
    """Graphs travel between the tuner's processes; a meaning stays behind."""
    graph = kernels()["experts", 3, 3].graph
    there = pickle.loads(pickle.dumps(graph))
    op = there.op("blend")
    assert there == graph
    with pytest.raises(AssertionError, match="does not travel"):
        op.call.meaning()


@pytest.mark.parametrize("arch", ARCHES)
def test_every_architecture_has_machine_code(arch: str) -> None:
    found = with_comments("experts", arch=arch, blocks=16)
    cubin = build_cubin(found.source, arch, [include()], {})
    assert cubin.spill_bytes == 0 and cubin.registers * found.manifest["threads"] <= machine(arch).registers_per_sm


@pytest.mark.parametrize(
    ("decide", "words"),
    [
        (lambda s: s["blend"].publish("registers"), "MK247.*'blend' cannot publish from registers: its function stages them"),
        (lambda s: s["blend"].gather("registers"), "MK244.*'blend' cannot gather its input into registers: its function reads rows"),
        (lambda s: s["blend"].poll(pause=50), "MK158.*'blend' has no input to poll"),
        (lambda s: s["blend"].columns(ways=2), "MK242.*'blend'.*it is no linear"),
        (lambda s: s["blend"].prefetch(registers=1), "MK243.*'blend' cannot hold"),
        (lambda s: s["blend"].prefetch(l2=64), "MK240.*'blend'"),
    ],
)
def test_schedules_that_are_refused(decide: Configure, words: str) -> None:
    with pytest.raises(MegadslError, match=words):
        made("experts", 1, 2, decide)
