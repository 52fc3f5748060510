"""The race detector against another: the stock libtsan, on tests/emulator/detector.cu, one process a protocol and mistake.

The same emulator and the same kernel are built into a program of their own with ``g++ -fsanitize=thread``; tests/emulator/libtsan
tells libtsan of fibers, barriers and copies. Both must say the same of every protocol, right and wrong, but for DIFFER.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megadsl.diagnostics import MegadslError
from megadsl.emulate import policy_of
from megadsl.resources import include, templates
from tests.test_detector import (
    AFTER_READ,
    COPY_OWN,
    EARLY_FREE,
    FENCE,
    LANES,
    MIXED,
    NO_EXPECT,
    NO_INIT_FENCE,
    NO_LANDING_WAIT,
    ONE_LANE,
    PAIR,
    PHASES,
    PLAIN,
    RELEASE,
    RING,
    SCENARIOS,
    SENDS,
    STALE_PHASE,
    SWAP_LANES,
    SWAP_WARPS,
    run,
)

EMULATOR = Path(__file__).parent / "emulator"
SEEDS = 3  # and as many policies
REPORT = "WARNING: ThreadSanitizer: data race"

# Without lanes' loads: libtsan sees the list that the emulator keeps of them, for it is one of the standard library's.
RIGHT = [(scenario, 0) for scenario in SCENARIOS if scenario not in (LANES, SENDS)]
BUGS = [(scenario, 1) for scenario in (SWAP_WARPS, SWAP_LANES, FENCE, RELEASE, COPY_OWN, PAIR, PLAIN, MIXED, AFTER_READ)]
RING_BUGS = [(RING, bug) for bug in (EARLY_FREE, NO_LANDING_WAIT, NO_EXPECT, NO_INIT_FENCE)]
PHASE_BUGS = [(PHASES, bug) for bug in (ONE_LANE, STALE_PHASE)]

# (scenario, bug): what ours says, what libtsan says, and why (docs/race-detector.md).
DIFFER = {
    (FENCE, 0): (False, True, "libtsan knows no fences: the payload behind one looks unordered"),
    (AFTER_READ, 0): (False, True, "a write after a read that an observed relaxed store orders: an assumption of ours, counted"),
    (RING, NO_INIT_FENCE): (True, False, "libtsan knows no proxies, so no fence for an mbarrier's initialisation"),
    (COPY_OWN, 1): (True, False, "libtsan knows no proxies: a copy is ordered behind all that its thread did before"),
    (MIXED, 1): (True, False, "to libtsan atomics do not race with each other, also those of overlapping but different bytes"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that begins a launch of detector.cu under libtsan."""
    compiler = shutil.which("g++")
    assert compiler is not None
    runtime = subprocess.run([compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():  # a name that g++ does not find is printed as it was asked for
        pytest.skip("g++ has no libtsan")
    binary = tmp_path_factory.mktemp("libtsan") / "main"
    folders = [EMULATOR / "libtsan", EMULATOR, include(), templates()]  # the first stands before the emulator's own headers
    flags = ["-std=c++17", "-O2", "-g", "-w", "-fcf-protection=none", "-fsanitize=thread", "-DMK_HOST", "-DMK_DETECT"]
    source = str(EMULATOR / "libtsan" / "main.cpp")
    subprocess.run([compiler, *flags, *(f"-I{folder}" for folder in folders), source, "-o", str(binary)], check=True)
    # older ones find no room for their shadow memory where Linux spreads addresses over 32 bits
    fixed = ["setarch", "-R"]
    spread = shutil.which("setarch") is None or subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode != 0
    return [str(binary)] if spread else [*fixed, str(binary)]


def libtsan_says(program: list[str], scenario: int, bug: int) -> bool:
    """Whether libtsan reports a race under any of the seeds."""
    environment = os.environ | {"TSAN_OPTIONS": "exitcode=66"}
    command = [*program, str(scenario), str(bug), str(SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert len(done.stdout.splitlines()) == SEEDS, done.stderr[-4000:]
    assert done.returncode == (66 if REPORT in done.stderr else 0), done.stderr[-4000:]
    assert bug != 0 or done.stdout == "0\n" * SEEDS, "a launch failed"
    return REPORT in done.stderr


def ours_says(scenario: int, bug: int) -> bool:
    """Whether our detector reports one."""
    for seed in range(SEEDS):
        try:
            if run(scenario, bug, seed, policy_of(seed))[0].races:
                return True
        except MegadslError as fault:  # some bugs also break the count of an mbarrier
            assert fault.code == "MK360"
    return False


@pytest.mark.parametrize(("scenario", "bug"), [*RIGHT, *BUGS, *RING_BUGS, *PHASE_BUGS])
def test_both_detectors_say_the_same(program: list[str], scenario: int, bug: int) -> None:
    said = ours_says(scenario, bug), libtsan_says(program, scenario, bug)
    if (scenario, bug) in DIFFER:
        assert said == DIFFER[scenario, bug][:2]
    else:
        assert said[0] == said[1] == (bug != 0 and scenario != PAIR)  # a value that is merely old is no race to either
