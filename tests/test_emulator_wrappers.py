"""What every PTX wrapper means on the host, against numpy and the PTX ISA's own words."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulator.harness import filled, launch, room

MMA, COLLECTIVES, MEMORY, ARITHMETIC, BARRIER, ATOMICS, PARTIAL, IDENTITY = range(8)
LANES = np.arange(32)


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, NaN to 0x7fff."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


def fragments(a: NDArray[np.uint16], b: NDArray[np.uint16], c: NDArray[np.float32]) -> NDArray[np.uint32]:
    """(32 lanes, 10 registers) of A (16, 16), B (16, 8) as bf16 bits and C (16, 8): figures of the PTX ISA for m16n8k16."""
    g, q = LANES // 4, LANES % 4

    def pair(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> NDArray[np.uint32]:
        return low.astype(np.uint32) | high.astype(np.uint32) << 16

    rows_a = [pair(a[g + r, 2 * q + k], a[g + r, 2 * q + k + 1]) for k in (0, 8) for r in (0, 8)]
    rows_b = [pair(b[2 * q + k, g], b[2 * q + k + 1, g]) for k in (0, 8)]
    rows_c = [c[g + r, 2 * q + e].view(np.uint32) for r in (0, 8) for e in (0, 1)]
    return np.stack([*rows_a, *rows_b, *rows_c], axis=1).astype(np.uint32)


def in_order(a: NDArray[np.uint16], b: NDArray[np.uint16], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """The host's sum: fp32 products added one by one in order of k, and no -0 (measured on an H200)."""
    fa, fb, total = from_bf16(a), from_bf16(b), c.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(16):
            total = total + fa[:, k : k + 1] * fb[k]
    return total + np.float32(0)


def multiply(a: NDArray[np.uint16], b: NDArray[np.uint16], c: NDArray[np.float32]) -> NDArray[np.float32]:
    out = room(32 * 16)
    launch("units", [MMA], weights=filled(fragments(a, b, c)), kv=out)
    registers = out.view(np.float32).reshape(32, 4)
    d = np.zeros((16, 8), np.float32)
    g, q = LANES // 4, LANES % 4
    for i, (row, column) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)]):
        d[g + row, 2 * q + column] = registers[:, i]
    return d


@pytest.mark.parametrize("tokens", [0, 1, 5, 16])
def test_mma_is_the_ordered_sum(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    a, b = (to_bf16(rng.standard_normal(shape, np.float32)) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8), np.float32)
    a[tokens:] = 0
    c[tokens:] = 0
    assert multiply(a, b, c).tobytes() == in_order(a, b, c).tobytes()


def test_mma_of_small_integers_is_exact() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    assert (multiply(to_bf16(a), to_bf16(b), c) == a @ b + c).all()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, -0.0])
def test_skipped_rows_keep_their_bits(odd: float) -> None:
    """Rows of zeros still turn -0 into +0 and an infinite weight into NaN."""
    a = np.zeros((16, 16), np.uint16)
    b = to_bf16(np.full((16, 8), odd, np.float32))
    for fill in (0.0, -0.0, 1.5):
        c = np.full((16, 8), fill, np.float32)
        got, want = multiply(a, b, c), in_order(a, b, c)
        assert (np.isnan(got) == np.isnan(want)).all()
        assert (got.view(np.uint32) == want.view(np.uint32))[~np.isnan(want)].all()


@pytest.mark.parametrize("seed", [0, 3])
def test_warp_collectives(seed: int) -> None:
    out = room(64 * 32)
    launch("units", [COLLECTIVES], threads=64, seed=seed, kv=out)
    words = out.view(np.uint32).reshape(2, 32, 8)
    value = LANES.astype(np.float32) + np.float32(0.5)
    for warp in range(2):
        got = words[warp].T
        assert (got[0] == (LANES ^ 5) * 3).all()
        assert (got[1] == 21).all()
        assert (got[2].view(np.float32) == value[LANES ^ 16]).all()
        assert (got[3].view(np.float32) == 31.5).all()
        assert (got[4] == sum(1 << lane for lane in range(0, 32, 3))).all()
        assert (got[5] == 1).all()
        assert (got[6].view(np.float32) == value.sum()).all()
        assert (got[7] == warp << 16 | LANES).all()


