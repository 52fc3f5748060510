"""Batches in the emulator: sequences of unequal lengths in one launch, against the torch meaning of each by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.check.batch import Batch, after, batches, segments
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate import Policy
from megadsl.runtime.kv import KvCache
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource
from megadsl.types import ceil_div
from tests.batches import BatchBench, batch_steps, check_batches, same, several, singles
from tests.kernels import Configure, Oracle, Step, bits, compiled, distance, one_build, weights_for
from tests.schedules import everywhere, in_two_splits, kv_loader
from tests.wires import SYNCS

WINDOW = 24


def in_sixteen_splits(s: ScheduleBlock) -> None:
    s["attention"].split(kv=16)


# name: model, tokens, sequences, blocks, schedule, fields
KERNELS: dict[str, tuple[str, int, int, int, Configure | None, dict[str, object]]] = {
    "three": ("llama-tiny", 4, 3, 3, None, {}),
    "splits": ("llama-tiny", 6, 3, 9, None, {}),
    "sentinel": ("llama-tiny", 3, 3, 5, in_two_splits(everywhere(SYNCS["Sentinel"])), {}),
    "flag": ("llama-tiny", 3, 2, 3, in_two_splits(everywhere(SYNCS["Flag"])), {}),
    "many": ("llama-tiny-odd", 16, 8, 5, None, {}),
    "norms": ("qwen3-tiny", 5, 4, 2, None, {}),
    "wide": ("llama-tiny-wide", 2, 2, 7, None, {}),
    "window": ("llama-tiny", 8, 3, 3, None, {"sliding_window": WINDOW}),
    "loader": ("llama-tiny", 4, 2, 5, kv_loader, {}),
    "more-splits-than-chunks": ("llama-tiny-wide", 16, 5, 66, in_sixteen_splits, {}),
}


@cache
def kernels() -> dict[str, Compiled]:
    return one_build(
        {
            name: compiled(model, tokens=tokens, sequences=n, blocks=blocks, configure=configure, fields=load(model)[1] | fields)
            for name, (model, tokens, n, blocks, configure, fields) in KERNELS.items()
        }
    )


def sizes(name: str) -> list[tuple[list[int], list[int]]]:
    """Lengths of nothing, about a chunk's end and of many chunks, in several orders; new tokens for one, for some, for all."""
    _, tokens, n, *_ = KERNELS[name]
    lengths = ([5, 0, 1], [0, 0, 0], [100, 3, 17], [15, 16, 33], [2, 111, 64])
    counts = ([1, 1, 1], [tokens - n + 1, 1, 1], [0, tokens, 0], [tokens - 1, 0, 1], [1, 0, 1])

    def spread(of: list[int], idle: int) -> list[int]:
        return [*of, *[idle] * n][:n]

    found = []
    for index, kvs in enumerate(lengths):
        new = spread(counts[index], 1 if index == 0 and tokens >= n else 0)
        found.append((spread(kvs, 7 * index), new))
    if tokens >= 6:
        found.append((spread([5, 0, 1], 0), spread([5, 0, 1], 0)))
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_batches(name: str) -> None:
    check_batches(kernels()[name], sizes(name), seeds=(3,))


def test_a_split_may_have_nothing_of_a_sequence() -> None:
    """Also where what it lies within is a sequence: there are fewer chunks than splits."""
    check_batches(kernels()["more-splits-than-chunks"], [([15, 16, 33, 90, 90], [15, 0, 1, 0, 0]), ([16, 16, 32, 0, 0], [1, 0, 1, 0, 0])])


def test_about_a_window() -> None:
    edges = (0, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 8, 2 * WINDOW + 15)
    check_batches(kernels()["window"], [([a, b, 100], [3, 1, 4]) for a, b in zip(edges, reversed(edges), strict=True)])


def test_a_tree_in_a_batch() -> None:
    """Masks of one sequence's tokens, a chain of another's."""
    bench = BatchBench(kernels()["splits"])
    (step,) = batch_steps(bench.made, [([20, 0, 40], [4, 0, 2])])
    step = replace(step, sequences=(replace(step.sequences[0], ancestors=(1, 3, 5, 13), positions=(20, 21, 21, 22)), *step.sequences[1:]))
    bench.put(step)
    bench.program.control.set_batch(step.kv_lens, step.counts, step.ids, [20, 21, 21, 22, 40, 41], step.ancestors)
    bench.program.launch()
    bench.program.check()
    oracle, logits = Oracle(bench.made, bench.weights), bench.program.logits
    for of, own in zip((step.sequences[0], step.sequences[2]), (logits[:4], logits[4:6]), strict=True):
        assert distance(own, oracle.run(of)[0]) < 2e-2


