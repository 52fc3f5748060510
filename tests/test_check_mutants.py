"""The plan checker can fail: each way to break a plan is refused with its code, a table of the two sides, and a mend."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from check_tools import PIECES, area, arguments, by_block, plan, split, unmet, without
from lower_tools import GPU
from schedules import LINEARS, everywhere, gated

import megadsl as mk
from megadsl.check import shares
from megadsl.check.checker import check_plan
from megadsl.check.clocks import check_exchanges
from megadsl.check.edits import Edit, edited, with_area, with_exchange, with_words
from megadsl.check.model import Device
from megadsl.check.report import Findings
from megadsl.diagnostics import CATALOGUE
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.plan import Instr, LayerLoop, Plan
from megadsl.lower.pipeline import lower
from megadsl.types import Level

Break = Callable[[Plan], Plan]
SPECS = Path(__file__).parent / "specs"
FIELDS = {"vocab": 203, "hidden": 72, "inter": 104, "layers": 5}


def split_sentinels(s: ScheduleBlock) -> None:
    """Parts that are reused sooner than the value that they are added to."""
    split(mk.Sentinel(4), down_proj=3)(s)
    s["down_proj"].sync(mk.Tagged(8))


@cache
def base(kind: str = "default") -> Plan:
    """Plans to break. ``many``: more blocks than any value has groups, so that some own nothing."""
    match kind:
        case "sentinel":
            return plan("llama-tiny", everywhere(mk.Sentinel(4)), blocks=132)
        case "flag":
            return plan("llama-tiny", everywhere(mk.Flag(2)), blocks=132)
        case "gated":
            return plan("llama-tiny", gated, blocks=5)
        case "not held":
            return plan("llama-tiny", lambda s: [s[op].prefetch(registers=0) for op in LINEARS] and None, blocks=5)
        case "reduced":
            return plan("llama-tiny", lambda s: s["qkv_proj"].scale("before"), blocks=5)
        case "logits":
            return plan(f"{SPECS / 'shapes.py'}:flat", lambda s: s["embed"].sync(mk.Flag(2)), fields=FIELDS, blocks=132)
        case "smollm2":
            return plan("smollm2-135m")
        case "wide":
            return plan("llama-tiny", tokens=16, blocks=5)
        case "chunked":
            return plan("llama-3.2-1b", lambda s: s["down_proj"].columns(ways=1) and None, tokens=16)
    return other_base(kind) or plan("llama-tiny", blocks=5)


def other_base(kind: str) -> Plan | None:
    """Those of them with split columns, or on one block."""
    match kind:
        case "one block":
            return plan("smollm2-135m", by_block(), blocks=1)
        case "by block":
            return plan("llama-tiny", by_block(), blocks=5)
        case "split":
            return plan("llama-tiny", split_sentinels, 2, blocks=7, fields={**PIECES, "num_hidden_layers": 5})
        case "split, flag":
            return plan("llama-tiny", split(mk.Flag(2), down_proj=3), 2, blocks=7, fields=PIECES)
        case "split, in chunks":
            return plan("llama-3.2-1b", lambda s: s["down_proj"].columns(ways=2) and None, tokens=16, blocks=33)
    return None


def refused(broken: Plan, code: str, *texts: str) -> None:
    """A finding of that code has these texts in it, a table, a place in the spec and a mend."""
    found = [d for d in check_plan(broken).findings if d.code == code]
    assert found, f"no {code}"
    matching = [d for d in found if all(text in str(d) for text in texts)]
    assert matching, f"none shows {texts}:\n" + "\n".join(map(str, found))
    for shown in found:
        assert shown.span.line > 0 and shown.span.file.endswith(".py")
        assert re.fullmatch(r" {4}-+(  -+)*", shown.detail.splitlines()[1]), shown.detail
        assert str(shown).splitlines()[-1] == f"    mend: {shown.mend}" and "{" not in shown.mend


def repeated(call: str, op: str, times: int = 2) -> Break:
    """Runs an instruction of a loader several times."""

    def change(of: Plan) -> Plan:
        def body(items: tuple[Instr, ...]) -> tuple[Instr, ...]:
            return tuple(i for found in items for i in [found] * (times if (found.call, found.op) == (call, op) else 1))

        def program(p: object) -> object:
            made = tuple(
                replace(it, body=tuple(replace(ph, body=body(ph.body)) for ph in it.body))
                if isinstance(it, LayerLoop)
                else replace(it, body=body(it.body))
                for it in p.body  # type: ignore[attr-defined]
            )
            return replace(p, body=made)  # type: ignore[type-var]

        return replace(of, programs=tuple(program(p) for p in of.programs))  # type: ignore[misc]

    return change


def swapped(of: Plan) -> Plan:
    """The loader fills o_proj's tiles before the cached rows."""

    def program(p: object) -> object:
        def phases(it: object) -> object:
            if not isinstance(it, LayerLoop):
                return it
            body = list(it.body)
            ops = [ph.op for ph in body]
            a, b = ops.index("attention"), ops.index("o_proj")
            body[a], body[b] = body[b], body[a]
            return replace(it, body=tuple(body))

        return replace(p, body=tuple(phases(i) for i in p.body)) if p.kind == "loader" else p  # type: ignore[attr-defined,type-var]

    return replace(of, programs=tuple(program(p) for p in of.programs))  # type: ignore[misc]


