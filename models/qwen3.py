"""One decode step of the Qwen3 architecture (dense): Llama with a norm of each head of queries and keys in front of the rotation."""

from __future__ import annotations

from typing import Any

import megadsl as mk


@mk.kernel
def decode_step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Logits and the greedy next token for up to ``tokens`` new tokens. ``cfg`` has the fields of a Hugging Face Qwen3Config, and in
    ``biases`` the names of the projections that have one: all four of the attention, or none."""
    hidden, inter, eps = cfg.hidden_size, cfg.intermediate_size, cfg.rms_norm_eps
    heads, kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    q_rows, kv_rows, biased = heads * head_dim, kv_heads * head_dim, "o_proj" in getattr(cfg, "biases", ())
    embed_tokens = mk.weight("model.embed_tokens", (cfg.vocab_size, hidden))

    x = mk.embed(embed_tokens, mk.input_ids(tokens))
    for layer in mk.layers(cfg.num_hidden_layers):
        h = mk.rms_norm(x, layer.weight("input_layernorm", hidden), eps=eps)
        q, k, v = mk.linear(
            h,
            layer.weight("self_attn.q_proj", (q_rows, hidden)),
            layer.weight("self_attn.k_proj", (kv_rows, hidden)),
            layer.weight("self_attn.v_proj", (kv_rows, hidden)),
            bias=[layer.weight(f"self_attn.{n}_proj.bias", q_rows if n == "q" else kv_rows) for n in "qkv"] if biased else None,
        )
        q = mk.rms_norm(q, layer.weight("self_attn.q_norm", head_dim), eps=eps, head_dim=head_dim)
        k = mk.rms_norm(k, layer.weight("self_attn.k_norm", head_dim), eps=eps, head_dim=head_dim)
        scaling, rotary = getattr(cfg, "rope_scaling", None), getattr(cfg, "rotary_dim", None)
        q, k = mk.rope(q, k, head_dim=head_dim, theta=cfg.rope_theta, scaling=scaling, rotary_dim=rotary)
        window = mk.per_layer(getattr(cfg, "sliding_window", None))
        a = mk.attention(q, layer.kv_cache(kv_heads, head_dim).append(k, v), heads=heads, window=window)
        o_bias = [layer.weight("self_attn.o_proj.bias", hidden)] if biased else None
        x = x + mk.linear(a, layer.weight("self_attn.o_proj", (hidden, q_rows)), bias=o_bias)
        h = mk.rms_norm(x, layer.weight("post_attention_layernorm", hidden), eps=eps)
        gate, up = mk.linear(h, layer.weight("mlp.gate_proj", (inter, hidden)), layer.weight("mlp.up_proj", (inter, hidden)))
        activated = mk.map(f"{getattr(cfg, 'activation', 'silu')}(gate) * up", gate=gate, up=up)
        x = x + mk.linear(activated, layer.weight("mlp.down_proj", (hidden, inter)))

    h = mk.rms_norm(x, mk.weight("model.norm", hidden), eps=eps)
    lm_head = embed_tokens if cfg.tie_word_embeddings else mk.weight("lm_head", (cfg.vocab_size, hidden))
    return mk.argmax(mk.linear(h, lm_head, name="lm_head"))


# Sentinels carry whole units of eight values, and 48 KB of loads in flight keep HBM busy while blocks meet (docs/performance.md).
with mk.schedule(decode_step) as s:
    for op in ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"):
        s[op].sync(mk.Sentinel())
    s.ring("weights", meeting_window=48 * 1024)


def _config(**fields: Any) -> dict[str, Any]:
    return {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, **fields}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _config(vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "qwen3-8b": _config(
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    # Sizes that no tile divides, three query heads to a KV head, heads that are wider than hidden / heads.
    "qwen3-tiny": _config(
        vocab_size=1000, hidden_size=80, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, intermediate_size=176
    ),
}

MODELS = {name: (decode_step, config) for name, config in CONFIGS.items()}
