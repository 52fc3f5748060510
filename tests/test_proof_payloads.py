"""Every bit pattern goes through every wire: carried bit for bit, or canonicalised by its type's rule; never "not yet" for ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megadsl.check.payloads import PAYLOADS, Nans, Payload, carried_by_sentinel
from tests.emulator.harness import filled, launch, room

WIRES = ("Tagged", "Sentinel", "Flag")
BLOCKS, THREADS, SLOTS, FLAG_BYTES = 2, 64, 4, 64
GROUPS = 8192  # units of 8 elements in one exchange: every pattern of 16 bits
EVERY = np.arange(65536, dtype=np.uint16)
TAG_BITS = 4  # of each f32 word of a tagged vector
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


def inverse(divisor: int) -> int:
    """mk::Divisor::inverse."""
    return 0 if divisor <= 1 else (2**32 - 1) // divisor + 1


def exchanged(wire: str, data: U16 | U32, sequence: int) -> NDArray[np.generic]:
    """What arrives: of units of 8 16-bit patterns at both blocks, of f32 patterns at the second."""
    f32 = data.dtype == np.uint32
    groups, units = (0, 0) if f32 else (GROUPS, GROUPS // BLOCKS)
    vectors = data.nbytes // 16 if f32 else units + (-(-units // 7) if wire == "Tagged" else 0)
    slot = vectors if f32 else BLOCKS * vectors
    arena, out = room(SLOTS * slot * 16 + BLOCKS * FLAG_BYTES), room(data.nbytes * (1 if f32 else BLOCKS))
    if wire == "Sentinel":
        arena[:] = 0xFF
    out[:] = 0x5A
    exchange = [0, slot, SLOTS, vectors, units, groups, inverse(groups), 0, SLOTS * slot]
    report = launch(
        "payloads",
        [WIRES.index(wire), int(f32), vectors, sequence, *exchange],
        blocks=BLOCKS,
        threads=THREADS,
        smem_bytes=16 + 16 * (vectors + groups),
        seed=sequence,
        control=room(512),
        weights=filled(data),
        kv=out,
        exchange=arena,
    )
    assert report.hangs == (), "a payload is taken for 'not yet'"
    return out.view(data.dtype).reshape(-1, *data.shape)


def sent16(wire: str, patterns: U16) -> U16:
    """The rule of both 16-bit types, which is one function in wires.h."""
    canonical = {PAYLOADS[name].canonical for name in ("bf16", "f16")}
    assert canonical == {0x7FFF}
    return np.where(patterns == 0xFFFF, 0x7FFF, patterns).astype(np.uint16) if wire == "Sentinel" else patterns


@pytest.mark.parametrize("wire", WIRES)
def test_every_pattern_of_16_bits_arrives_at_every_place(wire: str) -> None:
    for place in range(8):
        units = np.roll(EVERY.reshape(GROUPS, 8), place, axis=1)
        assert (exchanged(wire, units, place + 1) == sent16(wire, units)).all()


@pytest.mark.parametrize("wire", WIRES)
def test_every_pattern_of_16_bits_arrives_between_all_ones(wire: str) -> None:
    """In either half of a word, beside the element that a tag pushes out and as that element."""
    for part in range(8):
        units = np.full((GROUPS, 8), 0xFFFF, np.uint16)
        units[:, 6 + part % 2] = EVERY[part * GROUPS :][:GROUPS]
        units[:, part % 2] = EVERY[(7 - part) * GROUPS :][:GROUPS]
        assert (exchanged(wire, units, part + 1) == sent16(wire, units)).all()


def float_patterns() -> U32:
    """Both signs, every exponent, mantissas around every boundary of tag and NaN bits; and random ones. (n, 4)."""
    mantissas = {0, 1, 7, 8, 15, 16, 0x3FFFFF, 0x400000, 0x400001, 0x40000F, 0x7FFFF0, 0x7FFFFE, 0x7FFFFF}
    listed = [sign << 31 | exponent << 23 | m for sign in (0, 1) for exponent in range(256) for m in sorted(mantissas)]
    drawn = np.random.default_rng(3).integers(0, 2**32, 2**13, np.uint32)
    return np.concatenate([np.array(listed, np.uint32), drawn]).reshape(-1, 4)


def sent32(wire: str, patterns: U32) -> U32:
    """Sentinel: the rule of f32. Tagged: without the bits of the tag, NaNs made quiet first, so that they stay NaNs."""
    if wire == "Sentinel":
        return np.where(patterns == PAYLOADS["f32"].empty, PAYLOADS["f32"].canonical, patterns).astype(np.uint32)
    if wire == "Tagged":
        nan = (patterns & 0x7FFFFFFF) > 0x7F800000
        return np.where(nan, patterns | 0x400000, patterns).astype(np.uint32) & np.uint32(2**32 - 2**TAG_BITS)
    return patterns


@pytest.mark.parametrize("wire", WIRES)
def test_floats_of_every_class_arrive(wire: str) -> None:
    patterns = float_patterns()
    for place in range(4):
        sequence = 0xBEEF + place  # a tag of which every word gets some bits
        data = np.roll(patterns, place, axis=1)
        got = exchanged(wire, data, sequence)[0]
        assert (got == sent32(wire, data)).all()
        before, after = data.view(np.float32), got.view(np.float32)
        assert (np.isnan(before) == np.isnan(after)).all() and (np.isinf(before) == np.isinf(after)).all()
        assert (np.signbit(before) == np.signbit(after))[~np.isnan(before)].all()


def isnan(dtype: str) -> list[bool]:
    """What torch takes for NaN among all patterns of a type of 8 or 16 bits."""
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    every = torch.arange(PAYLOADS[dtype].empty + 1)
    every = every.to(torch.uint8) if PAYLOADS[dtype].bits == 8 else every.to(torch.int16)
    found: list[bool] = every.view(kinds[dtype]).float().isnan().tolist()
    return found


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3", "e5m2"])
def test_the_rule_loses_no_number(dtype: str) -> None:
    """Exhaustively: one NaN becomes another, all else is sent as it is, and the empty value is never sent."""
    rule, nan = PAYLOADS[dtype], isnan(dtype)
    assert [rule.is_nan(p) for p in range(rule.empty + 1)] == nan
    assert carried_by_sentinel(dtype)
    sent = [rule.sent(p) for p in range(rule.empty + 1)]
    assert rule.empty not in sent and all(s == p or (nan[s] and nan[p]) for p, s in enumerate(sent))
    assert [p for p, s in enumerate(sent) if s != p] == [rule.empty]


def test_pairs_of_fp4_use_every_pattern() -> None:
    """All 256 bytes are two numbers each, so none is left to say "not yet"."""
    fp4 = PAYLOADS["e2m1"]
    values = {(byte & 15, byte >> 4) for byte in range(256)}
    assert len(values) == 256 and not any(fp4.is_nan(nibble) for pair in values for nibble in pair)
    assert fp4.empty == 15 and not carried_by_sentinel("e2m1")


@pytest.mark.parametrize("dtype", ["u32", "i32", "unheard of"])
def test_what_has_no_rule_is_refused(dtype: str) -> None:
    assert not carried_by_sentinel(dtype)


def test_an_unsigned_nan_has_no_other_pattern() -> None:
    assert Payload(8, 0, Nans.LAST, signed=False).canonical is None
