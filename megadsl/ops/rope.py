"""rope: rotary position embedding of whole heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megadsl.diagnostics import Collector, declare
from megadsl.ir.graph import LongRope, RopeScaling
from megadsl.ir.spec import Node, Tensor
from megadsl.ops.base import Family, Outline, shape_text
from megadsl.source import Span
from megadsl.types import all_layers

ROPE_STYLE = declare(
    "MK118", "rope: unknown style {style!r}", 'use style="half" (Llama, pairs i and i + D/2) or style="interleaved" (2i, 2i + 1)'
)
ROPE_FEATURES = declare(
    "MK119",
    "rope: {tensor!r} of shape {shape} does not hold whole heads of {head_dim} features",
    "give head_dim= the width of one head; features must be heads * head_dim",
)
HEAD_DIM = declare("MK120", "{name}: head_dim {head_dim} is not supported", "use a head dimension of {known}")
SCALING_KIND = declare("MK252", "rope: unknown scaling {scaling}", "use a rope_type of these, or none: {known}")
SCALING_FIELD = declare("MK253", "rope: scaling {kind!r} needs {field}, {what}, and has {value}", "give {field} in scaling=")
ROTARY_DIM = declare(
    "MK255",
    "rope: rotary_dim = {rotary_dim!r} of heads of {head_dim} features",
    "rotate a multiple of {unit} of them, at most {head_dim}",
)
ROTARY_UNIT = 8  # features of a head that a lane maps and rotates together
STYLES = ("half", "interleaved")
HEAD_DIMS = tuple(range(64, 256 + 1, 16))  # whole steps of the products; a chunk of 16 rows is at most a ring's stage
MAPPED_DIMS = (64, 128, 256)  # a power of two of units, so that a head's lanes reduce among themselves


# Fields of a scaling by its kind, as config.json spells them and as RopeScaling does.
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "positions",
    },
    "yarn": {"factor": "factor", "original_max_position_embeddings": "positions"},
    "longrope": {"factor": "factor", "original_max_position_embeddings": "positions"},
}
OPTIONAL: dict[str, dict[str, tuple[str, float]]] = {"yarn": {"beta_fast": ("high", 32.0), "beta_slow": ("low", 1.0)}}
_MAGNITUDE = {"yarn": ("attention_factor", "mscale", "mscale_all_dim"), "longrope": ("attention_factor",)}
_DIVISORS = {"short_factor": "divisors", "long_factor": "beyond"}  # of longrope
_NUMBER = "a number above 0"
UNSCALED = ("default", None)


def rope_scaling(given: object, found: Collector, span: Span) -> RopeScaling | None:
    """The scaling in a config.json's rope_scaling; None for none, and after a finding: MK252 unknown kind, MK253 a field."""
    if given is None:
        return None
    kind = given.get("rope_type", given.get("type")) if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or kind not in (*SCALINGS, *UNSCALED):
        found.add(SCALING_KIND, span, scaling=repr(kind), known=", ".join(SCALINGS))
        return None
    if kind in UNSCALED:
        return None
    before = len(found.found)
    fields = _numbers(kind, given, found, span)
    if kind == "longrope":
        fields |= _divisors(given, found, span)
    if len(found.found) > before:
        return None
    if fields.get("high", 2) <= fields.get("low", 1):
        field = "high_freq_factor above low_freq_factor" if kind == "llama3" else "beta_fast above beta_slow"
        found.add(SCALING_FIELD, span, kind=kind, field=field, what=_NUMBER, value=repr(fields["high"]))
        return None
    if kind == "longrope":
        return LongRope(kind, **{"amplitude": _long_amplitude(fields), **fields})
    if kind == "yarn":
        fields |= {"amplitude": _amplitude(fields), "whole": given.get("truncate", True) is not False}
    return RopeScaling(kind, **fields)


def _numbers(kind: str, given: Mapping[str, Any], found: Collector, span: Span) -> dict[str, Any]:
    """The fields that are numbers, by the names that RopeScaling has for them; MK253."""
    fields: dict[str, Any] = dict(OPTIONAL.get(kind, {}).values())
    names = SCALINGS[kind] | {field: name for field, (name, _) in OPTIONAL.get(kind, {}).items()}
    names |= {field: field for field in _MAGNITUDE.get(kind, ())}
    for field, name in names.items():
        value = given.get(field)
        if value is None and field not in SCALINGS[kind]:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            found.add(SCALING_FIELD, span, kind=kind, field=field, what=_NUMBER, value="none" if value is None else repr(value))
        fields[name] = value
    return fields


