"""A signal that never comes: who waited for what is said, and nothing is lost but the launch."""

from __future__ import annotations

import re

import pytest

from megadsl.driver import Compiled
from megadsl.runtime.control import ERROR, STEPS, MegakernelHang
from tests.kernels import Bench, bits, compiled, judge, steps

SIZES = [(17, 2), (33, 1)]


def kernel() -> Compiled:
    return compiled("llama-tiny", tokens=2, blocks=5)


def publisher(made: Compiled, op: str) -> int:
    """The site at which an op hands its value on."""
    return next(int(s["id"]) for s in made.manifest["sites"] if s["op"] == op and s["kind"] == "publish")


@pytest.mark.parametrize(("op", "reader", "value"), [("embed_tokens", "qkv_proj", "x"), ("gate_up_proj", "down_proj", "gate_up_proj")])
def test_a_lost_signal_is_reported(op: str, reader: str, value: str) -> None:
    made = kernel()
    some = steps(made, SIZES)
    faulty = Bench(made, defines={"MK_LOST_SIGNAL": str(publisher(made, op))})
    gathers = [s for s in made.manifest["sites"] if s["op"] == reader and s["kind"] == "exchange"]
    site = next(s for s in gathers if s["expects"].startswith(f"tag of {value} "))
    for _ in range(2):  # the second launch begins with a clean exchange and hangs at the same place
        before = faulty.put_rows(some[0])
        with pytest.raises(MegakernelHang) as caught:
            faulty.run(some[0])
        kv = faulty.program.kv
        assert kv is not None
        for layer, rows in enumerate(before):
            for now, old in zip(kv.read(layer, kv.max_kv), rows, strict=True):
                assert bits(now[:, : some[0].kv]).equal(bits(old[:, : some[0].kv])), "an aborted launch changed cached rows"
        waits = [w for w in caught.value.waits if w.site == site["id"]]
        assert len({w.block for w in waits}) > 1 and all(w.role == "consumer" and w.layer == 0 for w in waits)
        text = re.escape(f"role consumer, op {reader} ({site['span']}), layer 0")
        text += rf".*site {site['id']} \[exchange\] waited for tag of {value} .* expected 0x([0-9a-f]+), observed 0x([0-9a-f]+)"
        said = re.search(text, str(caught.value))
        assert said is not None and said[1] != said[2]
    healthy = Bench(made)
    judge(made, healthy.weights, some, healthy.play(some))


def test_an_error_stays_until_it_is_read() -> None:
    made = kernel()
    bench, some = Bench(made), steps(made, SIZES)
    expected = bench.play(some)
    bench.program.reset()
    bench.put_rows(some[0])
    bench.program.logits.fill_(float("nan"))
    bench.program.control.words[ERROR] = 2
    for _ in range(3):
        bench.program.launch()
    assert bool(bench.program.logits.isnan().all())
    assert int(bench.program.control.words[STEPS]) == 0
    with pytest.raises(MegakernelHang):
        bench.program.check()
    for step, first in zip(some, expected, strict=True):
        assert bench.run(step).same(first), "the launch after an error is right"
