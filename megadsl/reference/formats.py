"""What formats of weights mean: a matrix as codes and scales, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from megadsl.ir.formats import FORMATS
from megadsl.types import round_up

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code without its sign
E2M1_MAX, E4M3_MAX, INT8_MAX, INT4_MAX = 6.0, 448.0, 127, 7
_E2M1_MAX_EXPONENT = 2  # of 6.0 = 1.5 * 2^2
_E8M0_BIAS = 127

Made: TypeAlias = "tuple[Tensor, Tensor | None]"  # codes and scales


@dataclass(frozen=True)
class Quantised:
    """``codes`` uint8 (rows, columns); 4-bit codes have their bits 0 to 3. ``scales`` (rows, columns / block) in the type that lies in
    memory: uint8 bits of E4M3 or E8M0, or bf16; None without blocks. ``row_scales`` fp32 (rows,); None without."""

    codes: Tensor
    scales: Tensor | None
    row_scales: Tensor | None


def quantised(name: str, weight: Tensor) -> Quantised:
    """A matrix (rows, columns) of any float type in the format ``name``, rounded to nearest, ties to even. Columns are filled up with
    zeros to whole blocks. NaN and infinities are not allowed for."""
    w, rows = weight.float(), row_scales(name, weight)
    if block := FORMATS[name].block:
        w = torch.nn.functional.pad(w, (0, round_up(w.shape[1], block) - w.shape[1])).unflatten(1, (-1, block))
    return Quantised(*_QUANTISE[name](w, rows), rows)


def row_scales(name: str, weight: Tensor) -> Tensor | None:
    """The ``row_scales`` of :func:`quantised` alone: the largest element of a row is the largest code; of nvfp4, that of the largest
    block of the matrix the largest code with the largest scale."""
    if not FORMATS[name].row_scale:
        return None
    sizes = weight.float().abs()
    largest = sizes.amax().expand(len(weight)) if FORMATS[name].block else sizes.amax(1)
    return _over(largest, _LARGEST[name])


def operands(name: str, q: Quantised) -> Tensor:
    """What is multiplied, fp32 (rows, columns), each a bf16 number: codes times the scales of their blocks."""
    values = _VALUES[name](q.codes)
    if q.scales is None:
        return values
    scales = _SCALES[name](q.scales).repeat_interleave(FORMATS[name].block, 1)
    found: Tensor = (values * scales).to(torch.bfloat16).float()
    return found


def dequantised(name: str, weight: Tensor) -> Tensor:
    """The matrix that a linear of format ``name`` multiplies by in place of ``weight``: fp32 of its shape, or itself for bf16."""
    if name == "bf16":
        return weight
    q = quantised(name, weight)
    found = operands(name, q)[:, : weight.shape[1]]
    return found if q.row_scales is None else found * q.row_scales[:, None]


def _over(a: Tensor, b: float) -> Tensor:
    """a / b, rounded once on every device: by a number, torch multiplies by its reciprocal on a GPU."""
    return a / torch.full_like(a, b)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 where b is."""
    return torch.where(b == 0, torch.zeros_like(a), a / torch.where(b == 0, torch.ones_like(b), b))


def _fp8(w: Tensor, rows: Tensor) -> Made:
    return _ratio(w, rows[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), None


def _int8(w: Tensor, rows: Tensor) -> Made:
    return _ratio(w, rows[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8).view(torch.uint8), None


def _nvfp4(w: Tensor, rows: Tensor) -> Made:
    most, rows = _over(w.abs().amax(2), E2M1_MAX), rows[:, None]
    scales = _ratio(most, rows.expand_as(most)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return _e2m1(_ratio(w, (scales.float() * rows)[:, :, None])).flatten(1), scales.view(torch.uint8)


def _mxfp4(w: Tensor, rows: None) -> Made:
    """The power of two of a block is that of its largest element less that of 6 (OCP MX)."""
    _, exponents = torch.frexp(w.abs().amax(2))  # of a fraction from 0.5 on
    codes = (exponents - 1 - _E2M1_MAX_EXPONENT + _E8M0_BIAS).clamp(0, 254)
    scales = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes - _E8M0_BIAS)
    return _e2m1(w / scales[:, :, None]).flatten(1), codes.to(torch.uint8)


def _int4(w: Tensor, rows: None) -> Made:
    scales = _over(w.abs().amax(2), INT4_MAX).to(torch.bfloat16)
    codes = _ratio(w, scales.float()[:, :, None]).round().clamp(-INT4_MAX - 1, INT4_MAX)
    return (codes.to(torch.int8) & 0xF).flatten(1).view(torch.uint8), scales


def _e2m1(x: Tensor) -> Tensor:
    """Codes of the nearest E2M1 numbers, ties to even codes; what is larger than 6 becomes 6."""
    steps = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)], device=x.device)
    size = x.abs().contiguous()
    up, down = torch.bucketize(size, steps, right=True), torch.bucketize(size, steps)  # they differ in the middle between two numbers
    codes = torch.where(up % 2 == 0, up, down)
    return (codes + 8 * (x < 0)).to(torch.uint8)


def _from_e2m1(codes: Tensor) -> Tensor:
    signed = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return signed[codes.long()]


def _from_e4m3(bits: Tensor) -> Tensor:
    return bits.view(torch.float8_e4m3fn).float()


def _from_e8m0(bits: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(bits, dtype=torch.float32), bits.int() - _E8M0_BIAS)


def _from_int4(codes: Tensor) -> Tensor:
    return ((codes.int() ^ 8) - 8).float()


_LARGEST = {"fp8": E4M3_MAX, "int8": INT8_MAX, "nvfp4": E2M1_MAX * E4M3_MAX}
_QUANTISE: dict[str, Callable[..., Made]] = {  # of fp32 elements, by blocks where there are any, and the row scales
    "fp8": _fp8, "int8": _int8, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "int4": _int4,
}  # fmt: skip
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": _from_e4m3, "int8": lambda codes: codes.view(torch.int8).float(), "nvfp4": _from_e2m1, "mxfp4": _from_e2m1, "int4": _from_int4,
}  # fmt: skip
_SCALES: dict[str, Callable[[Tensor], Tensor]] = {"nvfp4": _from_e4m3, "mxfp4": _from_e8m0, "int4": lambda scales: scales.float()}
