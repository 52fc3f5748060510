"""Tensors, weights and operands that are not what an op takes. How to read the comments: tests/broken_specs.py."""

from typing import Any

from dsl_tools import HIDDEN, head, square, start

import megadsl as mk


@mk.kernel
def dtype(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.linear(start(tokens), mk.weight("w", (HIDDEN, HIDDEN), dtype="float16")))
    # MK101 `mk.weight(` | unknown dtype 'float16' | dtype="bf16"
    # mend: dtype="float16" => «dtype="bf16"»


@mk.kernel
def tokens_range(cfg: Any, tokens: int = 1) -> mk.Tensor:
    ids = mk.input_ids(17)
    # MK102 `mk.input_ids(` | tokens = 17 is out of range | 1 to 16 new tokens
    # mend: 17 => «1»
    return head(mk.embed(mk.weight("e", (256, HIDDEN)), ids))


@mk.kernel
def tokens_passed_on(cfg: Any, tokens: int = 1) -> mk.Tensor:
    ids = mk.input_ids(2)
    # MK137 `mk.input_ids(` | traced for tokens=1, but mk.input_ids asks for 2 | pass the function's tokens on
    # mend: mk.input_ids(2) => «mk.input_ids(tokens)»
    return head(mk.embed(mk.weight("e", (256, HIDDEN)), ids))


@mk.kernel
# MK187 `` | kernel 'no_tokens' takes no tokens | pass tokens to mk.input_ids
# mend: def no_tokens(cfg: Any) -> mk.Tensor: => «def no_tokens(cfg, tokens=1):»
def no_tokens(cfg: Any) -> mk.Tensor:
    return head(start())


@mk.kernel
def weight_twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = mk.linear(start(tokens), square("w"))
    return head(mk.linear(x, mk.weight("w", (64, HIDDEN))))
    # MK103 `mk.weight(` | 'w.weight' is declared with shape [64, 128], but before with [128, 128] at dsl_tools.py | give both the same shape
    # mend: (64, HIDDEN) => (HIDDEN, HIDDEN)


@mk.kernel
def drawn_twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = mk.linear(start(tokens), mk.weight("w", (HIDDEN, HIDDEN), random=(0, 0.1)))
    return head(mk.linear(x, mk.weight("w", (HIDDEN, HIDDEN), random=(0, 0.2))))
    # MK103 `mk.weight(` | is declared with random (0.0, 0.2), but before with (0.0, 0.1) at | give both the same random
    # mend: random=(0, 0.2) => random=(0, 0.1)


@mk.kernel
def drawn_backwards(cfg: Any, tokens: int = 1) -> mk.Tensor:
    w = mk.weight("w", (HIDDEN, HIDDEN), random=(0, -0.1))
    # MK222 `mk.weight(` | weight 'w.weight': random, deviation = -0.1 is not a number of at least 0 | of at least 0
    # mend: random=(0, -0.1) => random=(0, 0.1)
    return head(mk.linear(start(tokens), w))


@mk.kernel
def dimension(cfg: Any, tokens: int = 1) -> mk.Tensor:
    w = mk.weight("w", (HIDDEN / 1, HIDDEN))
    # MK104 `mk.weight(` | weight 'w.weight': dimension 128.0 is not a positive integer | use // for divisions
    # mend: HIDDEN / 1 => HIDDEN «//» 1
    return mk.argmax(mk.linear(start(tokens), w))


@mk.kernel
def missing_dimension(cfg: Any, tokens: int = 1) -> mk.Tensor:
    w = mk.weight("w", (cfg.nothing, HIDDEN))
    # MK104 `mk.weight(` | dimension None | positive integers
    # mend: cfg.nothing => cfg.vocab
    return mk.argmax(mk.linear(start(tokens), w))


@mk.kernel
def not_a_tensor(cfg: Any, tokens: int = 1) -> mk.Tensor:
    y = mk.linear(start(tokens), square("a"), square("b"))
    return head(mk.linear(y, square("c")))
    # MK105 `mk.linear(` | c: expected a tensor, got tuple (Tensor( | returns one for each
    # mend: mk.linear(y, => mk.linear(y[0] * y[1],


@mk.kernel
def no_tensor_at_all(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("silu(x)", x=None))
    # MK105 `mk.map(` | map: expected a tensor, got None | as mk.embed and mk.linear return it
    # mend: x=None => x=start(tokens)


