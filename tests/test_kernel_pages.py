"""Cached rows in pages, in the emulator: in random order in a pool full of NaN, against the torch meaning and rows that lie together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from specs import layers as kinds

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.check.checker import check_plan
from megadsl.check.edits import with_words
from megadsl.check.mutants import PlanMutant, judge_plan, plan_mutants
from megadsl.check.pages import place, stages
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate import Policy
from megadsl.emulate.abi import Point
from megadsl.emulate.equivalent import Facts, argument_for
from megadsl.emulate.mutants import mutants
from megadsl.lower.shape import PAGES
from megadsl.machine import machine
from megadsl.resources import include
from megadsl.runtime.control import ADVANCE, CHOSEN, STEPS_MADE
from megadsl.runtime.explore import Subject
from megadsl.runtime.mutants import MutableSubject
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource
from tests.batches import BatchBench, batch_steps, judge_batch
from tests.batches import several as batch_several
from tests.kernels import Bench, Configure, Step, bits, compiled, judge, one_build, steps, weights_for
from tests.schedules import alone, everywhere, in_two_splits, kv_loader, settled
from tests.test_kernel_cluster import clustered
from tests.wires import SYNCS

SM90 = machine("sm_90a")
WINDOW = 24
LOTS = 3 << 15  # pages of more than 2**31 elements
LAYERS = {
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 128,
    "windows": [16, None, 40],
    "thetas": [1e4, 1e6, 1e4],
    "scalings": [None] * 3,
}


def ahead(s: ScheduleBlock) -> None:
    s["attention"].prefetch(l2=3 << 11, ahead_of="down_proj").split(kv=2)


# name: model, tokens, sequences, page, blocks, schedule, fields, options
Case = tuple[Any, int, int, int, int, Configure | None, dict[str, object], dict[str, Any]]
KERNELS: dict[str, Case] = {
    "one": ("llama-tiny", 1, 1, 16, 3, None, {}, {}),
    "norms": ("qwen3-tiny", 1, 1, 32, 2, None, {}, {}),
    "some": ("llama-tiny-odd", 5, 1, 32, 5, kv_loader, {}, {}),
    "wide": ("llama-tiny-wide", 16, 1, 64, 7, None, {}, {}),
    "layers": (kinds.step, 2, 1, 16, 3, None, LAYERS, {}),
    "cluster": ("llama-tiny", 1, 1, 64, 4, clustered(2), {}, {}),
    "ahead": ("llama-tiny", 2, 1, 32, 3, ahead, {}, {}),
    "lanes": ("llama-tiny", 4, 1, 16, 3, None, {}, {"arch": "sm_80"}),
    "three": ("llama-tiny", 6, 3, 16, 9, in_two_splits(everywhere(SYNCS["Sentinel"])), {}, {}),
    "many": ("llama-tiny-odd", 16, 8, 64, 5, None, {}, {}),
    "window": ("llama-tiny", 8, 3, 32, 3, None, {"sliding_window": WINDOW}, {}),
    "lanes-batch": ("llama-tiny-wide", 4, 3, 32, 2, None, {}, {"arch": "sm_80"}),
}
BATCHES = [name for name, case in KERNELS.items() if case[2] > 1]
SINGLES = [name for name in KERNELS if name not in BATCHES]


def made(case: Case, page: int, **pool: int) -> Compiled:
    model, tokens, n, _, blocks, configure, fields, options = case
    own = load(model)[1] | fields if isinstance(model, str) else fields
    return compiled(model, tokens=tokens, sequences=n, kv_page=page, blocks=blocks, configure=configure, fields=own, **options, **pool)


@cache
def kernels() -> dict[tuple[str, bool], Compiled]:
    """Of each, the one with pages and the one without."""
    some = {(name, paged): made(case, case[3] if paged else 0) for name, case in KERNELS.items() for paged in (True, False)}
    some["tight", True] = made(KERNELS["three"], 16, kv_pages=10)
    for name, pages in (("few", 16), ("lots", LOTS)):
        some[name, True] = compiled("llama-tiny", tokens=8, sequences=8, kv_page=64, kv_pages=pages, configure=settled)
    return one_build(some)


@cache
def bench(name: str, paged: bool = True) -> Bench:
    return Bench(kernels()[name, paged])


@cache
def batch_bench(name: str, paged: bool = True) -> BatchBench:
    return BatchBench(kernels()[name, paged])


def lengths(name: str) -> list[tuple[int, int]]:
    """About the borders of the first two pages, with one token and with all."""
    _, tokens, _, page, *_ = KERNELS[name]
    borders = [0, 5, *(page * n + more for n in (1, 2) if page * n + 1 + tokens <= 128 for more in (-1, 0, 1)), 128 - tokens]
    return [(kv, tokens if i % 2 else 1) for i, kv in enumerate(borders)]


def batches(name: str) -> list[tuple[list[int], list[int]]]:
    _, tokens, n, page, *_ = KERNELS[name]

    def spread(of: list[int], idle: int = 0) -> list[int]:
        return [*of, *[idle] * n][:n]

    lens = ([5, 0, 1], [page - 1, page, page + 1], [2 * page - 1 if page < 64 else 90, 1, 0], [0, 0, 0], [100, 3, 17])
    counts = ([1, 1, 1], [1, tokens - 2, 1], [0, tokens, 0], [tokens - 2, 1, 1], [1, 0, 1])
    return [(spread(kv, 7 * i), spread(new)) for i, (kv, new) in enumerate(zip(lens, counts, strict=True))]


@pytest.mark.parametrize("name", SINGLES)
def test_one_sequence(name: str) -> None:
    """As the torch meaning, and bit for bit what the kernel makes of rows that lie together; under other schedules too."""
    some = steps(bench(name).made, lengths(name))
    found, plain = bench(name).play(some), bench(name, False).play(some)
    judge(bench(name).made, bench(name).weights, some, found)
    assert all(ours.same(theirs) for ours, theirs in zip(found, plain, strict=True))
    bench(name).program.seed = 5
    assert all(ours.same(theirs) for ours, theirs in zip(bench(name).play(some), plain, strict=True))
    bench(name).program.seed = 0


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch(name: str) -> None:
    """Of each sequence, with pages of all of them mixed in the pool."""
    ours, plain = batch_bench(name), batch_bench(name, False)
    some = batch_steps(ours.made, batches(name))
    found, apart = ours.play(some), plain.play(some)
    judge_batch(ours, some, found)
    for step, a, b in zip(some, found, apart, strict=True):
        assert a.ids == b.ids and bits(a.logits).equal(bits(b.logits)), f"{step.kv_lens}, {step.counts}"
        pairs = zip(ours.appended(step, a), plain.appended(step, b), strict=True)
        assert all(bits(x).equal(bits(y)) for xs, ys in pairs for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("name", ["three", "window", "one", "some"])
def test_a_launch_of_several_steps(name: str) -> None:
    """Whose rows end one page and begin the next: the same as in single launches, and as without pages."""
    _, tokens, n, page, *_ = KERNELS[name]
    kv, counts = ([page - 3, 0, 2 * page - 1][:n], [min(2, tokens), 1, 1][:n])
    found = []
    for paged in (True, False):
        if n > 1:
            many = batch_bench(name, paged)
            (step,) = batch_steps(many.made, [(kv, counts)])
            for seed, policy in ((0, 0), (1, int(Policy.LATE_COPIES))):
                many.program.seed, many.program.policy = seed, policy
                chosen, logits, *_ = batch_several(many, step, 6)
                found.append((chosen, logits, _rows(many.program, [k + c + 5 for k, c in zip(kv, counts, strict=True)])))
            many.program.seed = many.program.policy = 0
            continue
        one = bench(name, paged)
        (alone_step,) = steps(one.made, [(kv[0], counts[0])])
        for together in (6, 1):
            found.append(_decoded(one, alone_step, together))
    for chosen, logits, rows in found[1:]:
        assert chosen == found[0][0] and logits.equal(found[0][1]) and all(a.equal(b) for a, b in zip(rows, found[0][2], strict=True))


def _rows(program: Program, counts: Sequence[int]) -> list[torch.Tensor]:
    layers = program.manifest["layers"]
    return [bits(t) for i, count in enumerate(counts) for layer in range(layers) for t in program.rows(i).read(layer, count)]


def _decoded(one: Bench, step: Step, together: int) -> tuple[object, torch.Tensor, list[torch.Tensor]]:
    """Six greedy steps behind ``step``, so many a launch."""
    program, chosen = one.program, list[int]()
    program.reset()
    one.put_rows(step)
    program.reserve([step.kv + len(step.ids) + 5])
    masks = [(2 << i) - 1 for i in range(len(step.ids))]
    program.control.set_inputs(step.kv, step.ids, range(step.kv, step.kv + len(step.ids)), masks, ADVANCE)
    program.set_steps(together)
    while len(chosen) < 6:
        program.launch()
        words = program.check()
        chosen += words[CHOSEN : CHOSEN + words[STEPS_MADE]]
    program.set_steps(1)
    return chosen, bits(program.logits[:1]).clone(), _rows(program, [step.kv + len(step.ids) + 5])


RACES = ("one", "some", "lanes", "cluster", "three", "window", "lanes-batch")


@cache
def watched() -> dict[str, Compiled]:
    """For the race detector, which takes long to build: these alone."""
    return one_build({name: made(KERNELS[name], KERNELS[name][3]) for name in RACES})


@pytest.mark.parametrize("name", RACES)
def test_no_race(name: str) -> None:
    if name in BATCHES:
        batch = BatchBench(watched()[name], defines={DETECT: "1"})
        for seed, step in enumerate(batch_steps(batch.made, batches(name)[:4])):
            batch.program.seed = seed + 1
            assert batch.run(step).same(batch_bench(name).run(step))
            assert batch.program.report is not None and not batch.program.report.races
        (step,) = batch_steps(batch.made, [([KERNELS[name][3] - 2, 0, 3], [1, 1, 1])])
        batch_several(batch, step, 4)
        assert not batch.program.report.races
        return
    alone_bench = Bench(watched()[name], defines={DETECT: "1"})
    some = steps(alone_bench.made, lengths(name))
    for seed, (step, expected) in enumerate(zip(some, bench(name).play(some), strict=True)):
        alone_bench.program.seed = seed + 1
        assert alone_bench.run(step).same(expected)
        assert alone_bench.program.report is not None and not alone_bench.program.report.races


def test_one_op_a_launch() -> None:
    found = []
    for page in (0, 32):
        launched = Bench(compiled("llama-tiny", tokens=2, blocks=3, kv_page=page, configure=alone))
        some = steps(launched.made, [(0, 2), (31, 2), (33, 1)])
        found.append(launched.play(some))
        judge(launched.made, launched.weights, some, found[-1])
    assert all(a.same(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("entry", [-1, 24, 1 << 30, -(1 << 31)])
def test_an_entry_that_is_no_page(entry: int) -> None:
    """What lies outside of the pool is neither read nor written: rows without a page are not appended, the others as ever."""
    ours = batch_bench("three")
    (step,) = batch_steps(ours.made, [([16, 20, 40], [1, 1, 1])])
    expected = ours.run(step)
    ours.put(step)
    assert ours.program.pages is not None and ours.program.pages.count == 24
    table, before = ours.program.pages.table, ours.program.buffers["kv"].clone()
    last = int(table[0, 1])
    table[0, 1] = entry  # of its new row
    ours.program.launch()
    ours.program.check()
    after = ours.program.buffers["kv"]
    assert bits(ours.program.logits[:3]).equal(bits(expected.logits)), "cached rows were read from elsewhere"
    table[0, 1] = last
    for arena, of in ((before, expected.kv), (after, expected.kv)):
        chunks = [arena.view(2, 24, -1)[:, last], of.view(2, 24, -1)[:, last]]
        assert not chunks[0].equal(chunks[1])  # nothing was appended
    elsewhere = [page for page in range(24) if page != last]
    assert after.view(2, 24, -1)[:, elsewhere].equal(expected.kv.view(2, 24, -1)[:, elsewhere])
    table[1, 0] = entry  # of rows that are read: anything, from within the pool
    ours.program.launch()
    ours.program.check()


def test_the_table_is_what_says_where_rows_lie() -> None:
    """An entry that is another sequence's: its rows are read."""
    ours = batch_bench("three")
    (step,) = batch_steps(ours.made, [([40, 20, 40], [1, 1, 1])])
    expected = ours.run(step)
    ours.put(step)
    assert ours.program.pages is not None
    table = ours.program.pages.table
    table[0, 0] = table[2, 0]
    ours.program.launch()
    ours.program.check()
    assert not bits(ours.program.logits[0]).equal(bits(expected.logits[0]))
    assert bits(ours.program.logits[1:3]).equal(bits(expected.logits[1:3]))


