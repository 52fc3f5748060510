"""Who has which pages: the pool, generators whose sequences take and give back pages, and a torch step with a table of its own."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch.library import opcheck

from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.runtime.batch import BatchGenerator
from megadsl.runtime.generate import Generator
from megadsl.runtime.pages import Pages
from megadsl.runtime.weights import TensorSource
from megadsl.torch import DecodeStep
from megadsl.torch.op import decode_step
from tests.kernels import bits, compiled, distance, one_build, weights_for

PROMPTS = ([1, 2, 3], [5], [7, 8, 9, 10, 11, 12, 13], [4, 4], [100, 200, 300])
LONG = list(range(1, 40))


@cache
def kernels() -> dict[str, Compiled]:
    """``tight``: a pool of 7 pages of 16 rows for three sequences of up to 128."""
    of = {"tokens": 6, "sequences": 3}
    return one_build(
        {
            "batch": compiled("llama-tiny", **of),  # type: ignore[arg-type]
            "tight": compiled("llama-tiny", **of, kv_page=16, kv_pages=7),  # type: ignore[arg-type]
            "one": compiled("llama-tiny", tokens=6),
            "paged": compiled("llama-tiny", tokens=6, kv_page=16, kv_pages=7),
        }
    )


def source() -> TensorSource:
    return TensorSource(weights_for(kernels()["one"]))


@cache
def batch(name: str) -> BatchGenerator:
    return BatchGenerator(kernels()[name], source(), "cpu", progress=False, steps_per_launch=4)


@cache
def one(name: str) -> Generator:
    return Generator(kernels()[name], source(), "cpu", progress=False, steps_per_launch=4)


def pool(count: int = 6, sequences: int = 3, entries: int = 4) -> Pages:
    return Pages({"kv_page": 16, "kv_pages": count}, torch.zeros(sequences, entries, dtype=torch.int32))


def test_pages_are_given_and_taken_back() -> None:
    pages = pool()
    pages.hold({0: 17, 1: 0, 2: 1})
    assert (pages.of(0), pages.of(1), pages.of(2)) == ((0, 1), (), (2,)) and sorted(pages.free) == [3, 4, 5]
    assert pages.table.tolist() == [[0, 1, -1, -1], [-1] * 4, [2, -1, -1, -1]]
    pages.grow({0: 1, 2: 33})
    assert pages.of(0) == (0, 1) and pages.of(2) == (2, 3, 4)
    pages.hold({0: 16, 1: 32})  # what one gives back, another takes
    assert pages.of(0) == (0,) and set(pages.of(1)) == {1, 5} and pages.free == []
    pages.clear()
    assert sorted(pages.free) == list(range(6)) and bool((pages.table == -1).all())


def test_no_page_has_two_owners() -> None:
    pages, draw = pool(9, 3, 9), random.Random(4)
    for _ in range(300):
        asked = {i: draw.randrange(0, 100) for i in draw.sample(range(3), draw.randrange(1, 4))}
        before = [pages.of(i) for i in range(3)], list(pages.free), pages.table.tolist()
        try:
            pages.hold(asked)
        except MegadslError as why:
            assert why.code == "MK469"
            assert before == ([pages.of(i) for i in range(3)], pages.free, pages.table.tolist()), "something changed"
        owned = [page for i in range(3) for page in pages.of(i)]
        assert sorted([*owned, *pages.free]) == list(range(9))
        assert all([p for p in row if p != -1] == list(pages.of(i)) for i, row in enumerate(pages.table.tolist()))


def test_who_is_out_of_pages_is_told() -> None:
    pages = pool()
    pages.hold({0: 64})
    with pytest.raises(MegadslError, match="sequence 2 needs 3 for 40 rows, 0 are its own and 2 of the pool's 6 are free") as caught:
        pages.hold({2: 40})
    assert caught.value.code == "MK469" and "larger kv_pages" in str(caught.value)


def test_texts_in_a_tight_pool() -> None:
    """What there are no pages for waits; each text is the same, and all pages come back."""
    texts, arrived = [LONG, LONG[::-1], LONG[5:], *PROMPTS], list[int]()
    found = batch("tight").generate(texts, 6, on_token=lambda index, token, text: arrived.append(index))
    assert [g.ids for g in found] == [one("one").generate(prompt, 6).ids for prompt in texts]
    assert arrived.index(2) > max(i for i, text in enumerate(arrived) if text == 1), "three pages each are more than there are"
    pages = batch("tight").program.pages
    assert pages is not None
    batch("tight").reset()
    assert len(pages.free) == 7


def test_a_text_that_no_pool_holds() -> None:
    with pytest.raises(MegadslError, match="sequence of prompt 1 needs 8 for 119 rows, 0 are its own and 7 of the pool's 7 are free"):
        batch("tight").generate([[1, 2], LONG], 81)
    with pytest.raises(MegadslError) as caught:
        one("paged").generate(LONG, 81)
    assert caught.value.code == "MK469"


def test_a_step_without_pages_changes_nothing() -> None:
    """A prefill that the pool has no room for is refused before its first launch; with another sequence gone it works."""
    tight = batch("tight")
    tight.reset()
    tight.prefill({0: LONG, 1: LONG})  # 3 pages each
    pages, before = tight.program.pages, tight.program.buffers["kv"].clone()
    assert pages is not None and len(pages.free) == 1
    with pytest.raises(MegadslError, match="sequence 2 needs 2"):
        tight.prefill({2: list(range(17))})
    assert tight.lengths == [39, 39, 0] and tight.program.buffers["kv"].equal(before) and pages.of(2) == ()
    tight.lengths[0] = 5
    logits = tight.step([[6], [], [1, 2]]).clone()
    assert tight.lengths == [6, 39, 2] and len(pages.of(0)) == 1 and len(pages.free) == 2
    other = batch("batch")
    other.reset()
    other.prefill({0: LONG, 1: LONG})
    other.lengths[0] = 5
    assert bits(logits).equal(bits(other.step([[6], [], [1, 2]])))
    keys, values = (bits(t) for t in tight.rows(1).read(1, 39))
    assert keys.equal(bits(other.rows(1).read(1, 39)[0])) and values.equal(bits(other.rows(1).read(1, 39)[1]))
    with pytest.raises(MegadslError, match="row 16 of sequence 2 has no page: the table says -1, the pool has 7") as caught:
        tight.rows(2).read(0, 17)
    assert caught.value.code == "MK478"


def test_one_text_in_pages() -> None:
    paged, plain = one("paged"), one("one")
    assert paged.generate(LONG, 20).ids == plain.generate(LONG, 20).ids
    assert paged.kv_len == 58 and paged.program.pages is not None and len(paged.program.pages.of(0)) == 4
    paged.kv_len = plain.kv_len = 16
    assert len(paged.program.pages.of(0)) == 1
    assert bits(paged.step([9, 8])).equal(bits(plain.step([9, 8]))) and len(paged.program.pages.of(0)) == 2
    paged.reset()
    assert paged.program.pages.of(0) == ()


# ---- torch


def step_of(name: str) -> DecodeStep:
    return DecodeStep(kernels()[name], source(), "cpu")


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([row + [-1] * (8 - len(row)) for row in rows], dtype=torch.int32)


def test_a_table_of_the_users() -> None:
    """In any order, changed between calls; full pages may be those of two sequences."""
    paged, plain = step_of("tight"), step_of("batch")
    pages, ids = table([4, 2], [6], [1]), torch.arange(1, 7)
    arena, other = paged.new_cache(), plain.new_cache()
    for at in range(3):
        lens, counts = tensor(6 * at, 0, 0), tensor(6, 0, 0)
        assert bits(paged(ids, lens, counts=counts, cache=arena, pages=pages).logits).equal(
            bits(plain(ids, lens, counts=counts, cache=other).logits)
        )
    pages = table([4, 2], [4, 5], [3])  # the first 16 rows of sequence 0 are sequence 1's as well
    out = paged(tensor(9, 9), tensor(16, 16, 0), counts=tensor(1, 1, 0), cache=arena, pages=pages)
    assert bits(out.logits[0]).equal(bits(out.logits[1]))
    assert distance(out.logits[:1], plain(tensor(9), tensor(16, 0, 0), counts=tensor(1, 0, 0), cache=other).logits) < 5e-3


def test_opcheck_and_one_graph() -> None:
    paged = step_of("tight")
    assert paged.pool is not None and paged.pages is not None and list(paged.state_dict()) == []
    paged.pool.hold({0: 20, 1: 5, 2: 40})
    given = (tensor(1, 2, 3), tensor(4, 0, 16), tensor(1, 1, 1), None, None, paged.weights, paged.cache, paged.pages, paged.name)
    assert set(opcheck(decode_step, given).values()) == {"SUCCESS"}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids: torch.Tensor, kv_len: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return paged(ids, kv_len, cache=cache, pages=pages).logits * 2

    for pages in (paged.pages, table([0], [1], [2, 3])):
        first, second = paged.new_cache(), paged.new_cache()
        found = step(tensor(1, 2, 3), tensor(0, 4, 9), first, pages)
        assert found.equal(paged(tensor(1, 2, 3), tensor(0, 4, 9), cache=second, pages=pages).logits * 2) and first.equal(second)


def test_a_step_of_one_shares_a_batchs_pool() -> None:
    many = step_of("tight")
    single = DecodeStep(kernels()["paged"], many)
    assert single.cache.data_ptr() == many.cache.data_ptr() and single.pool is many.pool
    assert many.pool is not None
    many.pool.hold({1: 30})  # not the first
    text = single.generate(LONG, 4).tolist()
    assert text == step_of("one").generate(LONG, 4).tolist() and len(many.pool.of(0)) == 3
    own = many(tensor(text[-1]), tensor(42, 0, 0), counts=tensor(1, 0, 0))
    assert int(own.next_ids[0]) == step_of("one").generate(LONG, 5).tolist()[-1]
    with pytest.raises(MegadslError, match="MK489"):
        DecodeStep(kernels()["one"], many)


@pytest.mark.parametrize(
    ("code", "name", "pages"),
    [
        ("MK484", "tight", torch.zeros(3, 4, dtype=torch.int32)),
        ("MK483", "tight", torch.zeros(3, 8, dtype=torch.int64)),
        ("MK485", "tight", torch.zeros(8, 3, dtype=torch.int32).t()),
        ("MK478", "tight", table([0], [7], [1])),
        ("MK478", "tight", table([0], [1], [])),
        ("MK492", "batch", table([0], [1], [2])),
    ],
)
def test_what_a_table_cannot_be(code: str, name: str, pages: torch.Tensor) -> None:
    step = step_of(name)
    with pytest.raises(MegadslError, match=r"test_runtime_pages\.py") as caught:
        step(tensor(1, 2, 3), tensor(0, 4, 9), pages=pages)
    assert caught.value.code == code


def test_a_step_in_pages_needs_a_table() -> None:
    paged = step_of("tight")
    with pytest.raises(MegadslError, match="no table of KV pages for a step that needs one") as raised:
        decode_step(tensor(1, 2, 3), tensor(0, 4, 9), None, None, None, paged.weights, paged.cache, None, paged.name)
    assert raised.value.code == "MK492"
