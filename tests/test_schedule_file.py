"""Schedule files: every knob goes to text and back, and each mistake is named where it stands."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from dsl_tools import findings, graph_of, one
from test_dsl_schedule import default
from test_dsl_schedule import kernel as llama

import megadsl as mk
from megadsl.diagnostics import collecting
from megadsl.dsl.apply import apply
from megadsl.dsl.knob_values import Bytes, Count, Name, Syncs, Words
from megadsl.dsl.knobs import EDGE, KERNEL, KNOBS, OP, RING, ROLE, Knob, knob_of, knobs_of, normal, statements
from megadsl.dsl.overrides import Decision, Overrides, recorded
from megadsl.dsl.schedule import EdgeHandle, OpHandle, ScheduleBlock
from megadsl.dsl.schedule_file import HEAD, Head, Note, ScheduleFile, load, parse, render, written
from megadsl.ir.schedule import Flag, Sentinel, Tagged
from megadsl.source import UNKNOWN
from megadsl.types import Level

ARCH = "sm_90a"
HEADED = f"arch = {ARCH}\n"
SUBJECTS = {
    KERNEL: [()],
    ROLE: [("consumer",), ("kv_loader",), ("a role",)],
    RING: [("weights",), ("kv_loader",), ("loader",)],
    OP: [("o_proj",), ("attention",), ('odd "op"\u2028',), ("none",)],
    EDGE: [("qkv_proj", "attention"), ("attention", "attention"), ("a-", "->")],
}


def values(knob: Knob, rng: random.Random) -> object:
    """Any value that the knob can have."""
    match knob.values:
        case Count(least=least, none=none):
            return rng.choice([least, least + rng.randrange(1 << 20), *([None] if none else [])])
        case Bytes(least=least):
            return rng.choice([least, rng.randrange(1, 4096), rng.randrange(1, 512) << 10, rng.randrange(1, 64) << 20])
        case Words(values=words):
            return rng.choice(words)[1]
        case Name(none=none):
            return rng.choice(["kv_loader", "o_proj", "none", "3 # odd \\", *([None] if none else [])])
        case Syncs():
            return rng.choice([Tagged, Sentinel, Flag])(rng.randrange(1, 99), rng.choice(list(Level)))
    raise AssertionError(f"{knob.name}: say here what values it has")


def drawn(rng: random.Random, count: int) -> Overrides:
    """Some decisions, in any order, some of them several times."""
    found = []
    for _ in range(count):
        knob = rng.choice(KNOBS)
        subject = rng.choice(SUBJECTS[knob.of])
        found.append(recorded(Decision(knob.record, subject, knob.field, values(knob, rng), UNKNOWN)))
    return Overrides(ARCH, tuple(found))


@pytest.mark.parametrize("seed", range(40))
def test_any_decisions_go_to_text_and_back(seed: int) -> None:
    rng = random.Random(seed)
    asked = drawn(rng, rng.randrange(30))
    meant = rng.choice([None, "any", "llama-3.2-1b", "7b"]), rng.choice([None, 1, 16]), rng.choice([None, (0, 512)])
    head = Head(ARCH, *meant, "H200, 580", rng.choice([None, 1, 8]))
    notes = {left: f"{i} # gain" for i, (left, _) in enumerate(statements(asked)) if rng.random() < 0.3}
    file = written(head, asked, notes)
    again = parse(render(file), "f.schedule")
    assert again == file and again.overrides == normal(asked) and again.digest == file.digest
    assert render(again) == render(file)
    assert all(d.span.file == "f.schedule" and d.span.line and d.span.column == 1 for d in again.overrides.decisions())


@pytest.mark.parametrize("knob", KNOBS, ids=lambda k: f"{k.of}-{k.name}")
def test_each_knob_goes_to_text_and_back(knob: Knob) -> None:
    rng = random.Random(knob.name)
    for subject in SUBJECTS[knob.of]:
        for _ in range(8):
            decision = Decision(knob.record, subject, knob.field, values(knob, rng), UNKNOWN)
            asked = Overrides(ARCH, (recorded(decision),))
            assert list(asked.decisions()) == [decision] and knob_of(decision) is knob
            assert parse(render(written(Head(ARCH), asked)), "f").overrides == asked == normal(asked)


def said(owner: type) -> Iterator[tuple[str, str]]:
    """(method, parameter) of what a user can decide with it."""
    for name, method in vars(owner).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield from ((name, p) for p in list(inspect.signature(method).parameters)[1:])


def test_the_table_has_everything_that_python_can_say() -> None:
    """A parameter of mk.schedule's methods that is a decision has its knob, whose ``python`` names it; and no other has."""
    names = {"op", "name", "producer", "consumer", "override", "what", "value", "least", "choices", "span", "values"}  # no decisions
    for owner, begin in ((ScheduleBlock, "s."), (OpHandle, "s[...]."), (EdgeHandle, "s.edge(..., ...).")):
        wanted = {(m, p) for m, p in said(owner) if p not in names and m not in ("record", "checked", "choice", "changes")}
        for method, parameter in wanted:
            calls = {f"{begin}{method}({parameter}=...)", f"{begin}{method}(..., {parameter}=...)", f"{begin}{method}(...)"}
            assert sum(k.python in calls for k in KNOBS) == 1, f"{begin}{method}: {parameter} has no knob in megadsl/dsl/knobs.py"
    lefts = [(k.of, k.name) for k in KNOBS]
    assert len(set(lefts)) == len(lefts) and not set(HEAD) & set(knobs_of(KERNEL))


