"""Generated kernels of Llama-like models in the emulator, against their torch meanings."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import megadsl as mk
from megadsl.driver import Compiled
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import Linear
from megadsl.lower.memory import chunk_pieces, pass_groups
from megadsl.lower.tiling import tiling
from megadsl.reference import ReferenceModel
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource
from tests.kernels import (
    FACTOR,
    SLACK,
    Bench,
    Step,
    attention_of,
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
from tests.schedules import everywhere, settled

# Cached rows around the 16 of a chunk.
EDGES = (0, 1, 15, 16, 17, 31, 33, 100)


def sizes(tokens: int) -> list[tuple[int, int]]:
    """Every edge, with all tokens, one of them and all but one in turn."""
    counts = (tokens, 1, max(1, tokens - 1))
    return [(kv, counts[i % 3]) for i, kv in enumerate(EDGES)] + [(max(EDGES), tokens)]


def few_stages(s: ScheduleBlock) -> None:
    """By default the ring takes all memory that is left."""
    s.ring("weights", stages=6)


def pieces(made: Compiled, name: str) -> tuple[int, int]:
    """Tiles of a row group of a linear, and how many of them are multiplied between two gathers of its input."""
    op = made.graph.op(name)
    assert isinstance(op, Linear)
    return tiling(op).pieces, chunk_pieces(op, made.graph, made.schedule)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 7), (2, 5), (5, 2), (16, 5)])
def test_tokens(tokens: int, blocks: int) -> None:
    check(compiled("llama-tiny", tokens=tokens, blocks=blocks), sizes(tokens), seeds=(1, 2))


MODELS = [
    ("llama-tiny-odd", 1, 5),
    ("llama-tiny-odd", 16, 3),
    ("llama-tiny-wide", 2, 7),
    ("llama-tiny-wide", 16, 2),
    ("llama-tiny-interleaved", 5, 1),
    ("qwen3-tiny", 1, 7),
    ("qwen3-tiny", 16, 3),
    ("gemma-tiny", 1, 3),
    ("gemma-tiny", 5, 2),
    ("gemma2-tiny", 1, 5),
    ("gemma2-tiny", 16, 3),
    ("gemma3-tiny", 1, 2),
    ("gemma3-tiny", 4, 3),
]


@cache
def models() -> dict[tuple[str, int], Compiled]:
    made = together(*(compiled(model, tokens=tokens, blocks=blocks) for model, tokens, blocks in MODELS))
    return dict(zip(((model, tokens) for model, tokens, _ in MODELS), made, strict=True))


@pytest.mark.parametrize(("model", "tokens"), [(model, tokens) for model, tokens, _ in MODELS])
def test_models(model: str, tokens: int) -> None:
    check(models()[model, tokens], sizes(tokens), seeds=(1, 2))


UNTIED = {"num_attention_heads": 7, "num_key_value_heads": 1, "vocab_size": 1001, "tie_word_embeddings": False, "num_hidden_layers": 1}
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {  # blocks, fields; gqa-5: llama-tiny-odd
    "units-beyond-blocks": (2, {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "gqa-3": (3, {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "gqa-7-vocab-1001-untied": (7, UNTIED),
    "idle-blocks-vocab-1003": (20, {"vocab_size": 1003}),  # other tests build it as well
}


@cache
def shapes() -> dict[str, Compiled]:
    """By the names above and of the tests below; kernels of two tokens where they do not say how many."""
    made = {
        name: compiled("llama-tiny", tokens=2, blocks=blocks, fields=config(**fields), configure=settled)
        for name, (blocks, fields) in SHAPES.items()
    }
    idle = {name: made.pop(name) for name in ("idle-blocks-vocab-1003",)}
    fields, blocks = SHAPES["units-beyond-blocks"][1], SHAPES["units-beyond-blocks"][0]
    made["long cache"] = compiled("llama-tiny", tokens=2, blocks=blocks, fields=config(**fields), configure=settled, max_kv=1024)
    made["no whole vectors"] = compiled("llama-tiny", tokens=2, fields=config(hidden_size=100, intermediate_size=87, vocab_size=1001))
    made |= {f"chunks, {tokens}": normed_columns_in_chunks(tokens) for tokens in (2, 16)}
    fields = config(num_attention_heads=9, num_key_value_heads=1, intermediate_size=2112, num_hidden_layers=1)
    made["split columns"] = compiled("llama-tiny", tokens=16, blocks=3, fields=fields, configure=few_stages)
    return idle | one_build(made)


LARGE = {"vocab-151936": 151936, "vocab-128256": 128256}


@cache
def large_vocabularies() -> dict[str, Compiled]:
    """The same code as that of ``shapes``."""
    fields = {name: config(vocab_size=size, num_hidden_layers=1) for name, size in LARGE.items()}
    return one_build({name: compiled("llama-tiny", tokens=2, blocks=3, fields=own, configure=settled) for name, own in fields.items()})


@pytest.mark.parametrize("name", SHAPES)
def test_heads_and_vocabularies(name: str) -> None:
    check(shapes()[name], sizes(2), seeds=(3,))


ROTATED_IN_PART: list[tuple[str, int, dict[str, Any]]] = [
    ("llama-tiny-wide", 1, {"rotary_dim": 64}),
    ("llama-tiny-interleaved", 2, {"rotary_dim": 32}),
    ("qwen3-tiny", 2, {"rotary_dim": 64}),  # behind a map over each head
    ("qwen3-tiny", 1, {"rotary_dim": 96, "head_dim": 128}),
]
# Head dimension, tokens, query heads, KV heads.
HEADS = [
    *((80, 1, 4, 2), (80, 16, 2, 1), (96, 2, 3, 1), (112, 5, 2, 2), (256, 2, 2, 1), (256, 9, 2, 2)),
    *((64, 1, 14, 1), (64, 2, 16, 1), (64, 1, 71, 1), (64, 4, 71, 1), (128, 3, 7, 1)),
    (80, 16, 4, 1),  # two warps to a tile of queries, whose halves would end inside a pair of groups
]


@cache
def rotated_in_part() -> list[Compiled]:
    made = [compiled(m, tokens=t, blocks=3, fields=load(m)[1] | fields, max_kv=9216) for m, t, fields in ROTATED_IN_PART]
    return list(together(*made))


@cache
def of_heads() -> dict[tuple[int, ...], Compiled]:
    fields = [config(head_dim=d, num_attention_heads=h, num_key_value_heads=kv, num_hidden_layers=1) for d, _, h, kv in HEADS]
    made = [compiled("llama-tiny", tokens=of[1], fields=f) for of, f in zip(HEADS, fields, strict=True)]
    return dict(zip(HEADS, together(*made), strict=True))


@pytest.mark.parametrize("index", range(len(ROTATED_IN_PART)), ids=lambda i: ROTATED_IN_PART[i][0])
def test_heads_that_are_rotated_in_part(index: int) -> None:
    """Features behind the rotated ones do not depend on the position."""
    (_, tokens, fields), made = ROTATED_IN_PART[index], rotated_in_part()[index]
    check(made, [(0, tokens), (17, 1), (33, tokens)], seeds=(1,))
    bench, ids = Bench(made), (3, 77)[:tokens]
    near, far = (bench.run(Step(ids, 20, 5, tuple(range(first, first + tokens)))) for first in (20, 9000))
    (k, v), (far_k, far_v) = near.rows[0], far.rows[0]  # what enters the first layer knows no positions
    rotary = fields["rotary_dim"]
    assert bits(k[..., rotary:]).equal(bits(far_k[..., rotary:])) and bits(v).equal(bits(far_v))
    assert distance(k[..., :rotary], far_k[..., :rotary]) > 0.1


def test_nothing_is_read_behind_the_table_of_angles() -> None:
    """64 of 128 features of a head are rotated; NaN stands behind the last row, also for a launch of several steps."""
    made, last = rotated_in_part()[0], 9216 - 1
    bench = Bench(made)
    table = bench.program.buffers["rope"]
    assert table.numel() == 9216 * 128 // 2 * 8 and made.graph.tokens == 1
    guarded = torch.cat([table.view(torch.float32), torch.full((4096,), float("nan"))]).view(torch.uint8)[: table.numel()]
    with bench.program.using(rope=guarded):
        judge(made, bench.weights, some := steps(made, [(last, 1), (last - 1, 1)]), [bench.run(step) for step in some])
        bench.put_rows(some[1])
        bench.program.set_steps(2)
        bench.program.control.set_inputs(last - 1, some[1].ids, [last - 1], [1])
        bench.program.launch()
        bench.program.check()
        bench.program.set_steps(1)
    assert bool(bench.program.logits.isfinite().all())


@pytest.mark.parametrize("name", LARGE)
def test_large_vocabularies(name: str) -> None:
    """The greatest logit is the last one's, and then one of many that are equal."""
    made = large_vocabularies()[name]
    weights = weights_for(made)
    head, bench = weights["model.embed_tokens.weight"], Bench(made, weights)
    some = steps(made, [(0, 2), (17, 1)])
    judge(made, weights, some, bench.play(some))
    winner = int(bench.run(some[1]).logits[0].argmax())
    for place, factor in ((len(head) - 1, 2.0), (1234, 2.0)):
        head[place] = factor * head[winner]
        assert int(Bench(made, weights).run(some[1]).ids[0]) == place


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads: tuple[int, int, int, int]) -> None:
    """Dimensions that end inside a panel, and many query heads to a KV head."""
    tokens = heads[1]
    check(of_heads()[heads], [(0, tokens), (17, 1), (33, tokens)], seeds=(1,))


