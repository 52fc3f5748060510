"""cuda-python's driver API: a cubin becomes a kernel that can be launched cooperatively on a torch stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megadsl.build.cubin import function_bytes
from megadsl.build.gpus import bindings_installed, driver_version, gpus
from megadsl.diagnostics import declare, error
from megadsl.machine import Machine, machine, running, runs

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

BINDINGS_MISSING = declare(
    "MK440", "running on a GPU needs cuda-python, which is not installed", "pip install 'megadsl[cuda]', or run with device cpu"
)
NO_GPU = declare(
    "MK441", "no usable NVIDIA GPU: {why}", "run on a machine with a GPU and its driver, or with device cpu; megadsl doctor says more"
)
DRIVER_OLD = declare(
    "MK442",
    "the driver supports CUDA {have}, kernels for {arch} need {want}",
    "install a driver for CUDA {want} or newer, or run with device cpu",
)
WRONG_ARCH = declare(
    "MK443", "the kernel is built for {arch}, this GPU is {have}", "compile with --arch for this GPU, or run on a GPU of {arch}"
)
NOT_RESIDENT = declare(
    "MK444",
    "a grid of {blocks} blocks cannot be co-resident: there is room for {per_sm} per SM x {sms} SMs = {capacity}"
    " ({threads} threads, {smem} bytes of shared memory, {registers} registers per thread)",
    "schedule at most {capacity} blocks, or fewer ring stages, warps or registers; in a green context, give it more SMs",
)
NO_CLUSTERS = declare(
    "MK468",
    "a grid of {blocks} blocks in clusters of {size} cannot be co-resident: there is room for {clusters} clusters, {capacity} blocks",
    'schedule at most {capacity} blocks, or add the splits elsewhere: s["attention"].merge("exchange")',
)
SMEM_REFUSED = declare("MK445", "a block needs {smem} bytes of shared memory, this GPU gives at most {most}", "schedule a smaller ring")
CALL_FAILED = declare(
    "MK446",
    "the CUDA driver refused {call}: {name} ({text})",
    "if an earlier kernel of this process failed, start a fresh process; megadsl doctor checks driver and GPU",
)


def call(name: str, *arguments: Any) -> Any:
    """Call the driver function ``name``; its result (None, a value or a tuple). MK446 when it fails."""
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(status)[1]
        raise error(CALL_FAILED, call=name, name=status.name, text=text.decode() if text else "unknown")
    return values[0] if len(values) == 1 else tuple(values) or None


def check_gpu(arch: str, device: torch.device) -> None:
    """Raise MK440 to MK443 unless ``device`` can run kernels built for ``arch`` ("sm_90a")."""
    _check_driver(arch)
    if not torch.cuda.is_available():
        raise error(NO_GPU, why="torch sees none" if torch.version.cuda else "this torch is built without CUDA")
    if (device.index or 0) >= torch.cuda.device_count():
        raise error(NO_GPU, why=f"there is no {device}")
    found = architecture(device)
    if not runs(arch, found):
        raise error(WRONG_ARCH, arch=arch, have=found)


def gpu_for(arch: str) -> str:
    """The architecture ("sm_90") of the GPU that "cuda" means, asked without making a context on it. Raises as check_gpu does."""
    _check_driver(arch)
    found = gpus()
    if not found:
        raise error(NO_GPU, why="the driver lists none")
    if not found[0].runs(arch):
        raise error(WRONG_ARCH, arch=arch, have=found[0].arch)
    return found[0].arch


def _check_driver(arch: str) -> None:
    if not bindings_installed():
        raise error(BINDINGS_MISSING)
    have, want = driver_version(), machine(arch).min_driver
    if have is None:
        raise error(NO_GPU, why="there is no NVIDIA driver")
    if have < want:
        raise error(DRIVER_OLD, have=_dotted(have), want=_dotted(want), arch=arch)


def architecture(device: torch.device) -> str:
    """The architecture of a GPU: "sm_90"."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def machine_of(arch: str, device: torch.device) -> Machine:
    """The machine that runs a kernel for ``arch`` on ``device``; in the emulator, the one it is for."""
    return running(arch, architecture(device)) if device.type == "cuda" else machine(arch)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def shape_of(manifest: Mapping[str, Any], code_bytes: int) -> list[int]:
    """The words of the kernel's Shape argument, with the bytes of its code where it reads that ahead."""
    words: list[int] = list(manifest["shape"])
    if manifest["code_word"] is not None:
        words[manifest["code_word"]] = code_bytes
    return words