def deaf(of: Plan) -> Plan:
    """Nothing that a block has polled reaches its other threads."""
    return without("sync")(edited(of, lambda i: i if i.call == "embed" else replace(i, syncs=())))


def layered(value: str, round_: str) -> Edit:
    return lambda i: replace(i, args={**i.args, "round": round_}) if i.call == "publish" and i.args["value"] == value else i


# name -> (which plan, what is broken, code, what the message shows)
EXCHANGES: dict[str, tuple[str, Break, str, tuple[str, ...]]] = {
    "never published": (
        "default",
        without("publish", "o_proj"),
        "MK500",
        ("has published nothing", "gather of gate_up_proj, layer 0 [llama.py"),
    ),
    "a round too early": (
        "default",
        arguments("gather", "o_proj", round="epoch * layers + layer + 1"),
        "MK500",
        ("no block has published",),
    ),
    "a round too late": ("default", arguments("gather", "qkv_proj", round="epoch * (layers + 1)"), "MK500", ("has already replaced",)),
    "idle blocks left out, sentinel": (
        "sentinel",
        arguments("gather", whole=False),
        "MK501",
        ("empties its slot", "knows of block", "reads round"),
    ),
    "idle blocks left out, flag": ("flag", arguments("gather", whole=False), "MK501", ("overwrites its slot", "knows of block", "slots")),
    "next launch's inputs too early": ("logits", arguments("gather", whole=False), "MK503", ("writes the control block", "knows of block")),
    "no barrier behind any gather": ("smollm2", deaf, "MK501", ("knows of block 0 up to: embed of embed_tokens",)),
    "another wire": ("default", arguments("gather", "o_proj", wire="Flag"), "MK540", ("reads Flag", "Tagged, 2 slots")),
    "scope too narrow": (
        "default",
        lambda p: with_exchange(p, "o_proj", level=Level.CLUSTER),
        "MK541",
        ("level cluster", "level=mk.Level.GPU"),
    ),
    "two slots of sentinels": ("sentinel", lambda p: with_exchange(p, "qkv_proj", slots=2), "MK542", ("2 slots", "at least 4")),
    "one slot of tags": ("default", lambda p: with_exchange(p, "x", slots=1), "MK542", ("1 slots", "at least 2")),
    "slots that no mask picks": ("default", lambda p: with_exchange(p, "x", slots=3), "MK542", ("power of two",)),
    "a producible empty value": ("sentinel", lambda p: with_exchange(p, "o_proj", dtype="u32"), "MK543", ("u32", "mk.Tagged")),
    "a table's bits taken for results": (
        "sentinel",
        arguments("publish", raw=False),
        "MK543",
        ("'x' carries bf16", "sends what it was given"),
    ),
    "tagged vectors sent word by word": (
        "default",
        arguments("publish", "o_proj", words=True),
        "MK547",
        ("'o_proj' is sent word by word", "Tagged, read as whole vectors", "publish it staged"),
    ),
    "words that are read as vectors": (
        "sentinel",
        arguments("publish", "o_proj", words=True),
        "MK547",
        ("Sentinel, read as whole vectors",),
    ),
    "flag before its payload": ("flag", unmet("publish", "flag"), "MK544", ("no barrier", "st.release of the flag")),
    "flag before its parts": ("flag", unmet("attention", "published"), "MK544", ("attention.parts",)),
    "a round left out": ("default", lambda p: edited(p, layered("o_proj", "epoch * layers + 2 * layer")), "MK545", ("round",)),
    "parts never published": (
        "split",
        without("matrix", "down_proj"),
        "MK500",
        ("has published nothing", "add_parts of down_proj, layer 0 [llama.py"),
    ),
    "parts of a round too early": (
        "split",
        arguments("add_parts", round="epoch * layers + layer + 1"),
        "MK500",
        ("no block has published",),
    ),
    "parts as another wire": ("split", arguments("add_parts", wire="Flag"), "MK540", ("reads Flag", "Sentinel, 4 slots")),
    "parts published as another wire": ("split", arguments("matrix", "down_proj", parts_wire="Tagged"), "MK540", ("publishes Tagged",)),
    "flag before all sums": ("split, flag", unmet("matrix", "end"), "MK544", ("down_proj.parts",)),
    "parts of a round left out": ("split", arguments("matrix", "down_proj", parts_round="epoch * layers + 2 * layer"), "MK545", ("round",)),
    "no barrier behind any gather, parts": ("split", deaf, "MK501", ("of 'down_proj.parts' while", "reads round", "add_parts of")),
    "a first round of tag 0": ("default", lambda p: edited(p, layered("o_proj", "(epoch - 1) * layers + layer")), "MK546", ("round 0",)),
    "a first round of flag 0": (
        "flag",
        lambda p: edited(p, layered("o_proj", "(epoch - 1) * layers + layer - 1")),
        "MK546",
        ("Flag of 0",),
    ),
    "as many slots as tags": ("default", lambda p: with_exchange(p, "o_proj", slots=2**16), "MK546", ("65536 slots",)),
    "all ones of fp4": ("sentinel", lambda p: with_exchange(p, "o_proj", dtype="e2m1"), "MK543", ("e2m1", "mk.Tagged or mk.Flag")),
    "rounds begin anew": ("default", lambda p: edited(p, layered("o_proj", "layer")), "MK545", ("were due",)),
}