def test_a_pool_smaller_than_all_rows() -> None:
    """A long sequence beside short ones, in pages that would not do for three long ones; the kernel is the same."""
    small = kernels()["tight", True]
    assert small.manifest["buffers"]["kv"] * 24 == kernels()["three", True].manifest["buffers"]["kv"] * 10
    assert small.manifest["launches"] == kernels()["three", True].manifest["launches"]
    crowded = BatchBench(small)
    (step,) = batch_steps(small, [([100, 3, 17], [1, 1, 1])])
    judge_batch(crowded, [step], [crowded.run(step)])
    assert crowded.program.pages is not None and crowded.program.pages.free == []
    (more,) = batch_steps(small, [([100, 16, 17], [1, 1, 1])])
    with pytest.raises(MegadslError, match="sequence 2 needs 2 for 18 rows, 0 are its own and 1 of the pool's 10 are free"):
        crowded.put(more)


def test_pages_beyond_32_bits() -> None:
    """A pool of more than 2**31 elements, of which only those pages get memory that a step touches: those at its end."""
    found = []
    for name, pages in (("few", 16), ("lots", LOTS)):
        large = kernels()[name, True]
        arena = pack_weights(large.manifest, TensorSource(weights_for(large)), "cpu", progress=False)
        program = Program(large.manifest, large.source, "cpu", arena)
        assert program.pages is not None and program.pages.count == pages
        program.pages.free = list(range(pages - 16, pages))
        program.reserve([41, 0, 0, 0, 0, 0, 0, 41])
        for i in (0, 7):
            for layer in range(2):
                step = Step((5,), 40, 3)
                program.rows(i).write(layer, *step.rows(layer, 2, large.manifest["kv"]["head_dim"]))
        program.set_chain([40, 0, 0, 0, 0, 0, 0, 40], [5] * 8)
        program.launch()
        program.check()
        found.append((program.logits.clone(), *program.rows(7).read(1, 41)))
    assert large.manifest["buffers"]["kv"] // 2 > 2**31
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_every_stage_is_that_of_rows_that_lie_together() -> None:
    """All runs of up to 14 chunks, for all pages and stages."""
    for page, per_stage, begin, end in product((1, 2, 4), (1, 2, 4, 8), range(9), range(15)):
        found = [part for stage in stages(begin, end, per_stage, page) for part in stage]
        assert [(p.entry, p.inside + i) for p in found for i in range(p.chunks)] == [place(at, page) for at in range(begin, end)]
        assert all(p.inside + p.chunks <= page and 0 < p.chunks <= per_stage - p.at for p in found)
        assert [sum(p.chunks for p in s) for s in stages(begin, end, per_stage, page)][:-1] == [per_stage] * (
            (end - begin - 1) // per_stage
        )


