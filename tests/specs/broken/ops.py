"""Shapes and arguments of ops, and expressions. How to read the comments: tests/broken_specs.py."""

from typing import Any

from dsl_tools import HIDDEN, head, square, start

import megadsl as mk


def out(layer: mk.Layer, a: mk.Tensor) -> mk.Tensor:
    return mk.linear(a, layer.weight("o_proj", (HIDDEN, a.shape[1])))


@mk.kernel
def embed_table(cfg: Any, tokens: int = 1) -> mk.Tensor:
    vocab_size, hidden_size = cfg.vocab, cfg.hidden
    return head(mk.embed(mk.weight("e.weight", vocab_size * hidden_size), mk.input_ids(tokens)))
    # MK110 `mk.embed(` | the table 'e.weight' has shape [32768] | two dimensions
    # mend: mk.weight("e.weight", vocab_size * hidden_size) => «mk.weight('e.weight', (vocab_size, hidden_size))»


@mk.kernel
# MK138 `` | kernel 'embed_ids' never calls mk.input_ids | embed the token ids
def embed_ids(cfg: Any, tokens: int = 1) -> mk.Tensor:
    table = mk.weight("e", (256, HIDDEN))
    return head(mk.embed(table, table))
    # MK111 `mk.embed(` | 'e.weight' is bf16 of shape [256, 128], but token ids are i32 of shape [tokens] | as the second argument
    # mend: mk.embed(table, table) => mk.embed(table, «mk.input_ids(tokens)»)


@mk.kernel
def linear_rank(cfg: Any, tokens: int = 1) -> mk.Tensor:
    out_features, in_features = HIDDEN, HIDDEN
    return head(mk.linear(start(tokens), mk.weight("w", HIDDEN)))
    # MK112 `mk.linear(` | weight 'w.weight' has shape [128] | two dimensions
    # mend: mk.weight("w", HIDDEN) => mk.weight("w", «(out_features, in_features)»)


@mk.kernel
def linear_columns(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.linear(start(tokens), mk.weight("w", (HIDDEN, 64))))
    # MK113 `mk.linear(` | the input has 128 features (shape [1, 128]), weight 'w.weight' has 64 columns | make the weight's second dimension
    # mend: 64 => «128»