MEMORY: dict[str, tuple[str, Break, str, tuple[str, ...]]] = {
    "block without a unit": ("wide", unmet("attention", "idle"), "MK510", ("reads staged: publish of qkv_proj", "writes staged: merge")),
    "staged too early": ("default", unmet("embed", "end"), "MK510", ("'staged'", "no barrier", "another warp")),
    "products before the input": ("default", unmet("matrix", "gathered"), "MK510", ("'activations'", "reads activations: matrix")),
    "partial sums": ("default", unmet("matrix", "partials"), "MK510", ("'partials'",)),
    "end of a linear": ("wide", unmet("matrix", "end"), "MK510", ("'staged'",)),
    "published alone by one warp of many": (
        "wide",
        lambda p: arguments("publish", solo=True)(unmet("matrix", "end")(p)),
        "MK510",
        ("'staged'", "writes staged: matrix", "reads staged: publish"),
    ),
    "published by all what one warp has": ("by block", arguments("publish", solo=False), "MK510", ("'staged'", "writes staged: matrix")),
    "nobody told that it is published": (  # a value of more units than a warp has threads, for all warps to keep
        "one block",
        unmet("publish", "done"),
        "MK510",
        ("writes staged: matrix", "reads staged: keep"),
    ),
    "queries": ("default", unmet("attention", "gathered"), "MK510", ("'attention.queries'",)),
    "parts of the warps": ("default", unmet("attention", "parts"), "MK510", ("'attention.scratch'",)),
    "merge": ("wide", unmet("merge", "end"), "MK510", ("'staged'",)),
    "candidates": ("by block", unmet("argmax", "candidates"), "MK510", ("'lm_head.candidates'",)),
    "winners": ("by block", unmet("argmax", "winners"), "MK510", ("'lm_head.candidates'",)),
    "choice": ("by block", unmet("argmax", "choice"), "MK510", ("'lm_head.candidates'",)),
    "scales": ("default", unmet("matrix", "partials"), "MK510", ("'scalars'",)),
    "products while sums are still being added": ("default", unmet("matrix", "input"), "MK510", ("'partials'", "writes partials: matrix")),
    "last elements": ("default", unmet("matrix", "gathered"), "MK510", ("'partials'",)),
    "reductions": ("reduced", without("sync"), "MK510", ("writes activations: gather", "reduce of")),
    "kept in the overlay": (
        "default",
        lambda p: with_words(with_area(p, "kept.x", offset=area(p, "activations"), overlay=True), "x_kept", {0: area(p, "activations")}),
        "MK511",
        ("'kept.x'", "writes activations", "reads kept.x"),
    ),
    "sums still being read": ("split", unmet("matrix", "partials"), "MK510", ("'partials'", "down_proj")),
    "parts added": ("split, flag", unmet("add_parts", "end"), "MK510", ("'staged'", "writes staged: add_parts")),
    "never kept": ("default", without("keep", "embed_tokens"), "MK512", ("'kept.x'",)),
    "sums of chunks too few": ("chunked", lambda p: with_area(p, "sums", bytes=64), "MK513", ("'sums'", "as large as")),
    "area too small": ("default", lambda p: with_area(p, "activations", bytes=64), "MK513", ("'activations'", "as large as")),
    "staged over partials": ("default", lambda p: with_area(p, "staged", offset=area(p, "partials")), "MK514", ("'partials'", "'staged'")),
    "ring over an area": ("default", lambda p: with_area(p, "ring.loader", offset=area(p, "activations")), "MK514", ("ring.loader",)),
}

