"""mk.*: what a kernel is written with. Shapes: activations (tokens, features) in bf16, weights as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar, cast, overload

from megadsl.diagnostics import declare
from megadsl.dsl.loop import Layers
from megadsl.dsl.naming import joint_stem, stem
from megadsl.dsl.tensor import KVCache, Scalar, Tensor
from megadsl.dsl.tracer import current
from megadsl.expr import parse
from megadsl.ir.formats import FORMAT_UNKNOWN, FORMATS
from megadsl.ir.spec import Tensor as SpecTensor
from megadsl.ops.rope import rope_scaling
from megadsl.source import caller_span
from megadsl.types import Drawn, DType, Lifetime, PerLayer

T = TypeVar("T")

TOKENS_RANGE = declare(
    "MK102", "tokens = {tokens!r} is out of range", "a launch takes 1 to {most} new tokens; feed a longer prompt in chunks"
)
IDS_TWICE = declare("MK140", "mk.input_ids is called twice", "call it once and keep the tensor")
NO_WEIGHT = declare("MK141", "mk.linear: no weight is given", "pass one or more weights after the activation: mk.linear(x, w)")
NOT_A_CACHE = declare("MK149", "mk.attention: kv is {value}", "pass layer.kv_cache(...).append(k, v)")
MAX_TOKENS = 16

Bias: TypeAlias = "Tensor | Sequence[Tensor] | None"


def input_ids(tokens: int = 1) -> Tensor:
    """The new token ids, i32 of shape (tokens,), written by the host or by the launch before. MK102 outside 1 to 16."""
    tracer, span = current("input_ids"), caller_span()
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_TOKENS:
        tracer.found.add(TOKENS_RANGE, span, tokens=tokens, most=MAX_TOKENS)
        tokens = 1
    if "input_ids" in tracer.tensors:
        tracer.found.add(IDS_TWICE, span)
    return tracer.declare(SpecTensor("input_ids", (tokens,), DType.I32, Lifetime.INPUT, span))


def weight(name: str, shape: int | tuple[int, ...], dtype: str | DType = DType.BF16, *, random: Drawn | None = None) -> Tensor:
    """A weight that exists once, by its name in the checkpoint (``.weight`` is appended when no ``.weight`` or ``.bias`` ends it).

    bf16, (rows, columns) or (length,). ``random`` is mean and standard deviation of its elements where there is no checkpoint (bench,
    tune, trace): by default 1 and 0.1 for vectors, 0 and columns^-0.5 for matrices; a norm that multiplies by 1 + w wants a mean of 0.
    MK101 unknown dtype, MK103 declared before with another shape or other random elements, MK104 bad dimension, MK222 for what
    is no number.
    """
    return current("weight").weight(name, shape, dtype, per_layer=False, span=caller_span(), random=random)


def kv_cache(kv_heads: int, head_dim: int, name: str = "kv") -> KVCache:
    """A KV cache of a kernel without layers; inside mk.layers use layer.kv_cache. MK104 for a bad dimension."""
    return current("kv_cache").kv_cache(name, kv_heads, head_dim, per_layer=False, span=caller_span())


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Row ``ids[t]`` of ``table`` (vocabulary, features) for each token: (tokens, features). MK110, MK111 for wrong shapes."""
    tracer, span = current("embed"), caller_span()
    name = stem(table.name) if isinstance(table, Tensor) else "embed"
    (out,) = tracer.node("embed", name, (ids, table), [name], span)
    return out


@overload
def linear(x: Tensor, weight: Tensor, /, *, bias: Bias = None, name: str | None = None, format: str | None = None) -> Tensor: ...


@overload
def linear(
    x: Tensor, first: Tensor, second: Tensor, /, *more: Tensor, bias: Bias = None, name: str | None = None, format: str | None = None
) -> tuple[Tensor, ...]: ...


