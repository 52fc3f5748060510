"""A compiled step inside torch programs: the same bits eager, compiled and by the Generator; opcheck; DLPack; who holds which memory."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.library import opcheck

from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.reference import ReferenceModel
from megadsl.runtime.control import MegakernelHang
from megadsl.runtime.generate import Generator
from megadsl.runtime.program import Program
from megadsl.runtime.weights import TensorSource
from megadsl.torch import DecodeStep, decode_step
from tests.gpu import probe
from tests.kernels import FACTOR, SLACK, Weights, bits, compiled, distance, weights_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IDS = [3, 141, 59, 26, 5, 358, 97]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def tiny(tokens: int = 4) -> Compiled:
    return compiled("llama-tiny", tokens=tokens)


@cache
def weights() -> Weights:
    return weights_for(tiny())


def tiny_step(device: str) -> DecodeStep:
    return DecodeStep(tiny(), weights(), device)


def probe_step(device: str = "cpu", **options: Any) -> DecodeStep:
    return DecodeStep(probe.Probe(), {"w": torch.arange(1.0, probe.VOCAB + 1)[:, None]}, device, **options)


def tensor(values: object, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.tensor(values, device=device)


def chunks(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """IDS as steps of different sizes: ids and the rows before."""
    return [(tensor(IDS[begin:end], device), tensor([begin], device)) for begin, end in ((0, 4), (4, 6), (6, 7))]


def test_eager_compiled_and_the_generator_give_the_same_bits(device: str) -> None:
    generator = Generator(tiny(), TensorSource(weights()), device, progress=False)
    step, other = tiny_step(device), tiny_step(device)
    fast = torch.compile(other, fullgraph=True, dynamic=True)
    for ids, rows in chunks(device):
        want = generator.step(ids.tolist())
        for got in (step(ids, rows), fast(ids, rows)):
            assert got.logits.dtype == torch.float32 and bits(got.logits).equal(bits(want))
            assert got.next_ids.dtype == torch.int64 and got.next_ids.equal(want.argmax(-1))
    for cache_of in (step, other):
        assert cache_of.cache.equal(generator.program.buffers["kv"]), "the same rows, and nothing else"
    step.check()


def test_logits_are_those_of_the_meaning(device: str) -> None:
    def of(arithmetic: str, dtype: torch.dtype) -> torch.Tensor:
        model = ReferenceModel(tiny().graph, {k: v.to(dtype) for k, v in weights().items()}, tiny().manifest["max_kv"], arithmetic)
        return torch.cat([model.step(ids.tolist()) for ids, _ in chunks("cpu")])

    step, exact = tiny_step(device), of("fp32", torch.float32)
    ours = torch.cat([step(ids, rows).logits.cpu() for ids, rows in chunks(device)])
    assert distance(ours, exact) <= FACTOR * distance(of("bf16", torch.bfloat16), exact) + SLACK


def test_positions_and_ancestors_are_the_generators(device: str) -> None:
    generator = Generator(tiny(), TensorSource(weights()), device, progress=False)
    generator.prefill(IDS[:3])
    want = generator.step(IDS[3:6], positions=[3, 4, 4], ancestors=[1, 3, 5])
    step = tiny_step(device)
    step(tensor(IDS[:3], device), tensor(0, device))
    where = {"positions": tensor([3, 4, 4], device), "ancestors": tensor([1, 3, 5], device)}
    assert bits(step(tensor(IDS[3:6], device), tensor(3, device), **where).logits).equal(bits(want))
    for dtype in (torch.int32, torch.int64):
        again = step(tensor(IDS[3:6], device).to(dtype), tensor([3], device).to(dtype), **{k: v.to(dtype) for k, v in where.items()})
        assert bits(again.logits).equal(bits(want)), "a row that is written twice counts once"


def test_opcheck(device: str) -> None:
    step, ids = tiny_step(device), tensor(IDS[:3], device)
    for rest in ((None, None), (tensor([7, 8, 8], device), tensor([1, 3, 5], device))):
        found = opcheck(decode_step, (ids, tensor([5], device), None, *rest, step.weights, step.cache, None, step.name))
        assert set(found.values()) == {"SUCCESS"}


def test_a_compiled_function_works_in_the_cache_itself(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    step, used = tiny_step(device), []
    using = Program.using
    monkeypatch.setattr(Program, "using", lambda self, **tensors: used.append(tensors["kv"].data_ptr()) or using(self, **tensors))
    fast = torch.compile(lambda ids, rows, arena: step(ids, rows, cache=arena).next_ids, fullgraph=True)
    another = step.new_cache()
    fast(*chunks(device)[0], step.cache)
    fast(*chunks(device)[0], another)
    assert used == [step.cache.data_ptr(), another.data_ptr()] and step.cache.equal(another) and int(another.count_nonzero()) > 0


def test_sequences_take_turns_and_outputs_stay(device: str) -> None:
    step = tiny_step(device)
    first, second = step.new_cache(), step.new_cache()
    (a, rows), (b, more), _ = chunks(device)
    kept = step(a, rows, cache=first)
    before = kept.logits.clone()
    step(a.flip(0), rows, cache=second)
    after = step(b, more, cache=first)
    assert kept.logits.equal(before), "no later launch writes into what was given"
    own = tiny_step(device)
    own(a, rows)
    assert after.logits.equal(own(b, more).logits) and first.equal(own.cache) and int(step.cache.count_nonzero()) == 0
    keys, values = own.rows().read(layer=1, rows=6)
    assert keys.shape == values.shape == (2, 6, 64) and all(bool(t.any()) for t in (keys, values))


def test_tensors_of_other_libraries(device: str) -> None:
    arrays = {name: weight.float().numpy() for name, weight in weights().items()}
    step, want = DecodeStep(tiny(), arrays, device), tiny_step(device)
    ids, rows = chunks(device)[0]
    assert step.weights.equal(want.weights)
    assert np.from_dlpack(step(ids, rows).logits.cpu()).shape == (4, 512)
    if device == "cpu":
        arena = np.zeros(step.cache.numel(), np.uint8)
        out = step(ids.numpy(), rows.numpy(), cache=arena)
        assert out.logits.equal(want(ids, rows).logits) and arena.any(), "the kernel wrote into numpy's memory"
        strided = np.repeat(ids.numpy(), 2)[::2]
        assert step(strided, rows).logits.equal(out.logits)


def test_a_model_of_torch_brings_its_weights() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(1.0, probe.VOCAB + 1)[:, None])

    step = DecodeStep(probe.Probe(), Model(), "cpu")
    assert step.weights.equal(probe_step().weights) and step.state_dict() == {}
    assert "tokens=4" in repr(step) and "cpu" in repr(step)


def test_a_kernel_that_chooses_no_token(device: str) -> None:
    step = DecodeStep(probe.Probe(graph=probe.graph("logits")), {"w": torch.arange(1.0, probe.VOCAB + 1)[:, None]}, device)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(tensor([5], device), tensor(3, device))
    assert out.next_ids.shape == (0,) and out.logits.argmax(-1).tolist() == [28]
    assert step.generate(IDS[:1], 4).tolist() == probe.continuation(IDS[:1], 4)


def test_threads_take_turns(device: str) -> None:
    step, want = tiny_step(device), tiny_step(device)(*chunks(device)[0]).logits
    with ThreadPoolExecutor(4) as pool:
        caches = [step.new_cache() for _ in range(8)]
        found = list(pool.map(lambda arena: step(*chunks(device)[0], cache=arena).logits, caches))
    step.check()
    assert all(logits.equal(want) for logits in found) and all(arena.equal(caches[0]) for arena in caches)


def test_two_steps_share_weights_and_cache(device: str) -> None:
    many = tiny_step(device)
    one = DecodeStep(tiny(1), many)
    assert one.weights.data_ptr() == many.weights.data_ptr() and one.cache.data_ptr() == many.cache.data_ptr()
    want = many.generate(IDS, 6)
    assert one.generate(IDS, 6, prefill=many).equal(want) and one.generate(IDS, 6).equal(want)


def test_a_hang_is_raised_and_the_next_call_is_right(device: str) -> None:
    step = probe_step(device, timeout_s=0.5)
    ids, rows = tensor([5], device), tensor(3, device)
    step.cache.view(torch.int32)[0] = 2

    def run() -> None:
        step(ids, rows)
        step.check()

    with pytest.raises(MegakernelHang, match="op gather"):
        run()
    step.cache.zero_()
    assert step(ids, rows).next_ids.tolist() == [28]
    step.check()


def test_graphs_of_a_program_keep_it(device: str) -> None:
    step = probe_step(device)
    step.program.control.set_inputs(0, [7], [0], [1])
    replay, logits = step.program.capture(), step.program.logits
    del step
    gc.collect()
    replay.replay()
    assert int(logits[0].argmax()) == probe.continuation([7], 1)[0]


def calls() -> dict[str, tuple[str, str, Callable[[DecodeStep], object]]]:
    one, zero = tensor([1]), tensor(0)
    odd = torch.zeros(17, dtype=torch.uint8)[1:]
    gone = torch.zeros(16, dtype=torch.uint8)
    gone.untyped_storage().resize_(0)
    return {
        "a list": ("MK480", "ids is no tensor but of type list", lambda s: s([1], zero)),
        "a number": ("MK480", "device='cpu'), made once", lambda s: s(one, 0)),
        "meta": ("MK482", "kv_len lies on meta, the step runs on cpu", lambda s: s(one, zero.to("meta"))),
        "floats": ("MK483", "give ids.to(torch.int64)", lambda s: s(one.float(), zero)),
        "bytes": ("MK483", "give what new_cache() of the step makes", lambda s: s(one, zero, cache=torch.zeros(16))),
        "a batch": ("MK484", "ids has shape (1, 1), the step takes (n,)", lambda s: s(one[None], zero)),
        "rows": ("MK484", "kv_len has shape (2,)", lambda s: s(one, tensor([0, 1]))),
        "positions": ("MK484", "the step takes (1,)", lambda s: s(one, zero, positions=tensor([0, 1]))),
        "cache": ("MK484", "cache has shape (3,), the step takes (16,)", lambda s: s(one, zero, cache=torch.zeros(3, dtype=torch.uint8))),
        "strided": ("MK485", "not contiguous", lambda s: s(one, zero, cache=torch.zeros(32, dtype=torch.uint8)[::2])),
        "odd address": ("MK485", "multiple of 16 bytes", lambda s: s(one, zero, cache=odd)),
        "freed": ("MK486", "the memory of cache has been freed", lambda s: s(one, zero, cache=gone)),
        "too many": ("MK453", "a step of 5 tokens", lambda s: s(tensor([1] * 5), zero)),
        "none": ("MK453", "a step of 0 tokens", lambda s: s(one[:0], zero)),
        "an id": ("MK451", "token id 97 at index 0", lambda s: s(tensor([97]), zero)),
        "full": ("MK450", "40 are used and 1 more", lambda s: s(one, tensor(40))),
        "less than none": ("MK450", "-1 are used", lambda s: s(one, tensor(-1))),
        "a position": ("MK454", "position 40", lambda s: s(one, zero, positions=tensor([40]))),
        "a mask": ("MK455", "mask 0x2", lambda s: s(one, zero, ancestors=tensor([2]))),
    }


@pytest.mark.parametrize("name", calls())
def test_bad_calls(name: str) -> None:
    code, words, call = calls()[name]
    step = probe_step()
    with pytest.raises(MegadslError) as caught:
        call(step)
    (found,) = caught.value.diagnostics
    assert found.code == code and words in str(found) and "mend:" in str(found)
    assert found.span.line == call.__code__.co_firstlineno and Path(found.span.file) == Path(__file__)
    assert step(tensor([5]), tensor(3)).next_ids.tolist() == [28], "nothing was half done"


def test_all_that_is_wrong_is_said_at_once() -> None:
    step = probe_step()
    with pytest.raises(MegadslError) as caught:
        step(tensor([[1.0]]), tensor([0, 1]), cache=torch.zeros(3))
    assert [d.code for d in caught.value.diagnostics] == ["MK483", "MK484", "MK484", "MK483", "MK484"]


def test_memory_that_dlpack_has_no_word_for() -> None:
    with pytest.raises(MegadslError) as caught:
        probe_step()(np.array([1], ">i8"), tensor(0))
    assert caught.value.code == "MK481" and "ids cannot be taken over through DLPack" in str(caught.value)


def test_a_mistake_in_a_compiled_function_names_its_call() -> None:
    fast = torch.compile(probe_step(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"test_torch\.py:\d+.*MK483.*ids has dtype torch\.float32"):
        fast(tensor([1.0]), tensor(0))


def test_a_step_that_is_gone() -> None:
    step = probe_step()
    exported = torch.export.export(step, (tensor([5]), tensor(3))).module()
    assert exported(tensor([5]), tensor(3)).next_ids.tolist() == [28]
    arenas = step.weights, step.cache
    step.close()
    for call in (
        lambda: exported(tensor([5]), tensor(3)),
        lambda: step(tensor([5]), tensor(3)),
        lambda: step.generate([5], 2),
        step.new_cache,
    ):
        with pytest.raises(MegadslError, match=r"test_torch\.py:.*MK487.*the step of probe has been freed"):
            call()
    assert "closed" in repr(step) and step.cache.numel() == 0
    other = probe_step()
    name = other.name
    del other
    gc.collect()
    with pytest.raises(MegadslError, match="MK487"):
        decode_step(tensor([5]), tensor(3), None, None, None, *arenas, None, name)


def test_a_step_is_not_copied() -> None:
    step = probe_step()
    for copied in (lambda: copy.deepcopy(torch.nn.Sequential(step)), lambda: pickle.dumps(step)):
        with pytest.raises(MegadslError) as caught:
            copied()
        assert caught.value.code == "MK491"
    with pytest.raises(MegadslError) as caught:
        step.to("meta")(tensor([5]), tensor(3))
    assert [d.code for d in caught.value.diagnostics] == ["MK482", "MK482"]


def test_what_cannot_be_shared() -> None:
    step = probe_step()
    for changes, words in [({"max_kv": 48}, "max_kv is 40 and 48"), ({"layers": 2}, "they are packed otherwise")]:
        with pytest.raises(MegadslError) as caught:
            DecodeStep(probe.Probe(probe.manifest() | changes), step)
        assert caught.value.code == "MK489" and words in str(caught.value)
    with pytest.raises(MegadslError, match=r"MK489.*each has its own in memory"):
        step.generate([1, 2], 2, prefill=probe_step())
