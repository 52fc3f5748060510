"""Reading compute-sanitizer's reports: excerpts of real ones of an H200, with today's lines of the headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.sanitizer_reports import UNJUSTIFIED, called_from, callers, headers, judge, record, summarise, wrapper_at

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

LISTING = """\
\t.section\t.nv.info,"",@"SHT_CUDA_INFO"
\t//## File "/a/include/megadsl/ring.h", line 1
        /*22270*/                   NOP ;
\t.section\t.text.megakernel,"ax",@progbits
.text.megakernel:
        /*4210*/                   NOP ;
\t//## File "/a/include/megadsl/ptx/smem.h", line 117 inlined at "/a/include/megadsl/prologue.h", line 9
\t//## File "/a/include/megadsl/prologue.h", line 9 inlined at "/a/kernel.cu", line 136
\t//## File "/a/kernel.cu", line 136
        /*4220*/                   LDS.128 R20, [R20] ;
\t//## File "/a/kernel.cu", line 118 inlined at "/a/kernel.cu", line 325
\t//## File "/a/kernel.cu", line 325
\t//## File "/a/include/megadsl/ptx/copy.h", line 42 inlined at "/a/include/megadsl/ring.h", line 80
\t//## File "/a/include/megadsl/ring.h", line 80
        /*22260*/                   UMOV UR4, 0x8 ;
.L_x_14:
        /*22270*/                   UBLKCP.S.G [UR4], [UR12], UR11, desc[UR20] ;
"""


def barrier(kernel: str, text: str, code: int = 0) -> dict[str, Any]:
    return {"kernel": kernel, "tool": "racecheck", "exit": code, **summarise(text, HEADERS)}


def model(tool: str, text: str) -> dict[str, Any]:
    digests = {"llama-tiny/4/tagged": "94e5cd0574cd2a94"}
    row = {"tool": tool, "exit": 0, "cases": list(digests), "digests": digests, "as_without": dict.fromkeys(digests, True)}
    return row | summarise(text, HEADERS)


def judged(barriers: list[dict[str, Any]], *models: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "NVIDIA H200", "version": ["NVIDIA (R) Compute Sanitizer", "Version 2025.3.1.0", ""]}
    found |= {"barriers": barriers, "models": [{"tool": "none", "exit": 0, "cases": [], "digests": {}}, *models]}
    judge(found)
    return found


REPRODUCERS = [barrier("refill", CLEAN_RACECHECK), barrier("elect", ELECT), barrier("hint", HINTED), barrier("race", RACE)]


def without(kernel: str, *instead: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(row for row in REPRODUCERS if row["kernel"] != kernel), *instead]


def test_sides_are_wrappers_by_line_and_not_by_the_name_that_was_inlined() -> None:
    assert summarise(MODEL, HEADERS)["pairs"] == {RING: 67584, HINT: 64}
    assert summarise(MODEL, HEADERS)["races"] == [[RING], [HINT]]
    assert summarise(ELECT, HEADERS)["pairs"] == {RING: 248}
    assert summarise(RACE, HEADERS)["pairs"] == {"read ld_shared x write st_shared": 4}


def test_a_line_in_no_wrapper_stays_a_line() -> None:
    assert wrapper_at(HEADERS["smem.h"], 1, "read") is None
    assert wrapper_at(HEADERS["smem.h"], 10**6, "read") is None
    text = MODEL.replace(LOAD_U32X4, "kernel.cu:7")
    assert summarise(text, HEADERS)["races"][0] == ["read kernel.cu:7 x write bulk_load"]


def test_reproduced_pairs_are_justified() -> None:
    found = judged(REPRODUCERS, model("racecheck", MODEL), model("synccheck", CLEAN))
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
    assert callers(LISTING, "megakernel") == {0x4220: "prologue.h:9", 0x22260: "ring.h:80", 0x22270: "ring.h:80"}
    assert called_from(MODEL, HEADERS, LISTING, "megakernel") == {"read ld_shared": ["prologue.h:9"], "write bulk_load": ["ring.h:80"]}


def test_the_record_is_small_and_adds_up_the_runs_of_a_tool() -> None:
    once = model("racecheck", MODEL) | {"callers": {"write bulk_load": ["ring.h:80"]}}
    kept = record(judged(REPRODUCERS, once, once, model("memcheck", CLEAN)))
    assert kept["models"]["racecheck"]["findings"] == 4 and kept["models"]["racecheck"]["cases"] == 2
    assert kept["models"]["racecheck"]["verdicts"] == {"elect": 2, "hint": 2}
    assert kept["models"]["racecheck"]["callers"] == {"write bulk_load": ["ring.h:80"]}
    assert kept["models"]["memcheck"]["findings"] == 0 and kept["justified"] == 4
    assert "lines" not in json.dumps(kept) and "digests" not in json.dumps(kept)