@pytest.mark.parametrize("name", ["one", "three"])
def test_every_mistake_in_the_plan_is_noticed(name: str) -> None:
    plan = made(KERNELS[name], KERNELS[name][3]).plan
    proved = check_plan(plan).proved
    assert any("KV pages of 16 rows" in line for line in proved) and any("lie apart" in line for line in proved)
    own, others = list[PlanMutant](), list[PlanMutant]()
    for mutant in plan_mutants(plan):
        (own if re.search("page|entries|buffer", str(mutant)) else others).append(mutant)
    assert len(own) > 8 and all(judge_plan(mutant, plan, SM90).code == "MK536" for mutant in own)
    assert [str(m) for m in others[::10] if judge_plan(m, plan, SM90).survived] == []


def test_a_pool_that_is_too_large_is_refused() -> None:
    """By the checker, of a plan whose kernel would find pages behind the arena's end."""
    plan = made(KERNELS["three"], 16).plan
    (found,) = check_plan(with_words(plan, PAGES, {0: 25})).findings
    assert found.code == "MK536" and "a layer has" in found.message and "25 pages take" in found.message and "one place" in found.mend
    (found,) = check_plan(with_words(plan, PAGES, {1: 7})).findings
    assert found.code == "MK536" and "7 entries of a sequence reach 112 rows" in found.message and found.span.line > 0


