"""What a launch reads beside weights: tree masks, what lies behind the cached rows, padding, ties, its own last token."""

from __future__ import annotations

import pytest
import torch

from megadsl.runtime.control import ADVANCE, EPOCH, KV_LEN, N_TOKENS, NEXT_IDS, STEPS
from megadsl.runtime.program import Program
from tests.kernels import Bench, Step, bits, compiled, config, judge, steps, weights_for
from tests.schedules import settled

# A root with two children, each with one child: parents by token.
TREE = (-1, 0, 0, 1, 2)


def tree(parents: tuple[int, ...], ids: tuple[int, ...], kv: int) -> Step:
    """A step whose tokens see their parents' chains."""
    masks: list[int] = []
    depths: list[int] = []
    for token, parent in enumerate(parents):
        masks.append(1 << token | (masks[parent] if parent >= 0 else 0))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return Step(ids, kv, 7, tuple(kv + d for d in depths), tuple(masks))


@pytest.mark.parametrize(("tokens", "blocks"), [(5, 2), (16, 5)])
def test_trees(tokens: int, blocks: int) -> None:
    made = compiled("llama-tiny", tokens=tokens, blocks=blocks)
    generator = torch.Generator().manual_seed(3)
    parents = TREE if tokens == 5 else (-1, *(int(torch.randint(0, t, (), generator=generator)) for t in range(1, tokens)))
    bench = Bench(made)
    some = [tree(parents, s.ids, s.kv) for s in steps(made, [(0, tokens), (17, tokens), (100, tokens)])]
    judge(made, bench.weights, some, bench.play(some))


def test_tokens_do_not_see_other_branches() -> None:
    made = compiled("llama-tiny", tokens=5, blocks=2)
    bench = Bench(made)
    left = bench.run(tree(TREE, (3, 1, 4, 1, 5), 33))
    right = bench.run(tree(TREE, (3, 1, 9, 1, 6), 33))
    for token in (0, 1, 3):
        assert bits(left.logits[token]).equal(bits(right.logits[token]))
    for token in (2, 4):
        assert not bits(left.logits[token]).equal(bits(right.logits[token]))


def test_a_branch_is_the_chain_it_continues() -> None:
    made = compiled("llama-tiny", tokens=5, blocks=2)
    bench = Bench(made)
    branching = bench.run(tree(TREE, (3, 1, 4, 7, 5), 16))
    straight = bench.run(Step((3, 1, 7), 16, 7))
    for token, place in ((0, 0), (1, 1), (3, 2)):
        torch.testing.assert_close(branching.logits[token], straight.logits[place], atol=0.05, rtol=0)


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0xA5])
def test_what_lies_in_the_exchange_does_not_matter(byte: int) -> None:
    """Nothing of an earlier life of the memory is taken for a value: tags of another round are no tags."""
    made = compiled("llama-tiny", tokens=2, blocks=5)
    bench, some = Bench(made), steps(made, [(0, 1), (17, 2), (33, 1)])
    expected = bench.play(some)
    bench.program.reset()
    bench.program.buffers["exchange"].fill_(byte)
    for step, first in zip(some, expected, strict=True):
        assert bench.run(step).same(first)


def test_padding_never_wins() -> None:
    """All logits are below the zero that a row of padding would have."""
    fields = config(vocab_size=1001, tie_word_embeddings=False, num_key_value_heads=1)
    made = compiled("llama-tiny", tokens=2, blocks=20, fields=fields, configure=settled)
    weights = {}
    for name, w in weights_for(made).items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(w)  # the embedding goes through as it is
        else:
            weights[name] = -w.abs() - 0.01 if name == "lm_head.weight" else w.abs() + 0.01
    bench, some = Bench(made, weights), steps(made, [(0, 2), (5, 1)])
    results = bench.play(some)
    judge(made, weights, some, results)
    assert all(float(r.logits.max()) < 0 and max(r.ids) < 1001 for r in results)


def test_of_equal_logits_the_first_wins() -> None:
    fields = config(vocab_size=1001, tie_word_embeddings=False, num_key_value_heads=1)
    made = compiled("llama-tiny", tokens=2, blocks=20, fields=fields, configure=settled)
    weights = weights_for(made)
    weights["lm_head.weight"] = weights["lm_head.weight"][torch.arange(1001) % 13]
    bench = Bench(made, weights)
    for result in bench.play(steps(made, [(0, 2), (9, 2), (33, 2)])):
        assert bits(result.logits[:, :13]).equal(bits(result.logits[:, 13:26]))
        assert max(result.ids) < 13


def feed(program: Program, kv: int, ids: list[int], flags: int = 0) -> None:
    program.control.set_inputs(kv, ids, range(kv, kv + len(ids)), [(2 << i) - 1 for i in range(len(ids))], flags)


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_kernel_feeds_itself(tokens: int) -> None:
    made = compiled("llama-tiny", tokens=tokens, blocks=7 if tokens == 1 else 2)
    program = Bench(made).program
    prompt = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    expected, ids, kv = [], prompt, 0
    for _ in range(20):
        feed(program, kv, ids)
        program.launch()
        kv += len(ids)
        ids = [program.check()[NEXT_IDS + len(ids) - 1]]
        expected += ids
    program.reset()
    feed(program, 0, prompt, ADVANCE)
    found = []
    for launch in range(20):
        program.launch()
        words = program.check()
        found.append(words[NEXT_IDS + (tokens - 1 if launch == 0 else 0)])
        assert (words[KV_LEN], words[N_TOKENS], words[STEPS], words[EPOCH]) == (tokens + launch, 1, launch + 1, launch + 2)
    assert found == expected