def test_more_units_than_blocks() -> None:
    made = shapes()["units-beyond-blocks"]
    assert attention_of(made).kv_heads * made.schedule.op("attention").splits > made.schedule.blocks


def test_a_cache_longer_than_the_ring() -> None:
    assert 600 // 16 > 6 * 4, "chunks of a unit, of which 4 fill one of the ring's 6 stages"
    check(shapes()["long cache"], [(600, 2), (1000, 1), (601, 2)], seeds=(1,))


def normed_columns_in_chunks(tokens: int) -> Compiled:
    def configure(s: ScheduleBlock) -> None:
        few_stages(s)
        everywhere(mk.Sentinel())(s)
        for op in ("qkv_proj", "gate_up_proj", "lm_head"):
            s[op].split(chunk=1)
        s["down_proj"].columns(ways=1).split(chunk=1)

    fields = config(hidden_size=1056, intermediate_size=2080, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    return compiled("llama-tiny", tokens=tokens, blocks=3, fields=fields, configure=configure)


@pytest.mark.parametrize("tokens", [2, 16])
def test_normed_columns_in_chunks(tokens: int) -> None:
    """A norm's scale meets the products, so that its columns may come one chunk after another; at 16 tokens in several passes. Rows of
    several pieces in one chunk: tests/test_kernel_schedule.py."""
    made = shapes()[f"chunks, {tokens}"]
    assert all(pieces(made, op) == (2, 1) for op in ("qkv_proj", "gate_up_proj", "lm_head"))
    assert pieces(made, "down_proj") == (3, 1)
    assert (pass_groups(made.graph.op("gate_up_proj"), made.graph, made.schedule) < 88) == (tokens == 16)
    check(made, [(0, tokens), (17, 1), (33, tokens)], seeds=(1,))


def test_split_columns_and_several_passes() -> None:
    """16 tokens: the down projection's input is more than its budget of shared memory, query rows more than 8 warps hold."""
    made = shapes()["split columns"]
    assert pieces(made, "down_proj") == (3, 1) and made.schedule.op("down_proj").ways == 3
    assert attention_of(made).heads // attention_of(made).kv_heads * 16 > 8 * 16
    check(made, [(0, 16), (16, 3), (33, 16), (100, 15)], seeds=(1,))


def test_features_that_are_no_whole_vectors() -> None:
    """Neither a multiple of the 8 rows of a group, nor of the 8 values of a vector."""
    check(shapes()["no whole vectors"], sizes(2))


def test_a_prompt_in_chunks_is_the_prompt_one_by_one() -> None:
    prompt = torch.randint(0, 512, (23,), generator=torch.Generator().manual_seed(5)).tolist()
    last, made = {}, {}
    for tokens, blocks in ((5, 2), (1, 7)):
        made[tokens] = compiled("llama-tiny", tokens=tokens, blocks=blocks)
        weights = weights_for(made[tokens])
        generator = Generator(made[tokens], TensorSource(weights), "cpu", progress=False)
        generator.program.buffers["kv"].fill_(0xFF)
        last[tokens] = generator.prefill(prompt)[None].clone()
        assert generator.kv_len == len(prompt)
    fp32 = ReferenceModel(made[1].graph, {k: v.float() for k, v in weights.items()}, 64, "fp32").step(prompt)[-1:]
    bf16 = ReferenceModel(made[1].graph, weights, 64, "bf16").step(prompt)[-1:]
    for logits in last.values():
        assert distance(logits, fp32) <= 2 * FACTOR * distance(bf16, fp32) + SLACK, "one token's error scatters more than many tokens'"
