"""The whole compiler as a short list of steps: load the model, trace, lower, check, print. Building is build/'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megadsl.build.artifacts import write_artifacts as _write
from megadsl.build.proofs import prove
from megadsl.check.report import Report
from megadsl.diagnostics import MegadslError
from megadsl.dsl.checkpoints import is_checkpoint, load_checkpoint
from megadsl.dsl.chosen import Asked, Chosen, choose
from megadsl.dsl.formats import Formats, with_formats
from megadsl.dsl.kernel import Kernel, require_kernel
from megadsl.dsl.overrides import Overrides, in_scope
from megadsl.dsl.registry import load
from megadsl.dsl.schedule import require_counts
from megadsl.emit import emit
from megadsl.entries import SmallEntries
from megadsl.ir.graph import Attention, Graph
from megadsl.ir.plan import Plan
from megadsl.ir.plan_text import print_plan
from megadsl.ir.schedule import Schedule
from megadsl.ir.spec import Spec
from megadsl.lower.launches import entries, sequence
from megadsl.lower.pipeline import Lowering, lower
from megadsl.lower.shape import kv_strides
from megadsl.lower.steps import feeds_itself
from megadsl.lower.warm import code_word
from megadsl.machine import DEFAULT_ARCH, Machine, machine
from megadsl.ops.cost import floor_seconds, kv_bytes_per_token, total_cost
from megadsl.trace.layout import describe

DEFAULT_MAX_KV = 2048
_TEMPLATES = SmallEntries(".template")


@dataclass(frozen=True)
class Compiled:
    """Every stage of one compilation; ``manifest`` is what the runtime needs beside the code, ``overrides`` what was decided beside
    the compiler's own choices."""

    spec: Spec
    graph: Graph
    schedule: Schedule
    plan: Plan
    source: str
    plan_text: str
    manifest: dict[str, Any]
    overrides: Overrides
    report: Report | None = None  # of the plan checker; none where it was skipped


def compile_model(
    model: str | Kernel,
    *,
    config: Path | Mapping[str, Any] | None = None,
    arch: str = DEFAULT_ARCH,
    tokens: int = 1,
    max_kv: int | None = None,
    sequences: int = 1,
    kv_page: int = 0,
    kv_pages: int = 0,
    blocks: int | None = None,
    on: Machine | None = None,
    between: Callable[[str, Lowering], None] | None = None,
    check: bool = True,
    scope: str | None = None,
    schedule: Asked = None,
    formats: Formats = None,
) -> Compiled:
    """Compile a registered model, ``file.py[:function]``, the directory of a Hugging Face checkpoint, or a Kernel object down to
    CUDA text.

    tokens: most new tokens per launch, 1 to 16. max_kv: rows each KV cache holds. sequences: independent ones (1 to 8), each
    with KV caches of its own, that a launch's new tokens may belong to; a batch. kv_page: 16, 32 or 64, and cached rows lie in pages of so
    many, kv_pages of them for all sequences (default: enough for all rows of all); 0, and the rows of a sequence follow each other.
    blocks: persistent blocks (default: at most one per SM, as few as cost nothing). on: a machine other than the arch's table entry (the
    emulator's small ones).
    check: prove the plan's synchronisation, unless this very plan was proved before, and raise what does not hold. scope: what one
    launch runs, in place of what the schedule says: "step", "layer" or "op"; decisions that such launches cannot follow, and results do
    not depend on, do not count then. schedule: a schedule file or its path, Overrides, or a word: "default", the stored schedule for
    this registered model, arch, tokens and sequences if there is one and neither config nor blocks nor on nor formats is given, else
    the spec's own; "model", the spec's own; "none". formats: of the linears' weights, over what the spec says: "nvfp4, lm_head=fp8"
    (megadsl/dsl/formats.py). Raises MegadslError.
    """
    require_counts(max_kv=max_kv, blocks=blocks)
    name, kernel, values, rows = load_model(model, config, max_kv)
    spec = with_formats(kernel.trace(values, tokens=tokens), formats)
    target = on or machine(arch)
    named = name if isinstance(model, str) else None
    as_measured = named == model and config is None and blocks is None and on is None and not formats
    chosen = choose(schedule, named, kernel, target.arch, tokens, sequences, as_measured=as_measured)
    overrides = chosen.overrides
    if scope is not None:
        overrides = in_scope(overrides, scope, kernel.span)
    size: dict[str, Any] = {"max_kv": rows, "sequences": sequences, "page_rows": kv_page, "pool_pages": kv_pages}
    state = lower(spec, target, blocks=blocks, overrides=overrides, between=between, **size)
    report = prove(state.plan, target) if check else None
    if report is not None and report.findings:
        raise MegadslError(list(report.findings))
    manifest = _manifest(name, state, target, chosen, report is not None)
    source, text = emit(state.plan, _TEMPLATES), print_plan(state.plan)
    return Compiled(spec, state.graph, state.schedule, state.plan, source, text, manifest, overrides, report)


