"""Each op's torch meaning against an independent formula."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megadsl.expr import parse
from megadsl.ir.expr import UNARY_OPS, Arg, Expr, Unary
from megadsl.ir.graph import Rope
from megadsl.reference import meaning
from megadsl.source import Span


def expr(text: str, *args: str) -> Expr:
    return parse(text, Span("model.py", 1), args)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_expression_is_torch_rms_norm() -> None:
    x, w = randn(5, 80), randn(80, seed=1)
    ours = meaning.evaluate(expr("x * rsqrt(mean(x * x) + 1e-5) * w", "x", "w"), {"x": x, "w": w}, (5, 80))
    torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (80,), w, 1e-5))


def test_softmax_from_nested_reductions() -> None:
    x = randn(3, 11)
    ours = meaning.evaluate(expr("exp(x - max(x)) / sum(exp(x - max(x)))", "x"), {"x": x}, (3, 11))
    torch.testing.assert_close(ours, x.softmax(-1))


def test_reduction_of_a_row_constant_counts_every_feature() -> None:
    x = randn(3, 11)
    ours = meaning.evaluate(expr("sum(mean(x)) + sum(2)", "x"), {"x": x}, (3, 11))
    torch.testing.assert_close(ours, (x.sum(-1, keepdim=True) + 22).expand(3, 11))


def test_binary_ops_and_powers() -> None:
    x, y = randn(2, 7), randn(2, 7, seed=1)
    ours = meaning.evaluate(expr("max(x, y) - min(x, 2) / (abs(y) + 1) + x ** 3 - 2 ** -y", "x", "y"), {"x": x, "y": y}, (2, 7))
    torch.testing.assert_close(ours, torch.maximum(x, y) - x.clamp(max=2) / (y.abs() + 1) + x * x * x - torch.exp(-y * math.log(2.0)))


SCALAR: dict[str, Callable[[float], float]] = {
    "neg": lambda x: -x,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "abs": abs,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
    "square": lambda x: x * x,
}


@pytest.mark.parametrize("op", UNARY_OPS)
def test_unary_op(op: str) -> None:
    points = [0.25, 1.0, 3.5] if op in ("log", "sqrt", "rsqrt") else [-2.5, -0.25, 0.0, 1.0, 3.5]
    ours = meaning.evaluate(Unary(op, Arg("x")), {"x": torch.tensor([points])}, (1, len(points)))
    torch.testing.assert_close(ours[0], torch.tensor([SCALAR[op](p) for p in points]))


def test_rounding_follows_the_usual_bf16_program() -> None:
    x, w = randn(4, 64).bfloat16(), randn(64, seed=1).bfloat16()
    tree = expr("x * rsqrt(mean(x * x) + 1e-5) * w", "x", "w")
    ours = meaning.evaluate(tree, {"x": x, "w": w}, (4, 64), meaning.round_bf16)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(ours, (normed * w).float())


def test_linear_has_exact_products_of_bf16() -> None:
    x, w = randn(3, 80).bfloat16(), randn(40, 80, seed=1).bfloat16()
    torch.testing.assert_close(meaning.linear(x, w), (x.double() @ w.double().T).float(), rtol=1e-5, atol=1e-5)
    assert meaning.linear(x, w).dtype == torch.float32


@pytest.mark.parametrize("position", [0, 1, 9000])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope_is_complex_rotation(position: int, style: str) -> None:
    dim, theta, heads = 16, 500000.0, 3
    x = randn(1, heads, dim)
    cos, sin = meaning.rope_table(torch.tensor([position]), Rope(dim, theta, style).frequencies)
    ours = meaning.rope(x, cos, sin, style)
    for head in range(heads):
        for i in range(dim // 2):
            first, second = (i, i + dim // 2) if style == "half" else (2 * i, 2 * i + 1)
            turned = complex(x[0, head, first], x[0, head, second]) * cmath.exp(1j * position * theta ** (-2 * i / dim))
            assert complex(ours[0, head, first], ours[0, head, second]) == pytest.approx(turned, abs=1e-6)


def test_rope_angles_are_exact_at_far_positions() -> None:
    cos, sin = meaning.rope_table(torch.tensor([9000, 131071]), Rope(64, 10000.0, "half").frequencies)
    for row, position in enumerate((9000, 131071)):
        for i in range(32):
            angle = position * 10000.0 ** (-2 * i / 64)
            assert float(cos[row, i]) == pytest.approx(math.cos(angle), abs=1e-7)
            assert float(sin[row, i]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_interleaved_is_half_with_permuted_dims() -> None:
    x = randn(5, 2, 64)
    cos, sin = meaning.rope_table(torch.arange(5) * 1800, Rope(64, 10000.0, "half").frequencies)
    pairs = torch.arange(64).view(2, 32).T.flatten()  # 0, 32, 1, 33, ...
    assert torch.equal(meaning.rope(x[..., pairs], cos, sin, "interleaved"), meaning.rope(x, cos, sin, "half")[..., pairs])


def test_unknown_rope_style_is_refused() -> None:
    with pytest.raises(ValueError, match="'neox'"):
        meaning.rope(randn(1, 1, 8), randn(1, 4), randn(1, 4), "neox")


def test_append_writes_only_the_new_rows() -> None:
    cache, new = randn(2, 10, 4), randn(3, 2, 4, seed=1)
    before = cache.clone()
    meaning.append(cache, new, 5)
    assert torch.equal(cache[:, 5:8], new.permute(1, 0, 2))
    assert torch.equal(cache[:, :5], before[:, :5]) and torch.equal(cache[:, 8:], before[:, 8:])


def test_visible_rows() -> None:
    seen = meaning.visible_rows(2, [0b001, 0b011, 0b101])
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1)])
def test_attention_row_by_row(heads: int, kv_heads: int) -> None:
    n, old, dim, scale = 3, 6, 16, 0.3
    rows = old + n
    q, keys, values = randn(n, heads, dim), randn(kv_heads, rows, dim, seed=1), randn(kv_heads, rows, dim, seed=2)
    visible = meaning.visible_rows(old, [0b001, 0b011, 0b101])
    ours = meaning.attention(q, keys, values, visible, scale)
    for t in range(n):
        for head in range(heads):
            kv = head // (heads // kv_heads)
            seen = [r for r in range(rows) if visible[t, r]]
            weights = torch.stack([(q[t, head] * keys[kv, r]).sum() * scale for r in seen]).softmax(0)
            wanted = sum((w * values[kv, r] for w, r in zip(weights, seen, strict=True)), torch.zeros(dim))
            torch.testing.assert_close(ours[t, head], wanted)


def test_attention_rounds_the_weights_but_not_their_sum() -> None:
    keys = torch.tensor([[[0.0], [-0.1], [-0.7]]])
    values = torch.tensor([[[1.0], [2.0], [4.0]]])
    ours = meaning.attention(torch.ones(1, 1, 1), keys, values, torch.ones(1, 3, dtype=torch.bool), 1.0, meaning.round_bf16)
    weights = [1.0, math.exp(-0.1), math.exp(-0.7)]
    rounded = torch.tensor(weights).bfloat16().double().tolist()
    assert float(ours) == pytest.approx((rounded[0] + 2 * rounded[1] + 4 * rounded[2]) / sum(weights), rel=1e-6)


def test_argmax_takes_the_smallest_index() -> None:
    assert meaning.argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-1.0, -3.0, -0.5]])).tolist() == [1, 0, 2]


def test_embed_picks_rows() -> None:
    table = randn(7, 4).bfloat16()
    assert torch.equal(meaning.embed(table, torch.tensor([6, 0])), torch.stack((table[6], table[0])))
