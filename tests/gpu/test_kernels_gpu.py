"""Generated kernels on a GPU: the same judgement as in the emulator, with real memory and real time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import megadsl as mk
from megadsl.build.nvcc import build_cubin
from megadsl.driver import Compiled
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.resources import include
from megadsl.runtime.control import ADVANCE, NEXT_IDS, MegakernelHang
from tests.kernels import Bench, bits, compiled, judge, steps
from tests.test_kernel_cluster import clustered
from tests.test_kernel_inputs import TREE, feed, tree
from tests.test_kernel_models import EDGES
from tests.test_kernel_schedule import everywhere, gated, mixed_syncs
from tests.test_kernel_watchdog import publisher

pytestmark = pytest.mark.gpu

SMS = 132


def default(s: ScheduleBlock) -> None:
    pass


def fed_apart(s: ScheduleBlock) -> None:
    gated(s)
    mixed_syncs(s)


# model, tokens, blocks, schedule
CASES = {
    "default-1": ("llama-tiny", 1, SMS, default),
    "tagged-5-odd": ("llama-tiny-odd", 5, 7, default),
    "sentinel-16-wide": ("llama-tiny-wide", 16, SMS, everywhere(mk.Sentinel(4))),
    "flag-16": ("llama-tiny", 16, SMS, everywhere(mk.Flag(2))),
    "kv-loader-mixed-5": ("llama-tiny", 5, 40, fed_apart),
    "cluster-of-4-1": ("llama-tiny", 1, 40, clustered(4)),
    "cluster-of-8-2-odd": ("llama-tiny-odd", 2, 16, clustered(8)),
    "layers-1": ("llama-tiny", 1, SMS, lambda s: s.launch("layer")),
    "layers-late-5": ("llama-tiny", 5, 40, lambda s: s.launch("layer", start="o_proj", trigger="down_proj")),
    "layers-apart-16": ("llama-tiny", 16, SMS, lambda s: s.launch("layer", start="qkv_proj", trigger="end")),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Compiled]:
    """All cases; their cubins are built side by side, and taken from the cache afterwards."""
    found = {name: compiled(model, tokens=t, blocks=b, configure=c) for name, (model, t, b, c) in CASES.items()}
    jobs: list[tuple[Compiled, dict[str, str]]] = [(c, {}) for c in found.values()] + [(found["default-1"], lost(found["default-1"]))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: build_cubin(job[0].source, job[0].manifest["arch"], [include()], job[1]), jobs))
    return found


def lost(kernel: Compiled) -> dict[str, str]:
    """Compile-time switches of a kernel that never publishes its queries, keys and values."""
    return {"MK_LOST_SIGNAL": str(publisher(kernel, "qkv_proj"))}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, made: dict[str, Compiled]) -> None:
    kernel, tokens = made[case], CASES[case][1]
    bench = Bench(kernel, device="cuda")
    some = steps(kernel, [(kv, tokens if i % 2 else max(1, tokens - 1)) for i, kv in enumerate(EDGES)] + [(100, tokens)])
    results = bench.play(some)
    judge(kernel, bench.weights, some, results)
    for _ in range(5):
        assert all(a.same(b) for a, b in zip(results, bench.play(some), strict=True)), "not the same bits every time"


def test_a_tree(made: dict[str, Compiled]) -> None:
    kernel = made["kv-loader-mixed-5"]
    bench = Bench(kernel, device="cuda")
    some = [tree(TREE, s.ids, s.kv) for s in steps(kernel, [(0, 5), (17, 5), (100, 5)])]
    judge(kernel, bench.weights, some, bench.play(some))


def test_a_lost_signal_is_reported_in_time(made: dict[str, Compiled]) -> None:
    kernel = made["default-1"]
    some = steps(kernel, [(17, 1), (33, 1)])
    healthy, faulty = Bench(kernel, device="cuda"), Bench(kernel, device="cuda", defines=lost(kernel), timeout_s=1.0)
    expected = healthy.play(some)
    for _ in range(2):
        before = faulty.put_rows(some[0])
        began = time.perf_counter()
        with pytest.raises(MegakernelHang, match=r"role \w+, op \w+ \(.*llama.py:\d+\), layer 0, .* expected 0x\w+, observed 0x\w+"):
            faulty.run(some[0])
        assert time.perf_counter() - began < 5
        kv = faulty.program.kv
        assert kv is not None
        for layer, rows in enumerate(before):
            for now, old in zip(kv.read(layer, 17), rows, strict=True):
                assert bits(now).equal(bits(old[:, :17])), "an aborted launch changed cached rows"
    assert all(a.same(b) for a, b in zip(expected, healthy.play(some), strict=True)), "the next launch is right"
    assert float(torch.ones(8, device="cuda").sum()) == 8


@pytest.mark.parametrize("case", ["layers-1", "layers-late-5", "layers-apart-16"])
def test_launches_of_layers_leave_the_bits_of_the_megakernel(case: str, made: dict[str, Compiled]) -> None:
    """Launch by launch, and 50 steps in one graph, in which launches overlap over steps too."""
    _, tokens, blocks, _ = CASES[case]
    whole, bench = compiled("llama-tiny", tokens=tokens, blocks=blocks), Bench(made[case], device="cuda")
    some = steps(whole, [(kv, tokens) for kv in EDGES])
    expected = Bench(whole, device="cuda").play(some)
    assert all(a.same(b) for a, b in zip(expected, bench.play(some), strict=True))
    last = bench.program.logits.clone()
    replay = bench.program.capture(launches=50)
    for _ in range(20):
        replay.replay()
    bench.program.check()
    assert bits(bench.program.logits).equal(bits(last))


def test_the_kernel_feeds_itself(made: dict[str, Compiled]) -> None:
    """The same ids whether the host feeds each token or the kernel does, launch after launch without a host in between."""
    program = Bench(made["default-1"], device="cuda").program
    expected, token = [], 7
    for kv in range(40):
        feed(program, kv, [token])
        program.launch()
        token = program.check()[NEXT_IDS]
        expected.append(token)
    program.reset()
    feed(program, 0, [7], ADVANCE)
    snapshots = []
    for _ in range(40):
        program.launch()
        snapshots.append(program.snapshot())
    assert [program.check(s)[NEXT_IDS] for s in snapshots] == expected
