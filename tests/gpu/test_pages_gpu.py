"""Cached rows in pages on the GPU: what tests/test_kernel_pages.py asks of the emulator, of larger kernels and in graphs."""

from __future__ import annotations

import pytest
import torch

from megadsl.driver import compile_model
from megadsl.runtime.batch import BatchGenerator
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource
from megadsl.torch import DecodeStep
from tests.batches import BatchBench, batch_steps, judge_batch, same, several
from tests.kernels import Bench, bits, compiled, config, judge, steps, weights_for
from tests.test_kernel_cluster import clustered

pytestmark = pytest.mark.gpu

ROWS = 2048


def around(page: int, tokens: int) -> list[tuple[int, int]]:
    """Lengths about the borders of pages, short ones, and a full cache."""
    return [(kv, tokens) for kv in (0, 5, page - 1, page, page + 1, 8 * page, 1000, ROWS - tokens)]


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize(
    ("model", "tokens", "blocks"), [("llama-tiny", 1, 66), ("llama-tiny-odd", 5, 33), ("llama-tiny-wide", 16, 132), ("qwen3-tiny", 1, 16)]
)
def test_one_sequence(model: str, tokens: int, blocks: int, page: int) -> None:
    """Against the torch meaning, and bit for bit the kernel whose rows lie together."""
    paged, plain = (Bench(compiled(model, tokens=tokens, blocks=blocks, max_kv=ROWS, kv_page=p), device="cuda") for p in (page, 0))
    some = steps(paged.made, around(page, tokens))
    found = paged.play(some)
    judge(paged.made, paged.weights, some, found)
    assert all(a.same(b) for a, b in zip(found, plain.play(some), strict=True))


def test_clusters_and_windows() -> None:
    for options in ({"configure": clustered(2), "blocks": 64}, {"fields": config(sliding_window=300), "blocks": 132}):
        paged, plain = (Bench(compiled("llama-tiny", max_kv=ROWS, kv_page=p, **options), device="cuda") for p in (32, 0))  # type: ignore[arg-type]
        some = steps(paged.made, around(32, 1))
        found = paged.play(some)
        judge(paged.made, paged.weights, some, found)
        assert all(a.same(b) for a, b in zip(found, plain.play(some), strict=True))


@pytest.mark.parametrize(
    ("model", "tokens", "sequences", "page"), [("llama-tiny", 6, 3, 16), ("llama-tiny-odd", 16, 8, 64), ("qwen3-tiny", 8, 4, 32)]
)
def test_a_batch(model: str, tokens: int, sequences: int, page: int) -> None:
    made = [compiled(model, tokens=tokens, sequences=sequences, blocks=66, max_kv=ROWS, kv_page=p) for p in (page, 0)]
    paged, plain = (BatchBench(of, device="cuda") for of in made)
    ones = [1] * sequences
    lens = [([5, 0, 1], ones), ([page - 1, page, page + 1], ones), ([2000, 3, 17], [0, tokens] + [0] * (sequences - 2))]
    some = batch_steps(made[0], [([*kv, *[60] * sequences][:sequences], counts) for kv, counts in lens])
    found = paged.play(some)
    judge_batch(paged, some, found)
    for a, b in zip(found, plain.play(some), strict=True):
        assert a.ids == b.ids and bits(a.logits).equal(bits(b.logits))


