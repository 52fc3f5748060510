"""Reading compute-sanitizer's reports: excerpts of real ones of an H200, with today's lines of the headers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools import sanitize
from tools.line_table import Instruction, line_table, placed
from tools.sanitizer_reports import UNJUSTIFIED, UNREAD, headers, judge, record, summarise, wrapper_at

HEADERS = headers()


def line_of(name: str, text: str) -> str:
    """file:line of the only line of a header that begins with ``text``, spaces aside."""
    numbers = [number for number, line in enumerate(HEADERS[name].splitlines(), 1) if line.strip().startswith(text)]
    assert len(numbers) == 1, numbers
    return f"{name}:{numbers[0]}"


COPY = line_of("copy.h", '"cp.async.bulk.shared::cluster.global')
LOAD_U32X4 = line_of("smem.h", 'asm volatile("ld.shared.v4.u32')
U32 = line_of("smem.h", "MK_SHARED(u32,")  # a load and a store
LOAD_VOLATILE = line_of("smem.h", 'asm volatile("ld.volatile.shared.u32')
STORE_VOLATILE = line_of("smem.h", 'asm volatile("st.volatile.shared.u32')

RING, HINT = "read ld_shared x write bulk_load", "read ld_shared_volatile x write st_shared_volatile"
WORD, BYTES, BARRIER = (f"mk::ptx::smem_ptr<{name}>" for name in ("unsigned int", "char", "unsigned long long"))
BULK_LOAD = f"mk::ptx::bulk_load({BYTES}, const char *, unsigned int, {BARRIER}, unsigned long long)"
HEAD = "========= COMPUTE-SANITIZER\n"

MODEL = f"""{HEAD}\
========= Error: Race reported between Write access at {BULK_LOAD}+0x22270 in {COPY}
=========     and Read access at T1 mk::ptx::ld_shared<mk::u32x4>(mk::ptx::smem_ptr<T1>)+0x4220 in {LOAD_U32X4} [4096 hazards]
=========     and Read access at T1 mk::ptx::ld_shared<mk::u32x4>(mk::ptx::smem_ptr<T1>)+0x5230 in {LOAD_U32X4} [63488 hazards]
=========\x20
========= Error: Race reported between Read access at mk::ptx::ld_shared_volatile({WORD})+0x21c30 in {LOAD_VOLATILE}
=========     and Write access at mk::ptx::st_shared_volatile({WORD}, unsigned int)+0x4850 in {STORE_VOLATILE} [64 hazards]
=========\x20
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""

ELECT = f"""{HEAD}\
========= Error: Race reported between Read access at T1 mk::ptx::ld_shared<unsigned int>(mk::ptx::smem_ptr<T1>)+0x3a0 in {U32}
=========     and Write access at mk::ptx::policy_evict_first()+0x5c0 in {COPY} [124 hazards]
=========\x20
========= Error: Race reported between Read access at mk::ptx::smem_ptr<unsigned int>::operator +(int) const+0x730 in {U32}
=========     and Write access at mk::ptx::policy_evict_first()+0x970 in {COPY} [124 hazards]
=========\x20
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""

RACE = f"""{HEAD}\
========= Error: Race reported between Write access at void mk::ptx::st_shared<unsigned int>(mk::ptx::smem_ptr<T1>, T1)+0x160 in {U32}
=========     and Read access at T1 mk::ptx::ld_shared<unsigned int>(mk::ptx::smem_ptr<T1>)+0x1c0 in {U32} [4 hazards]
=========\x20
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

# of a kernel with a finisher: plain loads and stores, whose callers tell what they are
PLAIN = f"""{HEAD}\
========= Error: Race reported between Read access at T1 mk::ptx::ld_shared<unsigned int>(mk::ptx::smem_ptr<T1>)+0x1000 in {U32}
=========     and Write access at void mk::ptx::st_shared<unsigned int>(mk::ptx::smem_ptr<T1>, T1)+0x2000 in {U32} [64 hazards]
=========\x20
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

# not of a report of its own: what the model's says of the same pair
HINTED = f"""{HEAD}\
========= Error: Race reported between Read access at mk::ptx::ld_shared_volatile({WORD})+0x2c0 in {LOAD_VOLATILE}
=========     and Write access at mk::ptx::st_shared_volatile({WORD}, unsigned int)+0x1b0 in {STORE_VOLATILE} [4 hazards]
=========\x20
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

CLEAN_RACECHECK = f"{HEAD}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
CLEAN = f"{HEAD}========= ERROR SUMMARY: 0 errors\n"

