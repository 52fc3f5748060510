"""One decode step of the Llama architecture: Llama, Mistral, Qwen2.5, SmolLM2, Phi-3, GLM and everything else of that shape."""

from __future__ import annotations

from typing import Any

import megadsl as mk


@mk.kernel
def decode_step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Logits and the greedy next token for up to ``tokens`` new tokens. ``cfg`` has the fields of a Hugging Face LlamaConfig, in ``biases``
    the names of the projections that have one, and where there is one sliding_window (a list where layers differ), the
    rotary_dim features of a head that are rotated, rope_style, and attn_softcap."""
    hidden, inter = cfg.hidden_size, cfg.intermediate_size
    heads, kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    q_rows, kv_rows = heads * head_dim, kv_heads * head_dim
    embed_tokens = mk.weight("model.embed_tokens", (cfg.vocab_size, hidden))

    x = mk.embed(embed_tokens, mk.input_ids(tokens))
    for layer in mk.layers(cfg.num_hidden_layers):
        h = mk.rms_norm(x, layer.weight("input_layernorm", hidden), eps=cfg.rms_norm_eps)
        q, k, v = mk.linear(
            h,
            layer.weight("self_attn.q_proj", (q_rows, hidden)),
            layer.weight("self_attn.k_proj", (kv_rows, hidden)),
            layer.weight("self_attn.v_proj", (kv_rows, hidden)),
            bias=_biases(cfg, layer, "self_attn", q_proj=q_rows, k_proj=kv_rows, v_proj=kv_rows),
        )
        style, scaling = getattr(cfg, "rope_style", "half"), getattr(cfg, "rope_scaling", None)
        rotary = getattr(cfg, "rotary_dim", None)
        q, k = mk.rope(q, k, head_dim=head_dim, theta=cfg.rope_theta, style=style, scaling=scaling, rotary_dim=rotary)
        kv, window = layer.kv_cache(kv_heads, head_dim).append(k, v), mk.per_layer(getattr(cfg, "sliding_window", None))
        a = mk.attention(q, kv, heads=heads, window=window, softcap=getattr(cfg, "attn_softcap", None))
        o_bias = _biases(cfg, layer, "self_attn", o_proj=hidden)
        x = x + mk.linear(a, layer.weight("self_attn.o_proj", (hidden, q_rows)), bias=o_bias)
        h = mk.rms_norm(x, layer.weight("post_attention_layernorm", hidden), eps=cfg.rms_norm_eps)
        gate, up = mk.linear(
            h,
            layer.weight("mlp.gate_proj", (inter, hidden)),
            layer.weight("mlp.up_proj", (inter, hidden)),
            bias=_biases(cfg, layer, "mlp", gate_proj=inter, up_proj=inter),
        )
        activated = mk.map(f"{getattr(cfg, 'activation', 'silu')}(gate) * up", gate=gate, up=up)
        down_bias = _biases(cfg, layer, "mlp", down_proj=hidden)
        x = x + mk.linear(activated, layer.weight("mlp.down_proj", (hidden, inter)), bias=down_bias)

    h = mk.rms_norm(x, mk.weight("model.norm", hidden), eps=cfg.rms_norm_eps)
    lm_head = embed_tokens if cfg.tie_word_embeddings else mk.weight("lm_head", (cfg.vocab_size, hidden))
    return mk.argmax(mk.linear(h, lm_head, name="lm_head"))


def _biases(cfg: Any, layer: Any, block: str, **rows: int) -> list[mk.Tensor] | None:
    """The biases of projections of a block, given by their ``rows``; None where ``cfg.biases`` does not name them."""
    if not rows.keys() <= set(getattr(cfg, "biases", ())):
        return None
    return [layer.weight(f"{block}.{name}.bias", count) for name, count in rows.items()]


def _config(**fields: Any) -> dict[str, Any]:
    return {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, **fields}


def _tiny(hidden: int, inter: int, vocab: int, heads: int, kv_heads: int, **fields: Any) -> dict[str, Any]:
    return _config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inter,
        **fields,
    )


def _llama3(factor: float) -> dict[str, Any]:
    far = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **far}


CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        rope_theta=100000.0,
    ),
    "llama-3.2-1b": _config(
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        rope_theta=500000.0,
        rope_scaling=_llama3(32.0),
    ),
    "llama-3.1-8b": _config(
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=_llama3(8.0),
        tie_word_embeddings=False,
    ),
    "llama-tiny": _tiny(hidden=128, inter=192, vocab=512, heads=4, kv_heads=2),
    # Sizes that no tile divides, and the other head dimension, rope style and head.
    "llama-tiny-odd": _tiny(hidden=80, inter=176, vocab=1000, heads=5, kv_heads=1),
    "llama-tiny-wide": _tiny(hidden=176, inter=80, vocab=1000, heads=2, kv_heads=2, head_dim=128, tie_word_embeddings=False),
    "llama-tiny-biased": _tiny(
        hidden=80,
        inter=176,
        vocab=1000,
        heads=5,
        kv_heads=1,
        biases=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "llama-tiny-interleaved": _tiny(hidden=128, inter=192, vocab=512, heads=2, kv_heads=1, rope_style="interleaved"),
}

# Schedules that measured fastest on an H200 (docs/performance.md): sentinels carry whole units of eight values. Around meetings, 48 KB of
# loads in flight keep HBM busy. Nothing is measured elsewhere.
OPS = ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
small, large = mk.kernel(decode_step.function), mk.kernel(decode_step.function)
with mk.schedule(small) as s:
    for op in OPS:
        s[op].sync(mk.Sentinel())
with mk.schedule(large) as s:
    for op in OPS:
        s[op].sync(mk.Sentinel())
    s.ring("weights", meeting_window=48 * 1024)

_SCHEDULED = {"smollm2-135m": small, "llama-3.2-1b": large, "llama-3.1-8b": large}
MODELS = {name: (_SCHEDULED.get(name, decode_step), config) for name, config in CONFIGS.items()}