@pytest.mark.parametrize(("tokens", "sequences", "page"), [(1, 1, 16), (16, 1, 64), (8, 8, 16)])
def test_a_model(tokens: int, sequences: int, page: int) -> None:
    """llama-3.2-1b: the bits of the kernel without pages, in every replay."""
    made = [compile_model("llama-3.2-1b", tokens=tokens, sequences=sequences, max_kv=ROWS, kv_page=p) for p in (page, 0)]
    weights = weights_for(made[0])
    if sequences == 1:
        some, benches = steps(made[0], [(900, tokens), (17, tokens)]), [Bench(of, weights, "cuda") for of in made]
        found, plain = (bench.play(some) for bench in benches)
        assert all(a.same(b) for _ in range(3) for a, b in zip(benches[0].play(some), plain, strict=True))
        judge(made[0], weights, some, found)
        return
    lens = [900, 0, 17, 15, 16, 33, 700, 1999]
    batch, whole = (BatchBench(of, weights, "cuda") for of in made)
    (step,) = batch_steps(made[0], [(lens, [1] * 8)])
    expected = whole.run(step)
    for _ in range(3):
        again = batch.run(step)
        assert again.ids == expected.ids and bits(again.logits).equal(bits(expected.logits))


def test_several_steps_a_launch() -> None:
    """Across pages' ends, the ids and rows of as many launches of one step."""
    made = compiled("llama-tiny", tokens=8, sequences=8, blocks=132, max_kv=ROWS, kv_page=16)
    bench = BatchBench(made, device="cuda")
    (step,) = batch_steps(made, [([13, 0, 900, 14, 15, 16, 17, 31], [1] * 8)])
    expected = several(bench, step, 1)
    for count in (8, 32):
        found = several(bench, step, count)
        assert found[0][0] == expected[0][0] and same(found, several(bench, step, count))


def test_generators() -> None:
    """A tight pool: texts wait for pages; most are those of a generator of one whose rows lie together."""
    paged = compiled("llama-tiny", tokens=8, sequences=4, blocks=66, max_kv=ROWS, kv_page=16, kv_pages=20)
    alone, single = (compiled("llama-tiny", tokens=8, blocks=66, max_kv=ROWS, kv_page=p) for p in (0, 32))
    weights = TensorSource(weights_for(alone))
    prompts = [[(7 * i + j) % 500 + 1 for j in range(1 + 5 * i)] for i in range(11)]
    many = BatchGenerator(paged, weights, "cuda", progress=False)
    one, other = (Generator(of, weights, "cuda", progress=False) for of in (alone, single))
    found, expected = [g.ids for g in many.generate(prompts, 64)], [one.generate(prompt, 64).ids for prompt in prompts]
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 9
    assert [other.generate(prompt, 64).ids for prompt in prompts] == expected
    assert found == [g.ids for g in many.generate(prompts, 64)]


def test_one_graph_for_any_table() -> None:
    """A captured graph reads the table where it lies; entries that are no page hurt nothing."""
    made = compiled("llama-tiny", tokens=6, sequences=3, blocks=66, max_kv=ROWS, kv_page=64, kv_pages=9)
    step = DecodeStep(made, TensorSource(weights_for(made)), "cuda")
    ids, rows = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))
    pages = torch.full((3, ROWS // 64), -1, dtype=torch.int32, device="cuda")
    cache, plain = step.new_cache(), step.new_cache()
    step(ids, rows, cache=cache, pages=pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(ids, rows, cache=cache, pages=pages)
    step.check()
    assert int(cache.count_nonzero()) == 0, "there was no page to append to"
    for table, lens in (([[3, 1], [8], [0]], [0, 0, 0]), ([[3, 1], [8], [0]], [1, 1, 1]), ([[3, 1], [2], [0]], [64, 0, 2])):
        given = torch.tensor([row + [-1] * (ROWS // 64 - len(row)) for row in table], dtype=torch.int32, device="cuda")
        pages.copy_(given)
        ids.copy_(torch.tensor([5, 6, 7]))
        rows.copy_(torch.tensor(lens))
        with step.turn():
            graph.replay()
        step.check()
        expected = step(ids, torch.tensor(lens, device="cuda"), cache=plain, pages=given)
        step.check()
        assert out.logits.equal(expected.logits) and cache.equal(plain)
    before = cache.clone()
    pages.fill_(1 << 30)
    with step.turn():
        graph.replay()
    step.check()
    assert cache.equal(before)
