"""Checkpoint directories that cannot be run: each finding with its code, the line in config.json and the mend; all at once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megadsl.diagnostics import Collector, Diagnostic, MegadslError
from megadsl.driver import compile_model
from megadsl.dsl.checkpoints import load_checkpoint, rope_fields
from megadsl.dsl.registry import load
from megadsl.ir.graph import LongRope, Rope, RopeScaling
from megadsl.ops.rope import rope_scaling
from megadsl.runtime.generate import Generator
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.tokenizer import tokenizer_in
from megadsl.runtime.weights import WeightSource, needed, open_weights, random_weights
from megadsl.source import UNKNOWN

safetensors = pytest.importorskip("safetensors.torch")
tokenizers = pytest.importorskip("tokenizers")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "silu",
    "rope_theta": 1e4,
}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 64, "num_key_value_heads": 1}
QWEN2_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}
LONG = {"type": "su", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 4096, "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def folder_of(path: Path, **fields: Any) -> Path:
    """A directory with a config.json, one key a line."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({k: v for k, v in (CONFIG | fields).items() if v is not ...}, indent=1))
    return path


def findings(path: Path) -> list[Diagnostic]:
    with pytest.raises(MegadslError) as refused:
        load_checkpoint(path)
    return refused.value.diagnostics


@pytest.mark.parametrize(
    ("code", "key", "value", "words", "mend"),
    [
        (
            "MK470",
            "architectures",
            ["BloomForCausalLM"],
            "'BloomForCausalLM'",
            "LlamaForCausalLM, MistralForCausalLM, MinistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, GemmaForCausalLM",
        ),
        ("MK470", "architectures", [], "[]", "write its spec"),
        ("MK471", "hidden_act", "mish", "hidden_act = 'mish', and mk.map has no such function", "silu"),
        ("MK471", "quantization_config", {"quant_method": "gptq"}, "quantization_config = 'gptq'", "bf16"),
        ("MK471", "head_dim", 120, "head_dim = 120, and the kernels of this architecture have heads of a multiple of 16", "such heads"),
        ("MK471", "layer_types", ["full_attention", "linear_attention"], "['linear_attention']", "full_attention"),
        ("MK471", "partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5, and this architecture rotates whole heads", "set it to 1.0"),
        ("MK471", "rope_scaling", {"type": "ntk", "factor": 4.0}, "rope_scaling.rope_type = 'ntk'", "none, linear, llama3, yarn"),
        ("MK471", "rope_parameters", {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters.rope_type = 'dynamic'", "linear"),
        ("MK253", "rope_scaling", {k: v for k, v in LLAMA3.items() if k != "factor"}, "needs factor", "factor"),
        ("MK253", "rope_scaling", LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor", "low_freq_factor"),
        ("MK472", "intermediate_size", ..., "intermediate_size = (absent)", "set intermediate_size"),
        ("MK472", "vocab_size", "64", "vocab_size = '64'", "set vocab_size"),
        ("MK472", "rms_norm_eps", -1, "rms_norm_eps = -1 is no positive number", "set rms_norm_eps"),
        ("MK253", "rope_scaling", YARN | {"beta_fast": 0.5}, "beta_fast above beta_slow", "beta_fast"),
        ("MK253", "rope_scaling", YARN | {"mscale": "1"}, "needs mscale", "mscale"),
        ("MK253", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "needs original_max", "original_max_position_embeddings"),
        ("MK253", "rope_scaling", LONG | {"long_factor": None}, "needs long_factor, a number above 0 for each pair", "long_factor"),
        ("MK253", "rope_scaling", LONG | {"short_factor": [1.0, 0.0]}, "and has [1.0, 0.0]", "short_factor"),
        ("MK253", "rope_scaling", LONG | {"original_max_position_embeddings": 1}, "a number above 1", "original_max_position_embeddings"),
        ("MK253", "rope_scaling", LONG | {"attention_factor": -1}, "needs attention_factor", "attention_factor"),
    ],
)
def test_what_a_config_asks_for(code: str, key: str, value: Any, words: str, mend: str, tmp_path: Path) -> None:
    (found,) = findings(folder_of(tmp_path, **{key: value}))
    assert found.code == code and words in found.message and mend in found.mend
    lines = (tmp_path / "config.json").read_text().splitlines()
    assert found.span.line == 1 if value is ... else f'"{key}"' in lines[found.span.line - 1]


def test_all_at_once(tmp_path: Path) -> None:
    found = findings(folder_of(tmp_path, hidden_act="mish", head_dim=120, num_hidden_layers=None, rope_scaling={"rope_type": "ntk"}))
    assert [d.code for d in found] == ["MK471", "MK471", "MK472", "MK471"]


def test_all_that_an_architecture_would_need(tmp_path: Path) -> None:
    """Each at its key, also what is wrong beside it."""
    path = folder_of(tmp_path, architectures=["PhiForCausalLM"], layer_norm_eps=1e-5, hidden_act="mish")
    found = findings(path)
    assert [d.code for d in found] == ["MK470", "MK471", "MK471", "MK471"]
    text = "\n".join(d.message for d in found)
    assert "norms that subtract the mean are missing" in text and "attention and MLP side by side" in text and "mish" in text
    lines = path.joinpath("config.json").read_text().splitlines()
    keys = ("architectures", "layer_norm_eps", "architectures", "hidden_act")
    assert all(f'"{key}"' in lines[d.span.line - 1] for key, d in zip(keys, found, strict=True))


def test_gemma(tmp_path: Path) -> None:
    gemma = {"architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1, "hidden_size": 2048}
    _, values, _ = load_checkpoint(folder_of(tmp_path, **gemma, hidden_act="gelu"))
    assert (values["activation"], values["head_dim"], values["embed_scale"], values["tie_word_embeddings"]) == (
        "gelu_tanh",
        256,
        45.25,
        True,
    )
    _, values, _ = load_checkpoint(folder_of(tmp_path, **gemma, hidden_activation="relu"))
    assert values["activation"] == "relu"
    assert load_checkpoint(folder_of(tmp_path, hidden_act="gelu"))[1]["activation"] == "gelu"


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, 512),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # transformers' default
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}, 4096),  # as transformers does
        ({"architectures": ["MinistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}, [None, 4096]),
        ({"architectures": ["MinistralForCausalLM"]}, 4096),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}, 2047),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}, None),
        (QWEN2_WINDOW | {"max_window_layers": 1}, [None, 512]),
        (QWEN2_WINDOW | {"max_window_layers": 0}, 512),
        (QWEN2_WINDOW | {"max_window_layers": 2}, None),
        (QWEN2_WINDOW | {"layer_types": ["full_attention"] * 2}, None),
        (QWEN2_WINDOW | {"layer_types": ["sliding_attention"] * 2}, 512),
        (QWEN2_WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, [512, None]),
        (GEMMA3 | {"num_hidden_layers": 3, "sliding_window_pattern": 2}, [4096, None, 4096]),
        ({"sliding_window": 512}, None),
    ],
)
def test_windows(fields: dict[str, Any], window: object, tmp_path: Path) -> None:
    """One of all layers, or a list of each layer's."""
    _, values, longest = load_checkpoint(folder_of(tmp_path, **{"num_key_value_heads": 1, **fields}))
    assert (values["sliding_window"], longest) == (window, None)