RINGS: dict[str, tuple[str, Break, str, tuple[str, ...]]] = {
    "loads in another order": ("smollm2", swapped, "MK520", ("fills", "takes")),
    "a vector never loaded": ("default", without("load_vector", "qkv_proj"), "MK520", ("takes qkv_proj.input_layernorm", "fills qkv_proj")),
    "rows never loaded": ("default", without("load_cache"), "MK520", ("takes attention",)),
    "a matrix loaded twice": ("default", repeated("load_matrix", "o_proj"), "MK520", ("fills o_proj",)),
    "the last matrix never loaded": ("default", without("load_matrix", "lm_head"), "MK520", ("takes lm_head", "fills qkv_proj")),
    "a gate never opened": (
        "gated",
        without("open_gate", "o_proj"),
        "MK521",
        ("waits for the gate of 'o_proj' at 1", "hold_tiles of o_proj"),
    ),
    "a vector never let go of": ("not held", without("release_vector"), "MK524", ("still holds",)),
    "one vector too many": ("default", lambda p: repeated("load_vector", "lm_head")(without("load_matrix", "lm_head")(p)), "MK520", ()),
    "fewer warps than arrivals": (
        "default",
        lambda p: replace(p, tunables=replace(p.tunables, consumer_warps=7)),
        "MK522",
        ("barrier of 7 arrivals", "8 warps"),
    ),
    "tape too short": ("default", lambda p: with_area(p, "tape.loader", bytes=112), "MK523", ("tape.loader",)),
    "tape too short for the parts": ("split, in chunks", lambda p: with_area(p, "tape.loader", bytes=560), "MK523", ("tape.loader",)),
    "parts in another order": ("split, in chunks", lambda p: with_words(p, "down_proj", {11: 1}), "MK520", ("fills down_proj",)),
    "barriers too few": ("default", lambda p: with_area(p, "barriers.loader", bytes=16), "MK523", ("barriers.loader",)),
    "stages too small": (
        "default",
        lambda p: replace(p, schedule=replace(p.schedule, rings=tuple((n, replace(r, stage_bytes=1024)) for n, r in p.schedule.rings))),
        "MK523",
        ("a stage for",),
    ),
}

STEPS: dict[str, tuple[str, Break, str, tuple[str, ...]]] = {
    "rows never released": ("default", without("release_rows"), "MK561", ("has not released", "appends rows: attention")),
    "rows never acquired": ("default", without("acquire_rows"), "MK561", ("no block acquires",)),
    "rows not waited for": ("default", without("await_rows"), "MK561", ("loader does not wait",)),
    "a token without a barrier": ("default", unmet("argmax", "token"), "MK510", ("'progress'",)),
    "progress too small": ("default", lambda p: with_area(p, "progress", bytes=16), "MK513", ("'progress'",)),
}

SHARES: dict[str, tuple[str, Break, str, tuple[str, ...]]] = {
    "rows that nobody computes": ("default", lambda p: with_words(p, "o_proj", {2: 15}), "MK530", ("tiles of 'o_proj'",)),
    "another fold": ("default", lambda p: with_words(p, "gate_up_proj", {3: 1}), "MK530", ("packed weights",)),
    "kernel and plan differ": ("default", lambda p: with_words(p, "o_proj_exchange", {5: 15}), "MK530", ("the kernel reads",)),
    "offset outside the blocks": ("default", lambda p: with_words(p, "o_proj", {4: 7}), "MK530", ("row groups of 'o_proj'",)),
    "another share": ("default", lambda p: with_exchange(p, "o_proj", share_offset=3), "MK531", ("producer o_proj", "readers of o_proj")),
    "merge of another share": ("default", lambda p: with_words(p, "attention_merge", {1: 2}), "MK531", ("producer attention",)),
    "too few vectors": ("default", lambda p: with_exchange(p, "o_proj", units=1), "MK532", ("has room for 1",)),
    "parts of another share": ("split", lambda p: with_exchange(p, "down_proj.parts", share_offset=3), "MK531", ("readers of down_proj",)),
    "parts that no kernel multiplies": ("split", lambda p: with_words(p, "down_proj", {10: 1}), "MK531", ("producer down_proj",)),
    "parts of broken tiles": ("split", lambda p: with_words(p, "down_proj", {10: 2}), "MK530", ("2 parts",)),
    "too few vectors for the parts": ("split", lambda p: with_exchange(p, "down_proj.parts", vectors=8), "MK532", ("has room for 8",)),
    "exchanges over each other": (
        "default",
        lambda p: with_exchange(p, "qkv_proj", offset=p.exchange("x").offset),
        "MK533",
        ("exchange arena",),
    ),
}


