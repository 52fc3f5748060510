"""What the machine has is not overspent: shared memory, warps, registers, barriers, co-resident blocks. And it has all that is used."""

from __future__ import annotations

from megadsl.check.model import Device
from megadsl.check.report import Findings
from megadsl.diagnostics import declare
from megadsl.ir.plan import Plan
from megadsl.ir.schedule import INSTRUCTION
from megadsl.machine import Machine

WARP_THREADS = 32
NAMED_BARRIERS = 2  # 0: the whole block, once; 1: the consumer role
MIN_REGISTERS = 128
MOST_COPY_BYTES = 2**20 - 1  # an mbarrier's transaction count

OVERSPENT = declare("MK550", "the plan needs {need} {what}, {arch} has {have}", "use less of it: {how}")


def needed_features(plan: Plan) -> list[str]:
    """What a machine must have for the kernel to run on it."""
    needed = {
        "bulk_copy": plan.tunables.copies == "bulk",
        "async_copy": plan.tunables.copies == "lanes",
        "setmaxnreg": plan.tunables.consumer_registers > 0,
        "dependent_launch": plan.schedule.scope != "step",
        "cluster": plan.schedule.cluster > 1,
        "st_async": plan.schedule.cluster > 1,
        "l2_bulk_prefetch": any(op.prefetch.l2_bytes and op.prefetch.l2_by == INSTRUCTION for op in plan.schedule.ops),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def check_budgets(device: Device, machine: Machine, findings: Findings) -> list[str]:
    """Compare the plan with the machine that it is made for."""
    plan = device.plan
    warps = sum(p.warps for p in plan.programs)
    registers = machine.registers_per_sm // max(1, warps * WARP_THREADS)
    end = max((a.offset + a.bytes for a in plan.areas), default=0)
    budgets = [
        (
            "bytes of shared memory",
            max(plan.smem_bytes, end),
            machine.smem_for(plan.schedule.resident),
            "fewer or smaller ring stages, or fewer tokens",
        ),
        ("bytes of shared memory that the launch asks for", end, plan.smem_bytes, "areas that end where the launch's bytes end"),
        ("warps", warps, min(machine.max_warps_per_block, plan.tunables.threads // WARP_THREADS), "fewer consumer or loader warps"),
        ("co-resident blocks", plan.schedule.blocks, machine.sms, "at most one block per SM"),
        ("named barriers", NAMED_BARRIERS, machine.named_barriers, "fewer roles that meet"),
        ("registers per thread", MIN_REGISTERS, registers, "fewer warps"),
    ]
    if plan.tunables.copies == "bulk":
        most = max((r.stage_bytes for _, r in plan.schedule.rings), default=0)
        budgets.append(("bytes in one bulk copy", most, MOST_COPY_BYTES, "smaller stages"))
    if (size := plan.schedule.cluster) > 1:
        have = machine.clustered_blocks(size)
        budgets.append((f"co-resident blocks in clusters of {size}", plan.schedule.blocks, have, "fewer blocks"))
    budgets += [(f"feature {name!r}", 1, int(name in machine.features), "compile for this machine") for name in needed_features(plan)]
    for what, need, have, how in budgets:
        if need > have:
            rows = [("plan", [f"{need} {what}"]), (machine.arch, [f"{have}"])]
            findings.add(OVERSPENT, plan.graph.span, rows, what=what, need=need, have=have, arch=machine.arch, how=how)
    return [f"budgets: {plan.smem_bytes} bytes of shared memory, {warps} warps, {plan.schedule.blocks} blocks fit {machine.name}"]
