"""A checkpoint that is not the one a kernel needs: everything wrong, listed at once."""

from __future__ import annotations

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.driver import compile_model
from megadsl.runtime.weights import TensorSource, needed, random_weights, validate
from tests.test_weights_pack import layered


def whole() -> dict[str, torch.Tensor]:
    source = random_weights(layered())
    return {name: source.load(name) for name in source.shapes()}


def findings(tensors: dict[str, torch.Tensor]) -> list[str]:
    with pytest.raises(MegadslError) as caught:
        validate(TensorSource(tensors), layered())
    return [f"{d.code} {d.message} | {d.detail.strip()} | {d.mend}" for d in caught.value.diagnostics]


def test_whole_checkpoint_passes() -> None:
    validate(TensorSource(whole()), layered())
    assert [n.shape for n in needed(layered()).values()][:2] == [(100, 80), (80,)]


def test_everything_wrong_is_listed_at_once() -> None:
    tensors = whole()
    for layer in range(3):
        del tensors[f"l.{layer}.k"]
        tensors[f"l.{layer}.norm"] = torch.zeros(81)
        tensors[f"l.{layer}.bias"] = torch.zeros(3)
    tensors["l.1.q"] = torch.zeros(32, 80, dtype=torch.int8)
    tensors["stray"] = torch.zeros(1)
    found = findings(tensors)
    assert len(found) == 5
    assert any(f.startswith("MK420 weight l.0.k is missing (and the same in 2 more layers: 1, 2) | read by op qk") for f in found)
    assert any("MK422 weight l.0.norm has shape (81,), the spec needs (80,) (and the same in 2 more layers: 1, 2)" in f for f in found)
    assert any("MK423 weight l.1.q has element type int8" in f and "bfloat16" in f for f in found)
    assert any("MK421 weight l.0.bias of the checkpoint is used nowhere in the spec (and the same in 2 more" in f for f in found)
    assert any("MK421 weight stray" in f for f in found)


def test_same_weight_under_a_prefix_is_pointed_out() -> None:
    tensors = whole()
    tensors["model.embed"] = tensors.pop("embed")
    assert "(the checkpoint has model.embed)" in findings(tensors)[0]


def test_harmless_extras() -> None:
    table = torch.zeros(4, 4)
    tensors = whole() | {"model.embed_tokens.weight": table, "lm_head.weight": table, "rope_freqs.weight": torch.ones(4)}
    tensors["model.rotary_emb.inv_freq"] = torch.ones(4)
    assert len(findings(tensors)) == 1, "only the table itself is left over"
    tensors["lm_head.weight"] = torch.ones(4, 4)
    assert len(findings(tensors)) == 2, "an output head of its own is not harmless"


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    one, two = random_weights(layered(), seed=1), random_weights(layered(), seed=1)
    two.load("embed")
    assert one.load("l.2.q").equal(two.load("l.2.q"))
    assert not one.load("l.2.q").equal(one.load("l.1.q"))
    assert not one.load("l.2.q").equal(random_weights(layered(), seed=2).load("l.2.q"))
    assert abs(float(one.load("embed").float().std()) - 80**-0.5) < 0.01


def test_random_weights_are_drawn_as_the_spec_says() -> None:
    source = random_weights({**layered(), "random": {"l.{layer}.norm": (-0.8, 0.01), "embed": (0.5, 0)}})
    norm = source.load("l.1.norm").float()
    assert abs(float(norm.mean()) + 0.8) < 0.01 and 0.001 < float(norm.std()) < 0.02
    assert source.load("embed").eq(0.5).all()
    plain = random_weights(layered())
    assert source.load("l.1.q").equal(plain.load("l.1.q")), "others are as they were"
    made = compile_model("gemma2-tiny", blocks=2, max_kv=64)
    behind, before = (f"model.layers.{{layer}}.{name}_feedforward_layernorm.weight" for name in ("post", "pre"))
    assert made.manifest["random"][behind] == (-0.8, 0.02) and made.manifest["random"][before] == (0.0, 0.1)
    assert compile_model("llama-tiny", blocks=2, max_kv=64).manifest["random"] == {}
