"""Steps whose residuals are added behind norms: maps of rows."""

from __future__ import annotations

from typing import Any

import megadsl as mk


@mk.kernel
def behind(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Each layer adds to the residual twice, behind a norm; the second map has two reductions and no vector. ``cfg``: hidden, inter,
    layers, vocab."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        h = mk.linear(x, layer.weight("up", (cfg.inter, cfg.hidden)))
        y = mk.linear(h, layer.weight("down", (cfg.hidden, cfg.inter)))
        x = x + mk.rms_norm(y, layer.weight("after", cfg.hidden), eps=1e-6)
        h = mk.rms_norm(x, layer.weight("before", cfg.hidden), eps=1e-6)
        z = mk.linear(h, layer.weight("mix", (cfg.hidden, cfg.hidden)))
        x = mk.map("x + z / (max(z * z) + mean(z * z) + 1)", x=x, z=z)
    return mk.argmax(mk.linear(mk.rms_norm(x, mk.weight("norm", cfg.hidden), eps=1e-6), mk.weight("lm_head", (cfg.vocab, cfg.hidden))))
