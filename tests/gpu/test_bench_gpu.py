"""The benchmark on a GPU: graphs of torch beside ours, and torch.compile as it comes."""

from __future__ import annotations

import pytest

from megadsl.runtime.bench import Subject
from megadsl.runtime.bench_kinds import Baseline
from tests.kernels import compiled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 5])
def test_torch_in_a_graph_beside_ours(tokens: int) -> None:
    subject = Subject(compiled("llama-tiny", tokens=tokens, blocks=40), "cuda")
    assert subject.clock.clears_l2, "the weights of a tiny model would stay in L2"
    row = subject.measure(17, 40, Baseline.EAGER_GRAPH, 0)
    assert row.passed and row.host_us is not None and 0 < row.host_us < 1000
    assert row.best is not None and row.best[0].startswith("eager in a CUDA graph"), [each.of.failure for each in row.baselines]
    assert row.times.p10 <= row.times.median <= row.times.p90 and row.times.median > row.floor_ms


def test_torch_compile_beside_ours() -> None:
    row = Subject(compiled("llama-tiny", tokens=1, blocks=40), "cuda").measure(17, 40, Baseline.COMPILE, 90)
    compiled_ = [each for each in row.baselines if each.name.startswith("compile")]
    assert row.passed and len(compiled_) >= 2
    assert all((each.times is None) == (each.of.failure is not None) for each in compiled_), "a baseline has a time or a reason"
    assert any(each.times is not None for each in compiled_), [each.of.failure for each in compiled_]
