"""What the NVIDIA driver of this machine says: its version and its GPUs. Makes no CUDA context."""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.machine import runs

try:
    from cuda.bindings import driver as _driver
except ImportError:  # the cuda extra is not installed
    _driver = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``arch`` is "sm_90"; ``memory`` is in bytes; ``cooperative`` says whether it launches cooperative kernels."""

    name: str
    arch: str
    sms: int
    memory: int
    cooperative: bool

    def runs(self, arch: str) -> bool:
        """Whether kernels for ``arch`` ("sm_90a") run on it, compiled for it where that is another."""
        return runs(arch, self.arch)


def bindings_installed() -> bool:
    """Whether cuda-python is there."""
    return _driver is not None


def driver_version() -> int | None:
    """The CUDA version that the driver supports, as 13000 for 13.0; None without driver or cuda-python."""
    if _driver is None:
        return None
    try:
        status, version = _driver.cuDriverGetVersion()
    except RuntimeError:  # no libcuda on this machine
        return None
    return int(version) if status == _driver.CUresult.CUDA_SUCCESS else None


def gpus() -> list[Gpu]:
    """The GPUs that this process may use, in CUDA's order; empty without any, or without driver or cuda-python."""
    if driver_version() is None or _driver.cuInit(0)[0] != _driver.CUresult.CUDA_SUCCESS:
        return []
    return [_describe(index) for index in range(_driver.cuDeviceGetCount()[1])]


def _describe(index: int) -> Gpu:
    device = _driver.cuDeviceGet(index)[1]
    attribute = _driver.CUdevice_attribute

    def value(which: object) -> int:
        return int(_driver.cuDeviceGetAttribute(which, device)[1])

    major = value(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = value(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return Gpu(
        name=_driver.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode(),
        arch=f"sm_{major}{minor}",
        sms=value(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        memory=int(_driver.cuDeviceTotalMem(device)[1]),
        cooperative=bool(value(attribute.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)),
    )


def fingerprint(index: int = 0) -> dict[str, object]:
    """What times on a GPU depend on: ``gpu`` (its name), ``sms``, ``driver`` (CUDA version), ``sm_mhz`` and ``memory_mhz`` (highest
    clocks). Empty where there is none."""
    found = gpus()
    if index >= len(found):
        return {}
    device = _driver.cuDeviceGet(index)[1]
    kinds = _driver.CUdevice_attribute
    clocks = {"sm_mhz": kinds.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, "memory_mhz": kinds.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE}
    rates = {name: int(_driver.cuDeviceGetAttribute(kind, device)[1]) // 1000 for name, kind in clocks.items()}
    return {"gpu": found[index].name, "sms": found[index].sms, "driver": driver_version(), **rates}
