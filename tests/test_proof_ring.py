"""mk::Ring for every number of stages and of tiles, filled in bulk or by a warp's lanes: all arrive, in order, and the ring is as good
as new after each drain.

One kernel (emulator/ring.cu) has all the stage counts; its block b streams b tiles, none, and b tiles again.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megadsl.build.host import DETECT
from megadsl.emulate import LaunchReport, policy_of
from tests.emulator.harness import filled, launch, room

STAGES = (1, 2, 3, 4, 5, 6, 7, 8, 13, 26)
BLOCKS = 18  # blocks of 0 to 17 tiles
STAGE, LANES, CONSUMERS = 128, 32, 64
LANE_BYTES = 16  # of a lane's copy
LOADER, CONSUMER = 10, 20
TILES = np.random.default_rng(5).integers(0, 2**32, (2 * BLOCKS, LANES), np.uint32)


def expected() -> NDArray[np.uint32]:
    """Per block and consumer thread: the hash of its tiles in their order."""
    hashes = np.ones((BLOCKS, LANES), np.uint32)
    for block in range(BLOCKS):
        for tile in range(2 * block):
            hashes[block] = hashes[block] * np.uint32(31) + TILES[tile]
    return np.tile(hashes, (1, CONSUMERS // LANES))


EXPECTED = expected()
FILLED = pytest.mark.parametrize("lanes", [False, True], ids=["bulk", "lanes"])


def windows(stages: int) -> list[tuple[int, int]]:
    """Bytes in flight (usual, around meetings): less than a stage, less than the ring, all of it, more; and a change between."""
    ring = stages * STAGE
    return [(1, 1), (ring // 2, ring // 2), (ring, ring), (4 * ring, 4 * ring), (4 * ring, STAGE)]


def stream(
    stages: int, window: tuple[int, int], *, lanes: bool, pairs: bool = False, stuck: int = -1, seed: int = 0, define: str = ""
) -> tuple[LaunchReport, NDArray[np.uint32]]:
    """The report, and per block the consumers' hashes, the most stages in flight and the faults after a drain."""
    out = room(BLOCKS * (CONSUMERS + 2) * 4)
    report = launch(
        "ring",
        [stages, int(pairs), *window, stuck, int(lanes)],
        blocks=BLOCKS,
        threads=CONSUMERS + 32,
        seed=seed,
        policy=policy_of(seed),
        define=define,
        control=room(512),
        weights=filled(TILES),
        kv=out,
    )
    return report, out.view(np.uint32).reshape(BLOCKS, CONSUMERS + 2)


def assert_right(stages: int, window: tuple[int, int], lanes: bool, report: LaunchReport, out: NDArray[np.uint32]) -> None:
    tiles = sum(2 * block for block in range(BLOCKS))
    assert report.hangs == () and report.copies == tiles * (STAGE // LANE_BYTES if lanes else 1)
    assert (out[:, :CONSUMERS] == EXPECTED).all()
    most, faults = out[:, CONSUMERS], out[:, CONSUMERS + 1]
    bound = min(max(window[0] // STAGE, 1), stages)
    full = np.minimum(np.arange(BLOCKS), bound)
    assert (most == full).all() if window[0] == window[1] else (most <= full).all()
    assert not faults.any(), "a drain left copies in flight"


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("pairs", [False, True])
@FILLED
def test_every_tile_arrives_in_order(stages: int, pairs: bool, lanes: bool) -> None:
    for turn, window in enumerate(windows(stages)):
        for seed in (turn, turn + stages + pairs):
            assert_right(stages, window, lanes, *stream(stages, window, lanes=lanes, pairs=pairs, seed=seed))


@pytest.mark.parametrize("stages", STAGES)
@FILLED
def test_no_schedule_of_a_ring_shows_a_race(stages: int, lanes: bool) -> None:
    for pairs in (False, True):
        seed = stages + 3 * pairs
        window = windows(stages)[seed % len(windows(stages))]
        report, out = stream(stages, window, lanes=lanes, pairs=pairs, seed=seed, define=DETECT)
        assert_right(stages, window, lanes, report, out)
        assert report.races == ()


@pytest.mark.parametrize("stages", STAGES)
@FILLED
def test_a_consumer_that_leaves_stops_its_loader_at_a_full_ring(stages: int, lanes: bool) -> None:
    """Nobody lets go of tile 2: blocks that stream more than the ring holds wait, name the tile, and still drain."""
    stuck = 2
    report, out = stream(stages, (stages * STAGE, stages * STAGE), lanes=lanes, stuck=stuck)
    waiting = {hang.block: hang.tile for hang in report.hangs if hang.site == LOADER}
    assert waiting == {block: stuck + stages for block in range(BLOCKS) if 2 * block > stuck + stages}
    assert not out[:, CONSUMERS + 1].any()