API_ERROR = f"""{HEAD}\
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========\x20
========= ERROR SUMMARY: 1 error
"""

# of a kernel of sentinels, where the tool names one side of each race by its offset alone
BARE = f"""{HEAD}\
========= Error: Race reported between Write access at megakernel+0x57e0
=========     and Read access at T1 mk::ptx::ld_shared<mk::u32x4>(mk::ptx::smem_ptr<T1>)+0x7c60 in {LOAD_U32X4} [2048 hazards]
=========     and Read access at T1 mk::ptx::ld_shared<mk::u32x4>(mk::ptx::smem_ptr<T1>)+0x8030 in {LOAD_U32X4} [15872 hazards]
=========\x20
========= Error: Race reported between Read access at megakernel+0x52a0
=========     and Write access at mk::ptx::st_shared_volatile({WORD}, unsigned int)+0x8fb0 in {STORE_VOLATILE} [32 hazards]
=========     and Write access at mk::ptx::st_shared_volatile({WORD}, unsigned int)+0xfa70 in {STORE_VOLATILE} [8 hazards]
=========\x20
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def frames(line: str, *callers: str) -> str:
    """A chain of frames as nvdisasm prints it, the innermost first; each is file:line under a folder."""
    chain = [(f"/a/include/megadsl/{name}", number) for name, _, number in (text.partition(":") for text in (line, *callers))]
    after = [*(f' inlined at "{name}", line {number}' for name, number in chain[1:]), ""]
    return "".join(f'\t//## File "{n}", line {k}{rest}\n' for (n, k), rest in zip(chain, after, strict=True))


LISTING = f"""\
\t.section\t.nv.info,"",@"SHT_CUDA_INFO"
\t//## File "/a/include/megadsl/ring.h", line 1
        /*57e0*/                   NOP ;
\t.section\t.text.megakernel,"ax",@progbits
.text.megakernel:
        /*5280*/                   NOP ;
{frames(f"ptx/{LOAD_VOLATILE}", "ring.h:54", "ring.h:74", "kernel.cu:358")}\
        /*52a0*/               @P1 LDS R95, [R63+UR16] ;
{frames("ring.h:82", "tape.h:197")}\
{frames(f"ptx/{COPY}", "ring.h:83", "tape.h:197", "kernel.cu:358")}\
        /*57d0*/                   UMOV UR4, 0x8 ;
.L_x_14:
        /*57e0*/                   UBLKCP.S.G [UR4], [UR8], UR6, desc[UR22] ;
{frames(f"ptx/{LOAD_U32X4}", "direct.h:55", "kernel.cu:356")}\
        /*7c60*/              @!P0 LDS.128 R24, [R17] ;
{frames(f"ptx/{LOAD_U32X4}", "direct.h:180", "kernel.cu:356")}\
        /*8030*/              @!P0 LDS.128 R24, [R41] ;
{frames(f"ptx/{STORE_VOLATILE}", "ptx/smem.h:146", "block.h:55", "kernel.cu:356")}\
        /*8fb0*/              @!P0 STS [R25], R24 ;
        /*fa70*/             @!UP2 STS [R43], RZ ;
