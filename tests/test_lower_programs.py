"""Pass ``program``: sites, rounds and the order of loads, by running the programs symbolically; and what verify_plan refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from lower_tools import lowered, model

from megadsl.ir.plan import Instr, LayerLoop, Phase, Plan, Program, Verb
from megadsl.ir.plan_text import print_plan
from megadsl.lower.programs import instructions
from megadsl.lower.verify_plan import verify_plan

MODELS = ("llama-3.2-1b", "smollm2-135m", "llama-tiny-odd", "llama-tiny-wide", "llama-tiny-interleaved")


@pytest.mark.parametrize("name", MODELS)
def test_every_wait_and_signal_between_blocks_has_a_site(name: str) -> None:
    plan = model(name, 2).plan
    assert [s.id for s in plan.sites] == list(range(len(plan.sites)))
    for program in plan.programs:
        for i in instructions(program.body):
            needs = i.verb is Verb.WAIT or i.call in ("publish", "argmax", "matrix", "attention", "merge", "load_matrix", "load_cache")
            assert (i.site is not None) or not needs, i.call
            if i.site is not None:
                site = plan.sites[i.site]
                assert (site.role, site.op, site.span) == (program.role, i.op, i.span)
    assert {s.kind for s in plan.sites} == {"ring.empty", "ring.full", "exchange", "publish", "gate"}


def test_site_ids_are_stable() -> None:
    """The same for any number of tokens, blocks or ring stages: reports and tests may name them."""
    first = [(s.id, s.role, s.op, s.kind) for s in model("smollm2-135m").plan.sites]
    for tokens, blocks in ((1, 7), (16, 132), (3, 2)):
        assert [(s.id, s.role, s.op, s.kind) for s in model("smollm2-135m", tokens, blocks=blocks).plan.sites] == first


def steps(program: Program, layers: int) -> Iterator[tuple[int, Instr]]:
    """(layer, instruction) in the order in which a role runs them; a linear's prologue comes before its result."""
    for item in program.body:
        phases = item.body if isinstance(item, LayerLoop) else (item,)
        for layer in range(layers if isinstance(item, LayerLoop) else 1):
            for phase in phases:
                for i in instructions([phase]):
                    yield layer, i


def handed_on(i: Instr) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(value, round) that an instruction reads, then those that it writes."""
    args: dict[str, Any] = dict(i.args)
    match i.call:
        case "gather" | "gather_kept":
            return [(args["value"], args["round"])], []
        case "attention":
            return [(args["qkv"], args["qkv_round"])], [(args["parts"], args["parts_round"])]
        case "merge":
            return [(args["parts"], args["round"])], []
        case "publish":
            return [], [(args["value"], args["round"])]
        case "argmax":
            return [], [(args["value"], args["round"])]
    return [], []


@pytest.mark.parametrize("name", MODELS)
def test_rounds_are_consecutive_and_every_read_is_of_the_latest(name: str) -> None:
    state = model(name)
    layers = state.graph.layers
    latest: dict[str, int] = {}
    for epoch in range(3):
        taken: dict[str, int] = {}
        for layer, i in steps(state.plan.program("consumer"), layers):
            names = {"epoch": epoch, "layers": layers, "layer": layer}
            read, written = handed_on(i)
            for value, expression in read:
                assert eval(expression, {}, names) == latest[value], f"{i.op} reads {value} in the wrong round"
            for value, expression in written:
                assert eval(expression, {}, names) == latest.get(value, -1) + 1, f"{i.op} writes {value} out of turn"
                latest[value] = latest.get(value, -1) + 1
                taken[value] = taken.get(value, 0) + 1
        assert taken == {e.name: eval(e.uses, {}, {"layers": layers}) for e in state.exchanges}


@pytest.mark.parametrize("name", MODELS)
def test_consumers_take_what_the_loader_fills_in_its_order(name: str) -> None:
    plan = model(name, 3).plan
    takes = {"matrix": "load_matrix", "wait_vector": "load_vector", "copy_vector": "load_vector", "attention": "load_cache"}
    filled = [(layer, i.op) for layer, i in steps(plan.program("loader"), 2) if i.verb is Verb.LOAD]
    taken = [(layer, i.op) for layer, i in steps(plan.program("consumer"), 2) if i.call in takes]
    assert filled == taken
    vectors = [i.args["record"] for _, i in steps(plan.program("loader"), 1) if i.call == "load_vector"]
    waits = [f"{i.op}.{i.args['arg']}" for _, i in steps(plan.program("consumer"), 1) if i.call in ("wait_vector", "copy_vector")]
    assert vectors == waits


def test_a_gate_is_opened_before_what_it_gates() -> None:
    plan = lowered(decide=lambda s: s["o_proj"].prefetch(smem=None) and None, blocks=2).plan
    loader = [i.call for i in instructions(plan.program("loader").body) if i.op == "o_proj"]
    consumer = [i.call for i in instructions(plan.program("consumer").body) if i.op == "o_proj"]
    assert loader == ["pass_gate", "load_matrix"] and consumer[0] == "open_gate"


def test_l2_prefetch_stands_where_the_user_put_it() -> None:
    plan = lowered(decide=lambda s: s["o_proj"].prefetch(l2=4096, ahead_of="attention") and None, blocks=2).plan
    (loop,) = [item for item in plan.program("loader").body if isinstance(item, LayerLoop)]
    (attention,) = [p for p in loop.body if p.op == "attention"]
    assert [(i.call, i.op) for i in attention.body] == [("prefetch_l2", "o_proj"), ("await_rows", "attention"), ("load_cache", "attention")]


def without(plan: Plan, role: str, call: str) -> Plan:
    """The plan with one kind of instruction taken out of a role."""

    def phase(p: Phase) -> Phase:
        return replace(p, body=tuple(i for i in p.body if i.call != call))

    def program(p: Program) -> Program:
        items = tuple(replace(i, body=tuple(map(phase, i.body))) if isinstance(i, LayerLoop) else phase(i) for i in p.body)
        return replace(p, body=items) if p.role == role else p

    return replace(plan, programs=tuple(map(program, plan.programs)))


def reordered(plan: Plan) -> Plan:
    """The loader fills the layer's ops the other way round."""
    loader = plan.program("loader")
    items = tuple(replace(i, body=tuple(reversed(i.body))) if isinstance(i, LayerLoop) else i for i in loader.body)
    return replace(plan, programs=tuple(replace(p, body=items) if p is loader else p for p in plan.programs))


