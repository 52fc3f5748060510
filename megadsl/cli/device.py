"""Where a command runs a kernel."""

from __future__ import annotations

from enum import StrEnum

from megadsl.machine import DEFAULT_ARCH


class Device(StrEnum):
    """On the GPU, or in the emulator."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


def resolve(device: Device) -> Device:
    """CUDA or CPU: what AUTO means on this machine."""
    from megadsl.build.gpus import gpus

    if device is not Device.AUTO:
        return device
    return Device.CUDA if any(gpu.runs(DEFAULT_ARCH) for gpu in gpus()) else Device.CPU