def _divisors(given: Mapping[str, Any], found: Collector, span: Span) -> dict[str, tuple[float, ...]]:
    """The two lists of longrope; MK253 for one that is none, and a first text of a single position, of which there is no logarithm."""
    lists = {}
    for field, name in _DIVISORS.items():
        numbers = given.get(field)
        if not isinstance(numbers, list | tuple) or not all(type(n) in (int, float) and n > 0 for n in numbers):
            found.add(SCALING_FIELD, span, kind="longrope", field=field, what=f"{_NUMBER} for each pair", value=repr(numbers))
        else:
            lists[name] = tuple(map(float, numbers))
    field = "original_max_position_embeddings"
    positions: Any = given.get(field)
    if type(positions) in (int, float) and 0 < positions <= 1:
        found.add(SCALING_FIELD, span, kind="longrope", field=field, what="a number above 1", value=repr(positions))
    return lists


def _long_amplitude(fields: dict[str, Any]) -> float:
    """What longrope multiplies cosines and sines by: what it is given, else sqrt(1 + ln(factor) / ln(positions)) (Ding et al., 2024)."""
    given = fields.pop("attention_factor", None)
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(fields["factor"]) / math.log(fields["positions"])) if fields["factor"] > 1 else 1.0


def _amplitude(fields: dict[str, Any]) -> float:
    """What yarn multiplies cosines and sines by: what it is given, else 0.1 ln(factor) + 1 (Peng et al., 2023, section 3.4), or the
    quotient of two such numbers. Takes its fields out of ``fields``."""
    given, over, under = (fields.pop(name, None) for name in _MAGNITUDE["yarn"])
    if given is not None:
        return float(given)

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(fields["factor"]) + 1.0 if fields["factor"] > 1 else 1.0

    return of(over) / of(under) if over and under else of(1.0)


def dims_text(dims: Sequence[int]) -> str:
    """Head dimensions in words."""
    return "a multiple of 16 from 64 to 256" if dims == HEAD_DIMS else " or ".join(map(str, dims))


def check_head_dim(node: Node, head_dim: int, found: Collector, dims: Sequence[int] = HEAD_DIMS) -> bool:
    """Whether the head dimension is one the kernels are written for; MK120 when not."""
    if head_dim in dims:
        return True
    found.add(HEAD_DIM, node.span, name=node.name, head_dim=head_dim, known=dims_text(dims))
    return False


def _outline(node: Node, inputs: tuple[Tensor, ...], found: Collector) -> tuple[Outline, ...]:
    head_dim = node.attrs["head_dim"]
    if node.attrs["style"] not in STYLES:
        found.add(ROPE_STYLE, node.span, style=node.attrs["style"])
    rotary = node.attrs.get("rotary_dim", head_dim)
    if not isinstance(rotary, int) or isinstance(rotary, bool) or not 0 < rotary <= head_dim or rotary % ROTARY_UNIT:
        found.add(ROTARY_DIM, node.span, rotary_dim=rotary, head_dim=head_dim, unit=ROTARY_UNIT)
    else:
        _check_divisors(node, rotary // 2, found)
    if check_head_dim(node, head_dim, found):
        for t in inputs:
            if len(t.shape) != 2 or t.shape[1] % head_dim:
                found.add(ROPE_FEATURES, node.span, tensor=t.name, shape=shape_text(t.shape), head_dim=head_dim)
    return tuple(Outline(t.shape) for t in inputs)


def _check_divisors(node: Node, pairs: int, found: Collector) -> None:
    """MK253 for lists of longrope that are not as long as there are pairs of features."""
    for scaling in all_layers(node.attrs.get("scaling")):
        for field, name in _DIVISORS.items() if isinstance(scaling, LongRope) else ():
            if (count := len(getattr(scaling, name))) != pairs:
                what = f"{_NUMBER} for each of {pairs} pairs of features"
                found.add(SCALING_FIELD, node.span, kind="longrope", field=field, what=what, value=f"{count} of them")


ROPE = Family("rope", _outline)
