"""What the race detector found, in the words of the kernel's text and of the spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadsl.diagnostics import Diagnostic, declare, diagnose
from megadsl.emulate.abi import BUFFERS, RaceRecord, RaceSide
from megadsl.emulate.frames import Frame, frames_at, spec_of
from megadsl.source import UNKNOWN, Span

DATA_RACE = declare(
    "MK363",
    "{count} bytes at {where} are accessed twice with nothing between that orders it",
    "let one side wait for the other: a barrier of the warp or block, a phase of an mbarrier, or a release and an acquire of gpu scope",
)
PROXY_RACE = declare(
    "MK364",
    "a bulk copy accesses {count} bytes at {where} that were written with no proxy fence on the way",
    "call ptx::fence_proxy_async() after the write, before the signal that the copying thread waits for",
)
MIXED_SIZES = declare(
    "MK365",
    "strong accesses of different sizes overlap at {where}; they do not see each other as one",
    "access these {count} bytes with one width",
)
UNFENCED_BARRIER = declare(
    "MK366",
    "a bulk copy signals the mbarrier at {where}, whose initialisation it need not have seen",
    "call ptx::fence_mbarrier_init() after mbar_init, before the barrier that lets the block go on",
)

KINDS = ("data race", "missing proxy fence", "mixed sizes", "mbarrier not fenced")
_CODES = dict(zip(KINDS, (DATA_RACE, PROXY_RACE, MIXED_SIZES, UNFENCED_BARRIER), strict=True))
_WRITE, _STRONG, _ASYNC, _PLAIN = 1, 2, 4, 8
_COPY_LANE = 32
_NO_SITE = 0xFFFF


@dataclass(frozen=True)
class Access:
    """One side of a race.

    ``how`` says what was done ("write", "read", "strong write", "copy read", ...), ``width`` its bytes. ``warp`` and ``lane``
    are None for an asynchronous copy, whose frames are those of its issue. ``site`` and ``layer`` are those of the last wait
    that the thread had begun (None: it had begun none). ``frames`` go from the access outwards. ``line`` is
    the line of kernel.cu that led to it (0: unknown); ``text`` that line; ``role``, ``op`` and ``span`` what the comments above
    it say, "" when there are none.
    """

    how: str
    width: int
    block: int
    warp: int | None
    lane: int | None
    site: int | None
    layer: int | None
    frames: tuple[Frame, ...]
    line: int
    text: str
    role: str
    op: str
    span: str

    def __str__(self) -> str:
        who = f"block {self.block}, " + ("asynchronous copy" if self.warp is None else f"warp {self.warp}, lane {self.lane}")
        spec = f", role {self.role or '?'}, op {self.op} ({self.span})" if self.op else ""
        after = "" if self.site is None else f", layer {self.layer}, after the wait of site {self.site}"
        inner = f"; in {self.frames[0].function}, {self.frames[0].file}:{self.frames[0].line}" if self.frames else ""
        return f"{self.how} of {self.width} bytes by {who}: kernel.cu:{self.line} `{self.text}`{spec}{after}{inner}"


@dataclass(frozen=True)
class Race:
    """Two accesses to one place that nothing orders. ``space`` is a buffer's name or "shared", ``block`` then its owner (else
    None); ``offset`` counts bytes from the buffer's or the block's start. ``kind`` is one of KINDS."""

    kind: str
    space: str
    block: int | None
    offset: int
    now: Access
    before: Access

    @property
    def where(self) -> str:
        return f"{self.space} + {self.offset}" + ("" if self.block is None else f" of block {self.block}")

    def __str__(self) -> str:
        return f"{self.kind} on {self.where}\n    {self.now}\n    {self.before}"

    def diagnostic(self) -> Diagnostic:
        """MK363 to MK366, at the spec line that the later access belongs to, else at the earlier one's."""
        span = next((_span(side.span) for side in (self.now, self.before) if side.span), UNKNOWN)
        count = min(self.now.width, self.before.width)
        return diagnose(_CODES[self.kind], span, f"    {self.now}\n    {self.before}", where=self.where, count=count)


def _span(text: str) -> Span:
    file, _, line = text.rpartition(":")
    return Span(file, int(line))


def describe_races(records: Sequence[RaceRecord], library: Path, text: str) -> tuple[Race, ...]:
    """The records of one launch of ``library``, made from the kernel.cu ``text``. Raises MK362 when there are some and no addr2line."""
    if not records:
        return ()
    source = text.splitlines()
    addresses = sorted({pc for record in records for side in (record.now, record.before) for pc in side.stack if pc})
    frames = frames_at(library, addresses)
    return tuple(
        Race(
            kind=KINDS[record.kind],
            space=BUFFERS[record.space] if record.space < len(BUFFERS) else "shared",
            block=None if record.space < len(BUFFERS) else record.home,
            offset=record.offset,
            now=_access(record.now, frames, source),
            before=_access(record.before, frames, source),
        )
        for record in records
    )


def _access(side: RaceSide, frames: dict[int, tuple[Frame, ...]], source: Sequence[str]) -> Access:
    stack = [frame for pc in side.stack if pc for frame in frames[pc]]
    line = next((frame.line for frame in stack if frame.file == "kernel.cu"), 0)
    role, op, span = spec_of(source, line)
    copy = side.lane == _COPY_LANE
    return Access(
        how=_how(side.flags | (_ASYNC if copy else 0)),
        width=side.width,
        block=side.block,
        warp=None if copy else side.warp,
        lane=None if copy else side.lane,
        site=None if side.site == _NO_SITE else side.site,
        layer=None if side.site == _NO_SITE else side.layer,
        frames=tuple(stack),
        line=line,
        text=source[line - 1].strip() if 0 < line <= len(source) else "?",
        role=role,
        op=op,
        span=span,
    )


def _how(flags: int) -> str:
    words = [word for bit, word in ((_ASYNC, "copy"), (_STRONG, "strong"), (_PLAIN, "plain")) if flags & bit]
    return " ".join([*words, "write" if flags & _WRITE else "read"])
