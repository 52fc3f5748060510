"""Running the generated kernel on a CPU."""

from megadsl.emulate.emulator import Emulator, Hang, LaunchReport

__all__ = ["Emulator", "Hang", "LaunchReport"]
