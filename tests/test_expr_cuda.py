"""C++ text of expressions, compiled and run: the same numbers as folding gives."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from megadsl.expr import parse, to_cuda
from megadsl.expr.fold import fold, fp32
from megadsl.ir.expr import UNARY_OPS, Binary, Const, Expr, Reduce, Unary, arg_names, reductions, substitute
from megadsl.source import Span

# plain meanings, so that these tests say something about the text and nothing about megadsl's own math.h
MATH = """
#include <cmath>
namespace mk::math {
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float abs(float x) { return std::fabs(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
inline float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
inline float gelu_tanh(float x) { return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
inline float relu(float x) { return x > 0.0f ? x : 0.0f; }
inline float square(float x) { return x * x; }
inline float max(float x, float y) { return x > y ? x : y; }
inline float min(float x, float y) { return x < y ? x : y; }
inline float pow(float x, float y) { return std::pow(x, y); }
}  // namespace mk::math
"""
TEXTS = [
    "x - (y - 3) - (x - y)",
    "x / (y / 3) / (x * y)",
    "-(-x) - -y * -2 - -(x + y)",
    "-x ** 2 + (-2) ** 3 * x + 2 ** y ** 0.5 + (x + 0.5) ** 2",
    "max(x, min(y, 1.25)) * 1e-05 / 3e-05",
    "x * rsqrt(mean(x * x) + 1e-05) - max(x) + sum(max(x) - x)",
    "y * 0.5 * (1 + tanh(0.797 * (y + 0.044 * y ** 3))) * x",
    *(f"{op}(x) + y" for op in UNARY_OPS),
]
VALUES = {"x": fp32(0.7), "y": fp32(1.9)}
REDUCED = 0.3125


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b[xy]\b", text))


def folded(e: Expr) -> Expr:
    """``e``, whose leaves are constants, folded; reductions count as REDUCED."""
    match e:
        case Unary(op, a):
            return fold(Unary(op, folded(a)))
        case Binary(op, a, b):
            return fold(Binary(op, folded(a), folded(b)))
        case Reduce():
            return Const(REDUCED)
        case _:
            return e


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("expr")
    functions = []
    for index, text in enumerate(TEXTS):
        tree = parse(text, Span("model.py", 1), names_in(text))
        names = {name: name for name in arg_names(tree)}
        body = to_cuda(tree, names, dict.fromkeys(reductions(tree), "reduced"))
        functions.append(f'extern "C" float f{index}(float x, float y, float reduced) {{ return {body}; }}')
    source, library = folder / "expr.cpp", folder / "expr.so"
    source.write_text(MATH + "\n".join(functions) + "\n")
    flags = ["-std=c++17", "-Wall", "-Wconversion", "-Werror", "-Wno-unused-parameter", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("index", range(len(TEXTS)), ids=TEXTS)
def test_compiled_text_computes_the_tree(compiled: ctypes.CDLL, index: int) -> None:
    tree = parse(TEXTS[index], Span("model.py", 1), names_in(TEXTS[index]))
    function = compiled[f"f{index}"]
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    wanted = folded(substitute(tree, {name: Const(value) for name, value in VALUES.items()}))
    assert isinstance(wanted, Const)
    assert function(VALUES["x"], VALUES["y"], REDUCED) == pytest.approx(wanted.value, rel=2e-6, abs=1e-6)
