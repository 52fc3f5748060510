"""One decode step of Gemma 2 and Gemma 3: norms also behind the attention and behind the MLP, and layers that see a window between
layers that see all."""

from __future__ import annotations

from typing import Any

import megadsl as mk

CENTRED = (0.0, 0.1)  # norms multiply by 1 + w
SMALL = (-0.8, 0.02)  # what a layer adds is a fifth of the embedding, so that random layers do not drown it


@mk.kernel
def decode_step(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Gemma 2: logits and the greedy next token for up to ``tokens`` new tokens. ``cfg`` has the fields of a Hugging Face Gemma2Config,
    embed_scale, sliding_window as a list of all layers', and where there is one attn_scale and attn_softcap of the scores, and
    final_softcap of the logits."""
    return _step(cfg, tokens, head_norms=False)


@mk.kernel
def gemma3(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Gemma 3: with a norm of each head of queries and keys, and a rotation by kind of layer: rope_theta and rope_scaling may be lists."""
    return _step(cfg, tokens, head_norms=True)


def _step(cfg: Any, tokens: int, *, head_norms: bool) -> mk.Tensor:
    hidden, inter, eps = cfg.hidden_size, cfg.intermediate_size, cfg.rms_norm_eps
    heads, kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    q_rows, kv_rows, biased = heads * head_dim, kv_heads * head_dim, "o_proj" in getattr(cfg, "biases", ())
    theta, scaling = mk.per_layer(cfg.rope_theta), mk.per_layer(getattr(cfg, "rope_scaling", None))
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
        if head_norms:
            q = _norm(q, layer.weight("self_attn.q_norm", head_dim, random=CENTRED), eps, head_dim)
            k = _norm(k, layer.weight("self_attn.k_norm", head_dim, random=CENTRED), eps, head_dim)
        q, k = mk.rope(q, k, head_dim=head_dim, theta=theta, scaling=scaling)
        kv, window = layer.kv_cache(kv_heads, head_dim).append(k, v), mk.per_layer(cfg.sliding_window)
        scale, softcap = getattr(cfg, "attn_scale", None), getattr(cfg, "attn_softcap", None)
        a = mk.attention(q, kv, heads=heads, scale=scale, window=window, softcap=softcap)
        o_bias = [layer.weight("self_attn.o_proj.bias", hidden)] if biased else None
        a = mk.linear(a, layer.weight("self_attn.o_proj", (hidden, q_rows)), bias=o_bias)
        x = x + _norm(a, layer.weight("post_attention_layernorm", hidden, random=SMALL), eps)
        h = _norm(x, layer.weight("pre_feedforward_layernorm", hidden, random=CENTRED), eps)
        gate, up = mk.linear(h, layer.weight("mlp.gate_proj", (inter, hidden)), layer.weight("mlp.up_proj", (inter, hidden)))
        activated = mk.map(f"{getattr(cfg, 'activation', 'gelu_tanh')}(gate) * up", gate=gate, up=up)
        m = mk.linear(activated, layer.weight("mlp.down_proj", (hidden, inter)))
        x = x + _norm(m, layer.weight("post_feedforward_layernorm", hidden, random=SMALL), eps)

    h = _norm(x, mk.weight("model.norm", hidden, random=CENTRED), eps)
    lm_head = embed_tokens if cfg.tie_word_embeddings else mk.weight("lm_head", (cfg.vocab_size, hidden))
    logits, cap = mk.linear(h, lm_head, name="lm_head"), getattr(cfg, "final_softcap", None)
    return mk.argmax(logits if cap is None else mk.map("cap * tanh(x / cap)", x=logits, cap=cap))


def _norm(x: mk.Tensor, w: mk.Tensor, eps: float, head_dim: int | None = None) -> mk.Tensor:
    return mk.map("x * rsqrt(mean(x * x) + eps) * (1 + w)", head_dim=head_dim, x=x, w=w, eps=eps)


# Sentinels carry whole units of eight values.
for kernel in (decode_step, gemma3):
    for arch in mk.ARCHES:
        with mk.schedule(kernel, arch=arch) as s:
            for op in ("embed_tokens", "qkv_proj", "attention", "o_proj", "post_attention_layernorm"):
                s[op].sync(mk.Sentinel())
            for op in ("gate_up_proj", "down_proj", "post_feedforward_layernorm"):
                s[op].sync(mk.Sentinel())


def _config(hidden_size: int, **fields: Any) -> dict[str, Any]:
    return {"hidden_size": hidden_size, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, **fields}


def _pattern(layers: int, every: int, window: int) -> list[int | None]:
    """Windows of layers of which each ``every``-th sees all."""
    return [window if (i + 1) % every else None for i in range(layers)]


# Sizes that no tile divides, small windows, and both soft caps.
_TINY = _config(
    80,
    embed_scale=8.9375,
    vocab_size=1000,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    intermediate_size=176,
    sliding_window=_pattern(2, 2, 24),
)

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-2-2b": _config(
        2304,
        embed_scale=48.0,
        vocab_size=256000,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        sliding_window=_pattern(26, 2, 4096),
        attn_softcap=50.0,
        final_softcap=30.0,
    ),
    "gemma2-tiny": {**_TINY, "head_dim": 96, "attn_scale": 0.125, "attn_softcap": 5.0, "final_softcap": 3.0},
}
CONFIGS3: dict[str, dict[str, Any]] = {
    "gemma-3-1b": _config(
        1152,
        embed_scale=34.0,
        vocab_size=262144,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=6912,
        sliding_window=_pattern(26, 6, 512),
    )
    | {"rope_theta": [10000.0 if window else 1000000.0 for window in _pattern(26, 6, 512)]},
    "gemma3-tiny": {
        **_TINY,
        "head_dim": 64,
        "rope_theta": [10000.0 if window else 1000000.0 for window in _TINY["sliding_window"]],
        "rope_scaling": [None if window else {"rope_type": "linear", "factor": 8.0} for window in _TINY["sliding_window"]],
    },
}

MODELS = {name: (decode_step, config) for name, config in CONFIGS.items()} | {name: (gemma3, config) for name, config in CONFIGS3.items()}
