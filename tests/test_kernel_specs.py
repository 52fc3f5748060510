"""Kernels of specs that are no Llama, and one whose arithmetic is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import megadsl as mk
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import ScheduleBlock
from tests.kernels import Bench, Configure, Result, Weights, attention_of, bits, check, compiled, one_build, steps, together

SPECS = Path(__file__).parent / "specs"
CONFIG = {"vocab": 203, "hidden": 72, "inter": 104, "layers": 2}


def shape(name: str, tokens: int, blocks: int, configure: Configure | None = None, **fields: int) -> Compiled:
    return compiled(load(f"{SPECS / 'shapes.py'}:{name}")[0], tokens=tokens, blocks=blocks, fields=CONFIG | fields, configure=configure)


def whole_units(s: ScheduleBlock) -> None:
    s["embed"].sync(mk.Sentinel(4))


def flags(s: ScheduleBlock) -> None:
    s["q_k_v"].sync(mk.Flag(2))


KERNELS: dict[str, Callable[[], Compiled]] = {
    "separate": lambda: shape("separate", 3, 4),
    "flat": lambda: shape("flat", 2, 3),
    "flat, 1 block": lambda: shape("flat", 2, 1),
    "branches": lambda: shape("branches", 2, 5),
    "separate, 75": lambda: shape("separate", 3, 4, hidden=75),
    "separate, 75, whole": lambda: shape("separate", 3, 3, whole_units, hidden=75),
    "flat, 75": lambda: shape("flat", 16, 4, hidden=75),
    "flat, 75, whole": lambda: shape("flat", 16, 3, whole_units, hidden=75),
    "heads": lambda: shape("heads", 2, 3, flags, heads=5, kv_heads=1, head_dim=64),
}


@cache
def kernels() -> dict[str, Compiled]:
    return dict(zip(KERNELS, together(*(make() for make in KERNELS.values())), strict=True))


@pytest.mark.parametrize("name", ["separate", "flat", "flat, 1 block", "branches"])
def test_other_shapes(name: str) -> None:
    made = kernels()[name]
    tokens = made.manifest["tokens"]
    assert made.manifest["kv"] is None and made.manifest["rope"] is None
    check(made, [(0, tokens), (0, 1), (0, tokens), (0, tokens - 1)], seeds=(1, 2))


@pytest.mark.parametrize("name", ["separate, 75", "flat, 75"])
def test_a_last_unit_that_is_not_full(name: str) -> None:
    """Rows that are scaled after their products, 75 features wide: the same bits whether last elements travel apart or not."""
    plain, whole = kernels()[name], kernels()[f"{name}, whole"]
    tokens = plain.manifest["tokens"]
    for ours, theirs in zip(*(check(made, [(0, tokens), (0, 1)], seeds=(1,)) for made in (plain, whole)), strict=True):
        assert ours.same(theirs)


def test_a_map_over_heads_of_one_side() -> None:
    """Reductions inside reductions, two vectors, and 5 query heads to a KV head; flags instead of tags."""
    made = kernels()["heads"]
    assert [which for which, _ in attention_of(made).maps] == ["q"]
    check(made, [(0, 2), (17, 1), (33, 2)], seeds=(1,))


def test_two_values_meet_in_one_prologue() -> None:
    made = compiled(load(f"{SPECS / 'shapes.py'}:separate")[0], fields=CONFIG)
    assert made.manifest["launches"] == [(0, 0)]
    assert len(made.graph.op("down").prologue.args) == 2  # type: ignore[union-attr]


def integers(tokens: int, folder: Path, blocks: int = 5) -> Compiled:
    """The spec of exact sums, by the name and configuration file that the command line takes."""
    path = folder / "integers.json"
    path.write_text(json.dumps(CONFIG))
    return compile_model(f"{SPECS / 'integers.py'}:integers", config=path, tokens=tokens, blocks=blocks, max_kv=16)


def integer_weights(made: Compiled) -> Weights:
    """Few ones and minus ones to a row, so that no sum that bf16 stores leaves -256 to 256."""
    generator = torch.Generator().manual_seed(11)

    def sparse(rows: int, columns: int, most: int) -> torch.Tensor:
        keep = torch.rand(rows, columns, generator=generator).argsort(1) < most
        return torch.randint(-1, 2, (rows, columns), generator=generator) * keep

    found = {"embed.weight": torch.randint(-2, 3, (CONFIG["vocab"], CONFIG["hidden"]), generator=generator)}
    for layer in range(CONFIG["layers"]):
        found[f"model.layers.{layer}.up.weight"] = sparse(CONFIG["inter"], CONFIG["hidden"], 4)
        found[f"model.layers.{layer}.down.weight"] = sparse(CONFIG["hidden"], CONFIG["inter"], 2)
    found["head.weight"] = torch.randint(-1, 2, (CONFIG["vocab"], CONFIG["hidden"]), generator=generator)
    return {name: w.bfloat16() for name, w in found.items()}


def integer_logits(weights: Weights, ids: tuple[int, ...]) -> torch.Tensor:
    """In 64-bit integers."""
    whole = {name: w.long() for name, w in weights.items()}
    x = whole["embed.weight"][list(ids)]
    for layer in range(CONFIG["layers"]):
        y = x @ whole[f"model.layers.{layer}.up.weight"].T
        x = x + y @ whole[f"model.layers.{layer}.down.weight"].T
        assert max(int(y.abs().max()), int(x.abs().max())) <= 256, "bf16 would round"
    return x @ whole["head.weight"].T


def integer_results(made: Compiled, device: str, seed: int = 0) -> list[Result]:
    """Three steps' results, each checked against integer arithmetic."""
    weights = integer_weights(made)
    bench = Bench(made, weights, device, seed=seed)
    some = steps(made, [(0, made.manifest["tokens"])] * 3)
    results = bench.play(some)
    for step, result in zip(some, results, strict=True):
        assert bits(result.logits).equal(bits(integer_logits(weights, step.ids).float() + 0.0))
    return results


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Compiled]:
    """By tokens."""
    return one_build({tokens: integers(tokens, tmp_path_factory.mktemp("exact")) for tokens in (1, 4)})


@pytest.mark.parametrize("tokens", [1, 4])
def test_exact_sums_are_exact(tokens: int, exact: dict[int, Compiled]) -> None:
    for seed in (0, 1):
        integer_results(exact[tokens], "cpu", seed)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_gpu_and_the_emulator_agree_exactly(tokens: int, tmp_path: Path) -> None:
    made = integers(tokens, tmp_path, blocks=132)
    few = integers(tokens, tmp_path)
    for ours, theirs in zip(integer_results(made, "cuda"), integer_results(few, "cpu"), strict=True):
        assert ours.same(theirs)
