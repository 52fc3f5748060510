"""The tables of ``megadsl explain``, against numbers worked out by hand and against what the device code would poll."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import pytest
from check_tools import plan, split

from megadsl import resources
from megadsl.cli import main
from megadsl.driver import Compiled, compile_model
from megadsl.ir.graph import Attention, Linear
from megadsl.ir.plan import Exchange, Plan
from megadsl.lower.columns import share_begin, share_owner
from megadsl.lower.explain import EDGE_COLUMNS, OP_COLUMNS, Table, rows
from megadsl.lower.memory import chunk_pieces
from megadsl.lower.tiling import GROUP_ROWS


@cache
def compiled(model: str, tokens: int = 1) -> Compiled:
    return compile_model(model, tokens=tokens, blocks=132)


def linear(model: Compiled, name: str) -> Linear:
    op = model.graph.op(name)
    assert isinstance(op, Linear)
    return op


def table(found: Table) -> dict[str, dict[str, str]]:
    """Lines by their first cell, cells by their column."""
    columns, lines = found
    assert all(len(line) == len(columns) for line in lines)
    return {line[0]: dict(zip(columns, line, strict=True)) for line in lines}


@cache
def explained(model: str, tokens: int = 1) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    ops, edges = rows(compiled(model, tokens))
    assert tuple(ops[0]) == OP_COLUMNS and tuple(edges[0]) == EDGE_COLUMNS
    return table(ops), table(edges)


def test_a_linear() -> None:
    ops, _ = explained("llama-3.2-1b")
    assert ops["gate_up_proj"] == {
        "op": "gate_up_proj",
        "spec": compiled("llama-3.2-1b").graph.op("gate_up_proj").span.short,
        "runs": "16",
        "tiles": "4,096 x 8x1024",
        "bytes per run": f"{2 * (16384 * 2048 + 2048):,}",
        "roles": "loader -> consumer",
        "placement": "ring; 4 tiles into registers",
        "hint": "evict_first",
        "largest share": "16 of 2,048 row groups",
        "floor us": "238.624",
    }


def test_an_attention_and_an_embedding() -> None:
    ops, _ = explained("llama-3.2-1b")
    attention, embed = ops["attention"], ops["embed_tokens"]
    assert attention["tiles"] == "128 units: 8 KV heads x 16 splits" and attention["bytes per run"] == "2,048 per row"
    assert attention["hint"] == "evict_normal" and attention["largest share"] == "1 of 128 units"
    assert embed["bytes per run"] == "4,096" and embed["roles"] == "consumer" and embed["placement"] == embed["tiles"] == ""


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-tiny-odd"])
def test_totals_are_those_of_the_manifest(model: str) -> None:
    ops, _ = explained(model)
    manifest = compiled(model).manifest
    empty, full = ops["total at KV 0"], ops["total at KV 2,047"]
    assert float(empty["floor us"]) == pytest.approx(manifest["floor_us"], abs=2e-3)
    grown = int(full["bytes per run"].replace(",", "")) - int(empty["bytes per run"].replace(",", ""))
    assert grown == 2047 * manifest["kv_bytes_per_token"]


def test_edges() -> None:
    _, edges = explained("llama-3.2-1b")
    assert edges["x"]["producer -> readers"] == "embed_tokens, then down_proj -> qkv_proj, o_proj, lm_head"
    assert edges["x"] | {"producer -> readers": ""} == {
        "value": "x", "producer -> readers": "", "sync": "Sentinel", "level": "gpu", "slots": "4", "vectors": "132 x 2",
        "polled bytes per block": f"{(256 + 2) * 16:,}",  # as the input of qkv_proj; and its own rows as a residual
    }  # fmt: skip
    assert edges["gate_up_proj"]["polled bytes per block"] == f"{1024 * 16:,}"
    _, tagged = explained("llama-tiny")
    assert tagged["gate_up_proj"]["polled bytes per block"] == f"{(24 + 132) * 16:,}"  # and an extra vector of each block
    assert edges["lm_head.best"]["producer -> readers"] == "lm_head -> lm_head"
    assert edges["lm_head.best"]["polled bytes per block"] == f"{132 * 16:,}"


def polled_by(block: int, e: Exchange, plan: Compiled) -> Iterator[int]:
    """Vectors that one block polls of this step's q, k and v: the device loop over its units, as run_attention walks it."""
    op = plan.graph.op("attention")
    assert isinstance(op, Attention)
    blocks, splits = plan.schedule.blocks, plan.schedule.op(op.name).splits
    heads = op.heads // op.kv_heads
    for unit in range(block, op.kv_heads * splits, blocks):
        head, fresh = unit // splits, unit % splits == splits - 1
        wanted = [(op.q, heads * op.head_dim), (op.k, op.head_dim), (op.v, op.head_dim)][: 3 if fresh else 1]
        for ref, width in wanted:
            first, last = ref.begin + head * width, ref.begin + (head + 1) * width - 1
            groups = sorted({f // GROUP_ROWS for f in range(first, last + 1)})
            owners = [share_owner(e.groups, blocks, e.share_offset, g) for g in groups]
            # blocks between them that own nothing are asked too
            yield len(groups) * plan.graph.tokens + (owners[-1] - owners[0] + 1) * (e.vectors - e.units)


@pytest.mark.parametrize(("model", "tokens"), [("llama-3.2-1b", 1), ("llama-3.2-1b", 5), ("smollm2-135m", 16), ("llama-tiny", 1)])
def test_polled_bytes_of_an_attention(model: str, tokens: int) -> None:
    plan = compiled(model, tokens)
    e = plan.plan.exchange("qkv_proj")
    most = max(sum(polled_by(block, e, plan)) for block in range(plan.schedule.blocks))
    assert explained(model, tokens)[1]["qkv_proj"]["polled bytes per block"] == f"{most * 16:,}"


def down_proj(ways: int) -> tuple[dict[str, str], dict[str, dict[str, str]], Plan]:
    """The down projection of 16 tokens, its columns in some parts, and the edges; on 128 blocks."""
    made = plan("llama-3.2-1b", split(down_proj=ways), 16, blocks=128)
    ops, edges = rows(SimpleNamespace(plan=made))
    return table(ops)["down_proj"], table(edges), made


def test_chunked_gathers_count_once_per_batch() -> None:
    """The down projection's 8192 inputs of 16 tokens do not fit at once: each batch of row groups gathers them chunk by chunk."""
    _, edges, made = down_proj(1)
    op = made.graph.op("down_proj")
    assert isinstance(op, Linear)
    chunks = 8 // chunk_pieces(op, made.graph, made.schedule)
    assert chunks == 4
    e = made.exchange("gate_up_proj")
    polled, extras = int(edges["gate_up_proj"]["polled bytes per block"].replace(",", "")) // 16, e.vectors - e.units
    assert 1024 * 16 + 128 * extras <= polled <= 1024 * 16 + (128 + chunks) * extras  # chunks share at most their border owners


def test_split_columns_are_polled_once() -> None:
    """A block gathers an eighth of the input, and eight parts of its 16 features."""
    op, edges, made = down_proj(8)
    assert op["largest share"] == "16 of 2,048 row groups of 8 column parts"
    assert edges["down_proj.parts"]["polled bytes per block"] == f"{2 * 8 * 16 * 8 * 4:,}"
    e = made.exchange("gate_up_proj")
    assert edges["gate_up_proj"]["polled bytes per block"] == f"{(128 * 16 + 16 * (e.vectors - e.units)) * 16:,}"


def test_more_tokens_split_the_down_projection() -> None:
    """Where its input does not fit a block's shared memory, by default; else a hop more would cost more than it spares."""
    ways = {tokens: compiled("llama-3.2-1b", tokens).schedule.op("down_proj").ways for tokens in (1, 5)}
    assert ways == {1: 1, 5: 8}


def test_share_owner_is_the_inverse_of_share_begin() -> None:
    for n, parts, offset in ((256, 132, 0), (256, 132, 131), (5, 12, 3), (49152 // 8, 132, 77), (7, 1, 0)):
        owners = [share_owner(n, parts, offset, item) for item in range(n)]
        assert owners == [i for i in range(parts) for _ in range(share_begin(n, parts, offset, i), share_begin(n, parts, offset, i + 1))]


def test_a_code_is_explained_by_its_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("MK113", "mk113"):
        monkeypatch.setattr("sys.argv", ["megadsl", "explain", code])
        with pytest.raises(SystemExit) as done:
            main()
        assert not done.value.code
        assert capsys.readouterr().out == (resources.diagnostics() / "MK113.md").read_text()


@pytest.mark.parametrize(("code", "near"), [("MK119X", ""), ("MK1130", "MK1"), ("mk999", "MK")])
def test_an_unknown_code_names_near_ones(code: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["megadsl", "explain", code])
    with pytest.raises(SystemExit) as done:
        main()
    shown = capsys.readouterr().err
    assert done.value.code == 1
    if near:
        assert shown.startswith(f"error[MK226]: no diagnostic has the code {code.upper()}\n    mend: near ones: {near}")
    else:
        assert "MK180" in shown  # no code: a model
