"""Renders kernel.cu from a plan. Templates decide which calls and in which order; arithmetic is in the headers."""

from __future__ import annotations

import marshal
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar, Protocol

import jinja2
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket, BytecodeCache

from megadsl.expr import decimal, to_cuda, to_text
from megadsl.ir.custom import Param
from megadsl.ir.expr import Expr, Reduce, arg_names, reductions
from megadsl.ir.formats import FORMATS
from megadsl.ir.graph import Attention, Custom, Embed, Fused, Linear, Op, RowMap, ValueRef, kept_values
from megadsl.ir.plan import Instr, Item, LayerLoop, Phase, Plan, Verb, ident
from megadsl.lower.dry import dry_stages
from megadsl.lower.exchanges import is_local, merges_in_cluster
from megadsl.lower.finish import side
from megadsl.lower.gathers import tiles_together
from megadsl.lower.heads import few_rows
from megadsl.lower.launches import launches
from megadsl.lower.memory import chunk_pieces, column_chunks, pass_groups
from megadsl.lower.operands import head_vectors, prologue_values, vectors
from megadsl.lower.packing import bias_name, head_vector_name, scale_name, vector_name
from megadsl.lower.programs import instructions
from megadsl.lower.scratch import SLOTS, loads_l2, scratch_member, slot_bytes
from megadsl.lower.shape import LOG2_E, ROPE_TABLES, WINDOWS, begin_name, input_name, rope_tables, windowed
from megadsl.lower.steps import READABLE, feeds_itself
from megadsl.lower.tiling import GROUP_ROWS, PANEL, tiling
from megadsl.lower.windows import begins_late, meeting_member, own_windows
from megadsl.resources import templates


@dataclass(frozen=True)
class Operand:
    """An argument of a prologue expression as the emitted code sees it."""

    register: str
    buffer: str
    is_vector: bool


class Kept(Protocol):
    """Where translations of templates outlive the process, by what they depend on."""

    def load(self, key_parts: Sequence[str | bytes]) -> bytes | None: ...

    def store(self, key_parts: Sequence[str | bytes], content: bytes) -> None: ...


class _Translated(BytecodeCache):
    """Templates as Python code, by their contents, for all kernels: to translate them takes as long as to check a plan."""

    codes: ClassVar[dict[tuple[str, str], CodeType]] = {}  # of this process

    def __init__(self, kept: Kept | None) -> None:
        self._kept = kept

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self.codes.get((bucket.key, bucket.checksum))
        if bucket.code is None and self._kept is not None and (found := self._kept.load(self._key(bucket))) is not None:
            self.codes[bucket.key, bucket.checksum] = bucket.code = marshal.loads(found)

    def dump_bytecode(self, bucket: Bucket) -> None:
        assert bucket.code is not None
        self.codes[bucket.key, bucket.checksum] = bucket.code
        if self._kept is not None:
            self._kept.store(self._key(bucket), marshal.dumps(bucket.code))

    @staticmethod
    def _key(bucket: Bucket) -> tuple[str, ...]:
        return bucket.key, bucket.checksum, jinja2.__version__, sys.version


_HERE = "#line @"  # becomes the number of the line behind it: what follows a user's header is kernel.cu again
_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)
_COPIES = {"bulk": "BulkCopies", "lanes": "LaneCopies"}  # copies.h


