"""From logits to a token: greedy, or drawn by temperature, top-k and top-p. Nothing here waits for a GPU, so that it can be captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megadsl.diagnostics import Diagnostic, MegadslError, declare, diagnose
from megadsl.torch.arguments import users_call

SAMPLING = declare("MK488", "{name} is {got}", "give {want}")


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. ``temperature`` 0: the greatest logit. ``top_k``: only the k greatest logits. ``top_p``: of these only the
    most likely tokens that together reach probability p; at least one. Raises MK488."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        found: list[Diagnostic] = []
        if not 0 <= self.temperature < float("inf"):
            found.append(diagnose(SAMPLING, name="temperature", got=self.temperature, want="a number of 0 (greedy) or more"))
        if self.top_k is not None and self.top_k < 1:
            found.append(diagnose(SAMPLING, name="top_k", got=self.top_k, want="a number of 1 or more, or None"))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(diagnose(SAMPLING, name="top_p", got=self.top_p, want="a number above 0 and up to 1, or None"))
        if found:
            span = users_call()
            raise MegadslError([Diagnostic(d.code, d.message, d.mend, span) for d in found])

    @property
    def greedy(self) -> bool:
        """Whether the greatest logit is taken, and nothing drawn."""
        return self.temperature == 0 or self.top_k == 1

    def __call__(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Ids int64 (...) for fp32 ``logits`` (..., vocab), drawn with ``generator`` (None: torch's default of the device)."""
        if self.greedy:
            return logits.argmax(-1)
        shares, ids = self._candidates(logits)
        # argmax of p / Exp(1) is a draw from p; torch.multinomial would ask the GPU whether p is valid
        drawn = (shares / torch.empty_like(shares).exponential_(generator=generator)).argmax(-1, keepdim=True)
        return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """What :meth:`__call__` draws from: fp32 of the shape of ``logits``, zero where a token is left out. ``temperature`` is not 0."""
        shares, ids = self._candidates(logits)
        shares = shares / shares.sum(-1, keepdim=True)
        return shares if ids is None else torch.zeros_like(logits).scatter(-1, ids, shares)

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens that may be drawn (None: all, in order) and their shares, which need not add up to 1. Only what top_k leaves is
        sorted, a vocabulary only where there is no top_k."""
        scaled, ids = logits / self.temperature, None
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            scaled, ids = scaled.topk(self.top_k, -1)
        elif self.top_p is not None and self.top_p < 1:
            scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
        shares = scaled.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            before = shares.cumsum(-1) - shares  # so the first is always kept
            shares = shares.masked_fill(before >= self.top_p, 0)
        return shares, ids