def test_a_list_of_layers_that_is_too_short(tmp_path: Path) -> None:
    (found,) = findings(folder_of(tmp_path, **QWEN2_WINDOW, layer_types=["sliding_attention"] * 3))
    assert found.code == "MK472" and "no list of 2 kinds of layers" in found.message


def test_each_kind_of_layer_has_its_rotation(tmp_path: Path) -> None:
    """Of Gemma 3, in files before and since transformers has named rotations by the kind of layer."""
    older = {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    }
    for fields in (older, {"rope_parameters": newer}):
        _, values, _ = load_checkpoint(folder_of(tmp_path, **GEMMA3, sliding_window_pattern=2, **fields))
        assert values["rope_theta"] == [5e3, 2e6] and values["rope_scaling"] == [None, {"rope_type": "linear", "factor": 8.0}]
    _, values, _ = load_checkpoint(folder_of(tmp_path, **GEMMA3, sliding_window_pattern=2, rope_theta=...))
    assert values["rope_theta"] == [1e4, 1e6] and values["rope_scaling"] == [None, None]
    (found,) = findings(folder_of(tmp_path, **GEMMA3, sliding_window_pattern=2, rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    assert found.code == "MK471" and "rope_scaling.rope_type" in found.message
    (found,) = findings(folder_of(tmp_path, **GEMMA3, use_bidirectional_attention=True))
    assert found.code == "MK471" and "tokens that see later ones" in found.message


def test_scores_and_logits_of_gemma_2(tmp_path: Path) -> None:
    gemma2 = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 16}
    _, values, _ = load_checkpoint(folder_of(tmp_path, **gemma2))
    assert (values["attn_scale"], values["attn_softcap"], values["final_softcap"]) == (0.25, 50.0, 30.0)
    _, values, _ = load_checkpoint(folder_of(tmp_path, **gemma2, attn_logit_softcapping=None))
    assert values["attn_softcap"] is None and load_checkpoint(folder_of(tmp_path))[1]["attn_scale"] is None


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    _, values, rows = load_checkpoint(folder_of(tmp_path, max_position_embeddings=1024, rope_scaling={"type": "linear", "factor": 2}))
    assert (values["head_dim"], values["num_key_value_heads"], values["tie_word_embeddings"], rows) == (64, 2, False, 1024)
    assert values["rope_scaling"] == {"rope_type": "linear", "factor": 2} and values["biases"] == []
    newer = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "rope_theta": ..., "attention_bias": True, "mlp_bias": True}
    _, values, _ = load_checkpoint(folder_of(tmp_path, **newer))
    assert (values["rope_theta"], values["rope_scaling"], len(values["biases"])) == (5e5, LLAMA3, 7)


