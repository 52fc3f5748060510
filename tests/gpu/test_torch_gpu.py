"""A step in torch programs on a GPU: graphs of the user, side streams, torch.compile with graphs, no wait for the host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters

from megadsl.torch import DecodeStep, Sampling, StepOutput
from tests.kernels import bits
from tests.test_torch import IDS, tensor, tiny_step

pytestmark = pytest.mark.gpu


@contextmanager
def without_waiting() -> Iterator[None]:
    """Whatever would wait for the GPU raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def wanted(device: str = "cuda") -> list[torch.Tensor]:
    """The logits of IDS one by one, each launched by itself."""
    step = tiny_step(device)
    return [step(tensor([token], device), tensor(row, device)).logits for row, token in enumerate(IDS)]


def captured(step: DecodeStep, ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, StepOutput]:
    """As torch's documentation has it: once on a side stream, then into a graph that also advances ``rows``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ids, rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = step(ids, rows)
        rows.add_(1)
    return graph, out


def test_a_call_does_not_wait() -> None:
    step, ids, rows = tiny_step("cuda"), tensor(IDS[:1], "cuda"), tensor([0], "cuda")
    step(ids, rows)
    generator = torch.Generator("cuda")
    with without_waiting():
        out = step(ids, rows)
        Sampling(0.7, 20, 0.9)(out.logits, generator)
    step.check()


def test_a_graph_of_the_user() -> None:
    step, ids, rows = tiny_step("cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), tensor([0], "cuda")
    graph, out = captured(step, ids, rows)
    gc.collect()
    rows.zero_()
    for token, want in zip(IDS, wanted(), strict=True):
        ids.fill_(token)
        with without_waiting():
            graph.replay()
        assert bits(out.logits).equal(bits(want)) and out.next_ids.equal(want.argmax(-1))
        gc.collect()
    assert rows.tolist() == [len(IDS)]
    step.check()


def test_replays_and_calls_on_several_streams_take_turns() -> None:
    step, ids, rows = tiny_step("cuda"), tensor(IDS[:1], "cuda"), tensor([0], "cuda")
    another = step.new_cache()
    graph, out = captured(step, ids, rows)
    want, streams = wanted()[0], [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(300):
        with torch.cuda.stream(streams[turn % 3]):
            if turn % 2:
                with step.turn():
                    rows.zero_()
                    graph.replay()
                    different += (bits(out.logits) != bits(want)).sum()
            else:
                got = step(ids, torch.zeros(1, dtype=torch.int64, device="cuda"), cache=another)
                with step.turn():
                    different += (bits(got.logits) != bits(want)).sum()
    step.check()
    torch.cuda.synchronize()
    assert int(different) == 0


def test_compiled_with_graphs() -> None:
    step, ids, rows = tiny_step("cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), tensor([0], "cuda")
    counters.clear()

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def run(ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = step(ids, rows)
        return out.logits, out.logits.softmax(-1)

    for row, (token, want) in enumerate(zip(IDS, wanted(), strict=True)):
        ids.fill_(token)
        rows.fill_(row)
        torch.compiler.cudagraph_mark_step_begin()
        logits, probabilities = run(ids, rows)
        assert bits(logits).equal(bits(want))
        torch.testing.assert_close(probabilities, want.softmax(-1))
    assert counters["inductor"]["cudagraph_skips"] == 0
    step.check()


def test_what_is_out_of_range_harms_nobody() -> None:
    step = tiny_step("cuda")
    before, arena, after = (step.new_cache() for _ in range(3))
    for ids, rows in (([1 << 40], 0), ([-5], 0), ([1], 1 << 40), ([1], -3), ([1, 2], step.program.manifest["max_kv"] - 1)):
        step(tensor(ids, "cuda"), tensor(rows, "cuda"), cache=arena)
    step.check()
    assert not before.any() and not after.any() and not step.cache.any()
    assert bits(step(tensor(IDS[:1], "cuda"), tensor(0, "cuda")).logits).equal(bits(wanted()[0]))


def test_draws_are_those_of_the_seed() -> None:
    step = tiny_step("cuda")
    own = Sampling(1.5, 50, 0.95)

    def text(seed: int, graphs: bool) -> list[int]:
        generator = torch.Generator("cuda")
        generator.manual_seed(seed)
        how = {"temperature": 1.5, "top_k": 50, "top_p": 0.95} if graphs else {"sample": lambda logits: own(logits, generator)}
        return step.generate(IDS, 40, generator=generator if graphs else None, **how).tolist()

    assert text(3, True) == text(3, True) != text(4, True)
    assert text(3, True)[0] == text(3, False)[0]
