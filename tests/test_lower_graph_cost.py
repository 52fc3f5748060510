"""Costs by hand, the byte floor, and specs as text."""

from __future__ import annotations

from typing import Any

from dsl_tools import CFG, HIDDEN, graph_of, line_of, start

import megadsl as mk
from megadsl.lower.printer import print_spec
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.ops import Cost, cost, floor_seconds, kv_bytes_per_token, total_cost
from megadsl.ops.cost import runs


@mk.kernel
def step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        h = mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=1e-5)
        q, k, v = mk.linear(h, *(layer.weight(f"{n}_proj", (rows, HIDDEN)) for n, rows in (("q", 256), ("k", 64), ("v", 64))))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        a = mk.attention(q, layer.kv_cache(1, 64).append(k, v), heads=4)
        x = x + mk.linear(a, layer.weight("o_proj", (HIDDEN, 256)))
    return mk.argmax(mk.linear(x, mk.weight("lm_head", (cfg.vocab, HIDDEN))))


def test_costs_by_hand() -> None:
    graph = graph_of(step, tokens=3)
    costs = {op.name: cost(op, 3, 100) for op in graph.ops}
    assert costs == {
        "embed": Cost(0, 3 * 256, 0, 3 * 256),
        "qkv_proj": Cost(2 * 3 * 384 * 128, 2 * (384 * 128 + 128), 0, 3 * 2 * (128 + 384)),
        "attention": Cost(4 * 3 * 103 * 256, 0, 103 * 256, 3 * 2 * (256 + 256 + 64 + 64)),
        "o_proj": Cost(2 * 3 * 128 * 256, 2 * 128 * 256, 0, 3 * 2 * (256 + 128 + 128)),
        "lm_head": Cost(2 * 3 * 256 * 128, 2 * 256 * 128, 0, 3 * (2 * 128 + 4 * 256)),
    }
    assert [runs(graph, op) for op in graph.ops] == [1, 2, 2, 2, 1]


def test_totals_and_floor() -> None:
    graph = graph_of(step, tokens=1)
    total = total_cost(graph, 1, 100)
    assert total.weight_bytes == 256 + 2 * (2 * (384 * 128 + 128) + 2 * 128 * 256) + 2 * 256 * 128
    assert total.kv_bytes == 2 * 101 * 256 and kv_bytes_per_token(graph) == 2 * 256
    gpu = machine(DEFAULT_ARCH)
    assert floor_seconds(graph, gpu, 100) == (total.weight_bytes + total.kv_bytes) / gpu.bandwidth


def test_costs_add_and_multiply() -> None:
    assert (Cost(1, 2, 3, 4) + Cost(10, 20, 30, 40)).times(2) == Cost(22, 44, 66, 88)
    assert Cost(weight_bytes=3, kv_bytes=4).hbm_bytes == 7


def test_a_spec_as_text() -> None:
    lines = print_spec(step.trace(CFG, tokens=3)).splitlines()

    def at(mark: str) -> str:
        return f"  # test_lower_graph_cost.py:{line_of(step, mark)}"

    assert lines[0].startswith("spec step tokens=3  # test_lower_graph_cost.py:")
    assert f"  weight model.layers.{{layer}}.norm.weight bf16[128] per layer{at('mk.rms_norm')}" in lines
    assert f"  state kv bf16[1, 64] per layer{at('mk.attention')}" in lines
    loop = lines.index(f"  loop layers x 2{at('mk.layers')}")
    norm = "norm[3, 128] = map norm x * rsqrt(mean(x * x) + 1e-05) * w where x=x.in, w=model.layers.{layer}.norm.weight"
    assert lines[loop + 1 : loop + 3] == ["    carry x: x.in = embed, then add", f"    {norm}{at('mk.rms_norm')}"]
    rope = "q_proj.rope[3, 256], k_proj.rope[3, 64] = rope rope(q_proj, k_proj) head_dim=64 style=half theta=10000.0"
    assert f"    {rope}{at('mk.rope')}" in lines
    assert lines[-2:] == [f"  next_ids[3] = argmax argmax(lm_head){at('lm_head')}", "  return next_ids"]
