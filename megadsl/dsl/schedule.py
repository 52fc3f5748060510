"""``with mk.schedule(kernel) as s:`` the user's say over every decision of a Schedule."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from megadsl.diagnostics import Collector, MegadslError, collecting, declare
from megadsl.dsl.apply import apply
from megadsl.dsl.kernel import Kernel, require_kernel
from megadsl.dsl.mistakes import explain, misuse
from megadsl.dsl.overrides import (
    Changes,
    Override,
    Overrides,
    SetCount,
    SetKernel,
    SetLoader,
    SetPoll,
    SetPrefetch,
    SetRing,
    SetRole,
    SetScale,
    SetSplit,
    SetSync,
)
from megadsl.ir.schedule import CODE_PARTS, L2_BY, MERGES, REGISTERS, SCOPES, SHARED, STAGED, Flag, Sentinel, Sync, Tagged
from megadsl.machine import machine
from megadsl.source import UNKNOWN, Span, caller_span
from megadsl.types import Level

__all__ = ["EdgeHandle", "OpHandle", "Overrides", "ScheduleBlock", "apply", "schedule"]

BAD_COUNT = declare("MK150", "{what} = {value!r} is not an integer of at least {least}", "give a whole number, {least} or more")
BAD_CHOICE = declare("MK151", "{what} = {value!r} is not known", "choose one of: {choices}")

HINTS = ("evict_first", "evict_normal", "evict_last")
KINDS = ("loader", "consumer")
SCALES = ("before", "after")
GATHERS = (SHARED, REGISTERS)
RESIDUALS = ("block", "exchange")
PUBLISHES = (STAGED, REGISTERS)
BLOCK_REGISTERS = ("launched", "moved")
FINISHES = ("block", "warp")


class _Keep:
    """The default of an argument that, left out, keeps what the schedule has."""


_KEEP = _Keep()
_Count = int | _Keep


class ScheduleBlock:
    """Records overrides. Bad values are collected and raised at the end of the with block; names are checked when applied."""

    def __init__(self, kernel: Kernel, arch: str | None) -> None:
        if arch is not None:
            machine(arch, caller_span())
        self._kernel = kernel
        self._arch = arch
        self._records: list[Override] = []
        self._found = Collector()

    def __enter__(self) -> ScheduleBlock:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(value, AttributeError | TypeError) and misuse(value, _OWNERS):
            raise MegadslError([*self._found.found, explain(value, UNKNOWN, _OWNERS)]) from value
        if kind is None:
            self._found.raise_if_any()
            self._kernel.records[self._arch] = tuple(self._records)

    def __getitem__(self, op: str) -> OpHandle:
        """The op called ``op``: ``s["o_proj"].prefetch(...)``."""
        return OpHandle(self, op)

    def phase(self, op: str) -> OpHandle:
        """The op again, where roles are meant: ``s.phase("attention").loader("kv_loader")``."""
        return OpHandle(self, op)

    def edge(self, producer: str, consumer: str) -> EdgeHandle:
        """The value that ``producer`` hands to ``consumer``. All readers of the value share its sync.

        An op with itself, ``s.edge("attention", "attention")``, is what its own blocks hand to each other (parts of a split).
        """
        return EdgeHandle(self, producer, consumer)

    def blocks(self, n: int) -> None:
        """Blocks of the grid, one per SM. Bit-identical where attention's kv split is given: by default it follows the blocks."""
        self._count("blocks", n, caller_span())

    def warps(self, n: int) -> None:
        """Warps of a block, all roles together; consumers get what loaders leave. Changes rounding: they share every sum."""
        self._count("warps", n, caller_span())

    def batch(self, n: int) -> None:
        """Row groups of a linear that are reduced together. Bit-identical."""
        self._count("batch", n, caller_span())

    def max_kv(self, n: int) -> None:
        """Rows that each KV cache holds. Bit-identical."""
        self._count("max_kv", n, caller_span())

    def launch(self, scope: str, *, start: str | _Keep = _KEEP, trigger: str | _Keep = _KEEP) -> None:
        """What one launch runs: "step", the megakernel; "layer": the ops of one layer, from the op ``start`` (default: the attention)
        to the one before it in the next layer; "op": one op of one layer. Of the last two each is a dependent of the launch before
        (programmatic dependent launch), whose rings fill while that one still works. ``trigger``, of "layer": from where on the launch
        behind may begin: "begin" (default), an op of the layers, or "end", when blocks leave: they then have all shared memory.
        Bit-identical."""
        span = caller_span()
        self.choice("launch scope", scope, SCOPES, span)
        given = (("scope", scope), ("start", start), ("trigger", trigger))
        self.record(SetKernel(tuple((field, value) for field, value in given if not isinstance(value, _Keep)), span))

    def registers(self, which: str) -> None:
        """Registers of a block's threads: "launched", each has as many; "moved": the loaders leave what they do not need to the
        consumers (setmaxnreg), for kernels that would spill. Needs whole warpgroups of consumers. Bit-identical."""
        span = caller_span()
        self.choice("registers", which, BLOCK_REGISTERS, span)
        self.record(SetKernel((("block_registers", which),), span))

    def finish(self, who: str) -> None:
        """Who adds the partial sums of a block's warps, and publishes: "block", those warps; "warp", one more that does nothing else, so
        that they go on to the next op meanwhile. For few tokens. Bit-identical."""
        span = caller_span()
        self.choice("finish", who, FINISHES, span)
        self.record(SetKernel((("finish", who),), span))

    def warm_code(
        self,
        role: str | _Keep | None = _KEEP,
        *,
        blocks: int | _Keep | None = _KEEP,
        part: str | _Keep = _KEEP,
        every: int | _Keep = _KEEP,
    ) -> None:
        """When a launch begins, the warps of ``role`` ask L2 for the kernel's own code, to be evicted last (prefetch instructions, for
        which nobody waits); None: nobody does. For launches of whole steps. Bit-identical.

        blocks: the first so many do, None all. part: each of them a "share" of the code, or the "whole". every: not at each launch, but
        at those that begin a multiple of so many steps behind the first one.
        """
        span = caller_span()
        found: list[tuple[str, int | str | bool | None]] = []
        if not isinstance(role, _Keep):
            found.append(("warm_up", role))
        if not isinstance(blocks, _Keep):
            found.append(("warm_blocks", blocks if blocks is None else self.checked("warm_code blocks", blocks, 1, span)))
        if not isinstance(part, _Keep):
            self.choice("warm_code part", part, CODE_PARTS, span)
            found.append(("warm_part", part))
        self.record(SetKernel((*found, *self.changes(1, span, warm_every=every)), span))

    def role(self, name: str, *, warps: int, kind: str | None = None) -> None:
        """Warps of a role; the consumer's change rounding. A role that the default schedule lacks needs kind="loader"."""
        span = caller_span()
        given: Changes = (("warps", self.checked("role warps", warps, 1, span)),)
        if kind is not None:
            self.choice("role kind", kind, KINDS, span)
            given = (("kind", kind), *given)
        self.record(SetRole(name, given, span))

    def ring(
        self,
        name: str,
        *,
        stages: int | _Keep = _KEEP,
        stage_bytes: int | _Keep = _KEEP,
        window: int | _Keep = _KEEP,
        meeting_window: int | _Keep = _KEEP,
    ) -> None:
        """A ring, by its name or its role's. ``window`` bounds the bytes in flight, ``meeting_window`` around meetings of
        blocks. Bit-identical."""
        span = caller_span()
        changes = self.changes(1, span, stages=stages, stage_bytes=stage_bytes, window=window, meeting_window=meeting_window)
        self.record(SetRing(name, changes, span))

    def record(self, override: Override) -> None:
        self._records.append(override)

    def checked(self, what: str, value: int, least: int, span: Span) -> int:
        """``value``; MK150 when it is no integer of at least ``least``."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._found.add(BAD_COUNT, span, what=what, value=value, least=least)
        return value

    def choice(self, what: str, value: object, choices: Sequence[object], span: Span) -> None:
        """MK151 when ``value`` is none of ``choices``."""
        if value not in choices:
            self._found.add(
                BAD_CHOICE, span, what=what, value=value, choices=", ".join(f"mk.{c}" if isinstance(c, Level) else str(c) for c in choices)
            )

    def changes(self, least: int, span: Span, **values: _Count) -> Changes:
        """The given ones of ``values``, checked."""
        return tuple((k, self.checked(k, v, least, span)) for k, v in values.items() if not isinstance(v, _Keep))

    def _count(self, field: str, value: int, span: Span) -> None:
        self.record(SetCount(field, self.checked(field, value, 1, span), span))


class OpHandle:
    """One op of the kernel, as the schedule sees it."""

    def __init__(self, block: ScheduleBlock, op: str) -> None:
        self._block = block
        self._op = op

    def loader(self, role: str) -> OpHandle:
        """The role that streams this op's weights (or KV rows). Bit-identical."""
        self._block.record(SetLoader(self._op, role, caller_span()))
        return self

    def prefetch(
        self,
        *,
        smem: str | _Keep | None = _KEEP,
        registers: int | _Keep | None = _KEEP,
        l2: int | _Keep = _KEEP,
        l2_by: str | _Keep = _KEEP,
        ahead_of: str | _Keep | None = _KEEP,
        hint: str | _Keep = _KEEP,
    ) -> OpHandle:
        """Where this op's weights go before they are needed. Bit-identical.

        smem: "ring" takes them as early as the ring has room, None only once the op has begun. registers: tiles of a
        linear (of an attention: cached chunks of each warp, 0 or 1) that the consumers take from the ring before they wait for
        its input, None as many as the compiler thinks good.
        l2: bytes of each block's share (of an attention: of the cached rows of each of its units) that are prefetched into L2 when the
        loader reaches the op ``ahead_of``; the next layer's, where that op stands behind this one. l2_by: by an "instruction", for which
        the loader does not wait, or by a "load" into shared memory that nobody reads (of which it takes a stage), two at a time: what has
        been loaded is read from L2 at a higher rate than what was prefetched. hint: evict_first, evict_normal, evict_last.
        """
        span = caller_span()
        found: list[tuple[str, int | str | bool | None]] = []
        if not isinstance(smem, _Keep):
            if smem is not None:
                self._block.choice("prefetch smem", smem, ("ring", "None"), span)
            found.append(("smem", smem == "ring"))
        if not isinstance(registers, _Keep):
            asked = registers if registers is None else self._block.checked("prefetch registers", registers, 0, span)
            found.append(("registers", asked))
        if not isinstance(l2, _Keep):
            found.append(("l2_bytes", self._block.checked("prefetch l2", l2, 0, span)))
        if not isinstance(l2_by, _Keep):
            self._block.choice("prefetch l2_by", l2_by, L2_BY, span)
            found.append(("l2_by", l2_by))
        if not isinstance(ahead_of, _Keep):
            found.append(("ahead_of", ahead_of))
        if not isinstance(hint, _Keep):
            self._block.choice("prefetch hint", hint, HINTS, span)
            found.append(("hint", hint))
        self._block.record(SetPrefetch(self._op, tuple(found), span))
        return self

    def split(self, *, kv: int | _Keep = _KEEP, share_offset: int | _Keep = _KEEP, chunk: int | _Keep = _KEEP) -> OpHandle:
        """How the op's work is shared. ``kv``: parts of the KV range per KV head. ``chunk``: tiles of a row group between two
        gathers of a linear's input; both change rounding. ``share_offset``: the block that first gets a larger share; bit-identical.
        """
        span = caller_span()
        given = self._block.changes(1, span, splits=kv)
        given += self._block.changes(0, span, share_offset=share_offset, chunk=chunk)
        self._block.record(SetSplit(self._op, given, span))
        return self

    def columns(self, *, ways: int) -> OpHandle:
        """Split a linear's input columns in ``ways`` parts that different blocks multiply. Changes rounding.

        Before, each block gathers the whole input and has rows / blocks rows of results; after, it gathers 1 / ``ways`` of the
        input, publishes fp32 sums of ``ways`` times as many rows, and adds ``ways`` parts of its rows. 1: no split. The parts'
        sync is that of ``s.edge(op, op)``.
        """
        span = caller_span()
        self._block.record(SetSplit(self._op, (("ways", self._block.checked("columns ways", ways, 1, span)),), span))
        return self

    def scale(self, when: str) -> OpHandle:
        """Where a factor of a linear's input that is the same along a row (a norm's) comes in. Changes rounding.

        "before": it multiplies the input, which is reduced, scaled and rounded to bf16 before the first product. "after": the
        input is final as it arrives, and the factor multiplies the fp32 products.
        """
        span = caller_span()
        self._block.choice("scale", when, SCALES, span)
        self._block.record(SetScale(self._op, when, span))
        return self

    def gather(self, into: str) -> OpHandle:
        """Where a linear's input arrives. Changes rounding: sums are added in another order.

        "shared": in shared memory, where all warps meet and load it from. "registers": each lane polls the elements that it
        multiplies itself, so that the block need not meet first; for mk.Sentinel, no more blocks than the input has groups of 8
        features, and a few thousand columns: of the whole input of up to 4 tokens, of a chunk (split(chunk=)) of more.
        """
        span = caller_span()
        self._block.choice("gather", into, GATHERS, span)
        self._block.record(SetSplit(self._op, (("gather", into),), span))
        return self

    def residual(self, where: str) -> OpHandle:
        """Where a linear finds the values that it adds to its own rows. Bit-identical.

        "block": in its shared memory, if the block computed exactly these rows itself; each block then meets once more behind
        the publication. "exchange": among the vectors that it polls.
        """
        span = caller_span()
        self._block.choice("residual", where, RESIDUALS, span)
        self._block.record(SetSplit(self._op, (("residual", where),), span))
        return self

    def poll(self, *, pause: int | _Keep = _KEEP, meeting_window: int | _Keep = _KEEP) -> OpHandle:
        """How a block waits for the op's input. Bit-identical.

        pause: its first poll comes about so many nanoseconds (at most twice that; up to 1,000,000) after its warps have met, or have
        published where they need not meet. What is polled in vain stands in the way of what other blocks still have to store. 0: at
        once. A warp that finishes, s.finish("warp"), meets the others when it is ready for the op too; where they pause, right behind
        what it publishes.
        meeting_window: bytes of the weight stream that may be in flight meanwhile, from the last tiles of the op before until the input is
        there (of an attention: until its splits are added), in place of the ring's meeting_window; 0: as the ring says.
        """
        span = caller_span()
        given: Changes = ()
        if not isinstance(pause, _Keep):
            given += (("pause", self._block.checked("poll pause", pause, 0, span)),)
        if not isinstance(meeting_window, _Keep):
            given += (("meeting_window", self._block.checked("poll meeting_window", meeting_window, 0, span)),)
        self._block.record(SetSplit(self._op, given, span))
        return self

    def dry_run(self, on: bool = True) -> OpHandle:
        """Whether a linear's loop of products runs once for nothing while its input is waited for. Bit-identical.

        It multiplies the op's first tiles by themselves, if they have landed, waits for nothing and leaves nothing: what the products
        then find is their own code, fetched. For inputs of up to 4 tokens that arrive in shared memory; no tiles are held in registers
        then.
        """
        span = caller_span()
        self._block.choice("dry_run", on, (True, False), span)
        self._block.record(SetSplit(self._op, (("dry_run", on),), span))
        return self

    def publish(self, form: str) -> OpHandle:
        """How an op's results leave a block. Bit-identical.

        "staged": by way of shared memory, as the 16-byte vectors that travel. "registers": each pair of neighbouring features as a 4-byte
        word, from the thread that has it; for linears and attention whose results a warp of its own finishes, s.finish("warp"), and sends
        by mk.Sentinel to blocks of which each owns a part; not for linears of two weights, whose threads have single features.
        """
        span = caller_span()
        self._block.choice("publish", form, PUBLISHES, span)
        self._block.record(SetSplit(self._op, (("publish", form),), span))
        return self

    def merge(self, where: str) -> OpHandle:
        """Where an attention's splits are added. May round differently: where it changes how many splits a thread adds.

        "exchange": each block polls, from all blocks, the parts of the features that it adds. "cluster": a KV head's splits are a cluster
        of blocks (2, 4 or 8; the whole launch is in clusters of so many), and each sends the others their features of its part through
        distributed shared memory, past the loads in flight; for an attention whose value goes by mk.Sentinel, with a block for each
        split of each KV head. The parts' own sync is not used then.
        """
        span = caller_span()
        self._block.choice("merge", where, MERGES, span)
        self._block.record(SetSplit(self._op, (("merge", where),), span))
        return self

    def sync(self, sync: Sync) -> OpHandle:
        """How all readers wait for what this op gives: mk.Tagged, mk.Sentinel or mk.Flag. Bit-identical."""
        EdgeHandle(self._block, self._op, None).sync(sync)
        return self