def shifted(plan: Plan) -> Plan:
    """The staged results begin inside the row reductions."""
    at = next(a.offset for a in plan.areas if a.name == "scalars")
    return replace(plan, areas=tuple(replace(a, offset=at) if a.name == "staged" else a for a in plan.areas))


def grown(plan: Plan) -> Plan:
    """The ring reaches past the shared memory that the launch asks for."""
    return replace(plan, smem_bytes=plan.smem_bytes - 1)


def beneath(plan: Plan) -> Plan:
    """The activations lie over the ring."""
    ring = next(a.offset for a in plan.areas if a.name == "ring.loader")
    return replace(plan, areas=tuple(replace(a, offset=ring) if a.name == "activations" else a for a in plan.areas))


def gapped(plan: Plan) -> Plan:
    return replace(plan, sites=plan.sites[:-1])


def siteless(plan: Plan) -> Plan:
    """A gate whose wait has lost its site."""
    loader = plan.program("loader")
    span = plan.graph.span
    phase = Phase("o_proj", "", span, (Instr(Verb.WAIT, "pass_gate", "o_proj", span),))
    return replace(plan, programs=tuple(replace(p, body=(*p.body, phase)) if p is loader else p for p in plan.programs))


def huge(plan: Plan) -> Plan:
    """More blocks than the share division is exact for."""
    return replace(plan, schedule=replace(plan.schedule, blocks=2**15))


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda p: without(p, "loader", "load_vector"), "the consumers take"),
        (lambda p: without(p, "consumer", "publish"), "a site is never used"),
        (reordered, "disagree on the order of ops"),
        (shifted, "scalars runs into|staged runs into"),
        (beneath, "activations overlaps ring.loader"),
        (grown, "reaches past"),
        (gapped, "a site is never used or unknown"),
        (siteless, "has no site"),
        (huge, "too large for mk::Divisor"),
    ],
)
def test_verify_plan_refuses(broken: Callable[[Plan], Plan], text: str) -> None:
    plan = model("llama-tiny", blocks=4).plan
    verify_plan(plan)
    with pytest.raises(AssertionError, match=text):
        verify_plan(broken(plan))


def test_the_text_of_a_plan_is_stable_and_says_everything() -> None:
    plan = model("llama-tiny-odd", 3, blocks=2).plan
    text = print_plan(plan)
    assert text == print_plan(model("llama-tiny-odd", 3, blocks=2).plan)
    titles = [line[3:] for line in text.splitlines() if line.startswith("== ")]
    assert titles[0] == "schedule" and titles[-1] == "shape" and any(t.startswith("role consumer: 8 warps from warp 0") for t in titles)
    for name in (*(o.name for o in plan.graph.ops), *(e.name for e in plan.exchanges), *(a.name for a in plan.areas)):
        assert name in text
    assert all(line == line.rstrip() for line in text.splitlines())