def test_a_file_is_applied_as_the_calls_are() -> None:
    step = llama()
    with mk.schedule(step) as s:
        s.role("kv_loader", warps=1, kind="loader")
        s.role("a_loader", warps=1, kind="loader")
        s.ring("kv_loader", stages=2, stage_bytes=4096, window=8192)
        s.ring("a_loader", stages=2, stage_bytes=4096, window=8192)
        s["o_proj"].columns(ways=2).prefetch(l2=4096, ahead_of="attention", registers=None)
        s["attention"].loader("kv_loader").split(kv=4).prefetch(smem=None)
        s["lm_head"].columns(ways=2)
        s["o_proj"].sync(mk.Flag())
        s.edge("o_proj", "o_proj").sync(mk.Sentinel(8))
        s.edge("qkv_proj", "attention").sync(mk.Sentinel(8, Level.GROUP))
        s.warps(12)
        s.blocks(7)
    graph, asked = graph_of(step), step.overrides_for(ARCH)
    file = parse(render(written(Head(ARCH), asked)), "f")
    with collecting() as found:
        assert apply(default(graph), graph, file.overrides, found) == apply(default(graph), graph, asked, found)
    roles = [line for line in render(file).splitlines() if line.startswith("role")]
    assert roles[0].startswith("role kv_loader"), "roles are added in the order in which they are named"


CANONICAL = """\
# what is measured
#   on an H200
model = llama-3.2-1b  # a note
arch = sm_90a
# alone
tokens = 1
kv = 0..2048
machine = "NVIDIA H200"

launch = step
blocks = 128

role consumer: warps = 11

# HBM stays busy
ring weights: stages = 5
ring weights: meeting_window = 48 KiB  # 1.012x

op attention: smem = none
op o_proj: l2 = 8 MiB
op o_proj: ahead_of = attention
op o_proj: sync = sentinel(slots = 4)  # "quoted"  # twice
op "the head": registers = auto

edge attention -> attention: sync = flag(slots = 2, level = group)

# behind all
"""


def test_canonical_text_and_comments() -> None:
    file = parse(CANONICAL, "f")
    assert render(file) == CANONICAL
    assert file.head == Head(ARCH, "llama-3.2-1b", 1, (0, 2048), "NVIDIA H200")
    assert file.notes["ring weights: stages"] == Note(("# HBM stays busy",))
    assert file.notes["op o_proj: sync"].beside == '# "quoted"  # twice'
    lines = CANONICAL.splitlines()
    messy = "\ufeff" + "\r\n".join([*lines[:3], "", *(line.replace(" = ", "=") for line in lines[3:9]), *reversed(lines[9:-2])])
    assert render(parse(messy.replace("slots=4", "slots = 4 "), "f")).count("\n") == CANONICAL.count("\n") - 2
    assert parse(messy, "f").overrides == file.overrides
    assert parse(HEADED + "op a: sync = tagged", "f") == parse(HEADED + "op a: sync = tagged(slots = 2, level = gpu)", "f")