@pytest.mark.parametrize("name", [*EXCHANGES, *MEMORY, *RINGS, *STEPS, *SHARES])
def test_a_broken_plan_is_refused(name: str) -> None:
    kind, change, code, texts = {**EXCHANGES, **MEMORY, **RINGS, **STEPS, **SHARES}[name]
    assert check_plan(base(kind)).findings == ()
    refused(change(base(kind)), code, *texts)


def test_why_sentinels_need_four_slots() -> None:
    """With two, a reader polls a slot that, for all it knows, has not been emptied since the round before the last."""

    @mk.kernel
    def chain(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = mk.embed(mk.weight("embed", (64, 64)), mk.input_ids(tokens))
        for layer in mk.layers(6):
            x = mk.map("x + y", x=x, y=mk.linear(x, layer.weight("w", (64, 64))))
        return mk.argmax(mk.linear(x, mk.weight("head", (64, 64))))

    with mk.schedule(chain, arch=GPU.arch) as s:
        s["embed"].sync(mk.Sentinel(4))
    held = lower(chain.trace({}), GPU, overrides=chain.overrides_for(GPU.arch), blocks=4).plan
    assert check_plan(held).findings == ()
    found = Findings()
    check_exchanges(Device(with_exchange(held, "x", slots=2)), found)
    stale = next(d for d in found.found if d.code == "MK502")
    assert "empties the slot" in stale.detail and "polls round" in stale.detail and "mk.Tagged" in stale.mend


@pytest.mark.parametrize(
    ("model", "blocks", "needed"), [("llama-tiny-odd", 5, False), ("llama-tiny-odd", 7, True), ("llama-tiny-interleaved", 7, False)]
)
def test_the_barrier_behind_the_queries_is_needed_where_bytes_meet(model: str, blocks: int, needed: bool) -> None:
    """Of a unit only rows that exist are written, and perhaps by the first warp alone, which has read the partial sums itself. The race
    detector sees a race in just those of these kernels whose barrier is needed (mutants of the kernel, docs/verification.md)."""
    made = plan(model, by_block(), blocks=blocks, max_kv=64)
    found = check_plan(edited(made, lambda i: replace(i, syncs=()) if (i.call, i.op) == ("publish", "qkv_proj") else i)).findings
    assert [f.code for f in found] == (["MK510"] if needed else [])


def test_rows_appended_under_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_takes_them(splits: int, unit: int, kv_len: int, _: int = 0) -> tuple[int, int, int, bool]:
        chunks = -(-kv_len // 16)
        split = unit % splits
        return unit // splits, chunks * split // splits, chunks * (split + 1) // splits, split == 0

    monkeypatch.setattr(shares, "attention_unit", first_takes_them)
    refused(base("smollm2"), "MK534", "appends", "streams chunks")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"smem_per_block": 65536}, "bytes of shared memory"),
        ({"max_warps_per_block": 8}, "warps"),
        ({"sms": 4}, "co-resident blocks"),
        ({"named_barriers": 1}, "named barriers"),
        ({"registers_per_sm": 32768}, "registers per thread"),
    ],
)
def test_budgets(change: dict[str, int], what: str) -> None:
    (found,) = check_plan(base(), replace(GPU, **change)).findings
    assert found.code == "MK550" and what in found.message


def test_every_code_is_shown_here() -> None:
    tested = {code for _, _, code, _ in {**EXCHANGES, **MEMORY, **RINGS, **STEPS, **SHARES}.values()} | {"MK502", "MK534", "MK535", "MK550"}
    assert {code for code in CATALOGUE if "MK500" <= code < "MK570"} - {"MK525", "MK536", "MK551", "MK560"} == tested
