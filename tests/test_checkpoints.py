"""Hugging Face directories run as they are: every family's logits are those of transformers, far positions included."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megadsl import cli
from megadsl.diagnostics import MegadslError
from megadsl.driver import DEFAULT_MAX_KV, Compiled, compile_model
from megadsl.dsl.checkpoints import load_checkpoint
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.graph import Attention, Graph, Linear, Op, Rope
from megadsl.reference import ReferenceModel
from megadsl.runtime.generate import Generator, check_rope
from megadsl.runtime.kv import rope_of
from megadsl.runtime.weights import open_weights
from tests.checkpoint_tools import FAMILIES, FAR, saved
from tests.kernels import FACTOR, SLACK, compiled, distance, one_build

tokenizers = pytest.importorskip("tokenizers")

MAX_KV = 9216
IDS, POSITIONS = [3, 77, 500, 41, 8], [0, 1, 700, 9000, 9001]
TOKENS = len(IDS)


def transformers_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        ids, positions = torch.tensor([IDS]), torch.tensor([POSITIONS])
        # with a mask of its own, transformers does not take far positions for a second text
        found: torch.Tensor = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0]
        return found


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Of all kinds of layers."""
    found = config.rope_parameters
    return [found] if "rope_theta" in found else list(found.values())


def reference_logits(graph: Graph, folder: Path, mode: str) -> torch.Tensor:
    source = open_weights(folder)
    weights = {name: source.load(name) for name in source.shapes()}
    return ReferenceModel(graph, weights, 16, mode).step(IDS, POSITIONS)


def unscaled(graph: Graph) -> Graph:
    """The graph with plain rotary frequencies."""

    def rotated(rope: Rope | None) -> Rope | None:
        return None if rope is None else replace(rope, scaling=None)

    def plain(op: Op) -> Op:
        match op:
            case Linear():
                return replace(op, parts=tuple(replace(p, rope=rotated(p.rope)) for p in op.parts))
            case Attention():  # heads that are mapped are rotated behind that
                return replace(op, rope=rotated(op.rope))
            case _:
                return op

    return replace(graph, ops=tuple(plain(op) for op in graph.ops))


AS_THE_COMMAND_LINE = ("qwen2", "gemma")
ALONE = ("qwen2", "llama", "llama-linear", "mistral")  # what other tests build, the command line's below among them


def made(family: str, folder: Path) -> Compiled:
    if family in AS_THE_COMMAND_LINE:
        return compile_model(str(folder), tokens=TOKENS, max_kv=MAX_KV, blocks=cli.options.EMULATED_BLOCKS)
    kernel, fields, _ = load_checkpoint(folder)
    return compiled(kernel, fields=fields, tokens=TOKENS, max_kv=MAX_KV, configure=in_parts if family == "llama-biased" else None)


def in_parts(s: ScheduleBlock) -> None:
    """A bias is added where the parts of the columns are, too."""
    s["down_proj"].columns(ways=2)


