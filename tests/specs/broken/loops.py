"""mk.layers and what goes from layer to layer. How to read the comments: tests/broken_specs.py."""

from typing import Any

from dsl_tools import HIDDEN, head, square, start

import megadsl as mk


def out(layer: mk.Layer, a: mk.Tensor) -> mk.Tensor:
    return mk.linear(a, layer.weight("o_proj", (HIDDEN, a.shape[1])))


@mk.kernel
def layer_after_its_loop(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    h = mk.linear(x, layer.weight("v", (HIDDEN, HIDDEN)))
    # MK107 `layer.weight(` | the layer of a loop is used outside the loop's body | move the line into the body of mk.layers
    # mend:     h = mk.linear(x, layer =>         x = x + mk.linear(x, layer
    # mend: head(h) => head(x)
    return head(h)


@mk.kernel
def left_by_break(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        # MK127 `mk.layers(` | the body of mk.layers is left by break or return | let the loop run to its end
        # mend:         break\n =>
        x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
        break
    return head(x)


@mk.kernel
def name_before_its_value(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        x = x + h
        # MK128 `h` | 'h' | give the name a value before this line (for a loop variable: before mk.layers)
        # mend: x = x + h\n => h = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))\n
        # mend: \n        h = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))\n    return => \n        x = x + h\n    return
        h = mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def misspelt_name(cfg: Any, tokens: int = 1) -> mk.Tensor:
    hidden = start(tokens)
    return head(hiden)
    # MK128 `hiden` | name 'hiden' is not defined | give the name a value
    # mend: head(hiden) => head(hidden)


@mk.kernel
def config_field(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.embed(mk.weight("e", (cfg.vocab_size, HIDDEN)), mk.input_ids(tokens)))
    # MK129 `cfg.vocab_size` | the configuration has no field 'vocab_size' | it has: hidden, layers
    # mend: vocab_size => «vocab»


@mk.kernel
def carried_shape(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        x = mk.linear(x, layer.weight("w", (64, HIDDEN)))
        # MK136 `mk.linear(` | 'x' enters with shape [1, 128] and leaves with shape [1, 64] | keeps its shape
        # mend: (64, HIDDEN) => (128, HIDDEN)
    return head(x)


@mk.kernel
def value_from_before_the_loop(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    kept = {id(x): x}.values()
    for layer in mk.layers(cfg.layers):
        x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    return head(x + next(iter(kept)))
    # MK142 `x +` | add reads the value that 'x' had before the loop | read 'x' itself
    # mend: x + next(iter(kept)) => x + x


@mk.kernel
def cache_from_outside(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    kv = mk.kv_cache(2, 64)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        x = x + out(layer, mk.attention(q, kv.append(k, v), heads=2))
        # MK143 `kv.append(` | cache 'kv' is declared outside mk.layers and appended to inside it | inside the loop use
        # mend: kv = mk.kv_cache(2, 64) => pass
        # mend: kv.append( => «layer.kv_cache(»2, 64).append(
    return head(x)


@mk.kernel
def layer_weight_outside(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        w = layer.weight("w", (HIDDEN, HIDDEN))
        x = x + mk.linear(x, w)
    return head(mk.linear(x, w))
    # MK144 `mk.linear(x, w))` | w reads 'model.layers.{layer}.w.weight', which exists once per layer, outside the loop | declare the weight with
    # mend: w = layer.weight => w = «mk.weight»


@mk.kernel
def two_loops(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    for layer in mk.layers(cfg.layers, prefix="more"):
        # MK145 `mk.layers(` | mk.layers is used a second time | put all layers in one loop
        # mend:     for layer in mk.layers(cfg.layers, prefix="more"):\n =>
        x = x + mk.linear(x, layer.weight("v", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def empty_loop(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, n = start(tokens), cfg.layers
    layer = next(iter([*mk.layers(n)]))
    # MK146 `mk.layers(` | the body of mk.layers records no op | and compute inside the body
    # mend: layer = next(iter([*mk.layers(n)])) => «for layer in mk.layers(n):»
    # mend:     x = x + =>         x = x +
    x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def carried_type(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x: Any = start(tokens)
    for layer in mk.layers(cfg.layers):
        # MK147 `mk.layers(` | 'x' is a tensor before the loop and a tuple after its body | give the other result another name
        # mend: x = mk.linear( => y = mk.linear(
        # mend:     return head(x[0] * x[1]) =>         x = x + y[0] * y[1]\n    return head(x)
        x = mk.linear(x, layer.weight("a", (HIDDEN, HIDDEN)), layer.weight("b", (HIDDEN, HIDDEN)))
    return head(x[0] * x[1])


@mk.kernel
def two_names_for_one_tensor(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    first = x
    for layer in mk.layers(cfg.layers):
        # MK148 `mk.layers(` | 'x' and 'first' are the same tensor when the loop begins | drop 'first'
        # mend: first = x => pass
        # mend: mk.linear(first, => mk.linear(x,
        x = x + mk.linear(first, layer.weight("w", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def too_few_names(cfg: Any, tokens: int = 1) -> mk.Tensor:
    q, k = mk.linear(start(tokens), square("q"), square("k"), square("v"))
    # MK220 `q, k` | ValueError: too many values to unpack | mend this line
    # mend: , square("v") =>
    return head(q * k)


@mk.kernel
def misspelt_function(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.rmsnorm(start(tokens), mk.weight("norm", HIDDEN), 1e-5))
    # MK220 `mk.rmsnorm` | module 'megadsl' has no attribute 'rmsnorm' | did you mean
    # mend: rmsnorm => «rms_norm»


@mk.kernel
def misspelt_method(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        x = x + mk.linear(x, layer.weigth("w", (HIDDEN, HIDDEN)))
        # MK220 `layer.weigth` | 'Layer' object has no attribute 'weigth' | did you mean
        # mend: weigth => «weight»
    return head(x)


@mk.kernel
def missing_argument(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, w, eps = start(tokens), mk.weight("norm", HIDDEN), 1e-5
    return head(mk.rms_norm(x, w))
    # MK220 `mk.rms_norm(` | missing 1 required positional argument: 'eps' | call it as
    # mend: mk.rms_norm(x, w) => «mk.rms_norm(x, w, eps»)


@mk.kernel
def loop_that_is_not_iterated(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, n = start(tokens), cfg.layers
    layer = mk.layers(n)
    x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    # MK220 `layer.weight` | 'Layers' object has no attribute 'weight' | iterate over it
    # mend: layer = mk.layers(n) => «for layer in mk.layers(n):»
    # mend:     x = x + =>         x = x +
    return head(x)


@mk.kernel
def config_by_key(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.embed(mk.weight("e", (cfg["vocab"], HIDDEN)), mk.input_ids(tokens)))
    # MK220 `cfg["vocab"]` | 'Config' object is not subscriptable | read the configuration's fields as attributes
    # mend: cfg["vocab"] => «cfg.»vocab


@mk.kernel
def too_few_windows(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(n, (HIDDEN, HIDDEN)) for n in "qkv"))
        a = mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2, window=mk.per_layer([None, 64, None]))
        # MK256 `mk.attention(` | window is given for 3 layers, but the loop has 2 | give mk.per_layer one value for each layer
        # mend: [None, 64, None] => [None, 64]
        x = x + out(layer, a)
    return head(x)