def test_memory_of_every_width() -> None:
    data = np.random.default_rng(0).integers(0, 256, 9472, np.uint8)
    out = room(9472)
    launch("units", [MEMORY], threads=64, weights=filled(data), kv=out)
    widths = {0: 2, 1024: 4, 2048: 4, 3072: 8, 4096: 8, 5120: 16}
    for offset, width in widths.items():
        rows = data[offset : offset + 64 * width].reshape(64, width)
        assert (out[offset : offset + 64 * width].reshape(64, width) == rows[np.arange(64) ^ 1]).all()
    for offset, width in {6144: 4, 7168: 8, 8192: 16}.items():
        assert (out[offset : offset + 64 * width] == data[offset : offset + 64 * width]).all()
    assert (out[9216:9220] == data[9216:9220]).all()


def test_conversions_and_approximations() -> None:
    odd = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.0e38, 3.4e38, 1e-40, np.inf, -np.inf, np.nan, 0.5, 127.0, -126.5, -130.0, 2.0]
    x = np.array([*odd, *np.random.default_rng(0).standard_normal(16)], np.float32)
    out = room(32 * 32)
    launch("units", [ARITHMETIC], weights=filled(x), kv=out)
    got = out.view(np.uint32).reshape(32, 8).T
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        low, high = to_bf16(x), to_bf16(np.float32(-2) * x)
        power, root, inverse = np.exp2(x), 1 / np.sqrt(x), 1 / x
    assert (got[0] == low | high.astype(np.uint32) << 16).all()
    assert (got[1] == low).all()
    assert (got[2] == low.astype(np.uint32) << 16).all()
    assert (got[3] == high.astype(np.uint32) << 16).all()
    assert (got[4] == got[2]).all()
    power[np.abs(power) < np.finfo(np.float32).tiny] = 0
    inverse[np.abs(inverse) < np.finfo(np.float32).tiny] = 0
    root[np.abs(x) < np.finfo(np.float32).tiny] = np.copysign(np.inf, x[np.abs(x) < np.finfo(np.float32).tiny])
    inverse[np.abs(x) < np.finfo(np.float32).tiny] = np.copysign(np.inf, x[np.abs(x) < np.finfo(np.float32).tiny])
    np.testing.assert_allclose(got[5].view(np.float32), power, rtol=1e-6)
    np.testing.assert_allclose(got[6].view(np.float32), root, rtol=1e-6)
    np.testing.assert_allclose(got[7].view(np.float32), inverse, rtol=1e-6)


def test_a_barrier_through_its_phases() -> None:
    out = room(64)
    launch("units", [BARRIER], kv=out)
    answers, count = out.view(np.uint32)[:2]
    #        fresh   1 of 2  phase 0 done  phase 1 done  anew
    want = [0, 1,    0,      1, 0,         0, 1,         0, 1]  # fmt: skip
    assert [int(answers) >> i & 1 for i in range(count)] == want


def test_atomics_over_blocks() -> None:
    out = room(64)
    launch("units", [ATOMICS], blocks=4, threads=64, seed=5, kv=out)
    total, winner, wins = out.view(np.uint32)[:3]
    assert total == 64 * (1 + 2 + 3 + 4)
    assert wins == 1 and 1 <= winner <= 4 * 64


@pytest.mark.parametrize("seed", range(4))
def test_barriers_of_some_warps_and_lanes_that_left(seed: int) -> None:
    out = room(1024)
    launch("units", [PARTIAL], threads=128, seed=seed, kv=out)
    words = out.view(np.uint32)
    assert words[:8].tolist() == [0, 2, 10, 12, 20, 22, 30, 32]
    assert (words[64:96:2] == 0x55555555).all() and (words[65:96:2] == 0).all()


def test_identity_and_clocks() -> None:
    out = room(4 * 64 * 16)
    launch("units", [IDENTITY], blocks=4, threads=64, cluster=2, kv=out)
    words = out.view(np.uint32).reshape(4, 2, 32, 4)
    block, warp, lane = np.meshgrid(range(4), range(2), range(32), indexing="ij")
    assert (words[..., 0] == block << 16 | 4).all()
    assert (words[..., 1] == warp << 16 | lane).all()
    assert (words[..., 2] == (block % 2) << 16 | 2).all()
    assert (words[..., 3] == 1).all()