def load_model(model: str | Kernel, config: Path | Mapping[str, Any] | None, max_kv: int | None) -> tuple[str, Kernel, dict[str, Any], int]:
    """Name, kernel, configuration and rows of the KV cache of what :func:`compile_model` takes as a model."""
    rows = DEFAULT_MAX_KV if max_kv is None else max_kv
    if not isinstance(model, str):
        require_kernel(model)
        return model.name, model, dict(config) if isinstance(config, Mapping) else {}, rows
    file = config if isinstance(config, Path) else None
    if not is_checkpoint(model):
        return (model, *load(model, file), rows)
    kernel, values, longest = load_checkpoint(Path(model), file)
    if max_kv is None and longest is not None:
        rows = min(rows, longest)
    return Path(model).resolve().name, kernel, values, rows


def _manifest(model: str, state: Lowering, target: Machine, chosen: Chosen, checked: bool) -> dict[str, Any]:
    plan, graph = state.plan, state.graph
    cost = total_cost(graph, graph.tokens, 0)
    attention = next((op for op in graph.ops if isinstance(op, Attention)), None)
    return {
        "model": model,
        "arch": target.arch,
        "proof": target.proof,
        "schedule": chosen.fields(),
        "checked": checked,
        "tokens": graph.tokens,
        "blocks": state.schedule.blocks,
        "threads": plan.tunables.threads,
        "cluster": state.schedule.cluster,
        "entries": entries(plan),
        "launches": sequence(plan),
        "several_steps": feeds_itself(graph, state.schedule),
        "smem_bytes": plan.smem_bytes,
        "layers": graph.layers,
        "vocab": graph.vocab,
        "max_kv": state.schedule.max_kv,
        "sequences": state.schedule.sequences,
        "kv_page": state.schedule.page_rows,
        "kv_pages": state.schedule.pool_pages,
        "weight_bytes": cost.weight_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(graph),
        "floor_us": round(floor_seconds(graph, target, 0) * 1e6, 3),
        "buffers": dict(plan.buffers),
        "exchange_fill": [list(fill) for fill in state.exchange_fills],
        "rope": None if attention is None or attention.rope is None else asdict(attention.rope),
        "kv": None if attention is None else _kv(attention, state.schedule),
        "trace": describe(plan),
        "sites": [{"id": s.id, "role": s.role, "op": s.op, "kind": s.kind, "span": s.span.short, "expects": s.expects} for s in plan.sites],
        "pack": [asdict(r) for r in plan.packs],
        "random": {t.name: t.random for t in state.spec.tensors.values() if t.random is not None},
        "code_word": code_word(plan.shape),
        "shape": [word for record in plan.shape for word in record.words],
    }


def _kv(op: Attention, schedule: Schedule) -> dict[str, int]:
    head, layer = kv_strides(op, schedule)
    return {"kv_heads": op.kv_heads, "head_dim": op.head_dim, "layer_stride": layer, "head_stride": head, "chunk_rows": 16}


def write_artifacts(compiled: Compiled, out: Path) -> dict[str, Any]:
    """Build the cubin and write kernel.cu, kernel.cubin, plan.txt, report.txt and manifest.json into ``out``, all or nothing."""
    return _write(compiled.source, compiled.plan_text, compiled.manifest, compiled.schedule.arch, out)
