"""Leaves out barriers that nothing needs.

Whether a block must meet behind a publication depends on what its warps do next: where the next op meets before it writes what may
still be read, one barrier does for both. Lowering lists a barrier wherever one could be needed, and what the proofs do without is
taken out of the plan here, before the kernel is written.
"""

from __future__ import annotations

from dataclasses import replace

from megadsl.check.clocks import check_exchanges
from megadsl.check.edits import edited
from megadsl.check.memory import check_memory
from megadsl.check.model import Device
from megadsl.check.report import Findings
from megadsl.ir.plan import Instr, Plan
from megadsl.lower.programs import instructions

OPTIONAL = {"publish": "done", "attention": "idle"}  # call: the barrier that its header has only where the plan names it


def without_needless_barriers(plan: Plan) -> Plan:
    """``plan`` without those barriers of OPTIONAL that its proofs do without, taken out one after the other in the order of the
    program; as it is where its shared memory or exchanges are not in order anyway."""
    lean = plan
    for call, op in dict.fromkeys((i.call, i.op) for p in plan.programs for i in instructions(p.body) if OPTIONAL.get(i.call) in i.syncs):
        trial = _without(lean, call, op)
        if not _memory_findings(trial):
            lean = trial
    return plan if lean is plan or _exchange_findings(lean) else lean


def _without(plan: Plan, call: str, op: str) -> Plan:
    def edit(i: Instr) -> Instr:
        return replace(i, syncs=tuple(s for s in i.syncs if s != OPTIONAL[call])) if (i.call, i.op) == (call, op) else i

    return edited(plan, edit)


def _memory_findings(plan: Plan) -> bool:
    findings = Findings()
    check_memory(Device(plan), findings)
    return bool(findings.found)


def _exchange_findings(plan: Plan) -> bool:
    findings = Findings()
    check_exchanges(Device(plan), findings)
    return bool(findings.found)