def emit(plan: Plan, kept: Kept | None = None) -> str:
    """The text of kernel.cu: compiles with nvcc for the GPU and with a C++17 compiler for the emulator. ``kept``: has templates that
    were translated before, and takes those that had to be."""
    environment = Environment(
        loader=FileSystemLoader(templates()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_Translated(kept),
    )
    environment.globals.update(_helpers(plan))
    text = environment.get_template("kernel.cu.j2").render()
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(f'#line {i + 1} "kernel.cu"' if line == _HERE else line for i, line in enumerate(lines, 1)) + "\n"


def _polled(plan: Plan, value: str, wire: str) -> str:
    """How an exchange's vectors are polled."""
    own = _wire(plan, value, wire)
    back_off = next((edge.back_off for edge in plan.schedule.edges if edge.value == value), 0)
    return f"mk::BackOff<{own}, {back_off}>" if back_off else own


def _wire(plan: Plan, value: str, wire: str) -> str:
    """How an exchange's vectors travel."""
    exchange = plan.exchange(value)
    if wire != "Sentinel" or not exchange.dense:
        return f"mk::{wire}"
    return f"mk::Words<mk::Dense<mk::{wire}>>" if exchange.words else f"mk::Dense<mk::{wire}>"


def _published(plan: Plan, instr: Instr) -> str:
    """How a publication's vectors are written."""
    wire = _wire(plan, str(instr.args["value"]), str(instr.args["wire"]))
    return f"mk::Converted<{wire}>" if instr.args["wire"] == "Sentinel" and not instr.args["raw"] else wire


def _wires(plan: Plan) -> dict[str, Any]:
    return {"wire": lambda value, wire: _polled(plan, value, wire), "published": lambda instr: _published(plan, instr)}


def _tiles_more(plan: Plan, op: Linear) -> str:
    """What mk::Tiles takes behind the parts of the columns, as far as it is not what it takes anyway."""
    chunks = column_chunks(op, plan.graph, plan.schedule)
    pairs = [
        (str(chunks), "1"),
        (str(pass_groups(op, plan.graph, plan.schedule)) if chunks > 1 else "~0u", "~0u"),
        (str(tiles_together(op, plan.schedule, plan.graph.tokens)), "1"),
        (f"mk::{FORMATS[op.format].device}", "mk::Bf16Weights"),
        (str(dry_stages(op, plan.graph, plan.schedule)), "0"),
    ]
    said = max((i + 1 for i, (value, default) in enumerate(pairs) if value != default), default=0)
    return "".join(f", {value}" for value, _ in pairs[:said])


def _helpers(plan: Plan) -> dict[str, Any]:
    linears = [op for op in plan.graph.ops if isinstance(op, Linear)]
    return {
        "plan": plan,
        "sequences": plan.schedule.sequences,
        **_pages(plan.schedule.page_rows),
        "rings": plan.schedule.rings,
        "attentions": [op for op in plan.graph.ops if isinstance(op, Attention)],
        "linears": linears,
        "tiles_type": lambda op: f"{_camel(op)}Tiles",
        "tiling": tiling,
        "panel": PANEL,
        "chunk": lambda op: chunk_pieces(op, plan.graph, plan.schedule),
        "chunks": lambda op: column_chunks(op, plan.graph, plan.schedule),
        "tiles_more": lambda op: _tiles_more(plan, op),
        "ways": lambda op: plan.schedule.op(op.name).ways,
        **_wires(plan),
        **_steps(plan),
        **_attentions(plan),
        **_customs(plan),
        **_row_maps(plan),
        **_expressions(),
        "has_argmax": any(op.sink == "argmax" for op in linears),
        "two_operands": any(len(prologue_values(op)) > 1 for op in linears),
        "ident": ident,
        "side": side,
        "begin_name": begin_name,
        "ring_name": lambda role: f"ring_{ident(role)}",
        "ring_type": lambda role: f"{_camel(role)}Ring",
        "copies_type": _COPIES[plan.tunables.copies],
        "one_lane": " && mk::ptx::lane_id() == 0" if plan.tunables.copies == "bulk" else "",
        **_scratches(plan),
        **_windows(plan),
        "reader_name": lambda role: f"read_{ident(role)}",
        "role_function": lambda role: f"role_{ident(role)}",
        "embed_cuda": lambda op: _embed_cuda(plan.graph.op(op)),
        "reductions": reductions,
        "dict": dict,
        "poll_type": _poll_type,
        "hints": lambda program: _hints(program.body),
        "launches": launches(plan),
        "part_hints": lambda parts: _hints(tuple(part.phase for part in parts)),
        "op_index": [op.name for op in plan.graph.ops].index,
        "kept_values": kept_values,
        "is_local": lambda op, ref: is_local(op, ref, plan.graph, plan.schedule),
        "rotates": lambda phase: any(_turns(plan, i) for i in phase.body),
        "row_op": lambda reduce: "mk::RowOp::kMax" if reduce.op == "max" else "mk::RowOp::kSum",
        "unknown_instruction": _unknown,
    }


def _scratches(plan: Plan) -> dict[str, Any]:
    """Where loaders bring something into L2 by loads."""
    types = {role: f"mk::Scratch<{SLOTS}, {slot_bytes(ring)}>" for role, ring in plan.schedule.rings if loads_l2(plan.schedule, role)}
    return {"scratch": lambda role: types.get(role, ""), "scratch_member": scratch_member}


def _windows(plan: Plan) -> dict[str, Any]:
    """Where ops have windows of their own: what is told of whom."""
    own = own_windows(plan.schedule)
    first: dict[str, str] = {}  # title of an op's first phase in the consumers' program
    consumer = next(p for p in plan.programs if p.kind == "consumer")
    for phase in (phase for item in consumer.body for phase in (item.body if isinstance(item, LayerLoop) else (item,))):
        first.setdefault(phase.op, phase.title)

    def told_late(phase: Phase) -> str:
        before = begins_late(plan.graph, plan.graph.op(phase.op)) if own and first[phase.op] == phase.title else None
        return before.name if before is not None else ""

    first_of_loop = {item.body[0].op for item in consumer.body if isinstance(item, LayerLoop)}
    begins_loop = lambda phase: phase.op in first_of_loop  # noqa: E731
    return {"own_windows": own, "meeting_member": meeting_member, "told_late": told_late, "begins_loop": begins_loop}


def _expressions() -> dict[str, Any]:
    """How expressions are printed, and what they read."""
    return {
        "operands": _operands,
        "operand": lambda op, arg: _operand(op, arg).buffer,
        "expr_text": to_text,
        "expr_cuda": _prologue_cuda,
        "epilogue_cuda": _epilogue_cuda,
        "bias_name": bias_name,
        "scale_name": scale_name,
        "row_scaled": lambda op: FORMATS[op.format].row_scale,
        "earlier": lambda op, index: reductions(op.prologue.expr)[:index],
        "vectors": vectors,
        "gathered": lambda op: prologue_values(op)[0][0],
        "ragged": lambda op: "true" if op.columns % GROUP_ROWS else "false",
        "full": lambda op: _bool(op.columns == tiling(op).columns_padded),
        "scale_reductions": lambda op: reductions(op.factored.scale),
        "terms_cuda": lambda op, expr: to_cuda(expr, {name: f"{ident(name)}_" for name, _ in prologue_values(op)}, {}),
        "scale_cuda": _scale_cuda,
        "operand_cuda": _operand_cuda,
    }


def _attentions(plan: Plan) -> dict[str, Any]:
    """How attentions are called."""
    by_layer = windowed(plan.graph)
    rows = {op.name: index for index, op in enumerate(by_layer)}
    return {
        "tiling_type": lambda op: f"{_camel(op)}Tiling",
        "score_type": lambda op: f"{_camel(op)}Score",
        "capped_log2": lambda op: f"{decimal(op.softcap * LOG2_E)}f",
        "windows": any(isinstance(op, Attention) and op.window for op in plan.graph.ops),
        "reads_ahead": any(_reads_ahead(program.body) for program in plan.programs),
        "window": lambda op: f"mk::kOfLayer | {by_layer.index(op)}" if op in by_layer else op.window or 0,
        "layer_window": lambda name: f"u32(s.{WINDOWS}.at[{rows[name]}][layer])" if name in rows else "",
        "layer_windows": WINDOWS if rows else "",
        "tables": rope_tables(plan.graph),
        "angles": "angles" if rope_tables(plan.graph) == 1 else "layer_angles",
        "turns": lambda body: any(_turns(plan, instr) for instr in body),
        "rope_tables": ROPE_TABLES,
        "few_rows": lambda op: few_rows(op, plan.tunables.tokens),
        "clustered": [op for op in plan.graph.ops if isinstance(op, Attention) and merges_in_cluster(op, plan.schedule)],
        "head_vectors": head_vectors,
        "head_vector_name": head_vector_name,
        "head_value": _head_value,
        "head_cuda": _head_cuda,
        "paired": lambda op: op.rope.paired if op.rope is not None else 0,
    }


def _customs(plan: Plan) -> dict[str, Any]:
    """How custom ops are called, and the headers that they bring, each once."""
    customs = [op for op in plan.graph.ops if isinstance(op, Custom)]
    return {
        "customs": customs,
        "headers": list(dict.fromkeys(op.call.header for op in customs)),
        "header_text": lambda header: _PRAGMA.sub("", header.text).rstrip(),
        "here": _HERE.removeprefix("#line "),
        "call_type": lambda op: f"{_camel(op.name)}Call",
        "param_type": lambda value: "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else "mk::i32",
        "param_text": _param_text,
        "operand_name": lambda instr: f"in_{ident(instr.args['arg'])}",
        "input_name": input_name,
    }


def _param_text(value: Param) -> str:
    if isinstance(value, bool):
        return _bool(value)
    return f"{decimal(value)}f" if isinstance(value, float) else str(value)


def _pages(rows: int) -> dict[str, Any]:
    """Where cached rows lie: in pages of so many, or, for 0, in stretches."""
    kind = f"mk::Pages<{rows}>"
    return {
        "page_rows": rows,
        "rows_type": kind,
        "cached_rows": f"{kind}(buffers, s.pages)",
        "buffers_type": "PagedBuffers" if rows else "Buffers",
    }


def _row_maps(plan: Plan) -> dict[str, Any]:
    """What maps of rows are printed with."""
    return {
        "vector_name": vector_name,
        "maps_rows": lambda op: isinstance(plan.graph.op(op), RowMap),
        "poll_in_order": lambda instr: _poll_type(instr, in_order=True),
        "row_terms": lambda op, expr: to_cuda(expr, {name: f"{ident(name)}_" for name, _ in op.fused.args}, {}),
        "row_cuda": _row_cuda,
    }


def _turns(plan: Plan, instr: Instr) -> bool:
    """Whether an instruction rotates queries and keys."""
    op = plan.graph.op(instr.op)
    late = isinstance(op, Attention) and bool(op.maps) and op.rope is not None
    return (instr.call == "attention" and late) or instr.args.get("rope") is not None


def _steps(plan: Plan) -> dict[str, Any]:
    """What a loop over the steps of a launch needs."""
    gated = any(i.call == "open_gate" for p in plan.programs for i in instructions(p.body))
    return {"several_steps": feeds_itself(plan.graph, plan.schedule), "readable": READABLE, "gates": gated}


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in ident(name).split("_"))


