"""Which blocks each gather waits for, from the same split functions that the device uses."""

from __future__ import annotations

import numpy as np

from megadsl.check.model import Bools, Device, attention_unit, prologue_gathers
from megadsl.ir.plan import Instr
from megadsl.types import ceil_div

Parts = list[Bools]  # per part of a publication: [reader, writer], who polls whose vectors


def gather(device: Device, instr: Instr) -> Bools:
    """mk::gather_value: the owners of all columns, chunk by chunk; of a whole value, every block."""
    e = device.exchanges[str(instr.args["value"])]
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    polled[:, device.owners(e, int(str(instr.args["begin"])), int(str(instr.args["features"])))] = True
    silent = e.wire == "Tagged" or e.groups < device.blocks  # blocks that own nothing; with more groups there are none
    if instr.args["whole"] and silent:
        polled[:, :] = True
    return polled


def gather_kept(device: Device, instr: Instr) -> Bools:
    """mk::gather_kept: the owners of the rows that the block computes."""
    e, m = device.exchanges[str(instr.args["value"])], device.matrix(instr.op)
    width = 8 // m.fold
    shares = device.shares(m.groups // m.fold, m.share_offset)
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    for block in range(device.blocks):
        rows = [shares[block + i] * m.fold * width for i in (0, 1)]
        polled[block, device.owners(e, int(str(instr.args["begin"])) + rows[0], rows[1] - rows[0])] = True
    return polled


def matrix(device: Device, instr: Instr) -> list[tuple[Instr, Bools]]:
    return [(inner, gather(device, inner)) for inner in prologue_gathers(instr)]


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
            ranges = [(heads.begins[0] + head * q_features, q_features)]
            if fresh:
                ranges += [(begin + head * op.head_dim, op.head_dim) for begin in heads.begins[1:]]
            mask[block] = True
            for begin, features in ranges:
                polled[block, device.owners(e, begin, features)] = True
        turns.append((mask, polled))
    return turns


def fresh_units(device: Device, op: str) -> Bools:
    """Blocks that take this step's own rows in some unit: they read the ancestor masks."""
    heads = device.heads(op)
    found = np.zeros(device.blocks, dtype=np.bool_)
    for unit in range(heads.splits - 1, heads.units, heads.splits):
        found[unit % device.blocks] = True
    return found


def merge(device: Device, instr: Instr) -> Parts:
    """mk::run_merge: all splits of the KV heads that a block's feature groups belong to, by the turn that published them."""
    heads, op, blocks = device.heads(instr.op), device.op(instr.op), device.blocks
    shares = device.shares(heads.merge_groups, heads.merge_offset)
    per_kv = op.head_dim // 8 * (heads.rows // device.tokens)
    parts = [np.zeros((blocks, blocks), dtype=np.bool_) for _ in range(ceil_div(heads.units, blocks))]
    for block in range(blocks):
        for head in {group // per_kv for group in range(shares[block], shares[block + 1])}:
            for unit in range(head * heads.splits, (head + 1) * heads.splits):
                parts[unit // blocks][block, unit % blocks] = True
    return parts


def chosen(device: Device) -> Bools:
    """mk::choose_tokens: block 0 asks everybody."""
    polled = np.zeros((device.blocks, device.blocks), dtype=np.bool_)
    polled[0, :] = True
    return polled
