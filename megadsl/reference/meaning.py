"""Each op's meaning as a plain torch function. All arithmetic is fp32 whatever the operands' dtype.

Shapes: n new tokens, R rows of a cache that are in use after this step's are appended, D the head dimension. A cache is
a tensor of shape (kv_heads, capacity, D) in natural order of rows and dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megadsl.ir.expr import Arg, Binary, Const, Expr, Reduce, Unary, varies

Rounding = Callable[[Tensor], Tensor]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "abs": torch.abs,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "square": torch.square,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "pow": torch.pow,
}
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "max": lambda x: x.amax(-1, keepdim=True),
}


def round_bf16(x: Tensor) -> Tensor:
    """fp32 values rounded to the nearest bf16 (ties to even), still stored as fp32."""
    return x.bfloat16().float()


def evaluate(e: Expr, args: Mapping[str, Tensor], shape: tuple[int, int], rounding: Rounding | None = None) -> Tensor:
    """``e`` over rows: fp32 of ``shape`` (tokens, features).

    Each argument broadcasts to ``shape``. ``rounding`` is applied to the result of every operation that varies along the
    row, as a framework that runs one kernel per operation does; reductions and what is computed from them alone stay
    fp32, as its fused norms do. Raises KeyError for an argument that is not in ``args``.
    """
    device = next(iter(args.values())).device if args else None

    def value(node: Expr, inside_reduction: bool) -> Tensor:
        match node:
            case Const(constant):
                return torch.tensor(constant, dtype=torch.float32, device=device)
            case Arg(name):
                return args[name].float()
            case Reduce(op, a):
                return REDUCE[op](value(a, True).expand(shape))
            case Unary(op, a):
                result = UNARY[op](value(a, inside_reduction))
            case Binary(op, a, b):
                result = BINARY[op](value(a, inside_reduction), value(b, inside_reduction))
        rounds = rounding is not None and not inside_reduction and varies(node)
        return rounding(result) if rounding is not None and rounds else result

    return value(e, False).expand(shape)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows ``token_ids`` (n,) of ``table`` (vocab, features): (n, features) in the table's dtype."""
    return table[token_ids]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` (n, columns) times ``weight`` (rows, columns) transposed, products and sums in fp32: (n, rows)."""
    return x.float() @ weight.float().T


def rope_table(positions: Tensor, frequencies: Sequence[float], amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 (n, head_dim / 2), of position * frequencies[i], times ``amplitude`` (see ir.graph.Rope).

    Angles and functions are float64 before the one rounding: at position 9000 an fp32 angle is off by 5e-4.
    """
    angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64, device=positions.device)
    return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotates the first R features of each head of ``x`` (n, heads, D) by the angles of its token (n, R / 2); fp32.

    ``style`` "half" rotates the pairs (i, i + R / 2), "interleaved" the pairs (2 i, 2 i + 1).
    """
    turned = 2 * cos.shape[-1]
    pairs, rest = x.float()[..., :turned], x.float()[..., turned:]
    cos, sin = cos[:, None], sin[:, None]
    if style == "half":
        first, second = pairs.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    if style == "interleaved":
        first, second = pairs[..., 0::2], pairs[..., 1::2]
        both = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        return torch.cat((both, rest), dim=-1)
    raise ValueError(f"rope style is 'half' or 'interleaved', not {style!r}")


def append(cache: Tensor, new: Tensor, kv_len: int) -> None:
    """Writes ``new`` (n, kv_heads, D) to rows kv_len, kv_len + 1, ... of ``cache`` (kv_heads, capacity, D)."""
    cache[:, kv_len : kv_len + new.shape[0]] = new.transpose(0, 1).to(cache.dtype)


def visible_rows(kv_len: int, ancestors: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Bool (n, kv_len + n): which rows each new token attends to.

    All kv_len older rows, and new row j when bit j of the token's mask in ``ancestors`` (n masks) is set.
    """
    n = len(ancestors)
    new = torch.tensor([[bool(mask >> j & 1) for j in range(n)] for mask in ancestors], device=device)
    return torch.cat((torch.ones(n, kv_len, dtype=torch.bool, device=device), new), dim=1)


def windowed(visible: Tensor, window: int) -> Tensor:
    """Of the rows that each token sees, (n, rows), the newest ``window``."""
    return visible & (visible.flip(-1).cumsum(-1).flip(-1) <= window)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    rounding: Rounding | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale * q . keys) @ values over visible rows, fp32 (n, heads, D).

    ``q`` is (n, heads, D), ``keys`` and ``values`` (kv_heads, R, D), ``visible`` bool (n, R) with at least one row set per
    token. Query head h reads KV head h // (heads / kv_heads). ``rounding`` applies to exp(score - greatest score), the
    left operand of the second product; the denominator sums the unrounded values. With ``softcap`` a scaled score s counts as
    softcap * tanh(s / softcap).
    """
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    grouped = q.float().transpose(0, 1).reshape(kv_heads, heads // kv_heads, n, head_dim)
    scores = scale * (grouped @ keys.float()[:, None].transpose(-1, -2))
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    if rounding is not None:
        weights = rounding(weights)
    out = weights @ values.float()[:, None] / total
    return out.reshape(heads, n, head_dim).transpose(0, 1)


def argmax(logits: Tensor) -> Tensor:
    """Smallest index of the greatest logit per token: int64 (n,) of (n, vocab)."""
    index = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), index, logits.shape[-1]).amin(-1)