def _poll_type(instr: Instr, *, in_order: bool = False) -> str:
    """How a gather polls; ``in_order``: each block takes a thread's units in the order of their numbers."""
    args = instr.args
    if args["dense"]:
        return f"mk::DensePoll<{args['units']}, {_bool(args['even'])}{', false' if in_order else ''}>"
    return f"mk::Poll<{args['units']}, {args['extras']}, {_bool(args.get('whole', False))}>"


def _bool(value: object) -> str:
    return "true" if value else "false"


def _unknown(instr: Instr) -> str:
    raise AssertionError(f"no template prints the instruction {instr.call!r} of {instr.op!r}")


def _hints(items: tuple[Item, ...]) -> list[str]:
    found = {str(i.args["hint"]) for i in instructions(items) if "hint" in i.args}
    return sorted(found)


def _reads_ahead(items: tuple[Item, ...]) -> bool:
    """Whether something is prefetched that needs more of the tape than runs of this layer's weights."""
    return any(i.verb is Verb.PREFETCH and "ahead" in i.args for i in instructions(items))


def _operand(op: Linear, arg: str) -> Operand:
    values = [name for name, _ in prologue_values(op)]
    if arg in values:
        return Operand(f"{ident(arg)}_", ("activations", "second")[values.index(arg)], False)
    return Operand(f"{ident(arg)}_", f"vector_{ident(arg)}", True)