def test_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    def rotary(**fields: Any) -> int:
        return int(load_checkpoint(folder_of(tmp_path, head_dim=128, num_key_value_heads=1, **fields))[1]["rotary_dim"])

    phi, glm = ({"architectures": [f"{name}ForCausalLM"]} for name in ("Phi3", "Glm"))
    assert (rotary(), rotary(**phi), rotary(**glm)) == (128, 128, 64)
    assert rotary(**phi, partial_rotary_factor=0.75) == 96
    assert rotary(**glm, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == 32
    for factor in (0.1, 1.5, "half"):
        (found,) = findings(folder_of(tmp_path, head_dim=128, num_key_value_heads=1, **phi, partial_rotary_factor=factor))
        assert found.code == "MK471" and "of 128 features a multiple of 8 is rotated" in found.message
    assert len(Rope(128, 1e4, "half", None, 64).frequencies) == 32


def test_frequencies() -> None:
    plain = Rope(64, 5e5, "half").frequencies
    assert Rope(64, 5e5, "half", RopeScaling("linear", 4.0)).frequencies == tuple(f / 4 for f in plain)
    scaled = Rope(64, 5e5, "half", RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)).frequencies
    ratios = [a / b for a, b in zip(plain, scaled, strict=True)]
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(8.0) and ratios == sorted(ratios)
    assert any(1.1 < r < 7.9 for r in ratios)
    yarn = Rope(64, 5e5, "half", RopeScaling("yarn", 4.0, 1.0, 32.0, 8192, 1.1))
    ratios = [a / b for a, b in zip(plain, yarn.frequencies, strict=True)]
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(4.0) and ratios == sorted(ratios) and yarn.amplitude == 1.1


