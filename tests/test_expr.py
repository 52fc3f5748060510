"""Expressions: what text means, how trees print, and what a mistake says."""

from __future__ import annotations

import itertools
import math
import random
import re
import struct

import pytest

from megadsl.diagnostics import MegadslError
from megadsl.expr import parse, to_cuda, to_text
from megadsl.expr.fold import fold, fp32
from megadsl.expr.parser import MAX_DEPTH
from megadsl.expr.printer import decimal
from megadsl.ir.expr import BINARY_OPS, REDUCE_OPS, UNARY_OPS, Arg, Binary, Const, Expr, Reduce, Unary, arg_names, reductions
from megadsl.source import Span

SPAN = Span("model.py", 12)
X, Y = Arg("x"), Arg("y")


def read(text: str) -> Expr:
    """Parse with every name of the text that is not called as an argument."""
    return parse(text, SPAN, dict.fromkeys(re.findall(r"\b[a-z]+\b(?!\()", text)))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("x", X),
        ("x + 2 * y", Binary("add", X, Binary("mul", Const(2.0), Y))),
        ("x - y - 1", Binary("sub", Binary("sub", X, Y), Const(1.0))),
        ("x / y / 2", Binary("div", Binary("div", X, Y), Const(2.0))),
        ("x ** y ** 2", Binary("pow", X, Binary("pow", Y, Const(2.0)))),
        ("-x ** 2", Unary("neg", Binary("pow", X, Const(2.0)))),
        ("x ** -y", Binary("pow", X, Unary("neg", Y))),
        ("-x * y", Binary("mul", Unary("neg", X), Y)),
        ("x * (y + 1)", Binary("mul", X, Binary("add", Y, Const(1.0)))),
        ("max(x, y) + max(x)", Binary("add", Binary("max", X, Y), Reduce("max", X))),
        ("min(x,.5e1)", Binary("min", X, Const(5.0))),
        ("sum(x - mean(x))", Reduce("sum", Binary("sub", X, Reduce("mean", X)))),
        ("silu(\n  x\n)", Unary("silu", X)),
        ("exp(x)", Unary("exp", X)),
    ],
)
def test_text_becomes_tree(text: str, tree: Expr) -> None:
    assert read(text) == tree


def test_an_argument_may_be_called_like_a_function() -> None:
    assert parse("max(max, 1)", SPAN, ["max"]) == Binary("max", Arg("max"), Const(1.0))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7.0),
        ("0.1 + 0.2", fp32(fp32(0.1) + fp32(0.2))),
        ("-2 ** 2", -4.0),
        ("(-2) ** 2", 4.0),
        ("sqrt(2)", fp32(math.sqrt(2.0))),
        ("sigmoid(-1000)", 0.0),
        ("max(1, 2) - min(1, 2)", 1.0),
        ("mean(3) + max(4)", 7.0),
        ("eps * 2", fp32(2 * fp32(1e-5))),
    ],
)
def test_constants_fold_in_fp32(text: str, value: float) -> None:
    constants = {"eps": 1e-5} if "eps" in text else {}
    assert parse(text, SPAN, [], constants) == Const(value)


def test_the_sum_of_a_constant_waits_for_the_row_length() -> None:
    assert parse("sum(2 * 1)", SPAN, []) == Reduce("sum", Const(2.0))


def test_every_unary_op_folds_and_parses() -> None:
    for op in UNARY_OPS:
        assert isinstance(fold(Unary(op, Const(0.5))), Const)
        assert parse(f"{op}(x)", SPAN, ["x"]) == Unary(op, X)


MISTAKES = [
    # text, code, part of the message, column of the caret in the text
    ("", "MK201", "missing at the end", 0),
    ("x +", "MK201", "missing at the end", 3),
    ("x * / y", "MK201", "missing before '/'", 4),
    ("(x + )", "MK201", "missing before ')'", 5),
    ("max(x,)", "MK201", "missing before ')'", 6),
    ("(x * (y)", "MK202", "never closed", 0),
    ("silu(x", "MK202", "never closed", 4),
    ("x + y)", "MK202", "closes nothing", 5),
    ("x ^ 2", "MK203", "'^'", 2),
    ("x y", "MK204", "missing before 'y'", 2),
    ("2x", "MK204", "missing before 'x'", 1),
    ("(x, y)", "MK205", "comma", 2),
    ("gat * y", "MK206", "unknown name 'gat'", 0),
    ("x * y * silu", "MK206", "unknown name 'silu'", 8),
    ("x * y + sliu(x)", "MK207", "unknown function 'sliu'", 8),
    ("x * silu(x, y)", "MK208", "takes one argument, here it has 2", 4),
    ("min(x) * y", "MK208", "takes two arguments, here it has 1", 0),
    ("x * y * max()", "MK208", "one argument (over the row) or two, here it has 0", 8),
    ("x * 2", "MK209", "'y' is given", 0),
    ("x * y * (1 / 0)", "MK210", "'1 / 0'", 9),
    ("x * y + 1e39", "MK210", "'1e39'", 8),
    ("x * y + 1e-60", "MK210", "'1e-60'", 8),
    ("x * y + log(-1)", "MK210", "'log(-1)'", 8),
]