@dataclass(frozen=True)
class Checkpoint:
    """A family's model in transformers, where it is saved, and its kernel."""

    model: Any
    folder: Path
    kernel: Compiled


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folders = {family: tmp_path_factory.mktemp("checkpoints") / family for family in FAMILIES}
    models = {family: saved(family, folder, max_shard_size="200KB" if family == "qwen2" else "1GB") for family, folder in folders.items()}
    kernels = {family: made(family, folder) for family, folder in folders.items()}
    kernels |= one_build({family: kernel for family, kernel in kernels.items() if family not in ALONE})
    return {family: Checkpoint(models[family], folders[family], kernels[family]) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    model, folder, ours = checkpoints[family].model, checkpoints[family].folder, checkpoints[family].kernel
    assert (folder / "model.safetensors.index.json").exists() == (family == "qwen2")
    theirs = transformers_logits(model)
    exact, rounded = (reference_logits(ours.graph, folder, mode) for mode in ("fp32", "bf16"))
    assert distance(exact, theirs) < 2e-3  # transformers takes angles in fp32
    scaled = any(p.get("rope_type", "default") != "default" for p in _rotations(model.config))
    assert (distance(reference_logits(unscaled(ours.graph), folder, "fp32"), theirs) > 0.1) == scaled
    logits = Generator(ours, folder, "cpu").step(IDS, POSITIONS)
    assert distance(logits, theirs) <= FACTOR * distance(rounded, theirs) + SLACK


def test_longrope_is_that_of_the_longest_text(checkpoints: dict[str, Checkpoint]) -> None:
    """A cache that ends where the short factors do has those, as transformers has for such texts; a longer one the long factors, for short
    texts too; and a kernel of the one is not taken for the other's."""
    model, folder, ours = checkpoints["phi3-long"].model, checkpoints["phi3-long"].folder, checkpoints["phi3-long"].kernel
    near = [0, 1, 700, 4094, 4095]
    with torch.no_grad():
        mask = torch.ones(1, TOKENS, dtype=torch.long)
        theirs = model(torch.tensor([IDS]), position_ids=torch.tensor([near]), attention_mask=mask).logits[0]
    source = open_weights(folder)
    weights = {name: source.load(name) for name in source.shapes()}
    short = compile_model(str(folder), tokens=TOKENS, max_kv=4096, blocks=3, check=False)
    assert distance(ReferenceModel(short.graph, weights, 16, "fp32").step(IDS, near), theirs) < 2e-3
    assert distance(ReferenceModel(ours.graph, weights, 16, "fp32").step(IDS, near), theirs) > 0.1
    assert compile_model(str(folder), blocks=3, check=False).manifest["max_kv"] == DEFAULT_MAX_KV  # texts of the short factors
    for made in (short, ours):
        written = json.loads(json.dumps(made.manifest))
        assert rope_of(written["rope"]) == rope_of(made.manifest["rope"])
        check_rope(written, source)
    with pytest.raises(MegadslError, match="MK424"):
        check_rope({**ours.manifest, "rope": short.manifest["rope"]}, source)


WINDOWED = ("mistral-window", "phi3", "gemma2", "gemma3", "ministral", "qwen2-mixed", "qwen3-mixed")


@pytest.mark.parametrize("family", WINDOWED)
def test_a_text_longer_than_the_window(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    """Logits of every token are those of transformers, which sees the window at once; without the window they are others."""
    model, folder, ours = checkpoints[family].model, checkpoints[family].folder, checkpoints[family].kernel
    _, fields, longest = load_checkpoint(folder)
    seen = fields["sliding_window"]
    assert {w for w in (seen if isinstance(seen, list) else [seen]) if w} == {model.config.sliding_window} and longest == FAR
    ids = [i * 37 % 512 for i in range(45)]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    source = open_weights(folder)
    weights = {name: source.load(name) for name in source.shapes()}
    exact, rounded = (ReferenceModel(ours.graph, weights, len(ids), mode).step(ids) for mode in ("fp32", "bf16"))
    assert distance(exact, theirs) < 2e-3
    whole = compile_model(str(folder), blocks=2, max_kv=model.config.sliding_window, check=False).graph  # no row is ever out of sight
    assert distance(ReferenceModel(whole, weights, len(ids), "fp32").step(ids), theirs) > 0.1
    generator = Generator(ours, folder, "cpu")
    logits = torch.cat([generator.step(ids[i : i + TOKENS]).clone() for i in range(0, len(ids), TOKENS)])
    assert distance(logits, theirs) <= FACTOR * distance(rounded, theirs) + SLACK


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """Every word is its number in the vocabulary."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(512)}, unk_token="0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megadsl", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a model of mine"
    model = saved("qwen2", folder)
    write_tokenizer(folder, bos_token="7", add_bos_token=True)
    arguments = (str(folder), "--device", "cpu", "--tokens", str(TOKENS), "--max-kv", str(MAX_KV))
    assert run(monkeypatch, "run", *arguments, "--prompt", "3 77 500 41", "--max-new-tokens", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_ids"] == [7, 3, 77, 500, 41]
    ids = torch.tensor([result["prompt_ids"]])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert result["ids"] == whole[0, 5:].tolist() and result["text"].split() == [str(i) for i in result["ids"]]
    assert run(monkeypatch, "check", str(folder)) == 0