@mk.kernel
def other_operand(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(2 * x + None)
    # MK139 `2 * x` | add: the other operand is None | a tensor of the same features or a number
    # mend: None => 1


@mk.kernel
def no_fp32(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(x * 1e60)
    # MK210 `x *` | the constant '1e+60' has no finite fp32 value | 3.4e38
    # mend: 1e60 => «3.4e38»


@mk.kernel
def product(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, w = start(tokens), square("w")
    return head(x @ w)
    # MK221 `x @` | tensors of a kernel have no @ | (out_features, in_features)
    # mend: x @ w => «mk.linear(x, w)»


@mk.kernel
def power(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(x**2)
    # MK221 `x**2` | have no ** | write an expression
    # mend: x**2 => «mk.map("x ** 2", x=x)»


@mk.kernel
def comparison(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(x * (x > 0))
    # MK221 `x > 0` | have no comparison | write an expression
    # mend: x * (x > 0) => «mk.map("max(x, 0)", x=x)»


@mk.kernel
def equality(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(2 * x if x == 0 else x)
    # MK221 `x == 0` | have no equality | decide by fields of the configuration
    # mend: x == 0 => cfg.layers == 0


@mk.kernel
def inequality(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    y = mk.linear(x, square("w"))
    return head(x + y if x != y else x)
    # MK221 `x != y` | have no equality | compare handles with `is`
    # mend: x != y => x «is» not y


@mk.kernel
def condition(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    if x:
        # MK221 `if` | have no value while they are traced | decide by fields of the configuration
        # mend: if x: => if cfg.layers:
        x = 2 * x
    return head(x)


@mk.kernel
def parts_by_index(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, w_a, w_b = start(tokens), square("a"), square("b")
    a, b = x[:64], x[64:]
    # MK221 `x[:64]` | have no elements | take the parts from a linear of several weights
    # mend: a, b = x[:64], x[64:] => «a, b = mk.linear(x, w_a, w_b)»
    return head(mk.linear(a * b, square("c")))


@mk.kernel
def no_number(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.rms_norm(start(tokens), mk.weight("norm", HIDDEN), eps="1e-5"))
    # MK222 `mk.rms_norm(` | eps = '1e-5' is not a number of at least 0 | give a plain number
    # mend: "1e-5" => 1e-5


@mk.kernel
def no_eps_in_the_configuration(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.rms_norm(start(tokens), mk.weight("norm", HIDDEN), eps=cfg.nothing))
    # MK222 `mk.rms_norm(` | eps = None is not a number of at least 0 | of at least 0
    # mend: cfg.nothing => «0»


@mk.kernel
def no_name(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.linear(start(tokens), mk.weight(3, (HIDDEN, HIDDEN))))
    # MK223 `mk.weight(` | the name of a weight is int 3, not a string | give a string
    # mend: mk.weight(3, => mk.weight(«"q_proj"»,


@mk.kernel
def no_expression(cfg: Any, tokens: int = 1) -> mk.Tensor:
    gate, up = mk.linear(start(tokens), square("gate"), square("up"))
    return head(mk.map(None, gate=gate, up=up))
    # MK223 `mk.map(` | the expression is None, not a string | give a string
    # mend: None => «"silu(gate) * up"»


@mk.kernel
def unused_tensor(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    y = mk.linear(x, square("w"))
    # MK130 `mk.linear(` | 'w', computed by 'w', is never used | delete the line
    # mend: y = mk.linear(x, square("w")) => pass
    return head(x)


@mk.kernel
def unused_weight(cfg: Any, tokens: int = 1) -> mk.Tensor:
    w = mk.weight("spare", (HIDDEN, HIDDEN))
    # MK131 `mk.weight(` | weight 'spare.weight' is declared and never used | use it
    # mend: head(start(tokens)) => head(mk.linear(start(tokens), w))
    return head(start(tokens))


@mk.kernel
def ids_twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    first, ids = mk.input_ids(tokens), mk.input_ids(tokens)
    # MK140 `mk.input_ids(tokens)` | mk.input_ids is called twice | call it once and keep the tensor
    # mend: first, ids = mk.input_ids(tokens), mk.input_ids(tokens) => first = ids = mk.input_ids(tokens)
    return head(mk.embed(mk.weight("e", (256, first.shape[0] * ids.shape[0] * 128)), ids))


@mk.kernel
# MK138 `` | kernel 'no_input' never calls mk.input_ids | embed the token ids
# mend: return table => return head(«mk.embed(table, mk.input_ids(tokens))»)
def no_input(cfg: Any, tokens: int = 1) -> mk.Tensor:
    table = mk.weight("e", (256, HIDDEN))
    return table


@mk.kernel
# MK126 `` | kernel 'no_output' returns nothing | return the logits
# mend: mk.linear(x, lm_head)\n => «return mk.argmax(mk.linear(x, lm_head))»\n
def no_output(cfg: Any, tokens: int = 1) -> None:
    x, lm_head = start(tokens), mk.weight("lm_head", (cfg.vocab, HIDDEN))
    mk.linear(x, lm_head)


@mk.kernel
# MK126 `` | returns [Tensor('next_ids', | return the logits
# mend: return [head(x)] => return head(x)
def output_in_a_list(cfg: Any, tokens: int = 1) -> list[mk.Tensor]:
    x = start(tokens)
    return [head(x)]