@pytest.mark.parametrize("name", ["splits", "sentinel"])
def test_sequences_do_not_see_each_other(name: str) -> None:
    """Not a bit of one depends on what the others hold, NaN included; only on how long they are."""
    bench = BatchBench(kernels()[name])
    (step,) = batch_steps(bench.made, [([40, 18, 65], [1, 1, 1])])
    expected = bench.run(step)
    others = replace(
        step,
        sequences=tuple(
            replace(of, seed=of.seed + 77 * (i != 1), ids=(9 + i,) if i != 1 else of.ids) for i, of in enumerate(step.sequences)
        ),
    )
    assert bits(bench.run(others).logits[1]).equal(bits(expected.logits[1]))
    bench.put(step)
    for i in (0, 2):
        cache = bench.caches()[i]
        for layer in range(bench.made.graph.layers):
            nan = torch.full((cache.kv_heads, step.kv_lens[i], cache.head_dim), float("nan"))
            cache.write(layer, nan, nan)
    bench.program.launch()
    bench.program.check()
    assert bits(bench.program.logits[1]).equal(bits(expected.logits[1]))
    assert bool(bench.program.logits[:3:2].isnan().all())


def test_a_sequence_alone() -> None:
    """With others idle it is what a kernel of one sequence makes of it, up to the order in which sums are added."""
    bench = BatchBench(kernels()["splits"])
    (together,) = batch_steps(bench.made, [([40, 18, 100], [1, 2, 1])])
    both, first = bench.run(together), 0
    for i, of in enumerate(together.sequences):
        single = replace(together, sequences=tuple(o if i == j else replace(o, ids=()) for j, o in enumerate(together.sequences)))
        alone = bench.run(single).logits
        assert distance(alone, both.logits[first : first + len(of.ids)]) < 5e-3
        first += len(of.ids)


STARTS = [([13, 0, 29], [1, 1, 1]), ([14, 30, 0], [2, 0, 1]), ([5, 0, 1], [1, 0, 0])]


@pytest.mark.parametrize("name", ["three", "sentinel", "flag"])
def test_a_launch_of_several_steps_is_as_many_launches(name: str) -> None:
    made = kernels()[name]
    tokens, n = made.manifest["tokens"], made.manifest["sequences"]
    bench = BatchBench(made)
    starts = [(kv[:n], counts[:n]) for kv, counts in STARTS if sum(counts[:n]) <= tokens]
    for seed, step in enumerate(batch_steps(made, starts)):
        expected = singles(bench, step, 5)
        for policy in (0, 1 + seed % (len(Policy) - 1)):
            bench.program.seed, bench.program.policy = seed + 1, policy
            assert same(several(bench, step, 5), expected), f"{step.kv_lens}, {step.counts}, policy {Policy(policy).name}"
        bench.program.policy = 0


def test_a_stop_id_of_any_sequence_ends_the_launch() -> None:
    bench = BatchBench(kernels()["three"])
    (step,) = batch_steps(bench.made, [([13, 0, 29], [1, 1, 1])])
    ids, *_ = singles(bench, step, 5)
    for sequence in range(3):
        stop = ids[2][sequence]
        ends = next(i for i, row in enumerate(ids) if stop in row)
        assert same(several(bench, step, 5, (stop,)), singles(bench, step, ends + 1))


def test_the_second_steps_of_a_batch_are_right() -> None:
    """What five launches append and choose is what the meaning of each sequence does with the ids that were chosen."""
    bench = BatchBench(kernels()["three"])
    (step,) = batch_steps(bench.made, [([13, 0, 29], [1, 2, 1])])
    ids, *_ = several(bench, step, 4)
    oracle, rows = Oracle(bench.made, bench.weights), bench.program.logits[:3]
    for i, of in enumerate(step.sequences):
        fed = (*of.ids, *(row[i] for row in ids[:-1]))
        assert distance(rows[i], oracle.run(replace(of, ids=fed))[0][-1]) < 2e-2


@pytest.mark.parametrize("name", ["three", "sentinel", "flag", "window", "norms"])
def test_no_race(name: str) -> None:
    bench, plain = BatchBench(kernels()[name], defines={DETECT: "1"}), BatchBench(kernels()[name])
    some = batch_steps(bench.made, sizes(name)[:4])
    for seed, step in enumerate(some):
        bench.program.seed = seed + 1
        assert bench.run(step).same(plain.run(step))
        assert bench.program.report is not None and not bench.program.report.races, "\n".join(map(str, bench.program.report.races))
    n, tokens = bench.made.manifest["sequences"], bench.made.manifest["tokens"]
    for kv, counts in STARTS:
        if len(kv) < n or sum(counts[:n]) > tokens:
            continue
        (step,) = batch_steps(bench.made, [(kv[:n], counts[:n])])
        found = several(bench, step, 4)
        assert not bench.program.report.races, "\n".join(map(str, bench.program.report.races))
        assert same(found, singles(plain, step, 4))


