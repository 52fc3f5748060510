"""Plan: for every role the exact program it runs, and where everything lies. What emit/ prints, what checks will prove.

Nodes exist per op and per run, never per tile: trip counts are expressions over run-time scalars and the split functions
that the device code shares (templates/include/megadsl/layout.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from megadsl.ir.graph import Graph
from megadsl.ir.schedule import Schedule, Sync
from megadsl.source import Span
from megadsl.types import Level

FIRST_EPOCH = 1
"""The epoch of the first launch on a fresh exchange arena, which the host gives."""


class Verb(Enum):
    """What an instruction does, as far as synchronisation is concerned."""

    WAIT = "wait"
    LOAD = "load"
    COMPUTE = "compute"
    STORE = "store"
    SIGNAL = "signal"
    PREFETCH = "prefetch"
    BARRIER = "barrier"


@dataclass(frozen=True)
class Region:
    """Part of a memory: ``space`` is smem, registers, ring, weights, kv, exchange, control, logits or angles; ``name`` says whose.
    ``level`` is the placement level that shares it. ``index`` tells which round: an expression over layer and epoch."""

    space: str
    name: str
    level: Level
    index: str = ""


@dataclass(frozen=True)
class Site:
    """A place where a role waits or signals. Hang reports, timelines and mutants speak of sites by ``id``.

    kind: ring.empty, ring.full, scratch, exchange, gate, publish. ``expects`` says in words what the expected value means.
    """

    id: int
    role: str
    op: str
    kind: str
    expects: str
    span: Span


@dataclass(frozen=True)
class Instr:
    """One instruction of a role. ``call`` names the macro in templates/ that prints it; ``args`` are its parameters.

    ``trips`` is how often it runs per execution (an expression); ``body`` are instructions nested in it (a prologue).
    ``syncs`` names the block's barriers that the call itself passes, in order: what lies between its accesses.
    """

    verb: Verb
    call: str
    op: str
    span: Span
    site: int | None = None
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    trips: str = "1"
    body: tuple[Instr, ...] = ()
    syncs: tuple[str, ...] = ()
    args: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """The instructions of one op in one role."""

    op: str
    title: str
    span: Span
    body: tuple[Instr, ...]


@dataclass(frozen=True)
class LayerLoop:
    """Runs its phases ``trips`` times; stays a loop in the emitted code. Of a launch of less than a step, "1": its phases are those of
    layer ``begin`` behind the one that the launch is for."""

    trips: str
    body: tuple[Phase, ...]
    begin: int = 0


Item: TypeAlias = Phase | LayerLoop


@dataclass(frozen=True)
class Program:
    """What one role runs, start to end. ``start``: before all else, by all lanes of its warps, for no op."""

    role: str
    kind: str
    first_warp: int
    warps: int
    body: tuple[Item, ...]
    start: tuple[Instr, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """A value's way between blocks: ``slots`` rounds of ``owners`` x ``vectors`` 16-byte vectors in the exchange arena, the
    first ``units`` of each owner for a group of 8 features of a token each.

    ``uses`` is how many rounds a launch takes (an expression); ``wire`` the device type; offsets in bytes.
    """

    name: str
    level: Level
    sync: Sync
    wire: str
    dtype: str
    offset: int
    owners: int
    vectors: int
    units: int
    slots: int
    groups: int
    share_offset: int
    flags_offset: int
    uses: str
    span: Span
    words: bool = False  # each word of a vector is accessed by itself: some op publishes word by word

    @property
    def dense(self) -> bool:
        """Whether a unit's number is its address: units of all blocks follow each other without room between them."""
        return self.wire == "Sentinel" and self.dtype == "bf16" and self.groups >= self.owners

    @property
    def slot_bytes(self) -> int:
        return self.owners * self.vectors * 16


@dataclass(frozen=True)
class Area:
    """A stretch of a block's shared memory. Areas of different phases may lie over each other (``overlay``)."""

    name: str
    offset: int
    bytes: int
    overlay: bool = False


@dataclass(frozen=True)
class StageRecord:
    """What one kind of load puts into a ring stage."""

    op: str
    bytes: int
    format: str  # "bf16 tile 8x1024", "bf16 vector", "kv bf16"


@dataclass(frozen=True)
class PackSource:
    """Rows of a packed matrix that come from one checkpoint tensor; ``order`` is natural, or pairs_half of each head's first
    ``rotary_dim`` features."""

    weight: str
    rows: int
    order: str
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True)
class PackRecord:
    """How a weight lies in the packed arena. kind: matrix, scale, bias, vector or table; sizes in elements, offsets in bytes.

    A matrix is tiles of 8 rows x ``tile_columns`` in panels of 32 columns, row groups outermost; depends on the
    tile layout only, never on a schedule, so that tuning does not repack. A bias has one element for each row of its matrix,
    in order; so has a scale, in fp32. ``format`` is a matrix's, or that of the matrix whose rows are scaled (ir.formats).
    """

    name: str
    kind: str
    offset: int
    layer_stride: int
    per_layer: bool
    sources: tuple[PackSource, ...]
    interleave: bool
    rows: int
    columns: int
    columns_padded: int
    tile_columns: int
    bytes: int
    format: str = "bf16"


def ident(name: str) -> str:
    """A C identifier for an op, value or role name."""
    return "".join(c if c.isalnum() else "_" for c in name)


@dataclass(frozen=True)
class Record:
    """One member of the emitted Shape struct: a header struct (or mk::i32) and its words in order."""

    type: str
    name: str
    words: tuple[int, ...]
    comment: str = ""


@dataclass(frozen=True)
class Tunables:
    """Compile-time sizes of the emitted kernel."""

    tokens: int
    batch: int
    consumer_warps: int
    threads: int
    consumer_registers: int  # of a thread, once registers have moved from the loaders to the consumers; 0: all keep what the launch gives
    loader_registers: int
    head_dim: int
    rope_dim: int
    copies: str  # how a loader fills a stage: "bulk", one lane at once, or "lanes", those of its warp, 16 bytes each
    finishes: bool  # a warp behind the consumers' adds what they multiply, and publishes


@dataclass(frozen=True)
class Plan:
    """Everything emit/ and the runtime need."""

    graph: Graph
    schedule: Schedule
    tunables: Tunables
    programs: tuple[Program, ...]
    sites: tuple[Site, ...]
    records: int  # room for the timeline of a role, in a build that leaves one
    exchanges: tuple[Exchange, ...]
    areas: tuple[Area, ...]
    stages: tuple[StageRecord, ...]
    packs: tuple[PackRecord, ...]
    shape: tuple[Record, ...]
    buffers: Mapping[str, int]
    smem_bytes: int

    def exchange(self, name: str) -> Exchange:
        return next(e for e in self.exchanges if e.name == name)

    def program(self, role: str) -> Program:
        return next(p for p in self.programs if p.role == role)
