"""Other work on the same GPU, for tests of what a busy one does to a megakernel."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from cuda.bindings import driver

from megadsl.build.nvcc import build_cubin
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.resources import include
from megadsl.runtime.cuda import call


class Occupant:
    """A kernel that holds SMs: a block of it and one that needs much shared memory do not fit one SM together."""

    def __init__(self) -> None:
        source = (Path(__file__).parent / "occupant.cu").read_text()
        cubin = build_cubin(source, DEFAULT_ARCH, [include()], {}).path
        torch.cuda.current_stream().synchronize()  # torch has made its context current
        self._library = call("cuLibraryLoadData", cubin.read_bytes(), [], [], 0, [], [], 0)
        self._function = call("cuKernelGetFunction", call("cuLibraryGetKernel", self._library, b"occupy"))
        self._smem = machine(DEFAULT_ARCH).smem_per_block
        call("cuFuncSetAttribute", self._function, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._smem)

    def hold(self, sms: int, seconds: float, stream: torch.cuda.Stream) -> None:
        """Keep ``sms`` SMs for ``seconds``, from when the stream gets there; returns at once."""
        duration = ctypes.c_uint64(round(seconds * 1e9))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
        shape = (sms, 1, 1, 32, 1, 1)
        call("cuLaunchKernel", self._function, *shape, self._smem, driver.CUstream(stream.cuda_stream), ctypes.addressof(arguments), 0)


def matmuls() -> Callable[[], None]:
    """Products that each fill the whole GPU for about a millisecond."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def enqueue() -> None:
        for _ in range(4):
            torch.mm(a, a, out=out)

    return enqueue


def small_kernels() -> Callable[[], None]:
    """Thousands of kernels of a few microseconds, as a graph."""
    x = torch.zeros(1 << 16, device="cuda")
    x.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2000):
            x.add_(1.0)
    return graph.replay


def copies() -> Callable[[], None]:
    """Copies of a gigabyte within the GPU's memory."""
    a = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)

    def enqueue() -> None:
        for _ in range(4):
            b.copy_(a)

    return enqueue


@contextmanager
def loaded(enqueue: Callable[[], None], depth: int = 3) -> Iterator[list[int]]:
    """Keep a second stream filled with what ``enqueue`` enqueues, ``depth`` calls ahead; yields [calls so far]."""
    stream, stop, calls = torch.cuda.Stream(), threading.Event(), [0]

    def feed() -> None:
        pending: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            while not stop.is_set():
                pending = [event for event in pending if not event.query()]
                if len(pending) >= depth:
                    time.sleep(2e-4)
                    continue
                enqueue()
                pending.append(torch.cuda.Event())
                pending[-1].record()
                calls[0] += 1

    torch.cuda.synchronize()
    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        while calls[0] < depth:
            time.sleep(1e-3)
        yield calls
    finally:
        stop.set()
        feeder.join()
        torch.cuda.synchronize()
