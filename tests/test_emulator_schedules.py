"""Asynchrony under seeds: pipelines, exchanges, clusters, deadlocks, replay, speed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from megadsl.diagnostics import MegadslError
from megadsl.emulate import LaunchReport
from megadsl.emulate.abi import SITE_BARRIER, SITE_CLUSTER
from tests.emulator.harness import emulator, filled, launch, room

TILES, STAGES, KIB = 23, 4, 1024
NO_FULL_WAIT, NO_EMPTY_WAIT, SOURCE_REUSE, NO_ARRIVE = 1, 2, 3, 4
SEEDS = range(12)


def pipeline(seed: int, bug: int = 0) -> tuple[bool, LaunchReport]:
    """Whether the sums of two blocks came out right."""
    data = np.random.default_rng(7).integers(0, 1000, (2, TILES, 64, 4), np.uint32)
    out = room(2 * 64 * 4)
    report = launch(
        "pipeline",
        [TILES, STAGES, bug],
        blocks=2,
        threads=96,
        smem_bytes=STAGES * KIB + 2 * STAGES * 8,
        seed=seed,
        weights=filled(data),
        kv=out,
    )
    return bool((out.view(np.uint32).reshape(2, 64) == data.sum(axis=(1, 3), dtype=np.uint32)).all()), report


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_delivers_every_tile(seed: int) -> None:
    right, report = pipeline(seed)
    assert right and report.hangs == () and report.copies == 2 * TILES


@pytest.mark.parametrize("bug", [NO_FULL_WAIT, NO_EMPTY_WAIT, SOURCE_REUSE])
def test_some_seed_exposes_a_missing_wait(bug: int) -> None:
    def exposed(seed: int) -> bool:
        try:
            right, report = pipeline(seed, bug)
        except MegadslError:
            return True
        return not right or report.hangs != ()

    assert any(exposed(seed) for seed in SEEDS)


def test_a_missing_arrival_is_reported() -> None:
    _, report = pipeline(0, NO_ARRIVE)
    loaders = [hang for hang in report.hangs if hang.site == 10]
    assert {(h.block, h.warp, h.lane, h.tile, h.expected) for h in loaders} == {(b, 0, 0, 3 + STAGES, 0) for b in (0, 1)}
    assert {(h.block, h.warp, h.site) for h in report.hangs} == {(b, w, 20 if w else 10) for b in (0, 1) for w in (0, 1, 2)}


def exchange(
    seed: int, blocks: int = 4, silent: tuple[int, int] = (-1, -1), raw: int = 0, step_limit: int = 0
) -> tuple[LaunchReport, NDArray]:
    out = room(blocks * 128)
    arena = room(4 * blocks * 32 * 16)
    report = launch("exchange", [9, *silent, raw], blocks=blocks, smem_bytes=0, seed=seed, step_limit=step_limit, exchange=arena, kv=out)
    return report, out.view(np.uint32)


def exchanged(blocks: int = 4) -> NDArray:
    value = np.repeat(np.arange(blocks, dtype=np.uint32), 32).reshape(blocks, 32)
    for round_ in range(1, 10):
        value[:] = sum(value[b] ^ np.uint32(b) ^ np.uint32(round_) for b in range(blocks))
    return value.reshape(-1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("raw", [0, 1])
def test_blocks_exchange_tagged_vectors(seed: int, raw: int) -> None:
    report, out = exchange(seed, raw=raw)
    assert report.hangs == () and (out == exchanged()).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_silent_block_is_a_deadlock_with_names(seed: int) -> None:
    report, out = exchange(seed, silent=(2, 5))
    assert {(h.site, h.block, h.warp, h.lane) for h in report.hangs} == {(7, b, 0, 0) for b in range(4)}
    assert {(h.layer, h.tile, h.expected, h.observed) for h in report.hangs} == {(5, 2, 5, 1)}
    assert (out == 0).all()  # everybody left early
    again, out = exchange(seed)
    assert again.hangs == () and (out == exchanged()).all()


def test_the_step_limit_ends_a_poll_without_pause() -> None:
    report, _ = exchange(0, silent=(0, 1), raw=1, step_limit=2000)
    assert report.steps > 2000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_passes_vectors_round(seed: int) -> None:
    out = room(4 * 128)
    report = launch("cluster", [7, 0], blocks=4, cluster=2, seed=seed, kv=out)
    start = (np.arange(4)[:, None] // 2 * 2 + 1 - np.arange(4)[:, None] % 2) * 100 + np.arange(32)  # an odd number of hops
    assert report.hangs == () and (out.view(np.uint32).reshape(4, 32) == start + 7).all()
    assert report.copies == 4 * 7 * 32 * 4


def test_hangs_in_barriers_have_sites_of_their_own() -> None:
    report = launch("cluster", [1, 1], blocks=2, cluster=2, kv=room(1024))
    assert {(h.site, h.block, h.expected, h.observed) for h in report.hangs} == {(SITE_CLUSTER, 0, 64, 32), (99, 1, 0, 0)}
    report = launch("units", [6], threads=96, kv=room(1024))  # warp 2 waits for warp 3
    assert {(h.site, h.block, h.warp, h.tile, h.expected, h.observed) for h in report.hangs} == {(SITE_BARRIER, 0, 2, 2, 64, 32)}


def test_a_seed_replays_its_schedule() -> None:
    reports = [pipeline(seed)[1] for seed in (5, 6, 5)]
    assert reports[0] == reports[2] and reports[0].fingerprint != reports[1].fingerprint
    assert len({exchange(seed)[0].fingerprint for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize(
    ("scenario", "threads", "message"),
    [
        (0, 32, "block 0, warp 0, lane 0: shared memory access of 16 bytes at offset 8 is misaligned"),
        (1, 32, "shared memory access of 4 bytes at offset 4096 is misaligned or outside the block's 4096 bytes"),
        (2, 32, "is outside every buffer (weights + 1024 of 1024 bytes)"),
        (3, 32, "global memory access of 8 bytes at"),
        (4, 32, "lane 16: lanes of one warp are in different collectives: ballot here, syncwarp in lanes 0xffff"),
        (5, 32, "mbarrier used before mbar_init"),
        (6, 32, "more arrivals on an mbarrier than the 1 of its phase"),
        (7, 32, "bulk copy of 24 bytes"),
        (8, 32, "global memory access of 32 bytes"),
        (9, 32, "bar.sync 1 with 1000 threads in a block of 32"),
        (10, 96, "bar.sync 1 with 96 threads, but another warp waits there for 64"),
        (11, 32, "stack overflow"),
        (12, 32, "rank 2 in a cluster of 1 blocks"),
        (13, 32, "L2 prefetch of 8 bytes"),
        (14, 32, "mbarrier used before mbar_init"),
        (15, 32, "shared memory access of 16 bytes at offset 8 is misaligned"),
        (16, 32, "a lane ends with loads on their way that no mbarrier counts"),
    ],
)
def test_faults(scenario: int, threads: int, message: str) -> None:
    with pytest.raises(MegadslError) as caught:
        launch("faults", [scenario], threads=threads, weights=room(1024), kv=room(64))
    assert caught.value.code == "MK360" and message in str(caught.value)


def test_a_launch_that_does_not_fit_the_kernel() -> None:
    with pytest.raises(MegadslError) as caught:
        launch("faults", [1, 2], padded=False)
    assert caught.value.code == "MK361"


def test_a_fiber_switch_is_cheap() -> None:
    assert min(emulator().switch_ns() for _ in range(5)) < 100


def test_a_decode_step_of_multiplies_takes_seconds() -> None:
    """A step of a 135M model is about 1.1 million of these; the bound leaves a slow, shared machine some room."""
    out = room(4 * 64 * 4)
    rounds = 5000

    def once() -> float:
        start = time.process_time()
        report = launch("mma_loop", [rounds], blocks=4, threads=64, logits=out)
        assert report.collectives == 4 * 2 * (2 * rounds + 1)
        return time.process_time() - start

    assert min(once() for _ in range(3)) / (4 * 2 * 2 * rounds) < 4e-6