def linear(
    x: Tensor, *weights: Tensor, bias: Bias = None, name: str | None = None, format: str | None = None
) -> Tensor | tuple[Tensor, ...]:
    """``x @ w.T`` for each weight (rows, columns), x (tokens, columns): (tokens, rows) each; several weights are one matrix.

    ``bias``, a vector weight (rows,), is added; of several weights a sequence with one for each.
    Accumulates in fp32, rounds to bf16. One tensor for one weight, else a tuple. The op is called ``name``, by default after
    its weights: o_proj; qkv_proj for q_proj, k_proj, v_proj. MK109 name taken, MK112 to MK114, MK250 and MK251 for wrong shapes,
    ``format``: what the weights are in memory, "bf16", "fp8", "int8", "nvfp4", "mxfp4" or "int4" (megadsl/ir/formats.py); they are
    made of the checkpoint's when these are packed. MK141 no weight, MK288 no such format.
    """
    tracer, span = current("linear"), caller_span()
    if not weights:
        raise tracer.fail(NO_WEIGHT, span)
    if name is not None:
        tracer.text("the name of a linear", name, '"o_proj"', span)
    names = [w.name for w in weights if isinstance(w, Tensor)]
    op = name or (joint_stem(names) if names else "linear")
    if name:
        tracer.require_new_name(name, span)
    parts = [op] if len(weights) == 1 else [stem(n) for n in names]
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    attrs: dict[str, object] = {"weights": len(weights)} if biases else {}
    if format is not None:
        if format not in FORMATS:
            raise tracer.fail(FORMAT_UNKNOWN, span, what=f"linear {op!r}", name=format, known=", ".join(FORMATS))
        attrs["format"] = format
    outputs = tracer.node("linear", op, (x, *weights, *biases), parts, span, attrs)
    return outputs[0] if len(outputs) == 1 else outputs


def map(expr: str, /, *, head_dim: int | None = None, **operands: Tensor | Scalar) -> Tensor:
    """An expression over the features of each token: ``mk.map("silu(gate) * up", gate=gate, up=up)``.

    Tensors are activations (tokens, features) or vector weights (features,); numbers are constants. sum, mean and max over
    one argument reduce over the features. fp32 inside; rounded to bf16 only where a value is materialised. With ``head_dim`` the
    expression is over each head by itself: it reads one activation (tokens, heads * head_dim) and vectors (head_dim,), and its
    reductions run over one head; such a map stands between a linear and mk.rope, attention or a cache. MK115 to MK117, MK227,
    MK228 and MK233 for operands that do not fit, MK201 to MK211 (with a caret) for the text, MK223 when it is none.
    """
    tracer, span = current("map"), caller_span()
    tracer.text("the expression", expr, '"silu(gate) * up"', span)
    tensors = {k: v for k, v in operands.items() if not isinstance(v, int | float)}
    numbers = {k: float(v) for k, v in operands.items() if isinstance(v, int | float)}
    parsed = parse(expr, span, tuple(tensors), numbers)
    return tracer.map("map", parsed, tensors, span) if head_dim is None else tracer.head_map("map", parsed, tensors, head_dim, span)


def rms_norm(x: Tensor, w: Tensor, eps: float, *, head_dim: int | None = None) -> Tensor:
    """``x * rsqrt(mean(x * x) + eps) * w`` with w (features,), all in fp32: same shape as x. MK115 for a wrong w, MK222 for eps.

    With ``head_dim`` each head is a row of its own and w is (head_dim,): see mk.map. MK227, MK228, MK233.
    """
    tracer, span = current("rms_norm"), caller_span()
    expr = parse("x * rsqrt(mean(x * x) + eps) * w", span, ("x", "w"), {"eps": tracer.number("eps", eps, span, least=0)})
    name = stem(w.name) if isinstance(w, Tensor) else "rms_norm"
    operands = {"x": x, "w": w}
    return tracer.map(name, expr, operands, span) if head_dim is None else tracer.head_map(name, expr, operands, head_dim, span)


def per_layer(value: T | Sequence[T]) -> T | PerLayer[T]:
    """What may differ from layer to layer: ``window=`` of mk.attention, ``theta=`` and ``scaling=`` of mk.rope.

    A list or tuple has a value for each layer of the loop, in order: with ``window=mk.per_layer([512, 512, None])`` the last of three
    layers sees all rows. Anything else is every layer's. The body of the loop is traced once; the kernel reads each layer's number as it
    goes. MK256, where it is used, for a list that is not as long as mk.layers.
    """
    return PerLayer(tuple(value)) if isinstance(value, list | tuple) else cast(T, value)


