"""Running the generated kernel on a CPU."""

from megadsl.emulate.abi import Policy
from megadsl.emulate.emulator import Emulator, Hang, LaunchReport
from megadsl.emulate.explore import Exploration, Finding, Run, explore, policy_of
from megadsl.emulate.frames import Frame
from megadsl.emulate.mutants import Mutant
from megadsl.emulate.races import Access, Race

__all__ = [
    "Access",
    "Emulator",
    "Exploration",
    "Finding",
    "Frame",
    "Hang",
    "LaunchReport",
    "Mutant",
    "Policy",
    "Race",
    "Run",
    "explore",
    "policy_of",
]
