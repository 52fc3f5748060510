"""Attention over a window and scores with a soft cap, in the emulator, against their torch meaning."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.check.model import Device, attention_unit
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.emulate import Policy
from megadsl.ops.cost import total_cost
from megadsl.reference import ReferenceModel
from megadsl.reference.meaning import visible_rows, windowed
from megadsl.reference.plain import ATTENTION_FORMS, PlainModel
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource
from tests.kernels import (
    Bench,
    Configure,
    Oracle,
    Step,
    bits,
    check,
    compiled,
    config,
    distance,
    judge,
    one_build,
    steps,
    together,
    weights_for,
)
from tests.schedules import everywhere, kv_loader

WINDOW = 24  # a chunk and a half


def edges(window: int, tokens: int) -> list[tuple[int, int]]:
    """Cached rows about the window's and the chunks' ends."""
    rows = (0, 1, window - 2, window - 1, window, window + 1, window + 7, window + 8, window + 9, 2 * window + 15, 100)
    return [(kv, (tokens, 1, max(1, tokens - 1))[i % 3]) for i, kv in enumerate(sorted({max(0, kv) for kv in rows}))] + [(100, tokens)]


def direct(s: ScheduleBlock) -> None:
    everywhere(mk.Sentinel())(s)


WINDOWS: list[tuple[str, int, int, int, Configure | None]] = [
    ("llama-tiny", 1, 7, WINDOW, None),
    ("llama-tiny", 1, 3, 16, direct),
    ("llama-tiny", 1, 2, 1, kv_loader),
    ("llama-tiny", 4, 3, WINDOW, None),  # FewRows
    ("llama-tiny-odd", 16, 3, 17, None),  # Softmax
    ("llama-tiny-wide", 2, 5, 40, direct),
    ("llama-tiny", 5, 3, WINDOW, None),
]
CAPPED: list[tuple[int, Configure | None, dict[str, Any]]] = [
    (1, None, {}),
    (1, direct, {}),
    (4, None, {"sliding_window": WINDOW}),
    (16, None, {}),
]


@cache
def kernels() -> tuple[list[Compiled], list[Compiled]]:
    """Those of WINDOWS, and those of CAPPED."""
    windows = [
        compiled(model, tokens=tokens, blocks=blocks, fields=load(model)[1] | {"sliding_window": window}, configure=configure)
        for model, tokens, blocks, window, configure in WINDOWS
    ]
    capped = [
        compiled("llama-tiny", tokens=tokens, fields=config(attn_softcap=0.5, **fields), configure=configure)
        for tokens, configure, fields in CAPPED
    ]
    made = list(together(*windows, *capped))
    return made[: len(windows)], made[len(windows) :]


def windowed_tiny(tokens: int) -> Compiled:
    """llama-tiny with a window of WINDOW."""
    return next(made for made, of in zip(kernels()[0], WINDOWS, strict=True) if (of[0], of[1], of[3]) == ("llama-tiny", tokens, WINDOW))


@pytest.mark.parametrize("index", range(len(WINDOWS)), ids=lambda i: "-".join(map(str, WINDOWS[i][:4])))
def test_windows(index: int) -> None:
    _, tokens, _, window, _ = WINDOWS[index]
    check(kernels()[0][index], edges(window, tokens), seeds=(1,))


def test_a_window_hides_rows() -> None:
    """The kernel's results are not those of the same model without a window, once there are more rows."""
    made = windowed_tiny(4)
    bench = Bench(made)
    whole = Oracle(compiled("llama-tiny", tokens=4), bench.weights)
    near, far = steps(made, [(WINDOW - 4, 4), (WINDOW - 3, 4)])
    assert distance(bench.run(near).logits, whole.run(near)[0]) < 0.02 < distance(bench.run(far).logits, whole.run(far)[0])