def rope(
    q: Tensor,
    k: Tensor,
    *,
    head_dim: int,
    theta: float | PerLayer[float],
    style: str = "half",
    scaling: Mapping[str, object] | PerLayer[Mapping[str, object] | None] | None = None,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k (tokens, heads * head_dim) rotated by their positions, angles ``position * theta ** (-2 i / R)``.

    Of each head the first R = ``rotary_dim`` features are rotated, a multiple of 8, by default all. style "half" pairs features i and
    i + R / 2, "interleaved" 2i and 2i + 1. ``scaling`` stretches the frequencies; it is what a
    config.json has as rope_scaling: rope_type "linear" with factor, "llama3" with factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings, or "yarn" with factor, original_max_position_embeddings, and as they are given beta_fast, beta_slow,
    attention_factor, mscale, mscale_all_dim and truncate; or "longrope" with factor, original_max_position_embeddings, short_factor and
    long_factor (a divisor of each of the R / 2 frequencies; the long ones where the kernel's KV cache has more rows than
    original_max_position_embeddings, for all texts) and as it is given attention_factor. MK118 unknown style, MK119 features that are no
    whole heads, MK222 theta, MK120 unsupported head_dim, MK255 for rotary_dim, MK252 and MK253 for the scaling. ``theta`` and ``scaling``
    may be mk.per_layer(...).
    """
    tracer, span = current("rope"), caller_span()
    thetas = tracer.each_layer("theta", theta, span, lambda one: tracer.number("theta", one, span, above=0))
    attrs: dict[str, object] = {"head_dim": head_dim, "theta": thetas, "style": style}
    scaled = tracer.each_layer("scaling", scaling, span, lambda one: rope_scaling(one, tracer.found, span))
    if scaled is not None:
        attrs["scaling"] = scaled
    if rotary_dim is not None:
        attrs["rotary_dim"] = rotary_dim
    names = [f"{t.name}.rope" if isinstance(t, Tensor) else "rope" for t in (q, k)]
    q_out, k_out = tracer.node("rope", "rope", (q, k), names, span, attrs)
    return q_out, k_out


def attention(
    q: Tensor,
    kv: KVCache,
    *,
    heads: int,
    scale: float | None = None,
    window: int | PerLayer[int | None] | None = None,
    softcap: float | None = None,
    name: str = "attention",
) -> Tensor:
    """Causal grouped-query attention over the cached rows and this step's: (tokens, heads * head_dim) to the same shape.

    ``scale`` defaults to head_dim ** -0.5. Query head h reads KV head h // (heads / kv_heads). With ``window`` each token sees the newest
    so many rows, its own included; of the cached rows only those are read. mk.per_layer(...) gives each layer its own. With ``softcap`` a
    scaled score s counts as softcap * tanh(s / softcap). MK120 head_dim, MK122 features of q, MK123 ratio, MK222 scale and softcap, MK104
    window, MK254 a window shorter than a step, MK149 when kv is no cache that was appended to.
    """
    tracer, span = current("attention"), caller_span()
    if not isinstance(kv, KVCache):
        raise tracer.fail(NOT_A_CACHE, span, value="None" if kv is None else f"a {type(kv).__name__}")
    if kv.appended is None:
        raise tracer.fail(NOT_A_CACHE, span, value=f"cache {kv.name!r}, to which nothing was appended")
    (count,) = tracer.dimensions("attention heads", heads, span)
    what = "attention window"
    plain = kv.declared.shape[1] ** -0.5
    attrs: dict[str, object] = {"heads": count, "scale": plain if scale is None else tracer.number("scale", scale, span)}
    if window is not None:
        attrs["window"] = tracer.each_layer("window", window, span, lambda w: None if w is None else tracer.dimensions(what, w, span)[0])
    if softcap is not None:
        attrs["softcap"] = tracer.number("softcap", softcap, span, above=0)
    tracer.text("the name of an attention", name, '"attention"', span)
    (out,) = tracer.node("attention", name, (q, kv.appended), [name], span, attrs)
    return out


def logits(x: Tensor) -> Tensor:
    """Marks the returned logits, fp32 of shape (tokens, vocabulary): the output of the last linear, as it is."""
    current("logits")
    return x


def argmax(x: Tensor) -> Tensor:
    """The smallest index of the largest logit of each token: i32 of shape (tokens,). The logits are stored as well."""
    tracer, span = current("argmax"), caller_span()
    (out,) = tracer.node("argmax", "argmax", (x,), ["next_ids"], span)
    return out


def layers(count: int, prefix: str = "model.layers") -> Layers:
    """``for layer in mk.layers(n):`` runs the body for each of n layers; it stays a loop in the emitted code.

    The body is traced once. A variable that is rebound in the body after its old tensor was read there goes from layer to
    layer; after the loop it holds its value after the last one. Weights are called ``<prefix>.<layer>.<name>.weight``.
    MK104 for a bad count, MK145 for a second or nested loop, MK146 for an empty body, MK136, MK147, MK148 for variables that
    cannot be carried.
    """
    tracer, span = current("layers"), caller_span()
    (n,) = tracer.dimensions("mk.layers", count, span)
    tracer.text("the prefix of mk.layers", prefix, '"model.layers"', span)
    return Layers(tracer, n, prefix, span)
