"""Schedule: every decision about how the graph runs. One record per op and one per edge; all of it is data.

Each knob's metadata says whether changing it keeps results bit-identical or changes rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from megadsl.types import Level


@dataclass(frozen=True)
class Tagged:
    """16-byte vectors that carry their epoch: 7 bf16 + 16-bit tag, or 4 fp32 with 4 tag bits each. No reset."""

    slots: int = 2
    level: Level = Level.GPU


@dataclass(frozen=True)
class Sentinel:
    """Lamport-style: full payload, an empty value (all ones) that producers never write, reset by the writer."""

    slots: int = 4
    level: Level = Level.GPU


@dataclass(frozen=True)
class Flag:
    """Plain data, then a release store of one epoch word per producing block; readers acquire."""

    slots: int = 2
    level: Level = Level.GPU


Sync: TypeAlias = Tagged | Sentinel | Flag

SHARED, STAGED, REGISTERS = "shared", "staged", "registers"  # where an op's input arrives and its results leave from


L2_BY = INSTRUCTION, LOAD = ("instruction", "load")


@dataclass(frozen=True)
class Prefetch:
    """Where an op's weights go before they are needed.

    smem: the ring takes them as early as it has room (else only once the op has begun).
    registers: so many of the block's first tiles (of an attention: of each warp's cached chunks, 0 or 1) move from the ring into
    registers before the op's input is waited for; None: the compiler chooses.
    l2_by: how those l2_bytes come into L2: by a prefetch "instruction", or by a "load" into shared memory that nobody reads.
    l2_bytes: this many bytes of the block's share (of an attention: of the cached rows of each of its units) are prefetched into L2 when
    the loader reaches ``ahead_of``; the next layer's, where that op stands behind this one in the layer.
    hint: cache policy of the stream, "evict_first" | "evict_normal" | "evict_last".
    """

    smem: bool = True
    registers: int | None = None
    l2_bytes: int = 0
    ahead_of: str | None = None
    hint: str = "evict_first"
    l2_by: str = INSTRUCTION


@dataclass(frozen=True)
class Ring:
    """A shared-memory ring of bulk-copy stages. ``window`` bounds the bytes in flight (issued, not landed);
    ``meeting_window`` does so from the last tiles of an op until the next one's input is there, because every load of an
    exchange queues behind the bytes in flight. 0: no other bound. Bit-identical."""

    name: str
    stages: int
    stage_bytes: int
    window: int
    meeting_window: int = 0


@dataclass(frozen=True)
class Role:
    """A set of warps with one program. kind is "loader" or "consumer"."""

    name: str
    kind: str
    warps: int


SCOPES = ("step", "layer", "op")
BEGIN, END = "begin", "end"  # of a launch: from where on the one behind may begin
CODE_PARTS = SHARE, WHOLE = ("share", "whole")
MERGES = MERGE_EXCHANGE, MERGE_CLUSTER = ("exchange", "cluster")


@dataclass(frozen=True)
class OpSchedule:
    """Per op. ``loader`` names the role that streams its weights (or KV rows). ``splits``: attention only, parts of the
    KV range per KV head (rounding-changing). ``share_offset`` rotates which blocks get the larger share of row groups.
    ``ways``: linears only, parts of the input columns that different blocks multiply (rounding-changing); then ``part_offset``
    rotates the shares of the parts' row groups, ``share_offset`` those of the features that the parts are added to.
    ``scale``: a factor of the input that is the same along a row meets the operand ("before") or the products ("after";
    rounding-changing). ``gather``: a linear's input arrives in "shared" memory, or in the "registers" that multiply it
    (rounding-changing); None: the compiler chooses. ``residual``: what a linear adds to its rows stays in the "block" that
    computed it, where that is the same one, or comes by "exchange". ``pause``: about so many nanoseconds
    pass between the meeting of the block and the first poll of the op's input. ``meeting_window``: bytes that may be in flight from the
    last tiles of the op before until the op's input is there; 0: as the ring says. ``dry_run``: while its input is
    waited for, a linear's loop of products runs once over its first tiles, for nothing, so that its code has been fetched.
    ``publish``: results are "staged" in shared memory
    as the vectors that travel, or leave word by word from the "registers" of who has them. ``merge``: an attention's splits are added by
    whoever gathers them from an "exchange" of all blocks, or within a "cluster" of as many blocks as there are splits
    (rounding-changing)."""

    op: str
    loader: str
    prefetch: Prefetch = field(default_factory=Prefetch)
    splits: int = 1
    share_offset: int = 0
    chunk: int = 0
    ways: int = 1
    part_offset: int = 0
    scale: str = "before"
    gather: str | None = None
    residual: str = "block"
    pause: int = 0
    meeting_window: int = 0
    dry_run: bool = False
    publish: str = STAGED
    merge: str = MERGE_EXCHANGE


@dataclass(frozen=True)
class EdgeSchedule:
    """Sync of one value between its producer op and all its readers, and how these poll it. ``back_off``: nanoseconds that a warp sleeps
    between two polls in vain. ``width``: most 16-byte vectors that a thread has under way together; 0: the compiler chooses."""

    value: str
    producer: str
    sync: Sync
    back_off: int = 0
    width: int = 0


@dataclass(frozen=True)
class Schedule:
    """All decisions for one graph on one machine."""

    arch: str
    blocks: int
    roles: tuple[Role, ...]
    rings: tuple[tuple[str, Ring], ...]  # loader role -> its ring
    ops: tuple[OpSchedule, ...]
    edges: tuple[EdgeSchedule, ...]
    batch: int  # row groups reduced together
    max_kv: int  # rows each KV cache holds
    scope: str = "step"  # what one launch runs: "step"; or as a dependent of the one before, a "layer", or a phase of one "op"
    start: str = ""  # scope "layer": the op at which a launch begins; "": to be decided
    trigger: str = BEGIN  # scope "layer": from where on the launch behind may begin: BEGIN, END, or an op
    block_registers: str = ""  # "launched": each thread has as many; "moved": loaders leave theirs to consumers; "": to be decided
    finish: str = ""  # who adds partial sums and publishes: the "block", or a "warp" that does nothing else; "": to be decided
    sequences: int = 1  # of a batch: each has KV caches of its own, and a step's new tokens are theirs
    page_rows: int = 0  # cached rows lie in pages of so many; 0: those of a sequence follow each other
    pool_pages: int = 0  # of a layer's pool, for all sequences
    warm_up: str | None = None  # the role that has the kernel's code read into L2 when a launch begins
    warm_blocks: int | None = None  # so many blocks do, the first ones; None: all
    warm_part: str = SHARE  # of the code, that each of them reads: a "share" of it, or the "whole"
    warm_every: int = 1  # of the launches: those whose first step is a multiple of so many steps behind the first
    resident: int = 1  # blocks that find room on an SM: two, and a launch fills its rings while the one before still works

    def op(self, name: str) -> OpSchedule:
        return next(o for o in self.ops if o.op == name)

    def edge(self, value: str) -> EdgeSchedule:
        return next(e for e in self.edges if e.value == value)

    def ring(self, role: str) -> Ring:
        return dict(self.rings)[role]

    def role(self, name: str) -> Role:
        return next(r for r in self.roles if r.name == name)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: where splits are added within one, as many as there are splits."""
        return max((o.splits for o in self.ops if o.merge == MERGE_CLUSTER), default=1)

    @property
    def consumer(self) -> Role:
        return next(r for r in self.roles if r.kind == "consumer")