@pytest.mark.parametrize("tokens", [1, 4])
def test_chunks_before_the_window_are_not_read(tokens: int) -> None:
    made = windowed_tiny(tokens)
    bench, step = Bench(made), Step((3, 77, 500, 41)[:tokens], 100, 5)
    expected = bench.run(step)
    put, first = bench.put_rows, (100 + 1 - WINDOW) // 16 * 16

    def poisoned(of: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
        put(of)
        kv = bench.program.kv
        assert kv is not None
        for layer in range(made.graph.layers):
            kv.write(layer, *(torch.full((kv.kv_heads, first, kv.head_dim), float("nan")).bfloat16() for _ in "kv"))
        return [kv.read(layer, kv.max_kv) for layer in range(made.graph.layers)]

    bench.put_rows = poisoned  # type: ignore[method-assign]
    again = bench.run(step)
    assert again.logits.equal(expected.logits)


def test_a_tree_of_tokens_sees_as_far_as_each_path_is_long() -> None:
    made = windowed_tiny(5)
    some = [
        replace(step, positions=tuple(step.kv + depth for depth in (0, 1, 1, 2, 2)), ancestors=(0b1, 0b11, 0b101, 0b1011, 0b10101))
        for step in steps(made, [(kv, 5) for kv in (WINDOW - 2, WINDOW, WINDOW + 7, WINDOW + 22, 90)])
    ]
    bench = Bench(made)
    judge(made, bench.weights, some, bench.play(some))


def test_a_text_longer_than_its_window() -> None:
    """Step by step, several steps a launch, and the whole prompt at once in torch."""
    made = windowed_tiny(4)
    weights, prompt = weights_for(made), [i * 37 % 512 for i in range(40)]
    generator = Generator(made, TensorSource(weights), "cpu", progress=False)
    ids = list(generator.generate(prompt, 12).ids)
    logits = bits(generator.program.logits[:1]).clone()
    several = Generator(made, TensorSource(weights), "cpu", progress=False, steps_per_launch=4)
    assert list(several.generate(prompt, 12).ids) == ids and bits(several.program.logits[:1]).equal(logits)
    fp32 = ReferenceModel(made.graph, {k: v.float() for k, v in weights.items()}, 64, "fp32")
    exact = fp32.step([*prompt, *ids[:-1]])
    assert [int(i) for i in exact[len(prompt) - 1 :].argmax(-1)] == ids


@cache
def watched() -> dict[int, Compiled]:
    """Kernels for the race detector, which is a build of its own, by tokens."""
    return one_build({tokens: compiled("llama-tiny", tokens=tokens, fields=config(sliding_window=WINDOW)) for tokens in (1, 4)})


@pytest.mark.parametrize("tokens", [1, 4])
def test_no_schedule_of_a_windowed_kernel_shows_a_race(tokens: int) -> None:
    made = watched()[tokens]
    some = steps(made, [(WINDOW + 9, tokens), (100, 1)])
    bench = Bench(made, defines={DETECT: "1"})
    first = bench.play(some)
    for seed, policy in enumerate(Policy):
        bench.program.seed, bench.program.policy = seed, policy
        bench.program.reset()
        for step, expected in zip(some, first, strict=True):
            assert bench.run(step).same(expected)
            assert bench.program.report is not None and not bench.program.report.races


def test_what_a_window_costs_and_covers() -> None:
    made, whole = (compiled("llama-tiny", fields=config(sliding_window=w), max_kv=1024) for w in (WINDOW, None))
    cached = [total_cost(m.graph, 1, kv).kv_bytes for m in (made, whole) for kv in (WINDOW - 1, WINDOW, 1000)]
    assert cached[0] == cached[1] == cached[2] == cached[3] < cached[4] < cached[5]
    heads = Device(made.plan).heads("attention")
    for kv_len in range(0, 200):
        units = [attention_unit(heads.splits, split, kv_len, WINDOW) for split in range(heads.splits)]
        chunks = [chunk for _, begin, end, _ in units for chunk in range(begin, end)]
        assert chunks == list(range(max(0, kv_len + 1 - WINDOW) // 16, -(-kv_len // 16)))


def test_a_window_in_torch() -> None:
    chain = windowed(visible_rows(4, [0b1, 0b11, 0b111]), 3)
    assert chain.int().tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]
    for fields in ({"sliding_window": 6}, {"attn_softcap": 2.0}, {"sliding_window": 6, "attn_softcap": 2.0}):
        made = compiled("llama-tiny", tokens=2, fields=config(**fields))
        weights = weights_for(made)
        exact = ReferenceModel(made.graph, weights, 32, "fp32").step(range(12))[-2:]
        for form in ATTENTION_FORMS:
            plain = PlainModel(made.graph, weights, 32, 2)
            for first in range(0, 12, 2):
                plain.set_inputs([first, first + 1], first)
                logits, _ = plain.step(first + 2, form)()
            assert distance(logits, exact) < 0.05


@pytest.mark.parametrize("index", range(len(CAPPED)), ids=lambda i: f"{CAPPED[i][0]} tokens, {i}")
def test_soft_caps(index: int) -> None:
    made, (tokens, _, fields) = kernels()[1][index], CAPPED[index]
    bench = Bench(made)
    some = steps(made, [(0, tokens), (17, 1), (33, tokens), (100, tokens)])
    results = bench.play(some)
    judge(made, bench.weights, some, results)
    plain = Oracle(compiled("llama-tiny", tokens=tokens, fields=config(**fields)), bench.weights)
    assert distance(results[3].logits, plain.run(some[3])[0]) > 0.1


def test_a_window_shorter_than_a_step() -> None:
    with pytest.raises(MegadslError) as refused:
        compiled("llama-tiny", tokens=4, fields=config(sliding_window=3))
    (found,) = refused.value.diagnostics
    assert found.code == "MK254" and "3 rows is shorter than a step of 4 tokens" in found.message and found.span.file.endswith("llama.py")