def test_a_file_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.schedule"
    path.write_text(CANONICAL)
    assert load(path) == parse(CANONICAL, "elsewhere") and load(path).path == str(path)
    path.write_bytes(b"arch = \xff")
    for wrong, why in ((path, "it is not UTF-8 text"), (tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        (found,) = findings(lambda wrong=wrong: load(wrong))
        assert found.code == "MK181" and why in found.message


WRONG = [
    ("MK261", "blocks 3", 8, "'3' has no place", "write '=' or a name"),
    ("MK261", "op o_proj sync = x", 11, "'sync' has no place", "write ':' or '->' there"),
    ("MK261", "batch =", 8, "something is missing at the end", "a text in quotes or a number"),
    ("MK261", "batch = 3 4", 11, "'4' has no place", "a comment or nothing"),
    ("MK261", "$", 1, "'$' has no place", "write a name or a comment"),
    ("MK261", 'machine = "open', 11, "'\"' has no place", "a name or a text in quotes"),
    ("MK261", r'machine = "a\q"', 11, "a text that cannot be read", "as JSON does"),
    ("MK261", "op a: sync = flag(slots = 4, slots = 3)", 30, "'slots' is given twice", "keep one of the two"),
    ("MK262", "opp x: blocks = 3", 1, "decides nothing about 'opp x'", "begin the line with role NAME:"),
    ("MK262", "op b -> c: sync = flag", 1, "decides nothing about 'op b -> c'", "edge OP -> READER:"),
    ("MK262", "edge b: sync = flag", 1, "decides nothing about 'edge b'", "edge OP -> READER:"),
    ("MK262", "kernel b: blocks = 3", 1, "decides nothing about 'kernel b'", "role NAME:"),
    ("MK263", "op o_proj: blocks = 3", 12, "op o_proj has no knob 'blocks'", "the knobs are: loader, smem"),
    ("MK263", "ring weights: windw = 4 KiB", 15, "ring weights has no knob 'windw'", "did you mean 'window'? the knobs are: stages"),
    ("MK263", "token = 4", 1, "the kernel has no knob 'token'", "did you mean 'tokens'?"),
    ("MK264", "blocks = 0", 10, "blocks cannot be 0", "it can be a whole number from 1 up"),
    ("MK264", "max_kv = 3.5", 10, "max_kv cannot be 3.5", "a whole number"),
    ("MK264", f"max_kv = {'9' * 30}", 10, "max_kv cannot be 9999", "a whole number"),
    ("MK264", "op a: residual = nowhere", 18, "op a: residual cannot be nowhere", "it can be block, exchange"),
    ("MK264", "op a: hint = 4", 14, "op a: hint cannot be 4", "evict_first, evict_normal, evict_last"),
    ("MK264", "op a: loader = 4", 16, "op a: loader cannot be 4", "the name of a loader role"),
    ("MK264", "op a: sync = lock", 14, "op a: sync cannot be lock", "tagged(slots = 2), sentinel(slots = 4), flag(slots = 2)"),
    ("MK264", "op a: sync = flag(slot = 4)", 14, "cannot be flag(slot = 4)", "flag has no 'slot': it has slots and level"),
    ("MK264", "op a: sync = flag(slots = 0)", 14, "cannot be flag(slots = 0)", "flag(slots = 2)"),
    ("MK264", "kv = 9..3", 6, "kv cannot be 9..3", "a range such as 0..2048"),
    ("MK264", "ring w: window = -4 KiB", 18, "window cannot be -4 KiB", "at least 1 B"),
    ("MK265", "ring w: window = 48", 18, "window = 48 has the wrong unit", "write bytes as in 48 KiB or 48 B"),
    ("MK265", "ring w: window = 48 KB", 18, "window = 48 KB has the wrong unit", "the units are MiB, KiB, B"),
    ("MK265", "ring w: stages = 4 KiB", 18, "stages = 4 KiB has the wrong unit", "write 4"),
    ("MK266", f"arch = {ARCH}", 1, "arch is decided twice", "the other stands in line 1"),
    ("MK001", "", 1, "unknown architecture 'sm_70'", "sm_90a"),
    ("MK267", "", 0, "does not say which architecture", "write `arch = ...`"),
]


@pytest.mark.parametrize(("code", "line", "column", "message", "mend"), WRONG)
def test_a_wrong_line(code: str, line: str, column: int, message: str, mend: str) -> None:
    head = {"MK001": "arch = sm_70\n", "MK267": "\n"}.get(code, HEADED)
    (found,) = findings(lambda: parse(f"{head}# so\n{line}\n", "wrong.schedule"))
    assert (found.code, found.span.file, found.span.column) == (code, "wrong.schedule", column)
    assert found.span.line == (1 if code in ("MK001", "MK267") else 3)
    assert message in found.message and mend in found.mend
    assert line in str(found)


REPEATED = """\
arch = sm_90a
ring weights: stages = 4
edge b -> c: sync = flag
ring weights: stages = 5
edge b -> d: sync = flag
op b: sync = flag
edge b -> b: sync = flag
edge b -> b: sync = tagged
"""


def test_what_is_decided_twice() -> None:
    found = findings(lambda: parse(REPEATED, "f"))
    assert [(d.code, d.span.line) for d in found] == [("MK266", 4), ("MK266", 5), ("MK266", 6), ("MK266", 8)]
    assert found[1].message == "the sync of what b gives is decided twice" and "line 3" in found[1].mend


def test_all_mistakes_at_once() -> None:
    lines = [line for code, line, *_ in WRONG if line and code != "MK266"]
    found = findings(lambda: parse("\n".join(lines), "f"))
    wanted = {code for code, line, *_ in WRONG if line} | {"MK267"}
    assert {d.code for d in found} == wanted and len(found) >= len(lines)


def test_a_number_of_any_length_is_refused() -> None:
    assert one(findings(lambda: parse(f"{HEADED}blocks = {'9' * 10000}", "f")), "MK264").span.line == 2


def test_the_least_that_a_file_says() -> None:
    file = ScheduleFile(Head(ARCH), Overrides(ARCH, ()))
    assert render(file) == HEADED and parse(HEADED, "f") == file
    assert parse(f"# only\n{HEADED}", "f").notes == {ScheduleFile.TOP: Note(("# only",))}
