"""How far logits are from the oracle's, and whether that is good enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadsl.reference.meaning import argmax


def relative_l2(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| / ||b|| per token, float64 (n,), of (n, features) tensors; 0 / 0 counts as 0, NaN stays NaN."""
    if a.shape != b.shape:
        raise ValueError(f"compared shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    a, b = a.double().cpu(), b.double().cpu()
    difference, size = (a - b).norm(dim=-1), b.norm(dim=-1)
    return torch.where(difference == 0, torch.zeros_like(difference), difference / size)


@dataclass(frozen=True)
class Error:
    """Relative l2 error against the oracle over some tokens."""

    mean: float
    max: float

    def __str__(self) -> str:
        return f"{self.mean:.3e} {self.max:.3e}"

    @staticmethod
    def of(a: Tensor, b: Tensor) -> Error:
        """Of ``a`` against ``b``, each (n, features) with n >= 1."""
        per_token = relative_l2(a, b)
        return Error(float(per_token.mean()), float(per_token.max()))

    def within(self, factor: float, other: Error) -> bool:
        """Whether mean and max are each at most ``factor`` times the other's; never for NaN."""
        return self.mean <= factor * other.mean and self.max <= factor * other.max


@dataclass(frozen=True)
class Agreement:
    """Greedy tokens compared with the oracle's where its two greatest logits differ by more than a margin.

    ``differing`` are the compared tokens (indices) whose choice is another; ``skipped`` counts tokens below the margin.
    """

    compared: int
    skipped: int
    differing: tuple[int, ...]


def agreement(ours: Tensor, fp32: Tensor, margin: float) -> Agreement:
    """Token agreement of logits (n, vocab), vocab >= 2, where the oracle's top-1/top-2 margin is above ``margin``."""
    top = fp32.float().topk(2, dim=-1).values
    clear = (top[:, 0] - top[:, 1] > margin).cpu()
    differs = argmax(ours.float()).cpu() != argmax(fp32.float()).cpu()
    differing = (clear & differs).nonzero().flatten().tolist()
    return Agreement(int(clear.sum()), int((~clear).sum()), tuple(differing))


@dataclass(frozen=True)
class Gate:
    """The fidelity gate: our error may be at most ``factor`` times torch bf16's, and clear greedy choices agree."""

    ours: Error
    bf16: Error
    factor: float
    tokens: Agreement

    @property
    def passed(self) -> bool:
        return self.ours.within(self.factor, self.bf16) and not self.tokens.differing

    def __str__(self) -> str:
        agreed = self.tokens.compared - len(self.tokens.differing)
        return (
            f"{'passed' if self.passed else 'FAILED'}: relative l2 error against fp32, mean and max over tokens: ours {self.ours}, "
            f"torch bf16 {self.bf16} (at most {self.factor} x); greedy tokens equal {agreed} of {self.tokens.compared}, "
            f"{self.tokens.skipped} below the margin"
        )


def gate(ours: Tensor, bf16: Tensor, fp32: Tensor, margin: float = 0.2, factor: float = 1.05) -> Gate:
    """Judges ``ours`` by torch bf16's own error on the same tokens.

    Logits (n, vocab) of the same teacher-forced tokens: from our kernel, EagerModel and ReferenceModel in mode "fp32".
    Passes when mean and max over tokens of our relative l2 error are each at most ``factor`` times torch bf16's and our
    greedy token is the oracle's wherever its top-1/top-2 margin is above ``margin``. Raises ValueError for other shapes.
    """
    return Gate(Error.of(ours, fp32), Error.of(bf16, fp32), factor, agreement(ours, fp32, margin))
