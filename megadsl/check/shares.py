"""Who owns what: every row group, feature, query head and cached row once, and where an exchange's vectors lie.

Checked with the numbers that the kernel reads (Shape) against what lowering says about each exchange, for every block.
"""

from __future__ import annotations

from itertools import pairwise

from megadsl.check.batch import Batch, batches, segments, skipped_chunks
from megadsl.check.model import Device, attention_unit
from megadsl.check.report import Findings
from megadsl.diagnostics import declare
from megadsl.ir.graph import Attention, Custom, Linear
from megadsl.ir.plan import Exchange, Instr, ident
from megadsl.lower.columns import share_begin, share_owner
from megadsl.lower.exchanges import ASYNC, PART_BYTES, row_vectors, vectors_for
from megadsl.lower.gathers import tiles_together
from megadsl.lower.shape import CHUNK_ROWS
from megadsl.lower.tiling import GROUP_ROWS, tiling
from megadsl.types import at_layer, ceil_div

COVER = declare("MK530", "{what} of {op!r}: {wrong}", "split the op with one function and the same numbers wherever it is split")
MISMATCH = declare(
    "MK531",
    "{op!r} shares {value!r} out as {mine}, its exchange as {theirs}",
    "let producer and exchange take groups and share_offset from one place",
)
CAPACITY = declare(
    "MK532",
    "block {block} publishes {need} units of {value!r}, the exchange has room for {have}",
    "size the exchange by the largest share",
)
ARENA = declare("MK533", "{value!r} and {other!r} lie over each other in the exchange arena", "give every exchange bytes of its own")
ROWS = declare(
    "MK534",
    "{op!r} appends KV row {row} in one block while another one streams the chunk it goes to",
    "let the unit that takes the newest rows be the only one that reads their chunk",
)


def check_shares(device: Device, findings: Findings) -> list[str]:
    """Coverage of every op and exchange, and of the cached rows for every length of the cache in chunks."""
    for op in device.ops[0]:
        _linear(device, op, findings)
    for step in device.steps(device.consumer, 1):
        if step.instr.call in ("publish", "keep"):
            _producer(device, step.instr, findings)
        elif step.instr.call == "matrix" and step.instr.args["parts"]:
            _parts(device, step.instr, findings)
    for attention in device.ops[1]:
        _attention(device, attention, findings)
    for custom in device.customs():
        _custom(device, custom, findings)
    for e in device.plan.exchanges:
        if e.wire != ASYNC:
            _exchange(device, e, findings)
    _arena(device, findings)
    lengths = _rows(device, findings) if device.sequences == 1 else _batch_rows(device, findings)
    proved = [
        f"shares: every row group and feature group of {len(device.ops[0])} linears and {len(device.plan.exchanges)} exchanges has exactly"
        f" one of {device.blocks} blocks, the same for producers and readers",
        "exchange arena: slots and flags of different values apart, as many vectors as the largest share",
    ]
    if device.ops[1]:
        proved.append(
            f"KV rows: every cached chunk read once per KV head, new rows' chunk by the appending unit alone ({lengths}"
            f" {'cache lengths' if device.sequences == 1 else f'batches of {device.sequences} sequences'})"
        )
    return proved


def _split(device: Device, op: str, what: str, groups: int, offset: int, findings: Findings, sharers: int | None = None) -> None:
    """share_begin tiles [0, groups), and share_owner is its inverse."""
    span, of = device.op(op).span, device.blocks if sharers is None else sharers
    shares = device.shares(groups, offset, of)
    wrong = ""
    if shares[0] != 0 or shares[-1] != groups or any(a > b for a, b in pairwise(shares)):
        wrong = f"blocks own {shares[0]} to {shares[-1]} of {groups}"
    else:
        for g in range(groups):
            owner = share_owner(groups, of, offset, g)
            if not share_begin(groups, of, offset, owner) <= g < share_begin(groups, of, offset, owner + 1):
                wrong = f"group {g} is looked for at block {owner}, which does not own it"
                break
    if wrong:
        findings.add(COVER, span, [("blocks", [f"{groups} groups, offset {offset}, {of} blocks"])], op=op, what=what, wrong=wrong)


