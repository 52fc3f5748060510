"""Batches on the GPU: what tests/test_kernel_batch.py asks of the emulator, of larger kernels and in graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megadsl.driver import compile_model
from megadsl.runtime.batch import BatchGenerator
from megadsl.runtime.control import ADVANCE, BATCH_CHOSEN, MOST_SEQUENCES, STEPS_MADE
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource
from megadsl.torch import DecodeStep
from tests.batches import BatchBench, batch_steps, check_batches, judge_batch
from tests.kernels import compiled, config, distance, weights_for
from tests.schedules import everywhere
from tests.wires import SYNCS

pytestmark = pytest.mark.gpu

LENGTHS = ([5, 0, 1], [0, 0, 0], [2000, 3, 17], [15, 16, 33], [700, 1999, 64])


def spread(of: Sequence[int], sequences: int, idle: int) -> list[int]:
    return [*of, *[idle] * sequences][:sequences]


def sizes(tokens: int, sequences: int) -> list[tuple[list[int], list[int]]]:
    counts = ([1, 1, 1], [tokens - sequences + 1, 1, 1], [0, tokens, 0], [tokens - 1, 0, 1], [1, 0, 1])
    found = []
    for index, kvs in enumerate(LENGTHS):
        new = spread(counts[index], sequences, int(index == 1))
        found.append((spread(kvs, sequences, 300 * index), new if sum(new) <= tokens else [1] * sequences))
    found.append((spread([1, 2040, 60], sequences, 400), [1] * sequences))
    return found


@pytest.mark.parametrize(
    ("model", "tokens", "sequences", "wire"),
    [
        ("llama-tiny", 6, 3, None),
        ("llama-tiny", 8, 8, "Sentinel"),
        ("llama-tiny", 4, 2, "Flag"),
        ("llama-tiny-odd", 16, 8, None),
        ("llama-tiny-wide", 16, 5, None),
        ("qwen3-tiny", 8, 4, None),
    ],
)
def test_batches(model: str, tokens: int, sequences: int, wire: str | None) -> None:
    configure = None if wire is None else everywhere(SYNCS[wire])
    made = compiled(model, tokens=tokens, sequences=sequences, blocks=66, max_kv=2048, configure=configure)
    check_batches(made, sizes(tokens, sequences), device="cuda")


def test_a_window() -> None:
    made = compiled("llama-tiny", tokens=8, sequences=3, blocks=132, max_kv=2048, fields=config(sliding_window=300))
    check_batches(made, sizes(8, 3), device="cuda")


@pytest.mark.parametrize(("model", "tokens"), [("llama-3.2-1b", 8), ("llama-3.2-1b", 16), ("qwen3-0.6b", 8)])
def test_models(model: str, tokens: int) -> None:
    """Whole models: replays leave the same bits, and each sequence is what a kernel of one makes of it, to rounding."""
    made = compile_model(model, tokens=tokens, sequences=8, max_kv=2048)
    weights = weights_for(made)
    bench = BatchBench(made, weights, "cuda")
    some = batch_steps(made, [(spread([900, 0, 17], 8, 77), [1] * 8), (spread([5, 0, 1], 8, 0), spread([5, 0, 1], 8, 0))])
    first = bench.play(some)
    for _ in range(3):
        assert all(a.same(b) for a, b in zip(first, bench.play(some), strict=True))
    judge_batch(bench, some, first)


def continued(bench: BatchBench, count: int, launches: int) -> tuple[list[int], torch.Tensor]:
    """Ids of all sequences, step by step, and the caches, behind ``launches`` launches of ``count`` steps."""
    (step,) = batch_steps(
        bench.made, [(spread([13, 0, 900], bench.made.manifest["sequences"], 60), [1] * bench.made.manifest["sequences"])]
    )
    bench.program.reset()
    bench.put(step, ADVANCE)
    bench.program.set_steps(count)
    graph, ids = bench.program.capture(), []
    for _ in range(launches):
        graph.replay()
        words = bench.program.check()
        ids += [words[BATCH_CHOSEN + at * MOST_SEQUENCES + i] for at in range(words[STEPS_MADE]) for i in range(len(step.sequences))]
    return ids, bench.program.buffers["kv"].clone()


@pytest.mark.parametrize("wire", SYNCS)
def test_several_steps_a_launch(wire: str) -> None:
    """From one graph, the ids and cached rows of as many launches of one step."""
    made = compiled("llama-tiny", tokens=8, sequences=8, blocks=132, max_kv=2048, configure=everywhere(SYNCS[wire]))
    bench = BatchBench(made, device="cuda")
    one, rows = continued(bench, 1, 96)
    for count in (4, 32):
        ids, kv = continued(bench, count, 96 // count)
        assert ids == one and kv.equal(rows), f"{count} steps a launch"


def test_a_generator() -> None:
    """More prompts than sequences, several steps a launch: the texts of a generator of one."""
    batch, alone = (compiled("llama-tiny", tokens=8, sequences=n, blocks=66, max_kv=2048) for n in (4, 1))
    weights = TensorSource(weights_for(alone))
    prompts = [[(7 * i + j) % 500 + 1 for j in range(1 + 5 * i)] for i in range(11)]
    many, one = BatchGenerator(batch, weights, "cuda", progress=False), Generator(alone, weights, "cuda", progress=False)
    found = [g.ids for g in many.generate(prompts, 64)]
    expected = [one.generate(prompt, 64).ids for prompt in prompts]
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    assert same >= 9, "greedy texts of random weights may part where two logits are all but equal; most may not"
    assert found == [g.ids for g in many.generate(prompts, 64)]


def test_caches_beyond_32_bits() -> None:
    """The last sequence's rows lie behind 2**31 elements, in an arena of 34 GB; they give what the first one's give."""
    made = compile_model("llama-3.2-1b", tokens=8, sequences=8, max_kv=1 << 17, check=False)
    assert made.manifest["buffers"]["kv"] // 2 * 7 // 8 > 2**31
    bench = BatchBench(made, device="cuda")
    (step,) = batch_steps(made, [([40, 0, 0, 0, 0, 0, 0, 40], [1] * 8)])
    for layer in range(made.graph.layers):
        k, v = step.sequences[0].rows(layer, 8, 64)
        for i in (0, 7):
            bench.caches()[i].write(layer, k.cuda(), v.cuda())
    bench.program.set_chain(step.kv_lens, [5] * 8)
    bench.program.launch()
    bench.program.check()
    logits = bench.program.logits
    assert distance(logits[7], logits[0]) < 2e-2 < distance(logits[1], logits[0])


def test_one_graph_for_any_lengths() -> None:
    """Counts and rows are tensors that a captured graph reads where they lie; values out of range are clamped."""
    made = compiled("llama-tiny", tokens=6, sequences=3, blocks=66, max_kv=2048)
    step = DecodeStep(made, TensorSource(weights_for(made)), "cuda")
    ids, rows, counts = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4, 3, 3))
    cache, plain = step.new_cache(), step.new_cache()
    counts.copy_(torch.tensor([2, 1, 1]))
    step(ids, rows, counts=counts, cache=cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(ids, rows, counts=counts, cache=cache)
    cache.zero_()
    for new, lens, own in (
        ([1, 2, 3, 4], [0, 0, 0], [4, 0, 0]),
        ([5, 6, 7, 8], [4, 0, 0], [1, 0, 3]),
        ([9, 9, 9, 9], [5, 0, 3], [2, 1, 1]),
    ):
        for tensor, values in ((ids, new), (rows, lens), (counts, own)):
            tensor.copy_(torch.tensor(values))
        with step.turn():
            graph.replay()
        step.check()
        expected = step(*(torch.tensor(v, device="cuda") for v in (new, lens)), counts=torch.tensor(own, device="cuda"), cache=plain)
        step.check()
        assert out.logits.equal(expected.logits) and cache.equal(plain)
    for tensor, values in ((ids, [-1, 10**6, 2, 3]), (rows, [-7, 10**6, 2047]), (counts, [-3, 9, 9])):
        tensor.copy_(torch.tensor(values))
    with step.turn():
        graph.replay()
    step.check()
