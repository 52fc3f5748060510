"""tools/stalls.py: a report of ncu laid over the kernel that it profiled."""

from __future__ import annotations

import pytest

from tools.line_table import line_table
from tools.stalls import laid_over, parts_of, read_report, show

SOURCE = """\
MK_DEV void role_consumer(mk::Context& cx) {
  // qkv_proj: 960 x 576  [llama.py:23]
  {
    mk::multiply();
  }
  // o_proj: 576 x 576  [llama.py:36]
  mk::multiply();
}
// a comment of no op  [llama.py:1]
extern "C" __global__ void megakernel() { role_consumer(cx); }
"""

LISTING = """\
\t.section\t.text.megakernel,"ax",@progbits
\t//## File "/a/include/megadsl/ptx/smem.h", line 115 inlined at "/a/include/megadsl/linear.h", line 30
\t//## File "/a/include/megadsl/linear.h", line 30 inlined at "/cache/kernel.cu", line 7
\t//## File "/cache/kernel.cu", line 7 inlined at "/cache/kernel.cu", line 10
\t//## File "/cache/kernel.cu", line 10
        /*0000*/                   LDS.64 R2, [R4] ;
        /*0010*/              @!P0 FADD R3, R2, R2 ;
\t//## File "/cache/kernel.cu", line 4 inlined at "/cache/kernel.cu", line 10
\t//## File "/cache/kernel.cu", line 10
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x100 ;
\t//## File "/cache/kernel.cu", line 10
        /*0030*/                   EXIT ;
"""

REPORT = """\
"Kernel Name","megakernel",
"Address","Source","# Samples","Instructions Executed","stall_barrier","stall_short_sb","stall_barrier (Not Issued)"
"0","LDS.64 R2, [R4]","30","320","","30","9"
"16","@!P0 FADD R3, R2, R2","10","320","","10",""
"32","BAR.SYNC.DEFER_BLOCKING 0x1, 0x100","60","160","60","","60"
"48","EXIT","5","160","5","",""
"""


def test_samples_are_told_apart_by_role_and_op() -> None:
    table = line_table(LISTING, "megakernel")
    laid = laid_over(read_report(REPORT), [table[at] for at in sorted(table)], SOURCE)
    parts = [(part.role, part.op, part.instructions, part.samples, part.executed, dict(part.stalls)) for part in parts_of(laid)]
    assert parts == [
        ("", "", 1, 5, 160, {"barrier": 5, "short_sb": 0}),
        ("consumer", "qkv_proj: 960 x 576", 1, 60, 160, {"barrier": 60, "short_sb": 0}),
        ("consumer", "o_proj: 576 x 576", 2, 40, 640, {"barrier": 0, "short_sb": 40}),
    ]


def test_times_are_those_of_one_warp() -> None:
    """20 blocks of 8 warps are in the role for 100 us: each sample of the 100 is 1 us of all its 160 warps."""
    table = line_table(LISTING, "megakernel")
    laid = laid_over(read_report(REPORT), [table[at] for at in sorted(table)], SOURCE)
    lines = list(show(laid, 100.0, {"consumer": 8}, 20, 2))
    assert lines[1].split() == ["consumer", "qkv_proj:", "960", "x", "576", "1", "8.0", "60.00", "barrier", "60.00"]
    assert lines[2].split() == ["consumer", "o_proj:", "576", "x", "576", "2", "16.0", "40.00", "short_sb", "40.00"]
    assert [line.split()[5:7] for line in lines[4:]] == [["8.0", "60.000"], ["16.0", "15.000"]]
    assert lines[5].endswith("LDS.64 R2, [R4]  smem.h:115 < linear.h:30 < kernel.cu:7  short_sb 15.00")


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ("nothing\n", "no table of instructions"),
        (REPORT.replace("# Samples", "Samples of another kind"), "no samples"),
        (REPORT.replace("EXIT", "RET"), "another kernel"),
        ("\n".join(REPORT.splitlines()[:-1]), "another kernel"),
    ],
)
def test_what_cannot_be_laid_over_is_refused(report: str, says: str) -> None:
    table = line_table(LISTING, "megakernel")
    with pytest.raises(ValueError, match=says):
        laid_over(read_report(report), [table[at] for at in sorted(table)], SOURCE)