@pytest.mark.parametrize(("text", "code", "message", "column"), MISTAKES)
def test_mistake_has_code_span_and_caret(text: str, code: str, message: str, column: int) -> None:
    with pytest.raises(MegadslError) as caught:
        parse(text, SPAN, ["x", "y"])
    found = caught.value.diagnostics
    assert [d.code for d in found] == [code]
    assert message in found[0].message
    assert found[0].span == SPAN and found[0].mend
    shown, caret = found[0].detail.split("\n")
    assert shown == "    " + text
    assert caret.index("^") == 4 + column


def test_mistakes_in_names_come_together_with_what_was_meant() -> None:
    with pytest.raises(MegadslError) as caught:
        parse("silo(gate) * upp", SPAN, ["gate", "up"])
    assert [d.code for d in caught.value.diagnostics] == ["MK207", "MK206"]
    assert "did you mean 'silu'?" in caught.value.diagnostics[0].mend
    assert "did you mean 'up'? (known names: gate, up)" in caught.value.diagnostics[1].mend


def test_caret_stays_on_its_line() -> None:
    with pytest.raises(MegadslError) as caught:
        parse("x +\n\ty * foo(\n x)", SPAN, ["x", "y"])
    assert caught.value.diagnostics[0].detail == "    \ty * foo(\n    \t    ^^^"


def test_unused_constant_is_an_error() -> None:
    with pytest.raises(MegadslError, match="'eps' is given"):
        parse("x", SPAN, ["x"], {"eps": 1e-5})


def test_constant_outside_fp32_names_itself() -> None:
    with pytest.raises(MegadslError, match="eps = nan"):
        parse("x + eps", SPAN, ["x"], {"eps": math.nan})


def test_a_name_is_a_tensor_or_a_constant() -> None:
    with pytest.raises(ValueError, match="eps"):
        parse("eps", SPAN, ["eps"], {"eps": 1.0})


def test_depth_is_bounded_but_parentheses_are_free() -> None:
    assert parse("(" * 3000 + "x" + ")" * 3000, SPAN, ["x"]) == X
    assert parse("+".join(["x"] * MAX_DEPTH), SPAN, ["x"])
    with pytest.raises(MegadslError) as caught:
        parse("+".join(["x"] * (MAX_DEPTH + 1)), SPAN, ["x"])
    assert caught.value.code == "MK211"


def test_every_short_token_sequence_parses_or_is_diagnosed() -> None:
    tokens = ["x", "2", "+", "-", "**", "(", ")", ",", "max("]
    for length in (1, 2, 3, 4):
        for chosen in itertools.product(tokens, repeat=length):
            try:
                parse(" ".join(chosen), SPAN, ["x"])
            except MegadslError as problem:
                assert problem.code.startswith("MK2")


def random_tree(rng: random.Random, depth: int) -> Expr:
    """A folded tree, as parse returns them."""
    if depth == 0:
        leaves: list[Expr] = [X, Y, Const(fp32(rng.uniform(-3, 3))), Const(float(rng.randint(-4, 4)))]
        return rng.choice(leaves)
    kind = rng.random()
    if kind < 0.25:
        return fold(Unary(rng.choice([op for op in UNARY_OPS if op not in ("log", "sqrt", "rsqrt")]), random_tree(rng, depth - 1)))
    if kind < 0.35:
        return fold(Reduce(rng.choice(REDUCE_OPS), random_tree(rng, depth - 1)))
    left, right = random_tree(rng, depth - 1), random_tree(rng, rng.randrange(depth))
    try:
        return fold(Binary(rng.choice(BINARY_OPS), left, right))
    except ArithmeticError:
        return X


def test_printed_text_parses_back() -> None:
    rng = random.Random(7)
    for _ in range(1500):
        tree = random_tree(rng, rng.randint(0, 5))
        assert parse(to_text(tree), SPAN, arg_names(tree)) == tree


@pytest.mark.parametrize(
    "text",
    [
        "silu(gate) * up",
        "x * rsqrt(mean(x * x) + 1e-05) * w",
        "gate * 0.5 * (1 + tanh(0.797 * (gate + 0.044 * gate ** 3))) * up",
        "x - (y - 1) - (x - y)",
        "-(-x) + (-2) ** x ** 2",
        "-(x + y) / (x * y)",
        "x - -3 + max(x, min(y, 2)) * max(x)",
    ],
)
def test_canonical_text_has_fewest_parentheses(text: str) -> None:
    assert to_text(read(text)) == text


def test_cuda_text() -> None:
    tree = parse("-(-x) * rsqrt(mean(x * x) + eps) - max(x, -2) ** 2 / w", SPAN, ["x", "w"], {"eps": 1e-6})
    (mean,) = reductions(tree)
    names = {"x": "x[i]", "w": "from_bf16(w)"}
    assert to_cuda(tree, names, {mean: "mean_0"}) == (
        "-(-x[i]) * mk::math::rsqrt(mean_0 + 1e-06f) - mk::math::pow(mk::math::max(x[i], -2.0f), 2.0f) / from_bf16(w)"
    )
    with pytest.raises(KeyError):
        to_cuda(tree, {"x": "x"}, {mean: "m"})


def test_literals_read_back_exactly() -> None:
    rng = random.Random(3)
    patterns = [rng.getrandbits(32) for _ in range(4000)] + [0, 1, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x3F800001]
    for pattern in patterns:
        (value,) = struct.unpack("<f", struct.pack("<I", pattern))
        if math.isfinite(value):
            assert struct.pack("<f", float(decimal(value))) == struct.pack("<I", pattern)
    assert decimal(0.1) == "0.1" and decimal(3.0) == "3.0" and decimal(1e-5) == "1e-05"