class CudaKernel:
    """A loaded kernel with its launch arguments built once: a step is one driver call, or one for each of its launches.

    ``pointers`` fill mk::Buffers in its order (0 for none). The megakernel is launched cooperatively; of a step of several launches
    each is a dependent of the one before, which may begin while that one works (programmatic dependent launch). Must be
    made and launched with ``device`` current, after torch has used it.
    """

    def __init__(self, cubin: Path, manifest: Mapping[str, Any], pointers: Sequence[int], device: torch.device) -> None:
        self._library = call("cuLibraryLoadData", cubin.read_bytes(), [], [], 0, [], [], 0)
        names = manifest["entries"]
        self._functions = [call("cuKernelGetFunction", call("cuLibraryGetKernel", self._library, name.encode())) for name in names]
        self._allow_smem(manifest["smem_bytes"], device)
        self._blocks, self._threads, self._smem = manifest["blocks"], manifest["threads"], manifest["smem_bytes"]
        self._config, self._cluster = self._launch_config(manifest), manifest["cluster"]
        self._require_room(torch.cuda.get_device_properties(device).multi_processor_count)
        self._stream = 0
        # the launch reads these through raw pointers, so they live as long as the kernel
        self._buffers = (ctypes.c_uint64 * len(pointers))(*pointers)
        shape = shape_of(manifest, function_bytes(cubin, names[0]))
        self._shape = (ctypes.c_int32 * max(1, len(shape)))(*shape)
        self._layers = (ctypes.c_uint32 * max(1, manifest["layers"]))(*range(max(1, manifest["layers"])))
        fixed, word = (ctypes.addressof(self._buffers), ctypes.addressof(self._shape)), ctypes.sizeof(ctypes.c_uint32)
        # the megakernel takes no layer: the driver reads as many parameters as a kernel has
        self._parameters = [(ctypes.c_void_p * 3)(*fixed, ctypes.addressof(self._layers) + word * i) for i in range(len(self._layers))]
        addresses = [ctypes.addressof(parameters) for parameters in self._parameters]
        self._launches = [(self._functions[kernel], addresses[layer]) for kernel, layer in manifest["launches"]]

    def launch(self, stream: int) -> None:
        """Launch on the raw stream handle. Asynchronous; safe while the stream is being captured into a graph."""
        if stream != self._stream:
            self._config.hStream = driver.CUstream(stream)
            self._stream = stream
        for function, parameters in self._launches:
            (status,) = driver.cuLaunchKernelEx(self._config, function, parameters, 0)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise error(CALL_FAILED, call="cuLaunchKernelEx", name=status.name, text=driver.cuGetErrorString(status)[1].decode())

    def point(self, buffer: int, pointer: int) -> None:
        """The next launches find buffer number ``buffer`` at ``pointer``; those that were made or captured before keep theirs."""
        self._buffers[buffer] = pointer

    def admit(self, stream: int) -> None:
        """Raise MK444 unless the SMs that the raw stream handle may use hold the grid: a green context has only some."""
        green = call("cuStreamGetGreenCtx", driver.CUstream(stream))
        if int(green):
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            self._require_room(call("cuGreenCtxGetDevResource", green, kind).sm.smCount)

    def close(self) -> None:
        """Unload the cubin. No launch may be in flight."""
        call("cuLibraryUnload", self._library)

    @property
    def registers(self) -> int:
        """Registers per thread, the most of any kernel."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return max(int(call("cuFuncGetAttribute", attribute, function)) for function in self._functions)

    def _allow_smem(self, smem: int, device: torch.device) -> None:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        most = call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", device.index or 0))
        if smem > most:
            raise error(SMEM_REFUSED, smem=smem, most=most)
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for function in self._functions:
            call("cuFuncSetAttribute", function, kind, smem)

    def _require_room(self, sms: int) -> None:
        asked = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        per_sm = min(call(asked, function, self._threads, self._smem) for function in self._functions)
        if per_sm * sms < self._blocks:
            figures = {"blocks": self._blocks, "per_sm": per_sm, "sms": sms, "capacity": per_sm * sms}
            raise error(NOT_RESIDENT, **figures, threads=self._threads, smem=self._smem, registers=self.registers)
        self._require_clusters()

    def _require_clusters(self) -> None:
        if self._cluster == 1:
            return
        clusters = min(call("cuOccupancyMaxActiveClusters", function, self._config) for function in self._functions)
        if clusters * self._cluster < self._blocks:
            figures = {"blocks": self._blocks, "size": self._cluster, "clusters": clusters, "capacity": clusters * self._cluster}
            raise error(NO_CLUSTERS, **figures)

    def _launch_config(self, manifest: Mapping[str, Any]) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = manifest["blocks"], 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = manifest["threads"], 1, 1
        config.sharedMemBytes = manifest["smem_bytes"]
        config.hStream = driver.CUstream(0)
        config.attrs = list(_launch_attributes(manifest))
        config.numAttrs = len(config.attrs)
        return config


def _launch_attributes(manifest: Mapping[str, Any]) -> Iterator[Any]:
    order = driver.CUlaunchAttribute()
    if len(manifest["launches"]) == 1:
        order.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        order.value.cooperative = 1
    else:
        order.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        order.value.programmaticStreamSerializationAllowed = 1
    yield order
    if manifest["cluster"] > 1:
        clusters = driver.CUlaunchAttribute()
        clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = clusters.value.clusterDim
        size.x, size.y, size.z = manifest["cluster"], 1, 1
        yield clusters
