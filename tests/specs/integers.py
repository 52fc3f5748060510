"""A kernel whose sums are all exact in bf16 and fp32, given small integers: every device must give the same bits."""

from __future__ import annotations

from typing import Any

import megadsl as mk


@mk.kernel
def integers(cfg: Any, tokens: int = 1) -> mk.Tensor:
    """Residual layers of two linears without norms; ``cfg`` has vocab, hidden, inter and layers."""
    x = mk.embed(mk.weight("embed", (cfg.vocab, cfg.hidden)), mk.input_ids(tokens))
    for layer in mk.layers(cfg.layers):
        y = mk.linear(x, layer.weight("up", (cfg.inter, cfg.hidden)))
        x = x + mk.linear(y, layer.weight("down", (cfg.hidden, cfg.inter)))
    return mk.argmax(mk.linear(x, mk.weight("head", (cfg.vocab, cfg.hidden))))