def _linear(device: Device, op: Linear, findings: Findings) -> None:
    m, tiles = device.matrix(op.name), tiling(op)
    mine = (m.groups, m.fold, m.pieces, m.tile_columns, m.tile_bytes, m.together)
    together = tiles_together(op, device.plan.schedule, device.tokens)
    theirs = (tiles.groups, tiles.fold, tiles.pieces, tiles.tile_columns, tiles.tile_bytes, together)
    if mine != theirs or m.pieces % (m.ways * m.chunk_pieces):
        rows = [("kernel", [str(mine)]), ("packed weights", [str(theirs)])]
        cut = f"{m.ways} parts, {m.chunk_pieces} tiles a chunk"
        wrong = f"(row groups, fold, tiles per group, columns, bytes of a tile, tiles in a stage) are {mine}, packed as {theirs}, {cut}"
        findings.add(COVER, op.span, rows, op=op.name, what="tiles", wrong=wrong)
    _split(device, op.name, "row groups", m.shared, m.share_offset, findings)


def _parts(device: Device, instr: Instr, findings: Findings) -> None:
    """What a block multiplies of the parts of the columns is what readers take it to have published."""
    e, m = device.exchanges[str(instr.args["parts"])], device.matrix(instr.op)
    if (m.shared, m.share_offset) != (e.groups, e.share_offset):
        _mismatch(instr, e, (m.shared, m.share_offset), findings)
    most = max(sum(last - first for _, first, last in found) for found in device.parts(instr.op)) * device.tokens * 2
    if most > e.vectors or e.owners != device.blocks:
        rows = [("busiest block", [f"{most} vectors"]), (f"exchange {e.name}", [f"{e.vectors} vectors, {e.owners} owners"])]
        findings.add(CAPACITY, e.span, rows, op=instr.op, block="of most rows", need=most, value=e.name, have=e.vectors)


def _mismatch(instr: Instr, e: Exchange, mine: tuple[int, int], findings: Findings) -> None:
    rows = [
        (f"producer {instr.op}", [f"groups {mine[0]}, offset {mine[1]}"]),
        (f"readers of {e.name}", [f"groups {e.groups}, offset {e.share_offset}"]),
    ]
    findings.add(MISMATCH, instr.span, rows, op=instr.op, value=e.name, mine=mine, theirs=(e.groups, e.share_offset))