def test_kernels_without_pages_are_as_they_were() -> None:
    text = made(KERNELS["three"], 0).source
    assert "Page" not in text and "mk::Buffers buffers" in text
    assert (
        compile_model("llama-tiny", kv_page=16, check=False).source
        == compile_model("llama-tiny", kv_page=16, kv_pages=40, check=False).source
    )


@pytest.mark.parametrize(
    ("code", "words", "options"),
    [
        ("MK282", "KV pages of 24 rows", {"kv_page": 24}),
        ("MK282", "use pages of 16, 32 or 64 rows", {"kv_page": 128}),
        ("MK283", "but cached rows are not in pages", {"kv_pages": 8}),
        ("MK283", "may need 6", {"kv_page": 16, "kv_pages": 5, "tokens": 17 - 1, "sequences": 6}),
        ("MK283", "has no KV cache", {"kv_page": 16, "model": True}),
    ],
)
def test_what_pages_cannot_be(code: str, words: str, options: dict[str, Any]) -> None:
    @mk.kernel
    def without_attention(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = mk.embed(mk.weight("table", (64, 64)), mk.input_ids(tokens))
        return mk.argmax(mk.linear(x, mk.weight("head", (64, 64))))

    model = without_attention if options.pop("model", False) else "llama-tiny"
    with pytest.raises(MegadslError) as caught:
        compile_model(model, **options)
    assert caught.value.code == code and words in str(caught.value)


def test_mistakes_in_a_stage_of_pages_are_noticed() -> None:
    """Of the barrier of a stage that is put together from several copies: what it expects, and what waits for it."""
    small = compiled("llama-tiny", blocks=4, kv_page=16, max_kv=64)
    subject = MutableSubject(Subject(small.manifest, small.source), (1, 2, 3))()
    places = subject.home.points((1, 2))[0]
    facts = Facts(small.plan, places, include())
    found = [m for m in mutants(places, 10**7) if any("stream_pages" in frame.function for frame in m.place.frames)]
    assert {m.place.kind for m in found} >= {Point.PHASE, Point.EXPECT}
    for mutant in found:
        verdict = subject.judge(mutant)
        assert not verdict.possible or not verdict.survived or argument_for(mutant, facts), verdict
    assert all(subject.judge(m).possible for m in found if m.place.kind is Point.EXPECT)
