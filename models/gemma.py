"""One decode step of the first Gemma: norms by 1 + w, a scaled embedding, a GELU in the MLP, heads that are wider than hidden / heads."""

from __future__ import annotations

from typing import Any

import megadsl as mk

CENTRED = (0.0, 0.1)  # norms multiply by 1 + w


@mk.kernel
def decode_step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Logits and the greedy next token for up to ``tokens`` new tokens. ``cfg`` has the fields of a Hugging Face GemmaConfig, embed_scale,
    and where there is one, attn_softcap of the scores and final_softcap of the logits."""
    hidden, inter, eps = cfg.hidden_size, cfg.intermediate_size, cfg.rms_norm_eps
    heads, kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    q_rows, kv_rows, biased = heads * head_dim, kv_heads * head_dim, "o_proj" in getattr(cfg, "biases", ())
    embed_tokens = mk.weight("model.embed_tokens", (cfg.vocab_size, hidden))

    x = mk.map("x * scale", x=mk.embed(embed_tokens, mk.input_ids(tokens)), scale=cfg.embed_scale)
    for layer in mk.layers(cfg.num_hidden_layers):
        h = _norm(x, layer.weight("input_layernorm", hidden, random=CENTRED), eps)
        q, k, v = mk.linear(
            h,
            layer.weight("self_attn.q_proj", (q_rows, hidden)),
            layer.weight("self_attn.k_proj", (kv_rows, hidden)),
            layer.weight("self_attn.v_proj", (kv_rows, hidden)),
            bias=[layer.weight(f"self_attn.{n}_proj.bias", q_rows if n == "q" else kv_rows) for n in "qkv"] if biased else None,
        )
        q, k = mk.rope(q, k, head_dim=head_dim, theta=cfg.rope_theta, scaling=getattr(cfg, "rope_scaling", None))
        kv = layer.kv_cache(kv_heads, head_dim).append(k, v)
        a = mk.attention(q, kv, heads=heads, softcap=getattr(cfg, "attn_softcap", None))
        o_bias = [layer.weight("self_attn.o_proj.bias", hidden)] if biased else None
        x = x + mk.linear(a, layer.weight("self_attn.o_proj", (hidden, q_rows)), bias=o_bias)
        h = _norm(x, layer.weight("post_attention_layernorm", hidden, random=CENTRED), eps)
        gate, up = mk.linear(h, layer.weight("mlp.gate_proj", (inter, hidden)), layer.weight("mlp.up_proj", (inter, hidden)))
        activated = mk.map(f"{getattr(cfg, 'activation', 'gelu_tanh')}(gate) * up", gate=gate, up=up)
        x = x + mk.linear(activated, layer.weight("mlp.down_proj", (hidden, inter)))

    h = _norm(x, mk.weight("model.norm", hidden, random=CENTRED), eps)
    lm_head = embed_tokens if cfg.tie_word_embeddings else mk.weight("lm_head", (cfg.vocab_size, hidden))
    logits, cap = mk.linear(h, lm_head, name="lm_head"), getattr(cfg, "final_softcap", None)
    return mk.argmax(logits if cap is None else mk.map("cap * tanh(x / cap)", x=logits, cap=cap))


def _norm(x: mk.Tensor, w: mk.Tensor, eps: float) -> mk.Tensor:
    return mk.map("x * rsqrt(mean(x * x) + eps) * (1 + w)", x=x, w=w, eps=eps)


# Sentinels carry whole units of eight values.
with mk.schedule(decode_step) as s:
    for op in ("embed_tokens", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"):
        s[op].sync(mk.Sentinel())


def _config(hidden_size: int, **fields: Any) -> dict[str, Any]:
    """``embed_scale`` is the root of the hidden size as a bf16 number, as in training: 45.25 for 2048."""
    return {"hidden_size": hidden_size, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, **fields}


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-2b": _config(
        2048,
        embed_scale=45.25,
        vocab_size=256000,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=16384,
    ),
    # Sizes that no tile divides, and both soft caps.
    "gemma-tiny": _config(
        80,
        embed_scale=8.9375,
        vocab_size=1000,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=96,
        intermediate_size=176,
        attn_softcap=5.0,
        final_softcap=3.0,
    ),
}

MODELS = {name: (decode_step, config) for name, config in CONFIGS.items()}