@pytest.mark.parametrize(
    ("fields", "amplitude"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_what_yarn_multiplies_by(fields: dict[str, float], amplitude: float) -> None:
    found = Collector()
    scaling = rope_scaling(YARN | fields, found, UNKNOWN)
    assert scaling is not None and scaling.amplitude == pytest.approx(amplitude) and (scaling.low, scaling.high) == (1.0, 32.0)


@pytest.mark.parametrize(
    ("given", "factor", "amplitude"),
    [
        ({}, 16.0, math.sqrt(1 + math.log(16) / math.log(4096))),  # 65536 positions for 4096
        ({"factor": 4.0}, 4.0, math.sqrt(1 + math.log(4) / math.log(4096))),
        ({"factor": 1.0}, 1.0, 1.0),
        ({"attention_factor": 1.25}, 16.0, 1.25),
        ({"type": "longrope"}, 16.0, math.sqrt(1 + math.log(16) / math.log(4096))),
    ],
)
def test_longrope_as_it_is_written(given: dict[str, Any], factor: float, amplitude: float) -> None:
    """Under its first name too; where a config.json has no factor, it is the quotient of the longest texts."""
    lists = {"type": "su", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    raw = {"rope_scaling": lists | given, "original_max_position_embeddings": 4096, "max_position_embeddings": 65536}
    found = Collector()
    scaling = rope_scaling(rope_fields(raw)[1], found, UNKNOWN)
    assert not found.found and isinstance(scaling, LongRope)
    assert scaling.factor == factor and scaling.positions == 4096 and scaling.amplitude == pytest.approx(amplitude)
    plain = Rope(64, 1e4, "half").frequencies
    near, far = (Rope(64, 1e4, "half", scaling).within(rows) for rows in (4096, 4097))
    assert near.frequencies == plain and far.frequencies == tuple(f / 2 for f in plain) and near.amplitude == far.amplitude
    assert far.within(100) == far


def test_longrope_of_another_head() -> None:
    scaling = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * 32}
    kernel, fields = load("llama-tiny")
    with pytest.raises(MegadslError) as raised:
        compile_model(kernel, config={**fields, "rope_scaling": scaling | {"long_factor": [1.0] * 31}})
    (found,) = {str(d): d for d in raised.value.diagnostics}.values()
    assert found.code == "MK253" and "long_factor, a number above 0 for each of 32 pairs of features, and has 31 of them" in found.message
    assert found.span.text.lstrip().startswith("q, k = mk.rope(") and found.mend == "give long_factor in scaling="


# Weights


def write_weights(path: Path, count: int = 3) -> None:
    safetensors.save_file({f"t{i}": torch.full((2, 4), float(i)) for i in range(count)}, path / "model.safetensors")


def refused(path: Path) -> list[Diagnostic]:
    with pytest.raises(MegadslError) as raised:
        open_weights(path)
    return raised.value.diagnostics


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    """MK474 without files, MK475 for every file of the index that is missing."""
    folder_of(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    (found,) = refused(tmp_path)
    assert found.code == "MK474" and "pytorch_model.bin, which is not read" in found.message and "save_pretrained" in found.mend
    write_weights(tmp_path)
    places = {"t0": "model.safetensors", "a": "b.safetensors", "b": "b.safetensors", "c": "c.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found, other = refused(tmp_path)
    assert found.code == other.code == "MK475" and "b.safetensors is missing" in found.message and "2 tensors" in found.message


def test_weights_that_are_damaged(tmp_path: Path) -> None:
    """MK476: a truncated file, one without what the index promises, an index that is none."""
    folder_of(tmp_path)
    write_weights(tmp_path)
    index, file = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    index.write_text(json.dumps({"weight_map": {"t0": file.name, "lost": file.name}}))
    assert [(d.code, "lacks lost" in d.message) for d in refused(tmp_path)] == [("MK476", True)]
    index.write_text("[]")
    assert [(d.code, "weight_map" in d.message) for d in refused(tmp_path)] == [("MK476", True)]
    index.write_text('{"weight_map": {"t0": "model.safetensors", "t0": "other.safetensors"}}')
    assert [(d.code, "'t0' is there twice" in d.message) for d in refused(tmp_path)] == [("MK476", True)]
    index.unlink()
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"t1"', b'"t0"'))  # a tensor twice in one file
    assert [d.code for d in refused(tmp_path)] == ["MK476"]
    file.write_bytes(whole)
    file.write_bytes(file.read_bytes()[:-8])
    assert [(d.code, "checksum" in d.mend) for d in refused(tmp_path)] == [("MK476", True)]


def test_a_tensor_in_two_files_is_the_one_of_the_index(tmp_path: Path) -> None:
    folder_of(tmp_path)
    for name, value in (("a", 1.0), ("b", 2.0)):
        safetensors.save_file({"t": torch.tensor([value]), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    for name, value in (("a", 1.0), ("b", 2.0)):
        places = {"t": f"{name}.safetensors", "a": "a.safetensors", "b": "b.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        source = open_weights(tmp_path)
        assert float(source.load("t")) == value and source.shapes().keys() == {"t", "a", "b"}


def test_element_types(tmp_path: Path) -> None:
    folder_of(tmp_path)
    tensors = {"half": torch.tensor([1.5, 2.5]).half(), "whole": torch.tensor([1, 2]), "wide": torch.tensor([1 / 3]).double()}
    tensors |= {"byte": torch.tensor([1], dtype=torch.uint8), "fp8": torch.tensor([1.0]).to(torch.float8_e4m3fn)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    assert source.load("half").tolist() == [1.5, 2.5] and source.load("wide").dtype == torch.bfloat16
    assert [source.unreadable(name) for name in tensors] == [None, "I64", None, "U8", "F8_E4M3"]
    assert source.shapes() == {"half": (2,), "whole": (2,), "wide": (1,), "byte": (1,), "fp8": (1,)}


def test_projections_that_the_files_have_stacked(tmp_path: Path) -> None:
    folder_of(tmp_path, architectures=["Phi3ForCausalLM"], num_key_value_heads=1)
    stacked = torch.arange(256 * 128).view(256, 128).remainder(251).bfloat16()
    names = {f"model.layers.0.self_attn.{n}_proj.weight": n for n in "qkv"}
    tensors = {"model.layers.0.self_attn.qkv_proj.weight": stacked, "model.layers.0.mlp.gate_up_proj.weight": torch.ones(7, 128)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    assert source.shapes() == {
        **{name: ((128 if n == "q" else 64), 128) for name, n in names.items()},
        "model.layers.0.mlp.gate_up_proj.weight": (7, 128),  # not the two that it should be
    }
    assert torch.cat([source.load(name) for name in names]).equal(stacked)
    assert source.unreadable(next(iter(names))) is None


class Watched(WeightSource):
    """Hands on another source's tensors, and asks at each how much memory the process has that is no file's."""

    def __init__(self, inner: WeightSource) -> None:
        self.inner, self.seen = inner, [anonymous()]

    def shapes(self) -> Any:
        return self.inner.shapes()

    def load(self, name: str) -> torch.Tensor:
        tensor = self.inner.load(name)
        self.seen.append(anonymous())
        return tensor


def anonymous() -> int:
    """Bytes of the process that back no file."""
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_weights_are_never_copied_whole(tmp_path: Path) -> None:
    """While they are packed, what is in memory beside the arena is a few tensors, though all files were read."""
    wide = folder_of(tmp_path / "wide", hidden_size=256, intermediate_size=512, num_hidden_layers=24, num_attention_heads=4)
    made = compile_model(str(wide), blocks=2, check=False)
    source = random_weights(made.manifest)
    safetensors.save_file({name: source.load(name) for name in needed(made.manifest)}, wide / "model.safetensors")
    size = int(made.manifest["buffers"]["weights"])
    watched = Watched(open_weights(wide))
    held = [watched.load(name) for name in watched.shapes()]  # mapped: takes nothing, however many are kept
    assert max(watched.seen) - watched.seen[0] < size / 5 and size > 30e6
    before = anonymous()
    arena = pack_weights(made.manifest, watched, "cpu", progress=False)
    assert max(watched.seen) - before < arena.numel() + size / 4
    assert len(held) == len(watched.shapes())


# Tokenizers and the rotation


def write_tokenizer(path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    inner.save(str(path / "tokenizer.json"))


def test_a_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    folder_of(tmp_path, eos_token_id=[1, 3])
    assert tokenizer_in(tmp_path) is None
    write_tokenizer(tmp_path)
    tokenizer = tokenizer_in(tmp_path)
    assert tokenizer is not None and tokenizer.encode("a b") == [2, 0, 1] and tokenizer.stop_ids == {1, 3}
    assert tokenizer.decode([2, 0, 3]) == "a"
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"add_bos_token": True, "bos_token": {"content": "<s>"}, "eos_token": "b"}))
    assert (tokenizer := tokenizer_in(tmp_path)) and tokenizer.encode("a") == [2, 0] and 1 in tokenizer.stop_ids
    settings.write_text(json.dumps({"add_bos_token": False, "bos_token": "<s>"}))
    assert (tokenizer := tokenizer_in(tmp_path)) and tokenizer.encode("a") == [0]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MegadslError) as broken:
        tokenizer_in(tmp_path)
    assert broken.value.code == "MK411"


def test_a_spec_that_rotates_otherwise(tmp_path: Path) -> None:
    """MK424 names the scaling that the spec lacks."""
    folder_of(tmp_path, rope_scaling=LLAMA3)
    write_weights(tmp_path)
    rope = {"head_dim": 64, "theta": 1e4, "style": "half", "scaling": None, "rotary_dim": 64}
    probe = SimpleNamespace(manifest={"model": "x", "rope": rope, "sequences": 1, "max_kv": 64})
    with pytest.raises(MegadslError) as raised:
        Generator(probe, tmp_path, "cpu")
    (found,) = raised.value.diagnostics
    assert found.code == "MK424" and "scaling={'rope_type': 'llama3'" in found.mend and "scaling" not in found.message.split(", the")[0]


def test_a_registered_name_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-tiny").mkdir()
    assert compile_model("llama-tiny", blocks=2, check=False).manifest["model"] == "llama-tiny"
