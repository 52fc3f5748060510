"""What fused ops and today's kernels cannot express. How to read the comments: tests/broken_specs.py."""

from typing import Any

from dsl_tools import HIDDEN, head, square, start

import megadsl as mk


def out(layer: mk.Layer, a: mk.Tensor) -> mk.Tensor:
    return mk.linear(a, layer.weight("o_proj", (HIDDEN, a.shape[1])))


def three(layer: mk.Layer, x: mk.Tensor, prefix: str = "") -> tuple[mk.Tensor, ...]:
    return mk.linear(x, *(layer.weight(f"{prefix}{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))


@mk.kernel
def unaligned_part(cfg: Any, tokens: int = 1) -> mk.Tensor:
    rows = 132
    a, b = mk.linear(start(tokens), mk.weight("a", (rows, HIDDEN)), mk.weight("b", (HIDDEN, HIDDEN)))
    y = mk.linear(b, square("w"))
    # MK159 `mk.linear(` | 'w' reads 'a_b' from feature 132 on, which is no multiple of 8 | a multiple of 8 rows
    # mend: rows = 132 => rows = 136
    z = mk.linear(a, mk.weight("v", (HIDDEN, rows)))
    return head(y + z)


@mk.kernel
def three_activations(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    a, b = mk.linear(x, square("a")), mk.linear(x, square("b"))
    y = mk.map("a * b + x", a=a, b=b, x=x)
    return mk.argmax(mk.linear(y, mk.weight("lm_head", (cfg.vocab, HIDDEN))))
    # MK171 `mk.linear(` | 'lm_head' reads 3 activations through one expression; a prologue gathers at most 2 | rows of one linear
    # mend: mk.linear(x, square("a")), mk.linear(x, square("b")) => mk.linear(x, square("a"), square("b"))


@mk.kernel
def three_matrices(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    a, b, c = mk.linear(x, square("a"), square("b"), square("c"))
    # MK172 `mk.linear(` | combines 3 matrices row by row; at most 2 can be folded | pass the result through another mk.linear
    # mend: head(mk.map("a * b + c", a=a, b=b, c=c)) => head(mk.linear(a * b, square("d")) + c)
    return head(mk.map("a * b + c", a=a, b=b, c=c))


@mk.kernel
def second_embedding(cfg: Any, tokens: int = 1) -> mk.Tensor:
    ids = mk.input_ids(tokens)
    x = mk.embed(mk.weight("e", (256, HIDDEN)), ids)
    y = mk.embed(mk.weight("f", (256, HIDDEN)), ids)
    # MK225 `mk.embed(` | 'f' is an embedding, but not the first op | embed the tokens once
    # mend: y = mk.embed(mk.weight("f", (256, HIDDEN)), ids) => y = x
    return head(x * y)


@mk.kernel
def different_linears(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        w_q, w_k, w_v = (layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv")
        q, (k, v) = mk.linear(x, w_q), mk.linear(x, w_k, w_v)
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK173 `mk.attention(` | come from different linears | compute them in one linear of several weights
        # mend: q, (k, v) = mk.linear(x, w_q), mk.linear(x, w_k, w_v) => q, k, v = mk.linear(x, w_q, w_k, w_v)
    return head(x)


@mk.kernel
# MK174 `` | rotary heads of 2 different kinds | use one head_dim, theta, scaling and style
# mend: theta=1e5 => theta=1e4
def two_ropes(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x, "a.")
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        x = x + mk.linear(mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2), layer.weight("a.o", (HIDDEN, HIDDEN)))
        q, k, v = three(layer, x, "b.")
        q, k = mk.rope(q, k, head_dim=64, theta=1e5)
        x = x + mk.linear(mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2), layer.weight("b.o", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def loop_from_a_linear(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = mk.linear(start(tokens), square("first"))
    # MK175 `mk.linear(` | begins as the result of 'first', which is no embedding | start the loop from
    # mend: mk.linear(start(tokens), square("first")) => start(tokens)
    for layer in mk.layers(cfg.layers):
        x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def attention_outside(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    q, k, v = mk.linear(x, *(mk.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
    a = mk.attention(q, mk.kv_cache(2, 64).append(k, v), heads=2)
    # MK176 `mk.attention(` | 'attention' is an attention outside mk.layers | put it inside the layer loop
    # mend:     q, k, v = =>     for layer in mk.layers(1):\n        q, k, v =
    # mend:     a = mk.attention(q, mk.kv_cache =>         a = mk.attention(q, layer.kv_cache
    # mend: heads=2)\n => heads=2)\n        x = x + mk.linear(a, square("o"))\n
    # mend: head(x + mk.linear(a, square("o"))) => head(x)
    return head(x + mk.linear(a, square("o")))


@mk.kernel
def weights_of_two_kinds(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    shared = square("shared")
    for layer in mk.layers(cfg.layers):
        a, b = mk.linear(x, layer.weight("own", (HIDDEN, HIDDEN)), shared)
        # MK189 `mk.linear(` | stacks weights of one layer and weights of all layers | use one mk.linear for each kind
        # mend: mk.linear(x, layer.weight("own", (HIDDEN, HIDDEN)), shared) => mk.linear(x, layer.weight("own", (HIDDEN, HIDDEN))), mk.linear(x, shared)
        x = x + mk.linear(a * b, layer.weight("down", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def map_into_attention(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q = q * 0.5
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK190 `mk.attention(` | q is computed by map 'mul' | feed attention from mk.linear
        # mend: q = q * 0.5 => pass
    return head(x)


@mk.kernel
def rope_of_a_map(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q, k = mk.rope(q * 2, k, head_dim=64, theta=1e4)
        # MK191 `mk.rope(` | rope: 'mul' is computed by map 'mul' | rotate what mk.linear returns
        # mend: q * 2 => q
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK190 `mk.attention(` | q is computed by rope 'rope' | feed attention from mk.linear
    return head(x)


@mk.kernel
def reader_of_rotated_rows(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        w = layer.weight("w", (HIDDEN, HIDDEN))
        q, k, v = three(layer, x)
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2)
        x = x + a * mk.linear(q, w)
        # MK192 `mk.linear(` | 'w' reads 'q_proj.rope', which is rotated | go to attention (q) and to the cache (k) only
        # mend: mk.linear(q, w) => mk.linear(v, w)
    return head(x)


@mk.kernel
def rotated_and_not(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        r, k = mk.rope(q, k, head_dim=64, theta=1e4)
        # MK193 `mk.rope(` | 'q_proj' is rotated and read unrotated as well | or a second linear for the other use
        # mend: a * q => a * mk.linear(x, layer.weight("other", (HIDDEN, HIDDEN)))
        a = mk.attention(r, layer.kv_cache(2, 64).append(k, v), heads=2)
        x = x + mk.linear(a * q, layer.weight("o", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def ropes_that_do_not_match(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        q, k = mk.rope(q, k, head_dim=128, theta=1e4)
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK194 `mk.attention(` | q is rotated by 128, theta 10000, half, k is rotated by 128 | with one mk.rope of the cache's head_dim
        # mend: head_dim=128 => head_dim=64
    return head(x)


@mk.kernel
def output_of_a_map(cfg: Any, tokens: int = 1) -> mk.Tensor:
    logits = mk.linear(start(tokens), mk.weight("lm_head", (cfg.vocab, HIDDEN)))
    return mk.argmax(logits * mk.weight("scale", cfg.vocab))
    # MK195 `mk.argmax(` | 'next_ids' is returned, but it is not plain logits: map 'mul' | return the output of one mk.linear
    # mend: logits * mk.weight("scale", cfg.vocab) => logits


@mk.kernel
def carried_expression(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        y = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        x = mk.map("x + y * w", x=x, y=y, w=layer.weight("scale", HIDDEN))
        # MK196 `mk.map(` | 'x' leaves the loop as map 'map' | an elementwise expression of a linear's output
        # mend: "x + y * w", x=x, y=y, w=layer.weight("scale", HIDDEN) => "x + y * y", x=x, y=y
    return head(x)


@mk.kernel
def stale_read(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        new = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)))
        y = mk.linear(x, layer.weight("b", (HIDDEN, HIDDEN)))
        # MK197 `mk.linear(` | 'b' reads the value that 'x' had before 'a' wrote it | compute this before 'a' in the loop body
        # mend:         new = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)))\n =>
        # mend:         x = new =>         x = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)))
        x = new
    return head(x + y)


@mk.kernel
def layer_weight_in_an_expression(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        w = layer.weight("a", (HIDDEN, HIDDEN))
        y = x * layer.weight("scale", HIDDEN)
        x = x + mk.linear(x, w)
    return mk.argmax(mk.linear(y, mk.weight("lm_head", (cfg.vocab, HIDDEN))))
    # MK198 `mk.linear(y` | 'lm_head', outside the loop, needs 'model.layers.{layer}.scale.weight' | use the value inside the loop body
    # MK197 `mk.linear(y` | 'lm_head' reads the value that 'x' had before | in the loop body
    # mend: mk.linear(x, w) => mk.linear(y, w)
    # mend: mk.argmax(mk.linear(y, => mk.argmax(mk.linear(x,


@mk.kernel
def cache_read_twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = three(layer, x)
        kv = layer.kv_cache(2, 64).append(k, v)
        a = mk.attention(q, kv, heads=2)
        b = mk.attention(q, kv, heads=2)
        # MK199 `mk.attention(` | cache 'kv' is read by 2 attentions | declare one cache for each attention
        # mend: b = mk.attention(q, kv => b = mk.attention(q, layer.kv_cache(2, 64).append(k, v)
        x = x + mk.linear(a * b, layer.weight("o", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def norm_of_a_norm_behind(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        y = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        n = mk.rms_norm(y, layer.weight("a", HIDDEN), eps=1e-6)
        x = x + mk.rms_norm(n, layer.weight("b", HIDDEN), eps=1e-6)
        # MK258 `x +` | contains another one | reduce over one value alone
        # mend: mk.rms_norm(n, layer.weight("b", HIDDEN), eps=1e-6) => n
    return head(x)


@mk.kernel
def norm_of_a_sum_behind(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        y = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        x = mk.map("(x + y) / mean((x + y) * y)", x=x, y=y)
        # MK258 `mk.map(` | is over several values | reduce over one value alone
        # mend: mean((x + y) * y) => mean(y * y)
    return head(x)
