"""A batch's step as a torch module: counts and rows of each sequence are tensors, read where they lie."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.runtime.weights import TensorSource
from megadsl.torch import DecodeStep
from megadsl.torch.arguments import StepInputs
from tests.kernels import compiled, distance, one_build, weights_for


@cache
def kernels() -> dict[str, Compiled]:
    made = {n: compiled("llama-tiny", tokens=6, sequences=count) for n, count in (("batch", 3), ("one", 1))}
    return one_build(made)


@pytest.fixture(scope="module")
def batch() -> DecodeStep:
    return DecodeStep(kernels()["batch"], TensorSource(weights_for(kernels()["one"])), "cpu")


@pytest.fixture(scope="module")
def one(batch: DecodeStep) -> DecodeStep:
    """Shares the weights, and the first sequence's cache."""
    return DecodeStep(kernels()["one"], batch)


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_unequal_sequences(batch: DecodeStep, one: DecodeStep) -> None:
    cache, alone = batch.new_cache(), one.new_cache()
    out = batch(tensor(3, 141, 59, 9), tensor(0, 0, 0), counts=tensor(3, 0, 1), cache=cache)
    assert out.next_ids.equal(out.logits.argmax(-1)) and out.logits.shape == (4, 512)
    expected = one(tensor(3, 141, 59), torch.tensor(0), cache=alone)
    assert distance(out.logits[:3], expected.logits) < 5e-3
    one(tensor(9), torch.tensor(0), cache=batch.sequence_cache(1, cache))  # a step of one sequence fills another one's rows
    out = batch(tensor(5, 6, 7), tensor(3, 1, 1), cache=cache)  # one token of each
    assert distance(out.logits[:1], one(tensor(5), torch.tensor(3), cache=alone).logits) < 5e-3
    assert distance(out.logits[1:2], one(tensor(6), torch.tensor(1), cache=batch.sequence_cache(2, cache).clone()).logits) < 5e-3
    keys, _ = batch.rows(cache, 2).read(0, 2)
    assert distance(keys[:, :1].float(), batch.rows(cache, 1).read(0, 1)[0].float()) < 1e-2  # both began with id 9


def test_positions_and_masks_are_those_of_chains(batch: DecodeStep) -> None:
    ids, kv, counts = tensor(1, 2, 3, 4, 5), tensor(2, 7, 0), tensor(1, 1, 3)
    first, second = batch.new_cache(), batch.new_cache()
    plain = batch(ids, kv, counts=counts, cache=first)
    given = {"positions": tensor(2, 7, 0, 1, 2), "ancestors": tensor(1, 2, 4, 12, 28)}
    assert batch(ids, kv, counts=counts, cache=second, **given).logits.equal(plain.logits) and first.equal(second)


def test_one_graph_of_a_compiled_function(batch: DecodeStep) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids: torch.Tensor, kv_len: torch.Tensor, counts: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return batch(ids, kv_len, counts=counts, cache=cache).logits * 2

    for counts in (tensor(2, 1, 0), tensor(0, 1, 2)):
        first, second = batch.new_cache(), batch.new_cache()
        asked = tensor(1, 2, 3), tensor(0, 4, 9), counts
        assert step(*asked, first).equal(batch(asked[0], asked[1], counts=counts, cache=second).logits * 2)


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ("MK499", lambda s: s(tensor(1, 2), tensor(0, 0, 0), counts=tensor(1, 1, 1))),
        ("MK499", lambda s: s(tensor(1, 2), tensor(0, 0, 0), counts=tensor(3, -1, 0))),
        ("MK499", lambda s: s(tensor(1, 2), tensor(0, 0, 0))),
        ("MK450", lambda s: s(tensor(1, 2, 3), tensor(0, 128, 0))),
        ("MK484", lambda s: s(tensor(1, 2, 3), tensor(0, 0))),
        ("MK484", lambda s: s(tensor(1, 2, 3), tensor(0, 0, 0), counts=tensor(1, 2))),
        ("MK455", lambda s: s(tensor(1, 2, 3), tensor(0, 0, 0), ancestors=tensor(1, 3, 4))),
        ("MK454", lambda s: s(tensor(1, 2, 3), tensor(0, 0, 0), positions=tensor(0, 0, 200))),
        ("MK453", lambda s: s(torch.arange(7), tensor(0, 0, 0), counts=tensor(3, 3, 1))),
        ("MK496", lambda s: s.generate([1, 2], 3)),
    ],
)
def test_what_a_batch_refuses(batch: DecodeStep, code: str, asked: object) -> None:
    with pytest.raises(MegadslError, match=r"test_torch_batch\.py") as caught:
        asked(batch)  # type: ignore[operator]
    assert caught.value.code == code


def test_counts_are_for_batches(one: DecodeStep) -> None:
    with pytest.raises(MegadslError, match="MK496"):
        one(tensor(1), torch.tensor(0), counts=tensor(1))


def test_values_out_of_range_are_clamped(batch: DecodeStep) -> None:
    """What a GPU does, which nobody asks for values: the launch ends, and touches nothing but the cache."""
    loaded, cache = batch.loaded, batch.new_cache()
    inputs = loaded._batch[3]
    inputs.stage(StepInputs(tensor(-5, 10**6, 3), tensor(-9, 10**6, 127), tensor(-1, 10**6, 2)))
    words = batch.program.control.words.tolist()
    assert words[128:131] == [0, 125, 126] and words[136:139] == [0, 3, 2] and words[8:11] == [0, 511, 3]
    with batch.program.using(kv=cache):
        batch.program.launch()
    batch.check()