def _attention(device: Device, op: Attention, findings: Findings) -> None:
    heads, parts = device.heads(op.name), device.exchanges[f"{op.name}.parts"]
    rows = op.heads // op.kv_heads * device.tokens
    windows = tuple(at_layer(op.window, layer) or 0 for layer in range(len(heads.windows)))
    mine = (heads.kv_heads, heads.rows, heads.merge_groups, heads.units, heads.windows)
    theirs = (op.kv_heads, rows, op.heads * op.head_dim // GROUP_ROWS, parts.owners, windows)
    if mine != theirs:
        sides = [("kernel", [str(mine)]), ("spec and exchange", [str(theirs)])]
        wrong = f"(KV heads, query rows, merged groups, units, windows) are {mine}, they should be {theirs}"
        findings.add(COVER, op.span, sides, op=op.name, what="units", wrong=wrong)
    _split(device, op.name, "merged groups", heads.merge_groups, heads.merge_offset, findings, device.sharers(op.name))
    sent = rows * row_vectors(op.head_dim) if parts.wire != ASYNC else rows * op.head_dim // GROUP_ROWS * PART_BYTES // 16
    _room(op.name, parts, sent, findings)


def _custom(device: Device, op: Custom, findings: Findings) -> None:
    """What its function is given are the features that its spec names; what blocks own of its outputs is everything."""
    features, _, groups, offset = device.records[ident(op.name)]
    mine = [features, *(device.rows(op.name, arg)[:2] for arg, _ in op.inputs)]
    theirs = [op.call.features, *((ref.begin, ref.features) for _, ref in op.inputs)]
    if mine != theirs or groups * GROUP_ROWS != features:
        sides = [("kernel", [f"{mine}, {groups} groups"]), ("spec", [str(theirs)])]
        findings.add(COVER, op.span, sides, op=op.name, what="rows", wrong=f"features (of outputs, of each input) are {mine}, not {theirs}")
    _split(device, op.name, "groups", groups, offset, findings)


def _room(op: str, e: Exchange, need: int, findings: Findings) -> None:
    """As many vectors as an owner publishes, where these are no units."""
    if need > e.vectors:
        sides = [("every owner", [f"{need} vectors"]), (f"exchange {e.name}", [f"{e.vectors} vectors"])]
        findings.add(CAPACITY, e.span, sides, op=op, block="of every number", need=need, value=e.name, have=e.vectors)


def _producer(device: Device, instr: Instr, findings: Findings) -> None:
    """What an op stages is what publishing (and keeping) takes to be staged."""
    e, op = device.exchanges[str(instr.args["value"])], device.op(instr.op)
    if isinstance(op, Linear):
        m = device.matrix(op.name)
        mine = (m.groups // m.fold, m.share_offset if m.ways == 1 else e.share_offset)  # parts are added by the value's own share
    else:
        words = device.records[ident(op.name)]
        heads = device.heads(op.name) if f"{ident(op.name)}_merge" in device.records else None
        mine = (words[2], words[3]) if heads is None else (heads.merge_groups, heads.merge_offset)
    if mine != (e.groups, e.share_offset):
        _mismatch(instr, e, mine, findings)


def _exchange(device: Device, e: Exchange, findings: Findings) -> None:
    op = e.name.rsplit(".", 1)[0] if e.dtype != "bf16" else device.plan.graph.value(e.name).producer
    words = device.records[f"{ident(e.name)}_exchange"]
    expected = (e.offset // 16, e.owners * e.vectors, e.slots, e.vectors, e.units, e.groups)
    if tuple(words[:6]) != expected or words[7] != e.share_offset:
        rows = [("kernel", [str(words)]), ("plan", [str(expected)])]
        findings.add(
            COVER, e.span, rows, op=op, what=f"exchange {e.name}", wrong=f"the kernel reads {tuple(words[:6])}, the plan says {expected}"
        )
    if e.dtype == "u32":
        _room(op, e, device.tokens, findings)
    if e.dtype != "bf16":
        return
    sharers = device.sharers(op)
    _split(device, op, f"exchange {e.name}", e.groups, e.share_offset, findings, sharers)
    shares = device.shares(e.groups, e.share_offset, sharers)
    most = max(range(device.blocks), key=lambda b: shares[b + 1] - shares[b])
    need = (shares[most + 1] - shares[most]) * device.tokens
    if need > e.units or e.vectors < vectors_for(e.sync, e.units) or e.owners != sharers:
        rows = [(f"block {most}", [f"{need} units"]), (f"exchange {e.name}", [f"{e.units} units, {e.vectors} vectors, {e.owners} owners"])]
        findings.add(CAPACITY, e.span, rows, op=op, block=most, need=need, value=e.name, have=e.units)
    if GROUP_ROWS * e.groups < device.plan.graph.value(e.name).features:
        findings.add(
            COVER, e.span, [("exchange", [f"{e.groups} groups"])], op=op, what=f"exchange {e.name}", wrong="features without a group"
        )


def _arena(device: Device, findings: Findings) -> None:
    taken = [(e.offset, e.offset + e.slot_bytes * e.slots, e) for e in device.plan.exchanges if e.wire != ASYNC]
    taken += [(e.flags_offset, e.flags_offset + 64 * e.owners, e) for e in device.plan.exchanges if e.wire == "Flag"]
    taken.sort(key=lambda t: t[0])
    for (_, end, e), (begin, _, other) in pairwise(taken):
        if end > begin:
            findings.add(
                ARENA,
                other.span,
                [(e.name, [f"up to {end}"]), (other.name, [f"from {begin}"])],
                op=other.name,
                value=e.name,
                other=other.name,
            )
    if taken and max(end for _, end, _ in taken) > device.plan.buffers["exchange"]:
        e = taken[-1][2]
        findings.add(ARENA, e.span, [(e.name, [f"up to {taken[-1][1]}"])], op=e.name, value=e.name, other="the end of the arena")


def _lengths(splits: int, max_kv: int, window: int) -> list[int]:
    """Cached rows that show all there are. Of whole chunks the first ones and the last ones: mk::attention_unit splits them evenly, so
    that so many chunks more as there are splits give each split one more and change nothing else. About a window's end each row."""
    shown, most = 4 * splits, ceil_div(max_kv, CHUNK_ROWS)
    chunks = range(most + 1) if most <= 2 * shown else [*range(shown), *range(most + 1 - shown, most + 1)]
    near = range(max(0, window - 2 * CHUNK_ROWS), window + 2 * CHUNK_ROWS) if window else ()
    # the newest row goes to the last, incomplete chunk
    return sorted({max(0, n * CHUNK_ROWS - 1) for n in chunks} | {rows for rows in near if rows < max_kv})


def _rows(device: Device, findings: Findings) -> int:
    """Cache lengths checked. The split depends on the number of chunks and the window alone."""
    count = 0
    for op, heads in ((op, device.heads(op.name)) for op in device.ops[1]):
        cases = [
            (n, window) for window in dict.fromkeys(heads.windows) for n in _lengths(heads.splits, device.plan.schedule.max_kv, window)
        ]
        count += len(cases)
        for kv_len, window in cases:
            units = [attention_unit(heads.splits, unit, kv_len, window) for unit in range(heads.splits)]
            chunks, first = ceil_div(kv_len, CHUNK_ROWS), max(0, kv_len + 1 - window) if window else 0  # that the step's first token sees
            ends = [first // CHUNK_ROWS, *(u[2] for u in units)]
            if [u[1] for u in units] != ends[:-1] or ends[-1] != chunks:
                wrong = f"chunks {ends[0]} to {chunks} are split into {[(u[1], u[2]) for u in units]}"
                findings.add(COVER, op.span, [("units", [str(u) for u in units])], op=op.name, what="cached rows", wrong=wrong)
            readers = [split for split, u in enumerate(units) if u[1] <= kv_len // CHUNK_ROWS < u[2]]
            if any(not units[split][3] for split in readers) or sum(u[3] for u in units) != 1:
                rows = [(f"unit {split}", [f"streams chunks {u[1]} to {u[2]}", "appends" if u[3] else ""]) for split, u in enumerate(units)]
                findings.add(ROWS, op.span, rows, op=op.name, row=kv_len)
    return count


def _batch_rows(device: Device, findings: Findings) -> int:
    """Batches checked, of lengths about the chunks' and the splits' borders."""
    count = 0
    for op in device.ops[1]:
        heads, most = device.heads(op.name), device.plan.schedule.max_kv
        chunks = (0, 1, 2, heads.splits - 1, heads.splits, heads.splits + 1, 3 * heads.splits + 1, ceil_div(most, CHUNK_ROWS))
        near = {row + more for row in (at * CHUNK_ROWS for at in chunks) for more in (-1, 0, 1)}
        near |= {heads.window(0) + more for more in (-1, 0, CHUNK_ROWS) if heads.window(0)}
        lengths = sorted(kv for kv in near if 0 <= kv <= most)
        for batch in batches(device.sequences, device.tokens, lengths, most):
            count += 1
            _batch_cover(device, op, batch, findings)
    return count


def _batch_cover(device: Device, op: Attention, batch: Batch, findings: Findings) -> None:
    heads = device.heads(op.name)
    units = [(split, s) for split in range(heads.splits) for s in segments(heads.splits, split, batch, heads.window(0))]
    for index, (kv_len, tokens) in enumerate(batch):
        own = [(split, s) for split, s in units if s.sequence == index]
        first, last = skipped_chunks(kv_len, heads.window(0)), ceil_div(kv_len, CHUNK_ROWS)
        ends = [first, *(s.end for _, s in own)]
        what = f"cached rows of sequence {index} of {batch}"
        empty = [(s.begin, s.end) for _, s in own if s.begin == s.end and not s.fresh]
        if empty or (tokens and ([s.begin for _, s in own] != ends[:-1] or ends[-1] != last)) or (not tokens and own):
            wrong = f"chunks {first} to {last} are split into {[(s.begin, s.end) for _, s in own]}"
            findings.add(COVER, op.span, [("units", [f"split {split}: {s}" for split, s in own])], op=op.name, what=what, wrong=wrong)
        appending = [split for split, s in own if s.fresh]
        readers = [split for split, s in own if s.begin <= kv_len // CHUNK_ROWS < s.end]
        if len(appending) != min(tokens, 1) or (tokens and any(split != appending[0] for split in readers)):
            rows = [(f"split {split}", [f"streams chunks {s.begin} to {s.end}", "appends" if s.fresh else ""]) for split, s in own]
            findings.add(ROWS, op.span, rows, op=op.name, row=kv_len)
