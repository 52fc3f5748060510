"""The plain torch decode step, which the benchmark times: it computes the same model, in every form, and torch.compile sees it whole."""

from __future__ import annotations

import re

import pytest
import torch

from megadsl.driver import compile_model
from megadsl.expr import parse
from megadsl.ir.graph import Linear
from megadsl.reference import ATTENTION_FORMS, EagerModel, PlainModel, ReferenceModel, meaning
from megadsl.reference.compare import Error
from megadsl.reference.plain import Term, plain_term
from megadsl.runtime.bench_baselines import FACTOR
from megadsl.runtime.weights import needed, random_weights
from megadsl.source import Span

MODELS = {"llama-tiny": 3, "llama-tiny-odd": 1, "llama-tiny-wide": 2, "llama-tiny-interleaved": 1}  # and the tokens of a step
MAX_KV = 64


class Trio:
    """Oracle, bf16 reference and plain model on the same weights."""

    def __init__(self, model: str, count: int) -> None:
        made = compile_model(model, tokens=count, blocks=2, max_kv=MAX_KV, check=False)
        source = random_weights(made.manifest, 7)
        weights = {name: source.load(name) for name in needed(made.manifest)}
        self.graph, self.count = made.graph, count
        self.fp32, self.eager = ReferenceModel(made.graph, weights, MAX_KV, "fp32"), EagerModel(made.graph, weights, MAX_KV)
        self.plain = PlainModel(made.graph, weights, MAX_KV, count)

    def start(self, kv: int) -> None:
        """Random rows in all caches, and NaN behind them in the plain model's: no unused row may count."""
        generator = torch.Generator().manual_seed(kv)
        for key, pair in self.fp32.caches.items():
            for oracle, eager, plain in zip(pair, self.eager.caches[key], self.plain.caches[key], strict=True):
                rows = torch.randn(oracle[:, :kv].shape, generator=generator).bfloat16()
                oracle[:, :kv], eager[:, :kv], plain[0, :, :kv] = rows.float(), rows, rows
                plain[0, :, kv:] = float("nan")
        self.fp32.kv_len = self.eager.kv_len = kv


@pytest.mark.parametrize(("model", "count"), MODELS.items())
def test_it_computes_the_same_model(model: str, count: int) -> None:
    trio = Trio(model, count)
    for kv in (0, 17):
        for form in ATTENTION_FORMS:
            trio.start(kv)
            step = trio.plain.step(kv + 2 * count, form), trio.plain.step(kv + count, form)
            for at, run in ((kv, step[1]), (kv + count, step[0])):  # the second step reads what the first has appended
                ids = [(37 * at + 11 * i) % trio.graph.vocab for i in range(count)]
                trio.plain.set_inputs(ids, at)
                logits, chosen = run()
                exact, eager = trio.fp32.step(ids), trio.eager.step(ids)
                assert Error.of(logits.float(), exact).within(FACTOR, Error.of(eager, exact)), (form, at)
                assert chosen is not None and chosen.equal(logits.argmax(-1))


def test_a_step_may_be_repeated() -> None:
    trio = Trio("llama-tiny", 3)
    trio.start(5)
    trio.plain.set_inputs([1, 2, 3], 5)
    step = trio.plain.step(8, "grouped")
    assert step()[0].equal(step()[0])


def test_what_a_user_would_fuse_is_fused() -> None:
    trio = Trio("llama-tiny", 1)
    qkv = next(op for op in trio.graph.ops if isinstance(op, Linear) and op.name == "qkv_proj")
    assert trio.plain.stacked(qkv, 1).shape == (qkv.rows, qkv.columns)
    assert trio.plain.stacked(qkv, 1) is trio.plain.stacked(qkv, 1)


@pytest.mark.parametrize(
    "text",
    [
        "x * rsqrt(mean(x * x) + 1e-5) * w",
        "exp(x - max(x)) / sum(exp(x - max(x)))",
        "sum(mean(x)) + sum(2)",
        "max(x, w) - min(x, 2) / (abs(w) + 1) + x ** 2",
        "x * 0 + 3",
    ],
)
def test_expressions(text: str) -> None:
    generator = torch.Generator().manual_seed(3)
    args = {"x": torch.randn(4, 48, generator=generator).bfloat16(), "w": torch.randn(48, generator=generator).bfloat16()}
    args = {name: tensor for name, tensor in args.items() if name in re.findall(r"\w+", text)}
    e = parse(text, Span("model.py", 1), args)
    terms: dict[str, Term] = {name: lambda values, name=name: values[name] for name in args}  # type: ignore[misc]
    found = plain_term(e, terms, (4, 48))(args)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), meaning.evaluate(e, args, (4, 48)), rtol=2e-2, atol=2e-2)
