"""Which blocks each gather waits for, from the same split functions that the device uses."""

from __future__ import annotations

import numpy as np

from megadsl.check.arrays import Bools
from megadsl.check.model import Device, attention_unit, prologue_gathers
from megadsl.ir.plan import Exchange, Instr
from megadsl.lower.columns import share_owner
from megadsl.lower.tiling import GROUP_ROWS
from megadsl.types import ceil_div

Parts = list[Bools]  # per part of a publication: [reader, writer], who polls whose vectors


def gather(device: Device, instr: Instr, parts: list[int | None]) -> Bools:
    """mk::gather_value: the owners of all columns of the part that each block has its turn with, chunk by chunk; of a whole
    value, every block."""
    e, m = device.exchanges[str(instr.args["value"])], device.matrix(instr.op)
    begin, features, width = int(str(instr.args["begin"])), int(str(instr.args["features"])), m.tile_columns * m.pieces // m.ways
    owners = [device.owners(e, begin + part * width, min(width, features - part * width)) for part in range(m.ways)]
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    for block, part in enumerate(parts):
        if part is not None:
            polled[block, owners[part]] = True
    return _with_idle(device, e, instr, polled)


def _with_idle(device: Device, e: Exchange, instr: Instr, polled: Bools) -> Bools:
    """A gather of a whole value asks those too that own nothing of it: with more groups there are none, and what lies densely has no place
    for them."""
    silent = not e.dense and (e.wire == "Tagged" or e.groups < device.blocks)
    if instr.args["whole"] and silent:
        polled[:, :] = True
    return polled


def custom(device: Device, instr: Instr) -> list[tuple[Instr, Bools]]:
    """mk::gather_rows, of each input of a custom op: all owners of its features, the same for every block."""
    found = []
    for inner in prologue_gathers(instr):
        e = device.exchanges[str(inner.args["value"])]
        polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
        polled[:, device.owners(e, *device.rows(instr.op, str(inner.args["arg"]))[:2])] = True
        found.append((inner, _with_idle(device, e, inner, polled)))
    return found


def row_map(device: Device, instr: Instr) -> list[tuple[Instr, Bools]]:
    """mk::reduce_value: the owners of all features, and of a whole value every block."""
    found = []
    for inner in prologue_gathers(instr):
        e, polled = device.exchanges[str(inner.args["value"])], np.zeros((device.blocks, device.blocks), dtype=np.bool_)
        polled[:, device.owners(e, int(str(inner.args["begin"])), int(str(inner.args["features"])))] = True
        found.append((inner, _with_idle(device, e, inner, polled)))
    return found


def gather_kept(device: Device, instr: Instr) -> Bools:
    """mk::gather_kept: the owners of the rows that the block owns of the op's value."""
    e, own = device.exchanges[str(instr.args["value"])], device.exchanges[str(instr.args["own"])]
    shares = device.shares(own.groups, own.share_offset)
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    for block in range(device.blocks):
        rows = [shares[block + i] * GROUP_ROWS for i in (0, 1)]
        polled[block, device.owners(e, int(str(instr.args["begin"])) + rows[0], rows[1] - rows[0])] = True
    return polled


def matrix(device: Device, instr: Instr) -> list[tuple[Bools, list[tuple[Instr, Bools]]]]:
    """Per part of the columns that a block takes in turn: which blocks have one, and whom they poll in each gather."""
    parts = device.parts(instr.op)
    turns = []
    for turn in range(max(map(len, parts))):
        now = [found[turn][0] if turn < len(found) else None for found in parts]
        mask = np.array([part is not None for part in now], dtype=np.bool_)
        turns.append((mask, [(inner, gather(device, inner, now)) for inner in prologue_gathers(instr)]))
    return turns