def test_every_chunk_of_every_sequence_once() -> None:
    """The cut, for all lengths of three sequences up to five chunks: in order, without gaps, and stretches differ by one chunk at most."""
    for splits, chunks, counts in product((1, 2, 3, 5, 16), product((0, 1, 2, 5), repeat=3), product((0, 1, 3), repeat=3)):
        batch: Batch = tuple((max(0, 16 * c - 3), n) for c, n in zip(chunks, counts, strict=True))
        units = [list(segments(splits, split, batch)) for split in range(splits)]
        for i, (kv_len, n) in enumerate(batch):
            own = [s for unit in units for s in unit if s.sequence == i]
            assert sum(s.end - s.begin for s in own) == (ceil_div(kv_len, 16) if n else 0)
            assert [s.fresh for s in own] == ([False] * (len(own) - 1) + [True] if n else [])
            assert all(a.end == b.begin for a, b in pairwise(own))
            assert all(s.begin < s.end or s.fresh for s in own)  # or a unit would publish what nobody has left
        items = [sum(max(s.end - s.begin, s.fresh) for s in unit) for unit in units]
        assert max(items) - min(items) <= 1


def test_later_steps_of_a_batch() -> None:
    assert after(((5, 3), (7, 0), (0, 1)), 0) == ((5, 3), (7, 0), (0, 1))
    assert after(((5, 3), (7, 0), (0, 1)), 2) == ((9, 1), (7, 0), (2, 1))
    assert len(batches(3, 4, (0, 16), 128)) == len(set(batches(3, 4, (0, 16), 128)))


def test_caches_beyond_32_bits() -> None:
    """Arenas of more than 2**31 elements, of which only those get memory that a step touches: the last sequence lies behind so many."""
    small, large = (compiled("llama-tiny", tokens=8, sequences=8, max_kv=rows) for rows in (128, 3 << 18))
    assert large.manifest["buffers"]["kv"] // 2 * 7 // 8 > 2**31 and large.source == small.source
    weights, found = weights_for(small), []
    for made in (small, large):
        arena = pack_weights(made.manifest, TensorSource(weights), "cpu", progress=False)
        program = Program(made.manifest, made.source, "cpu", arena)
        step = Step((5,), 40, 3)
        for i in (0, 7):
            cache = KvCache(made.manifest, program.buffers["kv"], i)
            for layer in range(2):
                cache.write(layer, *step.rows(layer, cache.kv_heads, cache.head_dim))
        program.set_chain([40, 0, 0, 0, 0, 0, 0, 40], [5] * 8)
        program.launch()
        program.check()
        keys, values = KvCache(made.manifest, program.buffers["kv"], 7).read(1, 41)
        found.append((program.logits.clone(), keys, values))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert distance(found[1][0][0], found[1][0][7]) < 5e-3 < distance(found[1][0][0], found[1][0][1])


def test_kernels_of_one_sequence_are_as_they_were() -> None:
    one = compile_model("llama-tiny", tokens=4, blocks=3, max_kv=128, check=False)
    assert "Sequences" not in one.source and "Batch" not in one.source.replace("kBatch", "") and one.plan.buffers["control"] == 512


@pytest.mark.parametrize(
    ("code", "words", "options"),
    [
        ("MK259", "a batch of 9 sequences in steps of 16 tokens", {"tokens": 16, "sequences": 9}),
        ("MK259", "at least as many tokens as sequences", {"tokens": 2, "sequences": 3}),
        ("MK259", "use 1 to 8", {"tokens": 1, "sequences": 0}),
        ("MK257", "a launch is an op", {"tokens": 2, "sequences": 2, "scope": "op"}),
        ("MK257", "it has no KV cache", {"tokens": 2, "sequences": 2, "model": True}),
        ("MK257", "layers of 'attention' have windows of their own", {"tokens": 2, "sequences": 2, "windows": [16, None]}),
    ],
)
def test_what_is_no_batch(code: str, words: str, options: dict[str, Any]) -> None:
    @mk.kernel
    def without_attention(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = mk.embed(mk.weight("table", (64, 64)), mk.input_ids(tokens))
        return mk.argmax(mk.linear(x, mk.weight("head", (64, 64))))

    model: Any = without_attention if options.pop("model", False) else "llama-tiny"
    if windows := options.pop("windows", None):
        model, values = load("llama-tiny")
        options |= {"config": values | {"sliding_window": mk.per_layer(windows)}}
    with pytest.raises(MegadslError) as caught:
        compile_model(model, **options)
    assert caught.value.code == code and words in str(caught.value)
    assert "test_kernel_batch.py" in str(caught.value) or model == "llama-tiny" or windows


REFUSED: dict[str, Configure] = {
    "each sequence of a batch takes its next token": lambda s: s.finish("warp"),
    "a unit of a batch has chunks of several sequences": lambda s: s["attention"].prefetch(registers=1),
    "whose rows are those of several sequences": lambda s: s["attention"].prefetch(l2=1024),
    "a split of a batch has chunks of several sequences": lambda s: s["attention"].split(kv=2).merge("cluster"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_for_one_sequence(words: str) -> None:
    with pytest.raises(MegadslError) as caught:
        compiled("llama-tiny", tokens=2, sequences=2, blocks=4, configure=REFUSED[words])
    assert words in str(caught.value)