class EdgeHandle:
    """A value between a producer and its readers."""

    def __init__(self, block: ScheduleBlock, producer: str, consumer: str | None) -> None:
        self._block = block
        self._producer = producer
        self._consumer = consumer

    def sync(self, sync: Sync) -> None:
        """How the readers of the value wait: mk.Tagged, mk.Sentinel or mk.Flag.

        Bit-identical for values. Parts (of an attention, of split columns) are fp32, of which mk.Tagged keeps 20 bits of the
        mantissa: changes rounding.
        """
        span = caller_span()
        if not isinstance(sync, Tagged | Sentinel | Flag):
            self._block.choice("sync", sync, ("mk.Tagged(...)", "mk.Sentinel(...)", "mk.Flag(...)"), span)
            return
        self._block.checked("sync slots", sync.slots, 1, span)
        self._block.choice("sync level", sync.level, tuple(Level), span)
        self._block.record(SetSync(self._producer, self._consumer, sync, span))

    def poll(self, *, back_off: int | _Keep = _KEEP, width: int | _Keep = _KEEP) -> None:
        """How the readers of the value poll what is not there yet. Bit-identical.

        back_off: nanoseconds (at most 1,000,000) that a warp sleeps behind a poll in vain; 0: it polls again at once. What is polled in
        vain stands in the way of what others store; who sleeps sees it later. width: most vectors of 16 bytes, 1 to 16, that a thread has
        under way together while it gathers the value into shared memory; 0: as the compiler thinks best. Inputs that arrive in registers,
        and parts, are polled as they are added.
        """
        span = caller_span()
        changes = self._block.changes(0, span, back_off=back_off, width=width)
        self._block.record(SetPoll(self._producer, self._consumer or self._producer, changes, span))


def require_counts(**values: object) -> None:
    """MK150 for each that is neither None nor an integer; how large it may be is the machine's to say."""
    with collecting() as found:
        for what, value in values.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                found.add(BAD_COUNT, what=what, value=value, least=1)


def schedule(kernel: Kernel, arch: str | None = None) -> ScheduleBlock:
    """Overrides for ``kernel`` on every architecture, or on ``arch`` alone; everything not named keeps its default.

    What a block for one architecture decides goes before what one for all decides, in whichever order they stand; a second block
    for the same architecture, or a second one for all, replaces the first. MK001 unknown arch, MK150 and MK151 bad values, MK220
    misspelt calls, MK224 no kernel; unknown names are reported on lowering (MK152 to MK158), as is what the architecture that is
    compiled for lacks (MK163, MK167, MK170, MK245).
    """
    require_kernel(kernel, caller_span())
    return ScheduleBlock(kernel, arch)


_OWNERS = (ScheduleBlock, OpHandle, EdgeHandle)  # whose signatures a mend may show