"""
TABLE = placed(line_table(LISTING, "megakernel"))


def barrier(kernel: str, text: str, code: int = 0) -> dict[str, Any]:
    return {"kernel": kernel, "tool": "racecheck", "exit": code, **summarise("racecheck", text, HEADERS, {})}


def model(tool: str, text: str, table: Mapping[int, Instruction] | None = None) -> dict[str, Any]:
    digests = {"llama-tiny/4/tagged": "94e5cd0574cd2a94"}
    row = {"tool": tool, "exit": 0, "cases": list(digests), "digests": digests, "as_without": dict.fromkeys(digests, True)}
    return row | summarise(tool, text, HEADERS, table or {})


def judged(barriers: list[dict[str, Any]], *models: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "NVIDIA H200", "version": ["NVIDIA (R) Compute Sanitizer", "Version 2025.3.1.0", ""]}
    found |= {"barriers": barriers, "models": [{"tool": "none", "exit": 0, "cases": [], "digests": {}}, *models]}
    judge(found)
    return found


REPRODUCERS = [
    *(barrier("refill", CLEAN_RACECHECK), barrier("elect", ELECT), barrier("hint", HINTED), barrier("turns", PLAIN), barrier("race", RACE)),
]


def without(kernel: str, *instead: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(row for row in REPRODUCERS if row["kernel"] != kernel), *instead]


def read(text: str, table: Mapping[int, Instruction] | None = None) -> dict[str, Any]:
    return summarise("racecheck", text, HEADERS, table or {})


def test_sides_are_wrappers_by_line_and_not_by_the_name_that_was_inlined() -> None:
    assert read(MODEL)["pairs"] == {RING: 67584, HINT: 64}
    assert read(MODEL)["races"] == [[RING], [HINT]]
    assert read(ELECT)["pairs"] == {RING: 248}
    assert read(RACE)["pairs"] == {"read ld_shared x write st_shared": 4}
    assert not any(read(text)["unread"] for text in (MODEL, ELECT, RACE, HINTED, CLEAN_RACECHECK))


def test_a_side_without_a_line_is_what_stands_at_its_offset() -> None:
    found = read(BARE, TABLE)
    assert found["pairs"] == {RING: 17920, HINT: 40} and found["races"] == [[RING], [HINT]] and found["unread"] == []
    judged_ = judged(REPRODUCERS, model("racecheck", BARE, TABLE))
    assert (judged_["justified"], judged_["unjustified"], judged_["unread"], judged_["complaints"]) == (2, 0, 0, [])


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({0x57E0: None}, {"hint": 1, UNREAD: 1, UNJUSTIFIED: 0}),
        ({0x52A0: None}, {"elect": 1, UNREAD: 1, UNJUSTIFIED: 0}),
        ({0xFA70: None}, {"elect": 1, UNREAD: 1, UNJUSTIFIED: 0}),
        ({0x7C60: ("LDS", "smem.h", 1)}, {"hint": 1, UNREAD: 1, UNJUSTIFIED: 0}),
        ({0x57E0: ("IMAD", *COPY.split(":"))}, {"hint": 1, UNREAD: 1, UNJUSTIFIED: 0}),
        ({0x52A0: ("STS", *STORE_VOLATILE.split(":"))}, {"elect": 1, UNREAD: 1, UNJUSTIFIED: 0}),
        ({0x57E0: ("STS", *STORE_VOLATILE.split(":"))}, {"hint": 1, UNJUSTIFIED: 1}),
    ],
    ids=["no bulk copy", "no load", "no store", "another line than the tool's", "no access", "a store for a load", "another wrapper"],
)
def test_a_table_of_another_kernel_justifies_nothing(change: dict[int, Any], verdict: dict[str, int]) -> None:
    table = {offset: place for offset, place in TABLE.items() if offset not in change}
    for offset, place in change.items():
        if place is not None:
            table[offset] = instruction(place[0], f"{place[1]}:{place[2]}")
    found = judged(REPRODUCERS, model("racecheck", BARE, table))
    assert found["models"][1]["verdicts"] == verdict and len(found["complaints"]) == 1


def within(function: str, text: str) -> str:
    """file:line of the first line with ``text`` in a function of linear.h."""
    lines = (sanitize.include() / "megadsl" / "linear.h").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(rf"\s*MK_DEV [^(=]*\b{function}\(", line))
    return f"linear.h:{next(i for i, line in enumerate(lines[at:], at + 1) if text in line)}"


READS, STORES = within("finish_batch", "ld_shared"), within("store_partials", "st_shared<float>")


def instruction(opcode: str, wrapper: str, caller: str = "") -> Instruction:
    """One that stands in a wrapper of the PTX headers, file:line, which ``caller`` has called."""
    frames = [("/ptx/" + wrapper).rsplit(":", 1), *([caller.rsplit(":", 1)] if caller else [])]
    return Instruction(opcode, tuple((path, int(line)) for path, line in frames))


@pytest.mark.parametrize(
    ("read_by", "stored_by", "verdict"),
    [
        (READS, STORES, {"turns": 1, UNJUSTIFIED: 0}),
        (READS, READS, {UNJUSTIFIED: 1}),
        (STORES, STORES, {UNJUSTIFIED: 1}),
        (READS, "", {UNJUSTIFIED: 1}),
        (READS, "nowhere.h:3", {UNJUSTIFIED: 1}),
    ],
)
def test_plain_accesses_are_justified_by_who_calls(read_by: str, stored_by: str, verdict: dict[str, int]) -> None:
    table = {0x1000: instruction("LDS", U32, read_by), 0x2000: instruction("STS", U32, stored_by)}
    assert judged(REPRODUCERS, model("racecheck", PLAIN, table))["models"][1]["verdicts"] == verdict
    assert judged(without("turns"), model("racecheck", PLAIN, table))["models"][1]["verdicts"] == {UNJUSTIFIED: 1}


def test_the_tools_have_to_understand_how_teams_meet() -> None:
    error = f"{HEAD}========= Barrier error detected. Divergent thread(s) in block.\n========= ERROR SUMMARY: 1 error\n"
    found = {"kernel": "turns", "tool": "synccheck", "exit": 1} | summarise("synccheck", error, HEADERS, {})
    assert judged([*REPRODUCERS, found])["complaints"] == ["synccheck reports kernel 'turns'"]
    looked = model("synccheck", CLEAN)
    assert judged(REPRODUCERS, looked)["complaints"] == ["synccheck did not look at kernel 'turns'"]
    understood = barrier("turns", CLEAN) | {"tool": "synccheck"}
    assert judged([*REPRODUCERS, understood], looked)["complaints"] == []


def test_sides_without_lines_and_without_a_table_are_unread() -> None:
    found = judged(REPRODUCERS, model("racecheck", BARE))
    assert found["models"][1]["verdicts"] == {UNREAD: 2, UNJUSTIFIED: 0} and (found["justified"], found["unread"]) == (0, 2)
    first = "Error: Race reported between Write access at megakernel+0x57e0"
    assert found["complaints"] == [f"racecheck: 2 parts of the report cannot be read, the first: {first}"]
    assert read(BARE)["races"][0] == [f"read ld_shared x write {UNREAD}"]


def test_what_is_no_side_is_never_passed_over() -> None:
    def unread(old: str, new: str) -> list[str]:
        found = judged(REPRODUCERS, model("racecheck", MODEL.replace(old, new)))
        assert any("cannot be read" in line for line in found["complaints"])
        unread: list[str] = found["models"][1]["unread"]
        return unread

    assert unread(f"in {LOAD_U32X4} [4096", f"near {LOAD_U32X4} [4096")[0].endswith("near " + LOAD_U32X4 + " [4096 hazards]")
    lonely = (
        f"=========     and Write access at mk::ptx::st_shared_volatile({WORD}, unsigned int)+0x4850 in {STORE_VOLATILE} [64 hazards]\n"
    )
    assert unread(lonely, "") == ["a race with one side: read ld_shared_volatile at 0x21c30"]
    assert unread("========= RACECHECK", f"{lonely}========= RACECHECK")[0].startswith("a side of no race: and Write access")
    assert unread("========= RACECHECK", "========= Internal Sanitizer Error\n========= RACECHECK") == ["Internal Sanitizer Error"]
    barrier_ = barrier("hint", HINTED.replace(f" in {LOAD_VOLATILE}", ""))
    found = judged(without("hint", barrier_), model("racecheck", MODEL))
    assert found["models"][1]["verdicts"] == {"elect": 1, UNJUSTIFIED: 1} and "kernel 'hint': 1 parts" in found["complaints"][0]


def test_saved_reports_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [model("racecheck", MODEL) | {"cases": ["llama-tiny/1/sentinel"]}, model("memcheck", CLEAN)]
    old = judged([*REPRODUCERS, barrier("hint", CLEAN) | {"tool": "synccheck"}], *rows)
    (tmp_path / "summary.json").write_text(json.dumps(old))
    texts = {"refill": CLEAN_RACECHECK, "elect": ELECT, "hint": HINTED, "turns": PLAIN, "race": RACE}
    sections = [*((f"{name}, racecheck", text) for name, text in texts.items()), ("hint, synccheck", CLEAN)]
    (tmp_path / "barriers.txt").write_text("".join(f"==== {name}\n{text}\n" for name, text in sections))
    (tmp_path / "models-racecheck-llama-tiny-1-sentinel.txt").write_text(BARE)
    (tmp_path / "models-racecheck-llama-tiny-1-sentinel.cubin").write_text("kept, so that nothing is compiled")
    (tmp_path / "models-memcheck.txt").write_text(CLEAN)
    monkeypatch.setattr(sanitize, "table_of", lambda cubin: TABLE if cubin.suffix == ".cubin" and cubin.exists() else {})
    found = sanitize.again(tmp_path)
    judge(found)
    assert found["models"][1]["pairs"] == {RING: 17920, HINT: 40}
    assert (found["justified"], found["complaints"]) == (2, []) and found["models"][1]["digests"] == old["models"][1]["digests"]


def test_a_line_in_no_wrapper_stays_a_line() -> None:
    assert wrapper_at(HEADERS["smem.h"], 1, "read") is None
    assert wrapper_at(HEADERS["smem.h"], 10**6, "read") is None
    text = MODEL.replace(LOAD_U32X4, "kernel.cu:7")
    assert read(text)["races"][0] == ["read kernel.cu:7 x write bulk_load"]


def test_reproduced_pairs_are_justified() -> None:
    found = judged(REPRODUCERS, model("racecheck", MODEL), model("initcheck", CLEAN))
    assert found["models"][1]["verdicts"] == {"elect": 1, "hint": 1, UNJUSTIFIED: 0}
    assert (found["justified"], found["unjustified"], found["complaints"]) == (2, 0, [])


@pytest.mark.parametrize(
    "barriers",
    [
        without("hint", barrier("hint", CLEAN_RACECHECK)),
        without("hint", barrier("hint", ELECT)),
        without("hint", barrier("hint", HINTED, code=1)),
        without("hint"),
    ],
    ids=["not reported", "reported for another pair", "wrong by itself", "not run"],
)
def test_a_kernel_that_no_longer_reproduces_justifies_nothing(barriers: list[dict[str, Any]]) -> None:
    found = judged(barriers, model("racecheck", MODEL))
    assert found["models"][1]["verdicts"] == {"elect": 1, UNJUSTIFIED: 1}
    assert found["complaints"] == ["racecheck: 1 findings of 2 are UNJUSTIFIED"]


def test_a_race_with_one_new_side_is_not_justified() -> None:
    new = MODEL.replace(f"{LOAD_U32X4} [63488", "mma.h:1 [63488")
    found = judged(REPRODUCERS, model("racecheck", new))
    assert found["models"][1]["verdicts"] == {"hint": 1, UNJUSTIFIED: 1}


def test_what_cannot_be_read_is_not_justified() -> None:
    found = judged(REPRODUCERS, model("racecheck", MODEL.replace("2 hazards displayed", "5 hazards displayed")))
    assert found["models"][1]["verdicts"] == {"elect": 1, "hint": 1, UNJUSTIFIED: 3}


def test_findings_of_other_tools_are_never_justified() -> None:
    found = judged(REPRODUCERS, model("memcheck", API_ERROR))
    assert found["unjustified"] == 1 and found["complaints"] == ["memcheck: 1 findings of 1 are UNJUSTIFIED"]


def test_other_complaints() -> None:
    assert judged(without("race", barrier("race", CLEAN_RACECHECK)))["complaints"] == ["racecheck does not report kernel 'race'"]
    assert judged([{"kernel": "none", "error": "no nvcc"}])["complaints"] == ["barriers: no nvcc"]
    killed = model("racecheck", HEAD) | {"exit": None}
    assert judged(REPRODUCERS, killed)["complaints"] == ["racecheck: exit None", "racecheck did not come to its end"]
    other = model("initcheck", CLEAN) | {"as_without": {"llama-tiny/4/tagged": False}}
    assert judged(REPRODUCERS, other)["complaints"] == ["initcheck: llama-tiny/4/tagged differs from the run without a tool"]


def test_callers_come_from_the_line_table() -> None:
    assert 0x5280 not in TABLE
    copy = TABLE[0x57E0]
    assert (copy.opcode, f"{copy.file}:{copy.line}", copy.caller) == ("UBLKCP.S.G", COPY, "ring.h:83")
    assert {offset: place.caller for offset, place in TABLE.items()} == {
        0x52A0: "ring.h:54",
        **dict.fromkeys((0x57D0, 0x57E0), "ring.h:83"),
        0x7C60: "direct.h:55",
        0x8030: "direct.h:180",
        **dict.fromkeys((0x8FB0, 0xFA70), "block.h:55"),
    }
    assert [TABLE[offset].opcode for offset in (0x52A0, 0x7C60, 0xFA70)] == ["LDS", "LDS.128", "STS"]
    assert read(BARE, TABLE)["callers"] == {
        "read ld_shared": ["direct.h:180", "direct.h:55"],
        "read ld_shared_volatile": ["ring.h:54"],
        "write bulk_load": ["ring.h:83"],
        "write st_shared_volatile": ["block.h:55"],
    }


def test_the_record_is_small_and_adds_up_the_runs_of_a_tool() -> None:
    once = model("racecheck", MODEL) | {"callers": {"write bulk_load": ["ring.h:80"]}}
    kept = record(judged(REPRODUCERS, once, once, model("memcheck", CLEAN)))
    assert kept["models"]["racecheck"]["findings"] == 4 and kept["models"]["racecheck"]["cases"] == 2
    assert kept["models"]["racecheck"]["verdicts"] == {"elect": 2, "hint": 2}
    assert kept["models"]["racecheck"]["callers"] == {"write bulk_load": ["ring.h:80"]}
    assert kept["models"]["memcheck"]["findings"] == 0 and kept["justified"] == 4
    assert "lines" not in json.dumps(kept) and "digests" not in json.dumps(kept)
