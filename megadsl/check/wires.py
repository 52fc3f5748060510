"""Formats and counters: both ends speak one wire, empty values cannot be produced, tags and epochs wrap without a gap.

* A writer's and a reader's format are the exchange's, and reach as far as the exchange: every block of the GPU.
* Sentinel: at least 4 slots, so that a whole exchange lies between emptying a slot and filling it (docs/ptx-notes.md says why
  PTX promises nothing for fewer); types alone whose all-ones the writer can canonicalise (payloads.py, wires.h), and does where
  it sends bits that it did not compute.
* Flag: the block meets between its payload and the one release that stands for it.
* Rounds: each launch publishes the rounds from f(epoch) to f(epoch + 1) - 1, each once, in order, f linear in the epoch. So
  rounds never repeat below 2^32, and at 2^32 they go on at 0, since the slot (a power of two) and the 16-bit tag both divide
  2^32. A vector is rewritten every S-th round, so a tag in memory is S behind, never 65,536.
* A fresh arena is zero. The first rounds on it, one per slot, are not 0 modulo 2^16 where tags are polled, and no round for which
  a flag of 0 stands.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megadsl.check.clocks import unrolled
from megadsl.check.model import Device, Step
from megadsl.check.payloads import carried_by_sentinel
from megadsl.check.report import Findings, shown
from megadsl.diagnostics import declare
from megadsl.ir.graph import Custom, Embed
from megadsl.ir.plan import FIRST_EPOCH, Exchange, Instr
from megadsl.lower.exchanges import ASYNC
from megadsl.types import Level

WIRE = declare(
    "MK540",
    "{op!r} {does} {value!r} as {wire}, its exchange is {kind}",
    "use the edge's sync at both ends: s[producer].sync(...) sets both",
)
SCOPE = declare(
    "MK541",
    "{value!r} is exchanged between {all}, its sync spans a {level}",
    "use level=mk.Level.{own}, or read the value in the block that writes it",
)
WORDS = declare("MK547", "{value!r} is sent word by word, and is read as {kind}", "publish it staged")
SLOTS = declare("MK542", "{value!r} is exchanged as {kind} with {slots} slots", "use a power of two that is at least {least}")
EMPTY = declare(
    "MK543", "{value!r} carries {dtype} as Sentinel, whose empty value a writer could produce", "use mk.Tagged or mk.Flag for this edge"
)
RELEASE = declare(
    "MK544",
    "{op!r} raises the flag of {value!r} before all warps have stored what it stands for",
    "let the block meet between its payload and its flag",
)
GAP = declare("MK545", "{value!r} is published in rounds {rounds} of a launch, {expected} were due", "publish every round once, in order")
FRESH = declare(
    "MK546",
    "{value!r} begins with round {round} in {slots} slots, and one of its first rounds seems to be there in memory that nobody has written",
    "count its rounds from epoch * uses on, with fewer slots: none of the first ones may be 0 modulo 2^16",
)

LEAST_SLOTS = {"Tagged": 2, "Sentinel": 4, "Flag": 2, ASYNC: 1}
_ENDS = {"publish": [("wire", "value", "publishes")], "gather": [("wire", "value", "reads")], "gather_kept": [("wire", "value", "reads")]}
_ENDS["merge"] = _ENDS["add_parts"] = [("wire", "parts", "reads")]
_ENDS["matrix"] = [("parts_wire", "parts", "publishes")]
_ENDS["attention"] = [("qkv_wire", "qkv", "reads"), ("parts_wire", "parts", "publishes")]
_FLAGS = {"publish": ("value", "flag"), "attention": ("parts", "published"), "matrix": ("parts", "end")}  # what, behind which barrier
_SCOPES = {Level.GPU: "the GPU", Level.CLUSTER: "a cluster"}  # another level is a finding
_ROUNDS = {"publish": ("value", "round"), "argmax": ("value", "round")}
_ROUNDS["attention"] = _ROUNDS["matrix"] = ("parts", "parts_round")


def check_wires(device: Device, findings: Findings) -> list[str]:
    """Formats, scopes, sentinels, flags and rounds of every exchange."""
    for step in device.steps(device.consumer, 1):
        for instr in (step.instr, *step.instr.body):
            _ends(device, instr, findings)
        _release(device, step, findings)
        _raw(device, step, findings)
        _words(device, step, findings)
    for e in device.plan.exchanges:
        _kind(e, findings)
    _rounds(device, findings)
    _fresh(device, findings)
    return [
        f"wires: writers and readers agree on {_agreed(device)}; no empty value can be produced",
        "rounds: consecutive within a launch, from launch to launch and over 2^16 and 2^32; none seems to be there in a fresh arena",
    ]


def _agreed(device: Device) -> str:
    """The wires, by the scope at which each is spoken: "Sentinel, Tagged at the scope of the GPU, Async at the scope of a cluster"."""
    by_level: dict[Level, set[str]] = {}
    for e in device.plan.exchanges:
        by_level.setdefault(e.level, set()).add(e.wire)
    spoken = [(level, ", ".join(sorted(by_level[level]))) for level in Level if level in by_level]
    return ", ".join(f"{wires} at the scope of {_SCOPES.get(level, level.value)}" for level, wires in spoken)


def _ends(device: Device, instr: Instr, findings: Findings) -> None:
    for wire, value, does in _ENDS.get(instr.call, ()) if instr.args.get("parts", True) else ():
        e, used = device.exchanges[str(instr.args[value])], str(instr.args[wire])
        if used != e.wire:
            rows = [("consumer", [f"{does} {used}: {shown(instr)}"]), (f"exchange {e.name}", [f"{e.wire}, {e.slots} slots"])]
            findings.add(WIRE, instr.span, rows, op=instr.op, does=does, value=e.name, wire=used, kind=e.wire)


def _release(device: Device, step: Step, findings: Findings) -> None:
    instr = step.instr
    value, meets = _FLAGS.get(instr.call, ("", ""))
    if not value or not instr.args[value] or meets in instr.syncs:
        return
    e = device.exchanges[str(instr.args[value])]
    if e.wire == "Flag":
        rows = [
            ("consumer, one warp", [f"stores its part: {shown(instr)}", "no barrier"]),
            ("consumer, thread 0", ["", "no barrier", "st.release of the flag"]),
        ]
        findings.add(RELEASE, instr.span, rows, op=instr.op, value=e.name)


def _raw(device: Device, step: Step, findings: Findings) -> None:
    """Bits that are sent as they lie in a table, or where a user's function may have left them, are looked at for the empty value;
    conversions never make it (ptx::to_bf16)."""
    instr = step.instr
    op = device.op(instr.op)
    as_it_lies = isinstance(op, Custom) or (isinstance(op, Embed) and op.expr is None)
    if instr.call != "publish" or instr.args["raw"] or not as_it_lies:
        return
    e = device.exchanges[str(instr.args["value"])]
    if e.wire == "Sentinel":
        rows = [("consumer", [f"sends what it was given: {shown(instr)}"]), (f"exchange {e.name}", [f"{e.wire}, {e.dtype}"])]
        findings.add(EMPTY, instr.span, rows, op=instr.op, value=e.name, dtype=e.dtype)


def _words(device: Device, step: Step, findings: Findings) -> None:
    """Of vectors that are sent word by word each word must say by itself that it is there."""
    instr = step.instr
    if instr.call != "publish" or not instr.args["words"]:
        return
    e = device.exchanges[str(instr.args["value"])]
    if not (e.words and e.dense and e.wire == "Sentinel"):
        read = f"{e.wire}, read {'word by word' if e.words else 'as whole vectors'}"
        rows = [("consumer, one warp", [f"stores words: {shown(instr)}"]), (f"exchange {e.name}", [read])]
        findings.add(WORDS, instr.span, rows, op=instr.op, value=e.name, kind=read)


def _kind(e: Exchange, findings: Findings) -> None:
    least = LEAST_SLOTS[e.wire]
    rows = [(f"exchange {e.name}", [f"{e.wire}, {e.dtype}, {e.slots} slots, level {e.level.value}"])]
    if e.slots < least or e.slots & (e.slots - 1) or (e.wire == ASYNC and e.slots > least):
        findings.add(SLOTS, e.span, rows, op=e.name, value=e.name, kind=e.wire, slots=e.slots, least=least)
    if e.wire == "Sentinel" and not carried_by_sentinel(e.dtype):
        findings.add(EMPTY, e.span, rows, op=e.name, value=e.name, dtype=e.dtype)
    own, spans = (Level.CLUSTER, "the blocks of a cluster") if e.wire == ASYNC else (Level.GPU, "all blocks")
    levels = [e.level] if e.wire == ASYNC else [e.level, e.sync.level]  # parts that a cluster adds do not use their edge's sync
    if wrong := [level for level in levels if level is not own]:
        findings.add(SCOPE, e.span, rows, op=e.name, value=e.name, level=wrong[0].value, all=spans, own=own.name)


def _rounds(device: Device, findings: Findings) -> None:
    """Three launches in a row, and three around the wrap of the epoch; values modulo 2^32, as the kernel computes them."""
    for first in (FIRST_EPOCH, 2**32 - 2):
        following: dict[str, int] = {}
        for epoch in range(first, first + 3):
            for value, (steps, rounds) in _published(device, epoch).items():
                begin = following.get(value, rounds[0])
                expected = [(begin + i) % 2**32 for i in range(len(rounds))]
                if rounds != expected:
                    rows = [("consumer", [f"round {r}: {shown(s.instr, s.layer)}" for s, r in zip(steps, rounds, strict=True)][:6])]
                    findings.add(GAP, steps[0].instr.span, rows, op=value, value=value, rounds=rounds[:6], expected=expected[:6])
                following[value] = (expected[-1] + 1) % 2**32


def _fresh(device: Device, findings: Findings) -> None:
    """The first round of each value, with all the model's layers, against an arena of zeros."""
    seen: set[str] = set()
    for step in device.steps(device.consumer, 1, FIRST_EPOCH):
        ends = _ROUNDS.get(step.instr.call)
        if ends is None or str(step.instr.args[ends[0]]) in ("", *seen):
            continue
        e = device.exchanges[str(step.instr.args[ends[0]])]
        seen.add(e.name)
        first = replace(step, names={**step.names, "layers": device.plan.graph.layers}).round(ends[1]) % 2**32
        if e.wire == ASYNC:  # a launch begins with a barrier of its own
            continue
        modulus = 2**32 if e.wire == "Flag" or e.dtype == "u32" else 2**16
        # Tags: round 0 among those that meet a slot first. Flags: a flag of 0 stands for a round and those up to slots - 1 before.
        if e.wire != "Sentinel" and -first % modulus < e.slots:
            rows = [("consumer", [f"round {first}: {shown(step.instr)}"]), ("fresh arena", [f"{e.wire} of 0 in {e.slots} slots"])]
            findings.add(FRESH, step.instr.span, rows, op=e.name, value=e.name, round=first, slots=e.slots)


def _published(device: Device, epoch: int) -> dict[str, tuple[list[Step], list[int]]]:
    """Per value, the rounds that one launch publishes."""
    found: dict[str, tuple[list[Step], list[int]]] = defaultdict(lambda: ([], []))
    for step in device.steps(device.consumer, unrolled(device), epoch):
        ends = _ROUNDS.get(step.instr.call)
        if ends is not None and step.instr.args[ends[0]]:
            steps, rounds = found[str(step.instr.args[ends[0]])]
            steps.append(step)
            rounds.append(step.round(ends[1]) % 2**32)
    return found
