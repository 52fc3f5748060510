"""What the timeline of a kernel speaks of: its roles, its phases, and who signals whom. The compiler's half, in the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megadsl.check.model import Device, evaluate
from megadsl.ir.plan import Instr, LayerLoop, Phase, Plan
from megadsl.lower.gathers import is_wide
from megadsl.lower.programs import instructions
from megadsl.lower.tiling import PANEL

RECORD_BYTES = 16
FINISHER = "finisher"  # the warp of the consumers that finishes, where one does
MOST_SITES = 1 << 12  # a record has 12 bits for a site

_SIGNALS = {
    "publish": ("value", "round"),
    "argmax": ("value", "round"),
    "attention": ("parts", "parts_round"),
    "matrix": ("parts", "parts_round"),  # where its columns are split
}
_WAITS = {
    "gather": ("value", "round"),
    "attention": ("qkv", "qkv_round"),
    "merge": ("parts", "round"),
    "add_parts": ("parts", "round"),
    "argmax": ("value", "round"),
}  # what the kernel marks as a wait; the gather of a residual's rows is part of the gap before it


def describe(plan: Plan) -> dict[str, Any]:
    """The manifest's ``trace``, all plain data:

    records: room of one role, in records of 16 bytes; bytes: of the whole buffer. roles: {name, kind, stages} in the buffer's
    order; ``stages`` of a loader's ring, 0 for others; a "finisher" comes last.
    phases: {name, op, span, looped, sites, loader} in the order in which the consumers run them; ``sites`` are all roles', ``loader``
    is whose ring the phase takes tiles from, "" for none.
    signals and waits: {value, phase, looped, slope, round}: in layer l a phase publishes, or waits for, round ``round + slope * l``
    of the value, counted from the launch's first. A wait of block b is ``whole`` where it lasts until all of some blocks have published:
    of all, or of those in polled[b % len(polled)]: where the input arrives in registers, so that only the first warp's end is recorded, and
    where a cluster adds an attention's splits.
    """
    assert len(plan.sites) <= MOST_SITES, "a record of the timeline has no room for this site"
    consumer = next(p for p in plan.programs if p.kind == "consumer")
    phases: list[dict[str, Any]] = []
    signals: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    for phase, looped in _phases(consumer.body):
        name = phase.op if all(p["name"] != phase.op for p in phases) else f"{phase.op}.merge"
        phases.append({"name": name, "op": phase.op, "span": phase.span.short, "looped": looped, "sites": _sites(phase), "loader": ""})
        for instr in _every(phase):
            own = name
            if instr.call == "argmax":
                own = f"{name}.argmax"
                phases.append(
                    {"name": own, "op": phase.op, "span": phase.span.short, "looped": looped, "sites": [instr.site], "loader": ""}
                )
            if instr.call in _SIGNALS and instr.args[_SIGNALS[instr.call][0]]:
                signals.append(_end(plan, instr, name, looped, *_SIGNALS[instr.call]))
            if instr.call in _WAITS:
                clustered = instr.call == "merge" and bool(instr.args["cluster"])
                whole = bool(instr.args.get("whole")) or instr.call == "argmax" or clustered
                lanes = whole and instr.args.get("into") == "registers"
                polled = _of_its_cluster(plan, instr) if clustered else _polled(plan, instr) if lanes else []
                waits.append({**_end(plan, instr, own, looped, *_WAITS[instr.call]), "whole": whole, "polled": polled})
    _add_loader_sites(plan, phases)
    rings = dict(plan.schedule.rings)
    roles = [{"name": p.role, "kind": p.kind, "stages": rings[p.role].stages if p.role in rings else 0} for p in plan.programs]
    if plan.tunables.finishes:
        roles.append({"name": FINISHER, "kind": "finisher", "stages": 0})
    return {
        "records": plan.records,
        "bytes": plan.schedule.blocks * len(roles) * (2 + plan.records) * RECORD_BYTES,
        "roles": roles,
        "phases": phases,
        "signals": signals,
        "waits": waits,
    }


def _phases(body: Any) -> Iterator[tuple[Phase, bool]]:
    for item in body:
        looped = isinstance(item, LayerLoop)
        for phase in item.body if isinstance(item, LayerLoop) else (item,):
            yield phase, looped


def _every(phase: Phase) -> Iterator[Instr]:
    return instructions([phase])


def _sites(phase: Phase) -> list[int]:
    """Each once, and only the op's own: the next linear may begin before a merge."""
    own = [i for i in _every(phase) if i.op == phase.op and i.call != "argmax"]
    found = [i.site for i in own if i.site is not None] + [int(str(i.args["gather_site"])) for i in own if "gather_site" in i.args]
    return list(dict.fromkeys(found))


def _add_loader_sites(plan: Plan, phases: list[dict[str, Any]]) -> None:
    """A loader's sites belong to the first phase of the op that they load for."""
    for site in plan.sites:
        if site.kind in ("ring.empty", "gate"):
            phase = next(p for p in phases if p["op"] == site.op)
            phase["sites"].append(site.id)
            phase["loader"] = site.role


def _polled(plan: Plan, instr: Instr) -> list[list[int]]:
    """Blocks that the first warp polls in a gather of a whole value into registers: of the panels of a tile it has every warps-th, from the
    first one on; of more tokens from one on that follows from the block's number (mk::panel_warp)."""
    device = Device(plan)
    m, e, features = device.matrix(instr.op), device.exchanges[str(instr.args["value"])], int(str(instr.args["features"]))
    panels = m.tile_columns // PANEL
    found = []
    for first in range(device.warps if is_wide(device.op(instr.op), plan.schedule, device.tokens) else 1):
        columns = [(piece * panels + panel) * PANEL for piece in range(m.pieces) for panel in range(first, panels, device.warps)]
        found.append(sorted({block for column in columns for block in device.owners(e, column, min(PANEL, features - column))}))
    return found


def _of_its_cluster(plan: Plan, instr: Instr) -> list[list[int]]:
    """Blocks that send a block what it adds of an attention: nobody, to one without a unit."""
    return [list(partners) for partners in Device(plan).partners(instr.op)]


def _end(plan: Plan, instr: Instr, phase: str, looped: bool, value: str, round_: str) -> dict[str, Any]:
    first, second = (evaluate(str(instr.args[round_]), {"epoch": 0, "layers": plan.graph.layers, "layer": layer}) for layer in (0, 1))
    return {"value": str(instr.args[value]), "phase": phase, "looped": looped, "slope": second - first, "round": first}