@mk.kernel
def linear_input(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(mk.linear(square("w"), x))
    # MK114 `mk.linear(` | 'w.weight' of shape [128, 128] is not an activation | the first argument is the activation, the weights follow
    # mend: mk.linear(square("w"), x) => mk.linear(x, square("w"))


@mk.kernel
def bias_shape(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.linear(start(tokens), square("w"), bias=mk.weight("w.bias", 64)))
    # MK250 `mk.linear(` | bias 'w.bias' has shape [64], weight 'w.weight' has 128 rows | one dimension
    # mend: 64 => «128»


@mk.kernel
def bias_count(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, b = start(tokens), mk.weight("b.bias", HIDDEN)
    q, k = mk.linear(x, square("q"), square("k"), bias=b)
    # MK251 `mk.linear(` | linear 'q_k' has 2 weights and 1 biases | one vector for each weight
    # mend: bias=b => bias=[b, b]
    return head(mk.map("q * k", q=q, k=k))


@mk.kernel
def linear_without_weight(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, w = start(tokens), square("w")
    return head(mk.linear(x) + mk.linear(x, w))
    # MK141 `mk.linear(x) +` | no weight is given | after the activation
    # mend: mk.linear(x) + mk.linear(x, w) => «mk.linear(x, w)»


@mk.kernel
def op_name_twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = mk.linear(start(tokens), square("a"), name="mix")
    return head(mk.linear(x, square("b"), name="mix"))
    # MK109 `mk.linear(` | two ops are called 'mix' | give each op its own name=
    # mend: square("b"), name="mix" => square("b"), name="mix_b"


@mk.kernel
def map_features(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(x + mk.linear(x, mk.weight("w", (64, HIDDEN))))
    # MK115 `x +` | 'embed' has shape [1, 128], 'w' has shape [1, 64] | the same number of features
    # mend: (64, HIDDEN) => (HIDDEN, HIDDEN)


@mk.kernel
def norm_features(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.rms_norm(start(tokens), mk.weight("norm", 64), eps=1e-5))
    # MK115 `mk.rms_norm(` | 'norm.weight' has shape [64] | one element per feature
    # mend: mk.weight("norm", 64) => mk.weight("norm", HIDDEN)


@mk.kernel
def map_operand(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(start(tokens) * square("w"))
    # MK116 `start(tokens) *` | operand 'w.weight' of shape [128, 128] | use mk.linear for matrices
    # mend: start(tokens) * square("w") => mk.linear(start(tokens), square("w"))


@mk.kernel
def map_of_weights(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    w = mk.map("a + b", a=mk.weight("a", HIDDEN), b=mk.weight("b", HIDDEN))
    # MK117 `mk.map(` | all operands are weights | give it at least one activation
    # mend: "a + b", a= => "x + a + b", x=x, a=
    # mend: head(x + w) => head(w)
    return head(x + w)


@mk.kernel
def rope_style(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4, style="neox")
        # MK118 `mk.rope(` | unknown style 'neox' | (Llama, pairs i and i + D/2)
        # mend: style="neox" => «style="half"»
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def rope_in_part(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4, rotary_dim=20)
        # MK255 `mk.rope(` | rotary_dim = 20 of heads of 64 features | rotate a multiple of 8 of them, at most 64
        # mend: rotary_dim=20 => rotary_dim=24
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def rope_scaling_kind(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4, scaling={"rope_type": "ntk", "factor": 4.0})
        # MK252 `mk.rope(` | unknown scaling 'ntk' | linear, llama3, yarn
        # mend: ntk => «linear»
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def rope_scaling_field(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4, scaling={"rope_type": "linear"})
        # MK253 `mk.rope(` | scaling 'linear' needs factor, a number above 0, and has none | give factor in scaling=
        # mend: {"rope_type": "linear"} => {"rope_type": "linear", "factor": 4.0}
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def rope_theta(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=-1)
        # MK222 `mk.rope(` | theta = -1 is not a number above 0 | above 0
        # mend: theta=-1 => theta=1e4
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
    return head(x)


@mk.kernel
def rope_features(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        rows = 96
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (rows, HIDDEN)) for n in "qkv"))
        q, k = mk.rope(q, k, head_dim=64, theta=1e4)
        # MK119 `mk.rope(` | 'q_proj' of shape [1, 96] does not hold whole heads of 64 features | features must be heads * head_dim
        # MK119 `mk.rope(` | 'k_proj' of shape [1, 96] | give head_dim=
        # mend: rows = 96 => rows = «128»
        x = x + out(layer, mk.attention(q, layer.kv_cache(2, 64).append(k, v), heads=2))
        # MK121 `layer.kv_cache(` | k 'k_proj.rope' has shape [1, 96], but the cache takes 2 heads of 64: 128 features | kv_heads * head_dim = 128
        # MK121 `layer.kv_cache(` | v 'v_proj' has shape [1, 96] | or change the cache's shape
        # MK122 `mk.attention(` | q 'q_proj.rope' has shape [1, 96], but 2 heads of 64 are 128 features | heads * head_dim = 128
    return head(x)


@mk.kernel
def head_dim(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        heads, head_dim = 4, 32
        x = x + out(layer, mk.attention(q, layer.kv_cache(heads, head_dim).append(k, v), heads=heads))
        # MK120 `mk.attention(` | head_dim 32 is not supported | a multiple of 16 from 64 to 256
        # mend: heads, head_dim = 4, 32 => heads, head_dim = 2, 64
    return head(x)


@mk.kernel
def gqa_ratio(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    heads, kv_heads = 3, 2
    for layer in mk.layers(cfg.layers):
        weights = (layer.weight(n, (64 * m, HIDDEN)) for n, m in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)))
        q, k, v = mk.linear(x, *weights)
        a = mk.attention(q, layer.kv_cache(kv_heads, 64).append(k, v), heads=heads)
        # MK123 `mk.attention(` | 3 query heads do not divide among 2 KV heads | a positive multiple of kv_heads
        # mend: heads, kv_heads = 3, 2 => heads, kv_heads = 4, 2
        x = x + out(layer, a)
    return head(x)


@mk.kernel
def argmax_input(cfg: Any, tokens: int = 1) -> mk.Tensor:
    logits = mk.linear(start(tokens), mk.weight("lm_head", (cfg.vocab, HIDDEN)))
    return mk.argmax(mk.argmax(logits))
    # MK124 `mk.argmax(mk` | 'next_ids' of shape [1] is not [tokens, vocabulary] logits | pass the output of the last mk.linear
    # mend: mk.argmax(mk.argmax(logits)) => mk.argmax(logits)


@mk.kernel
def no_cache(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        x = x + out(layer, mk.attention(q, (k, v), heads=2))
        # MK149 `mk.attention(` | mk.attention: kv is a tuple | pass layer.kv_cache(
        # mend: (k, v) => layer.kv_cache(2, 64)«.append(k, v)»
    return head(x)


@mk.kernel
def empty_cache(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        kv = layer.kv_cache(2, 64)
        x = x + out(layer, mk.attention(q, kv, heads=2) * k * v)
        # MK149 `mk.attention(` | kv is cache 'kv', to which nothing was appended | pass layer.kv_cache(
        # mend: kv, heads=2) * k * v => kv«.append(k, v)», heads=2)
    return head(x)


@mk.kernel
def appended_twice(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        q, k, v = mk.linear(x, *(layer.weight(f"{n}_proj", (HIDDEN, HIDDEN)) for n in "qkv"))
        kv = layer.kv_cache(2, 64).append(k, v)
        x = x + out(layer, mk.attention(q, kv.append(k, v), heads=2))
        # MK106 `kv.append(` | cache 'kv' is appended to twice in one step | append once per step
        # mend: kv.append(k, v), heads => kv, heads
    return head(x)


@mk.kernel
def unused_cache(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    for layer in mk.layers(cfg.layers):
        kv = layer.kv_cache(2, 64)
        # MK132 `layer.kv_cache(` | cache 'kv' is declared and never read | or delete it
        # mend: kv = layer.kv_cache(2, 64) => pass
        x = x + mk.linear(x, layer.weight("w", (HIDDEN, HIDDEN)))
    return head(x)


@mk.kernel
def operand_missing(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("x + ", x=start(tokens)))
    # MK201 `mk.map(` | an operand is missing at the end | write a name, a number
    # mend: "x + " => "x + 1"


@mk.kernel
def parentheses(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("silu(x", x=start(tokens)))
    # MK202 `mk.map(` | this '(' is never closed | close each '(' with one ')'
    # mend: "silu(x" => "silu(x)"


@mk.kernel
def character(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("x ^ 2", x=start(tokens)))
    # MK203 `mk.map(` | '^' cannot be part of an expression | a power is
    # mend: x ^ 2 => «x ** 2»


@mk.kernel
def operator_missing(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("2x", x=start(tokens)))
    # MK204 `mk.map(` | an operator is missing before 'x' | write one of
    # mend: 2x => 2 «*» x


@mk.kernel
def comma(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("(x, 1)", x=start(tokens)))
    # MK205 `mk.map(` | a comma outside the arguments of a call | drop this one
    # mend: (x, 1) => (x)


@mk.kernel
def unknown_name(cfg: Any, tokens: int = 1) -> mk.Tensor:
    gate, up = mk.linear(start(tokens), square("gate"), square("up"))
    return head(mk.map("silu(gat) * up", gate=gate, up=up))
    # MK206 `mk.map(` | unknown name 'gat' | did you mean
    # mend: gat) => «gate»)


@mk.kernel
def unknown_function(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("sliu(x)", x=start(tokens)))
    # MK207 `mk.map(` | unknown function 'sliu' | did you mean
    # mend: sliu => «silu»


@mk.kernel
def arity(cfg: Any, tokens: int = 1) -> mk.Tensor:
    a, b = mk.linear(start(tokens), square("a"), square("b"))
    return head(mk.map("min(x) * y", x=a, y=b))
    # MK208 `mk.map(` | min takes two arguments, here it has 1 | write
    # mend: min(x) * y => «min(x, y)»


@mk.kernel
def unused_name(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x = start(tokens)
    return head(mk.map("silu(x)", x=x, y=x))
    # MK209 `mk.map(` | 'y' is given but the expression does not use it | do not pass it
    # mend: x=x, y=x => x=x


@mk.kernel
def constant(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.map("x + 1e39", x=start(tokens)))
    # MK210 `mk.map(` | the constant '1e39' has no finite fp32 value | use magnitudes between
    # mend: 1e39 => «3.4e38»


@mk.kernel
def depth(cfg: Any, tokens: int = 1) -> mk.Tensor:
    x, text = start(tokens), "silu(" * 300 + "x" + ")" * 300
    return head(mk.map(text, x=x))
    # MK211 `mk.map(` | the expression is nested deeper than 200 levels | split it into several mk.map calls
    # mend: * 300 + "x" + ")" * 300 => * 2 + "x" + ")" * 2


@mk.kernel
def format_unknown(cfg: Any, tokens: int = 1) -> mk.Tensor:
    return head(mk.linear(start(tokens), square("w"), format="fp7"))
    # MK288 `mk.linear(` | linear 'w': there is no format 'fp7' of weights | bf16, fp8, int8, nvfp4, mxfp4, int4
    # mend: format="fp7" => format="fp8"
