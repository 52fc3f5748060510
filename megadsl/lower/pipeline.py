"""Lowering as one straight list of named passes: spec -> graph -> schedule -> plan. Each states what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megadsl.diagnostics import MegadslError, collecting
from megadsl.dsl.apply import apply
from megadsl.dsl.overrides import Overrides, SetCount
from megadsl.ir.graph import Attention, Custom, Graph, Linear, Op, Rope
from megadsl.ir.plan import Exchange, Plan, Program, Record, StageRecord, Tunables
from megadsl.ir.schedule import Schedule
from megadsl.ir.spec import Spec
from megadsl.ir.verify_graph import verify_graph
from megadsl.lower.builder import Builder
from megadsl.lower.cluster import check_clusters
from megadsl.lower.direct import choose_gathers
from megadsl.lower.dry import check_dry_runs
from megadsl.lower.edges import check_edges
from megadsl.lower.exchanges import plan_exchanges
from megadsl.lower.factor import factor
from megadsl.lower.finish import finishers
from megadsl.lower.fuse import fuse
from megadsl.lower.held import hold_tiles
from megadsl.lower.infer import infer
from megadsl.lower.limits import check_arenas, check_graph
from megadsl.lower.memory import Memory, plan_memory
from megadsl.lower.operands import vectors
from megadsl.lower.packing import Packed, natural_bytes, plan_packing
from megadsl.lower.pages import table_bytes, with_pool
from megadsl.lower.programs import build_programs
from megadsl.lower.publish import check_publications
from megadsl.lower.schedule import balance, default_schedule, verify_schedule
from megadsl.lower.scope import choose_launches, no_overlap
from megadsl.lower.shape import arena_bytes, build_shape, rope_tables
from megadsl.lower.threads import choose_finish, choose_registers, threads
from megadsl.lower.tiling import GROUP_ROWS, tiling
from megadsl.lower.timeline import timeline_records
from megadsl.lower.verify_plan import verify_plan
from megadsl.lower.warm import check_warm_up
from megadsl.machine import Machine
from megadsl.types import PerLayer

CONTROL_BYTES = 512
BATCH_BYTES = 1088  # mk::BatchControl, behind it


@dataclass
class Lowering:
    """The state between passes. A pass reads what earlier ones set and sets its own part, once."""

    spec: Spec
    machine: Machine
    blocks: int | None
    max_kv: int
    sequences: int
    page_rows: int
    pool_pages: int
    overrides: Overrides | None
    graph: Graph = field(init=False)
    schedule: Schedule = field(init=False)
    exchanges: tuple[Exchange, ...] = field(init=False)
    exchange_bytes: int = field(init=False)
    exchange_fills: tuple[tuple[int, int, int], ...] = field(init=False)
    packed: Packed = field(init=False)
    memory: Memory = field(init=False)
    programs: tuple[Program, ...] = field(init=False)
    builder: Builder = field(init=False)
    records: int = field(init=False)
    shape: tuple[Record, ...] = field(init=False)
    plan: Plan = field(init=False)


def _fuse(state: Lowering) -> None:
    infer(state.spec)
    state.graph = _rotations(_whole_windows(fuse(state.spec), state.max_kv), state.max_kv)
    verify_graph(state.graph)
    check_graph(state.graph)


def _whole_windows(graph: Graph, max_kv: int) -> Graph:
    """A window that holds all of the cache is none: such a kernel need not look where it begins."""

    def seen(window: int | None) -> int | None:
        return None if window is not None and window >= max_kv else window

    def whole(op: Op) -> Op:
        if not isinstance(op, Attention):
            return op
        if isinstance(op.window, PerLayer):
            return replace(op, window=PerLayer(tuple(seen(w) for w in op.window.values)).alike())
        return replace(op, window=seen(op.window))

    return replace(graph, ops=tuple(whole(op) for op in graph.ops))


def _rotations(graph: Graph, max_kv: int) -> Graph:
    """A rotation that depends on how long a text is, is that of the longest for which the cache has room: cached keys stay as they are."""

    def of(rope: Rope | None) -> Rope | None:
        return None if rope is None else rope.within(max_kv)

    def rotated(op: Op) -> Op:
        if isinstance(op, Linear):
            return replace(op, parts=tuple(replace(part, rope=of(part.rope)) for part in op.parts))
        return replace(op, rope=of(op.rope)) if isinstance(op, Attention) else op

    return replace(graph, ops=tuple(map(rotated, graph.ops)))


def _schedule(state: Lowering) -> None:
    schedule = default_schedule(state.graph, state.machine, blocks=_blocks(state), max_kv=state.max_kv, sequences=state.sequences)
    schedule = replace(schedule, page_rows=state.page_rows, pool_pages=state.pool_pages)
    asked = state.overrides or Overrides(schedule.arch, ())
    with collecting() as found:
        schedule = choose_launches(state.graph, apply(schedule, state.graph, asked, found), asked, found)
        verify_schedule(state.graph, schedule, state.machine, asked, found)
    state.schedule = balance(state.graph, with_pool(schedule))
    state.graph = factor(state.graph, state.schedule)
    state.schedule = choose_finish(state.graph, state.schedule, state.machine)
    state.schedule = choose_registers(state.graph, state.schedule, state.machine)
    check_clusters(state.graph, state.schedule, state.machine, state.overrides)
    state.schedule = choose_gathers(state.graph, state.schedule, state.overrides)
    check_publications(state.graph, state.schedule, state.overrides)
    check_edges(state.graph, state.schedule, state.overrides)
    check_warm_up(state.graph, state.schedule, state.overrides)
    state.schedule = hold_tiles(state.graph, state.schedule, state.machine, state.overrides)
    check_dry_runs(state.graph, state.schedule, state.overrides)
    verify_graph(state.graph)


def _blocks(state: Lowering) -> int | None:
    """Blocks that the user asked for: other defaults (the splits of an attention) follow from them."""
    records = state.overrides.records if state.overrides is not None else ()
    asked = [r.value for r in records if isinstance(r, SetCount) and r.field == "blocks"]
    return asked[-1] if asked else state.blocks


def _exchange(state: Lowering) -> None:
    state.exchanges, state.exchange_bytes, state.exchange_fills = plan_exchanges(state.graph, state.schedule)


def _pack(state: Lowering) -> None:
    state.packed = plan_packing(state.graph)
    check_arenas(state.graph, state.schedule, state.packed.bytes, state.overrides)


def _memory(state: Lowering) -> None:
    try:
        state.memory = plan_memory(state.graph, state.schedule, state.machine, state.exchanges, state.overrides)
    except MegadslError as full:
        if state.schedule.resident == 1:
            raise
        if state.schedule.scope == "layer":
            raise no_overlap(full, state.graph.span, state.overrides) from full
        state.schedule = replace(state.schedule, resident=1)  # launches of so many tokens do not find room beside each other
        state.memory = plan_memory(state.graph, state.schedule, state.machine, state.exchanges, state.overrides)
    state.schedule = replace(state.schedule, rings=state.memory.rings)


def _program(state: Lowering) -> None:
    state.builder = Builder(state.graph, state.schedule, state.exchanges, dict(state.memory.chunks))
    state.programs = build_programs(state.builder)


def _shape(state: Lowering) -> None:
    state.records = timeline_records(state.graph, state.schedule)
    state.shape = build_shape(state.graph, state.schedule, state.exchanges, state.packed, state.memory, state.records)


def _plan(state: Lowering) -> None:
    graph, schedule = state.graph, state.schedule
    attentions = [op for op in graph.ops if isinstance(op, Attention)]
    ropes = [op.rope.head_dim for op in attentions if op.rope is not None]
    block = threads(schedule, state.machine)
    state.plan = Plan(
        graph=graph,
        schedule=schedule,
        tunables=Tunables(
            tokens=graph.tokens,
            batch=schedule.batch,
            consumer_warps=schedule.consumer.warps,
            threads=block.count,
            consumer_registers=block.consumer,
            loader_registers=block.loader,
            head_dim=max((op.head_dim for op in attentions), default=0),
            rope_dim=max(ropes, default=0),
            copies="bulk" if state.machine.bulk else "lanes",
            finishes=finishers(schedule) > 0,
        ),
        programs=state.programs,
        sites=tuple(state.builder.sites),
        records=state.records,
        exchanges=state.exchanges,
        areas=state.memory.areas,
        stages=tuple(_stage_records(graph)),
        packs=tuple(state.packed.records),
        shape=state.shape,
        buffers={
            "control": CONTROL_BYTES + (BATCH_BYTES if schedule.sequences > 1 else 0),
            "weights": state.packed.bytes,
            "kv": arena_bytes(graph, schedule),
            "exchange": state.exchange_bytes,
            "logits": graph.tokens * graph.vocab * 4,
            "rope": rope_tables(graph) * schedule.max_kv * max(ropes, default=0) // 2 * 8,
            "pages": table_bytes(schedule),
        },
        smem_bytes=state.memory.bytes,
    )
    verify_plan(state.plan)


def _stage_records(graph: Graph) -> list[StageRecord]:
    found = []
    for op in graph.ops:
        if isinstance(op, Linear):
            tiles = tiling(op)
            found.append(StageRecord(op.name, tiles.tile_bytes, f"bf16 tile {GROUP_ROWS}x{tiles.tile_columns}"))
            found.extend(StageRecord(f"{op.name}.{arg}", 2 * op.columns, "bf16 vector") for arg, _ in vectors(op))
        elif isinstance(op, Attention):
            found.append(StageRecord(op.name, 64 * op.cache_dim, "bf16 KV rows, 16 to a chunk"))
        elif isinstance(op, Custom):
            found.extend(StageRecord(f"{op.name}.{arg}", natural_bytes(ref), "bf16 weight as it is") for arg, ref in op.weights)
    return found


@dataclass(frozen=True)
class Pass:
    """One step: its name, what holds after it, and why it stands where it does."""

    name: str
    contract: str
    run: Callable[[Lowering], None]


PASSES: tuple[Pass, ...] = (
    Pass("fuse", "every node is in exactly one fused op; only values cross ops (first: all else speaks of ops)", _fuse),
    Pass(
        "schedule", "every op and edge has a record the machine can run, prologues are factored (before all that depends on it)", _schedule
    ),
    Pass("exchange", "every value has buffers, slots and an owner for each feature (needs the split)", _exchange),
    Pass("pack", "every weight has one place in the arena (independent of the schedule)", _pack),
    Pass("memory", "no two live areas of shared memory overlap and the rings fit (needs the shares' sizes)", _memory),
    Pass("program", "every role has its program; every wait and signal has a site (needs rings and exchanges)", _program),
    Pass("shape", "every offset and size is data, in the headers' field order (needs all offsets)", _shape),
    Pass("plan", "one frozen plan that verify_plan accepts", _plan),
)


def lower(
    spec: Spec,
    machine: Machine,
    *,
    blocks: int | None = None,
    max_kv: int = 2048,
    sequences: int = 1,
    page_rows: int = 0,
    pool_pages: int = 0,
    overrides: Overrides | None = None,
    between: Callable[[str, Lowering], None] | None = None,
) -> Lowering:
    """Run all passes. ``between(pass name, state)`` is called after each: print, check or time there."""
    state = Lowering(spec, machine, blocks, max_kv, sequences, page_rows, pool_pages, overrides)
    for step in PASSES:
        step.run(state)
        if between is not None:
            between(step.name, state)
    return state
