"""The kernel's code, read ahead: the blocks that share it out leave no line of it to nobody.

Lines are dealt out by mk::warm_code (templates/include/megadsl/code.h), whose twin this is. Nothing waits for them, so that nothing else
is to prove: no instruction of a role writes code.
"""

from __future__ import annotations

from megadsl.check.model import Device
from megadsl.check.report import Findings
from megadsl.diagnostics import declare
from megadsl.lower.warm import CODE

UNREAD = declare(
    "MK551",
    "{role!r} reads the code ahead, in the blocks {blocks} of {grid}: line {line} is read by {readers} of them, not by {wanted}",
    "let as many blocks read it as share it out",
)
LANES, LINE = 32, 128
SOME_BYTES = (1, 20_000, 98_304)  # how large it may be


def check_code(device: Device, findings: Findings) -> list[str]:
    """MK551."""
    found = [p for p in device.plan.programs for i in p.start if i.call == "warm_code"]
    for program in found:
        _, sharers, whole, _ = device.records[CODE]
        reading = range(min(sharers, device.blocks))
        for size in SOME_BYTES:
            lines = -(-size // LINE)
            readers = [0] * lines
            for block in reading:
                for line in _lines(lines, block, sharers, bool(whole), program.warps * LANES):
                    readers[line] += 1
            wanted = sharers if whole else 1
            wrong = next((line for line, count in enumerate(readers) if count != wanted), None)
            if wrong is not None:
                rows = [(program.role, [f"block {reading.start} to {reading.stop - 1}"]), ("line", [f"{wrong}: {readers[wrong]} times"])]
                said = {"role": program.role, "blocks": f"0 to {sharers - 1}", "grid": device.blocks, "line": wrong}
                findings.add(UNREAD, device.plan.graph.span, rows, readers=readers[wrong], wanted=wanted, **said)
    return [f"code: {p.role} reads all of it ahead, each line as often as the schedule says" for p in found]


def _lines(lines: int, block: int, sharers: int, whole: bool, threads: int) -> list[int]:
    """Those that a block's threads read."""
    of, at = (1, 0) if whole else (sharers, block)
    return [line for thread in range(threads) for line in range(at * threads + thread, lines, of * threads)]
