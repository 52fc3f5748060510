"""Several texts at once: BatchGenerator in the emulator, against a Generator of one text."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.runtime.batch import BatchGenerator
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource
from tests.kernels import compiled, distance, one_build, weights_for

PROMPTS = ([1, 2, 3], [5], [7, 8, 9, 10, 11, 12, 13], [4, 4], [100, 200, 300])


@cache
def kernels() -> dict[str, Compiled]:
    made = {n: compiled("llama-tiny", tokens=4, sequences=count) for n, count in (("batch", 3), ("one", 1))}
    return one_build(made)


def source() -> TensorSource:
    return TensorSource(weights_for(kernels()["one"]))


@pytest.fixture(scope="module")
def batch() -> BatchGenerator:
    return BatchGenerator(kernels()["batch"], source(), "cpu", progress=False, steps_per_launch=4)


@pytest.fixture(scope="module")
def one() -> Generator:
    return Generator(kernels()["one"], source(), "cpu", progress=False)


def test_more_texts_than_sequences(batch: BatchGenerator, one: Generator) -> None:
    """Each is what it is alone; the next prompt takes the place of a text that has ended."""
    arrived: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    found = batch.generate(PROMPTS, 9, on_token=lambda index, token, text: arrived[index].append(token))
    assert [g.ids for g in found] == [one.generate(prompt, 9).ids for prompt in PROMPTS]
    assert [g.ids for g in found] == list(arrived.values()) and [g.prompt_ids for g in found] == list(PROMPTS)
    assert all(g.ms_per_token > 0 for g in found) and batch.lengths == [0, 0, 0]


def test_texts_end_by_themselves(batch: BatchGenerator, one: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token of one text ends a launch early; the others go on."""
    plain = [one.generate(prompt, 9).ids for prompt in PROMPTS]
    stop = plain[0][4]

    def cut(ids: list[int]) -> list[int]:
        return ids[: ids.index(stop) + 1] if stop in ids else ids

    monkeypatch.setattr(batch, "_stops", lambda stop_at_end: frozenset({stop}))
    found = batch.generate(PROMPTS, 9)
    assert [g.ids for g in found] == [cut(ids) for ids in plain]
    assert 0 < len(found[0].ids) < 9 and any(len(g.ids) == 9 for g in found)


def test_a_token_or_none(batch: BatchGenerator, one: Generator) -> None:
    assert [g.ids for g in batch.generate(PROMPTS[:2], 1)] == [one.generate(prompt, 1).ids for prompt in PROMPTS[:2]]
    assert [g.ids for g in batch.generate(PROMPTS[:2], 0)] == [[], []]
    assert batch.generate([], 3) == []


def test_steps_of_unequal_sequences(batch: BatchGenerator, one: Generator) -> None:
    """A sequence is prefilled while another waits, goes on, is taken back."""
    batch.reset()
    batch.prefill({1: [7, 8, 9, 10, 11]})
    assert batch.lengths == [0, 5, 0]
    logits = batch.step([[1, 2], [12], []]).clone()
    assert batch.lengths == [2, 6, 0] and logits.shape == (3, 512)
    one.reset()
    assert distance(logits[:2], one.step([1, 2])) < 5e-3
    one.reset()
    one.prefill([7, 8, 9, 10, 11])
    assert distance(logits[2:], one.step([12])) < 5e-3
    keys, _ = batch.rows(1).read(1, 6)
    assert one.program.kv is not None and distance(keys.float(), one.program.kv.read(1, 6)[0].float()) < 2e-2
    batch.lengths[1] = 5
    assert torch.equal(batch.step([[], [12], []]), logits[2:]) or distance(batch.program.logits[:1], logits[2:]) < 5e-3


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ("MK453", lambda g: g.step([[], [], []])),
        ("MK453", lambda g: g.step([[1, 2], [3, 4], [5]])),
        ("MK497", lambda g: g.step([[1], [2]])),
        ("MK451", lambda g: g.step([[1], [512], []])),
        ("MK450", lambda g: g.generate([[1, 2], [3]], 128)),
        ("MK452", lambda g: g.generate([[1], []], 2)),
        ("MK450", lambda g: g.prefill({0: [1] * 129})),
    ],
)
def test_what_a_batch_refuses(batch: BatchGenerator, code: str, asked: object) -> None:
    batch.reset()
    with pytest.raises(MegadslError) as caught:
        asked(batch)  # type: ignore[operator]
    assert caught.value.code == code


def test_kernels_and_generators_belong_together() -> None:
    for kind, name in ((Generator, "batch"), (BatchGenerator, "one")):
        with pytest.raises(MegadslError, match="MK496"):
            kind(kernels()[name], source(), "cpu", progress=False)
