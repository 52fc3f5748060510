"""The plan checker: every proof over one plan, and one report."""

from __future__ import annotations

import time

from megadsl.check.budgets import check_budgets
from megadsl.check.clocks import check_exchanges
from megadsl.check.clusters import check_clusters
from megadsl.check.code import check_code
from megadsl.check.launches import check_launches
from megadsl.check.memory import check_memory
from megadsl.check.model import Device
from megadsl.check.pages import check_pages
from megadsl.check.report import Findings, Report
from megadsl.check.ring import check_rings
from megadsl.check.ring_sizes import check_scratches
from megadsl.check.shares import check_shares
from megadsl.check.steps import check_steps
from megadsl.check.wires import check_wires
from megadsl.ir.plan import Plan
from megadsl.machine import Machine, machine


def check_plan(plan: Plan, on: Machine | None = None) -> Report:
    """Prove the synchronisation of ``plan``, for ``on`` (default: the machine its schedule names). Codes MK500 to MK561.

    Findings are complete per kind and op: the first counterexample of each. Never raises for what a plan does wrong.
    """
    begin = time.perf_counter()
    device, findings = Device(plan), Findings()
    proved = [*check_shares(device, findings), *check_pages(device, findings)]
    proved += [*check_clusters(device, findings), *check_wires(device, findings)]
    # The rest plays the programs, which makes sense only for blocks that agree on who owns what and how it travels.
    if not findings.found:
        proved += [*check_exchanges(device, findings), *check_memory(device, findings), *check_steps(device, findings)]
        proved += check_rings(device, findings) if plan.schedule.scope == "step" else check_launches(device, findings)
    proved += [*check_scratches(device, findings), *check_code(device, findings)]
    proved += check_budgets(device, on or machine(plan.schedule.arch), findings)
    lines = () if findings.found else tuple(proved)
    return Report(tuple(findings.found), time.perf_counter() - begin, lines)
