"""The error metric and the fidelity gate."""

from __future__ import annotations

import math

import pytest
import torch

from megadsl.reference.compare import Error, agreement, gate, relative_l2

ORACLE = torch.tensor([[3.0, 4.0, 0.0], [0.0, 1.0, 0.9]])


def off_by(amount: float) -> torch.Tensor:
    return ORACLE + torch.tensor([0.0, 0.0, amount])


def test_relative_l2_per_token() -> None:
    errors = relative_l2(off_by(0.5), ORACLE)
    assert errors.tolist() == pytest.approx([0.5 / 5.0, 0.5 / math.sqrt(1.81)])
    assert Error.of(off_by(0.5), ORACLE).max == pytest.approx(0.5 / math.sqrt(1.81))
    assert relative_l2(torch.zeros(1, 2), torch.zeros(1, 2)).tolist() == [0.0]
    assert relative_l2(torch.ones(1, 2), torch.zeros(1, 2)).tolist() == [math.inf]


def test_gate_allows_five_percent_more_than_torch() -> None:
    assert gate(off_by(0.0104), off_by(0.01), ORACLE).passed
    assert not gate(off_by(0.0106), off_by(0.01), ORACLE).passed
    assert gate(off_by(0.0106), off_by(0.01), ORACLE, factor=1.1).passed


def test_gate_states_both_errors() -> None:
    text = str(gate(off_by(0.02), off_by(0.01), ORACLE))
    assert text.startswith("FAILED") and "ours 9.433e-03 1.487e-02, torch bf16 4.716e-03 7.433e-03" in text
    assert "equal 1 of 1, 1 below the margin" in text


def test_gate_refuses_nan() -> None:
    assert not gate(off_by(math.nan), off_by(0.01), ORACLE).passed


def test_tokens_count_above_the_margin_only() -> None:
    flipped = torch.tensor([[4.0, 3.0, 0.0], [0.0, 0.9, 1.0]])
    assert agreement(flipped, ORACLE, 0.2).differing == (0,)
    assert agreement(flipped, ORACLE, 0.05).differing == (0, 1)
    assert agreement(flipped, ORACLE, 2.0).skipped == 2
    assert not gate(flipped, flipped, ORACLE).passed


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        relative_l2(torch.zeros(2, 3), torch.zeros(3, 2))
