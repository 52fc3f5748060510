"""What orders a cached row and its copies in a later step of the same launch, apart from the way that steps.h provides.

That way is: the appending block's release_rows, its winner, the copying block's acquire_rows, the word that its loader waits for. In some
kernels a part of it has nothing left to order. The functions here work out from the plan whether a kernel is one of them.
"""

from __future__ import annotations

from itertools import product

from megadsl.check.model import Device, attention_unit
from megadsl.check.ring import ROWS, Block, Fill, Gate
from megadsl.ir.plan import Plan, Program
from megadsl.lower.programs import instructions
from megadsl.lower.shape import CHUNK_ROWS

STEPS = 2


def copies_wait_for_stages(plan: Plan, *, of_the_head: bool) -> bool:
    """Whether each copy of cached rows fills a stage that the consumers let go of behind acquire_rows of the same step, for the ring has no
    more stages than what a step streams before its first cached row; ``of_the_head``: behind release_rows of the step before, which
    comes behind that step's acquire_rows, counting what is streamed from there on."""
    device = Device(plan)
    if not device.several or any(i.call == "pass_gate" for p in plan.programs for i in instructions(p.body)):
        return False
    last = next(i.op for i in instructions(device.consumer.body) if i.call == "release_rows")
    rings = dict(plan.schedule.rings)
    copying = [p for p in plan.programs if p.kind == "loader" and any(i.call == "load_cache" for i in instructions(p.body))]
    units = max(device.heads(op.name).units for op in device.ops[1])
    return all(
        _streamed(Block(device, block, CHUNK_ROWS + 1, turns=STEPS), program, last if of_the_head else "") >= rings[program.role].stages
        for program in copying
        for block in range(min(device.blocks, units))
    )


def _streamed(block: Block, program: Program, head: str) -> int:
    """Stages that a loader fills in the second step before its first cached row, and for ``head`` in the step before."""
    count = 0
    for action in block.loader(program, 1):
        if isinstance(action, Fill) and (action.step.turn == 1 or action.step.instr.op == head):
            count += action.count
        if isinstance(action, Gate) and action.op == ROWS and action.step.turn == 1:
            return count
    return 0


def copied_elsewhere_at_once(plan: Plan) -> bool:
    """Whether, for some length of the cache and some number of new tokens, a block copies rows that another has appended in the step
    just before."""
    device = Device(plan)
    for op in device.ops[1]:
        heads, tokens = device.heads(op.name), device.tokens
        room = range(plan.schedule.max_kv - tokens)
        for kv_len, new, window in product(room, range(1, tokens + 1), dict.fromkeys(heads.windows)):
            fresh = {row // CHUNK_ROWS for row in range(kv_len, kv_len + new)}
            for unit in range(heads.units):
                head, begin, end, _ = attention_unit(heads.splits, unit, kv_len + new, window)
                appender = head * heads.splits + heads.splits - 1
                if unit % device.blocks != appender % device.blocks and fresh & set(range(begin, end)):
                    return True
    return False
