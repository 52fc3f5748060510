"""Custom ops that cannot be. How to read the comments: tests/test_broken_specs.py."""

from typing import Any

from dsl_tools import HEADERS, HIDDEN, head, start

import megadsl as mk


def scale(x: Any, *, factor: float) -> Any:
    return x * factor


def doubled(x: Any, *, factor: float) -> Any:
    return x * factor


def shifted(x: Any, w: Any) -> Any:
    return x + w


def out(layer: mk.Layer, h: mk.Tensor) -> mk.Tensor:
    return mk.linear(h, layer.weight("out", (HIDDEN, h.shape[1])))


def inner(layer: mk.Layer, x: mk.Tensor) -> mk.Tensor:
    return mk.linear(x, layer.weight("in", (HIDDEN, HIDDEN)))


@mk.kernel
def no_header(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header="nowhere.cuh")(scale)
        # MK270 `mk.custom_op(` | custom op 'scale': its header nowhere.cuh cannot be read: No such file | relative to the file
        # mend: header="nowhere.cuh" => header=f"{HEADERS}/scale.cuh"
        x = x + out(layer, op(inner(layer, x), factor=2.0))
    return head(x)


@mk.kernel
def another_function(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh")(doubled)
        # MK271 `mk.custom_op(` | custom op 'doubled': scale.cuh defines no function 'doubled' | or name the Python function after it
        # mend: (doubled) => (scale)
        x = x + out(layer, op(inner(layer, x), factor=2.0))
    return head(x)


@mk.kernel
def inline_assembly(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/own_asm.cuh")(scale)
        # MK272 `mk.custom_op(` | own_asm.cuh, line 5, has `asm`, which the emulator cannot run | use the wrappers of mk::ptx
        # mend: own_asm.cuh => scale.cuh
        x = x + out(layer, op(inner(layer, x), factor=2.0))
    return head(x)


@mk.kernel
def two_headers(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/two_files.cuh")(scale)
        # MK273 `mk.custom_op(` | two_files.cuh, line 2, includes "helpers.cuh" | keep what the op needs in one header
        # mend: two_files.cuh => scale.cuh
        x = x + out(layer, op(inner(layer, x), factor=2.0))
    return head(x)


@mk.kernel
def a_parameter_is_left_out(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh")(scale)
        h = op(inner(layer, x))
        # MK274 `op(` | custom op 'scale': missing a required argument: 'factor' | call it as scale(x: Any, *, factor: float)
        # mend: h = op(inner(layer, x)) => h = op(inner(layer, x), factor=2.0)
        x = x + out(layer, h)
    return head(x)


@mk.kernel
def a_parameter_that_is_no_number(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh")(scale)
        h = op(inner(layer, x), factor="2")
        # MK275 `op(` | parameter 'factor' is str '2' | give an int of 32 bits, a finite float or a bool
        # mend: factor="2" => factor=2.0
        x = x + out(layer, h)
    return head(x)


@mk.kernel
def token_ids(cfg: Any, tokens: int = 1) -> mk.Tensor:
    ids = mk.input_ids(tokens)
    x = mk.embed(mk.weight("embed", (cfg.vocab, HIDDEN)), ids)
    op = mk.custom_op(header=f"{HEADERS}/scale.cuh", features=HIDDEN)(scale)
    h = op(ids, factor=2.0)
    # MK276 `op(` | argument 'x' is 'input_ids' of shape [1], which is i32 of lifetime input | pass activations [tokens, features]
    # mend: op(ids, => op(x,
    return head(x + mk.linear(h, mk.weight("mix", (HIDDEN, HIDDEN))))


@mk.kernel
def parts_of_groups(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh", features=100)(scale)
        h = op(inner(layer, x), factor=2.0)
        # MK277 `op(` | custom op 'scale' has outputs of 100 features | give each output a positive multiple of 8 features
        # mend: features=100 => features=128
        x = x + out(layer, h)
    return head(x)


@mk.kernel
def an_expression(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh")(scale)
        h = op(mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=1e-5), factor=2.0)
        # MK278 `op(` | argument 'x' is 'norm', an expression (map 'norm' (user_ops.py: | pass what mk.linear, mk.attention, mk.embed
        # mend: op(mk.rms_norm(x, layer.weight("norm", HIDDEN), eps=1e-5), => op(inner(layer, x),
        x = x + out(layer, h)
    return head(x)


@mk.kernel
def a_rule_that_gives_no_number(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh", features=lambda x: x[1] / 2)(scale)
        h = op(inner(layer, x), factor=2.0)
        # MK279 `op(` | custom op 'scale': features= is 64.0 | give a positive number of features
        # mend: x[1] / 2 => x[1] // 2
        x = x + out(layer, h)
    return head(x)


@mk.kernel
def scratch_without_end(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/scale.cuh", scratch=1 << 20)(scale)
        h = op(inner(layer, x), factor=2.0)
        # MK280 `op(` | custom op 'scale' needs 1048832 bytes of shared memory for 1 tokens, sm_90a has | less scratch=
        # mend: 1 << 20 => 1 << 10
        x = x + out(layer, h)
    return head(x)


@mk.kernel
# MK164 `` | weight 'w' of shifted needs 32768 | use stage_bytes=32768
# mend: (128, HIDDEN) => (1, HIDDEN)
def a_weight_of_two_stages(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        op = mk.custom_op(header=f"{HEADERS}/shifted.cuh")(shifted)
        h = op(inner(layer, x), layer.weight("shift", (128, HIDDEN)))
        x = x + out(layer, h)
    return head(x)