def _operands(op: Linear, expr: Expr) -> list[Operand]:
    return [_operand(op, arg) for arg in arg_names(expr)]


def _prologue_cuda(op: Linear, expr: Expr) -> str:
    names = {name: f"{_operand(op, name).register}[j]" for name, _ in op.prologue.args}
    reduced: dict[Reduce, str] = {r: f"r{i}" for i, r in enumerate(reductions(op.prologue.expr))}
    return to_cuda(expr, names, reduced)


def _scale_cuda(op: Linear) -> str:
    assert op.factored is not None
    return to_cuda(op.factored.scale, {}, {r: f"r{i}" for i, r in enumerate(reductions(op.factored.scale))})


def _operand_cuda(op: Linear) -> str:
    assert op.factored is not None
    names = [name for name, _ in (*prologue_values(op), *vectors(op))]
    return to_cuda(op.factored.operand, {name: f"a[{i}]" for i, name in enumerate(names)}, {})


def _head_value(fused: Fused) -> str:
    return next(name for name, ref in fused.args if isinstance(ref, ValueRef))


def _head_cuda(fused: Fused, expr: Expr) -> str:
    return to_cuda(expr, {name: f"{ident(name)}_[j]" for name, _ in fused.args}, {r: f"r{i}" for i, r in enumerate(reductions(fused.expr))})


def _row_cuda(op: RowMap) -> str:
    """The map of one feature: ``half`` takes it from a word of two."""
    names = {name: f"half(values{i})" for i, (name, _) in enumerate(kept_values(op))}
    names |= {name: f"half(weights{i})" for i, (name, _) in enumerate(vectors(op))}
    return to_cuda(op.fused.expr, names, {r: f"r{i}" for i, r in enumerate(op.reductions)})


def _embed_cuda(op: Op) -> str:
    """What becomes of an element's bits, empty where the table has it already."""
    return to_cuda(op.expr, {"x": "mk::ptx::from_bf16(bits)"}, {}) if isinstance(op, Embed) and op.expr is not None else ""


def _epilogue_cuda(op: Linear, products: list[str], suffix: str) -> str:
    assert op.epilogue is not None
    product = dict(zip((p.name for p in op.parts), products, strict=True))
    names = {name: product[ref.value] for name, ref in op.epilogue.args if isinstance(ref, ValueRef) and ref.value in product}
    names.update({name: f"value{i}{suffix}" for i, (name, _) in enumerate(kept_values(op))})
    return to_cuda(op.epilogue.expr, names, {})