def add_parts(device: Device, instr: Instr) -> Parts:
    """mk::add_parts: for the features that a block owns of the op's value, the blocks that multiply their rows, all parts, by
    the turn in which they publish."""
    m, e = device.matrix(instr.op), device.exchanges[str(instr.args["parts"])]
    own = device.exchanges[str(device.op(instr.op).out)]
    parts, shares = device.parts(instr.op), device.shares(own.groups, own.share_offset)
    turns = [np.zeros((device.blocks, device.blocks), dtype=np.bool_) for _ in range(max(map(len, parts)))]
    for block in range(device.blocks):
        for item in (p * own.groups + g for p in range(m.ways) for g in range(shares[block], shares[block + 1])):
            owner = share_owner(e.groups, device.blocks, e.share_offset, item)
            turns[[part for part, _, _ in parts[owner]].index(item // own.groups)][block, owner] = True
    return turns


def attention(device: Device, instr: Instr) -> list[tuple[Bools, Bools]]:
    """Per unit that a block takes in turn: which blocks have one, and whom they poll for queries, keys and values."""
    heads, op, blocks = device.heads(instr.op), device.op(instr.op), device.blocks
    e = device.exchanges[str(instr.args["qkv"])]
    q_features = heads.rows // device.tokens * op.head_dim
    turns = []
    for turn in range(ceil_div(heads.units, blocks)):
        mask = np.zeros(blocks, dtype=np.bool_)
        polled = np.zeros((blocks, blocks), dtype=np.bool_)
        for block in range(min(blocks, heads.units - turn * blocks)):
            head, _, _, fresh = attention_unit(heads.splits, turn * blocks + block, 0)
            fresh = fresh or device.sequences > 1  # mk::run_batch: any unit may take some sequence's rows
            ranges = [(heads.begins[0] + head * q_features, q_features)]
            if fresh:
                ranges += [(begin + head * op.head_dim, op.head_dim) for begin in heads.begins[1:]]
            mask[block] = True
            for begin, features in ranges:
                polled[block, device.owners(e, begin, features)] = True
        turns.append((mask, polled))
    return turns


def reads_ancestors(device: Device, op: str) -> Bools:
    """Blocks that read the ancestor masks in some unit: for this step's own rows, and with a window for what each token sees."""
    heads = device.heads(op)
    all_units = (any(heads.windows) and device.tokens > 1) or device.sequences > 1
    return np.arange(device.blocks) < heads.units if all_units else fresh_units(device, op)


def fresh_units(device: Device, op: str) -> Bools:
    """Blocks that take this step's own rows in some unit; of a batch, for some lengths of its sequences."""
    heads = device.heads(op)
    if device.sequences > 1:
        return np.arange(device.blocks) < heads.units
    found = np.zeros(device.blocks, dtype=np.bool_)
    for unit in range(heads.splits - 1, heads.units, heads.splits):
        found[unit % device.blocks] = True
    return found


def merge(device: Device, instr: Instr) -> Parts:
    """mk::run_merge: all splits of the KV heads that a block's feature groups belong to, by the turn that published them."""
    heads, op, blocks = device.heads(instr.op), device.op(instr.op), device.blocks
    if device.cluster(instr.op) is not None:
        return [_of_a_cluster(device, instr.op)]
    shares = device.shares(heads.merge_groups, heads.merge_offset)
    per_kv = op.head_dim // 8 * (heads.rows // device.tokens)
    parts = [np.zeros((blocks, blocks), dtype=np.bool_) for _ in range(ceil_div(heads.units, blocks))]
    for block in range(blocks):
        for head in {group // per_kv for group in range(shares[block], shares[block + 1])}:
            for unit in range(head * heads.splits, (head + 1) * heads.splits):
                parts[unit // blocks][block, unit % blocks] = True
    return parts


def _of_a_cluster(device: Device, op: str) -> Bools:
    """Every block with a unit waits for those of its cluster."""
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    for block, partners in enumerate(device.partners(op)):
        polled[block, partners] = True
    return polled


def winners(device: Device) -> Bools:
    """mk::take_token: between two steps of a launch every block asks everybody."""
    return np.ones((device.blocks, device.blocks), dtype=np.bool_)


def chosen(device: Device) -> Bools:
    """mk::choose_tokens: block 0 asks everybody."""
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    polled[0, :] = True
    return polled
