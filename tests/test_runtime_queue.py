"""The order of a program's work over streams, how long the host waits for it, and room for a grid: with stand-ins for CUDA."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.runtime import cuda
from megadsl.runtime.queue import LaunchQueue

STEPS = torch.zeros(1, dtype=torch.int32)


@dataclass(eq=False)
class Stream:
    cuda_stream: int
    waited: list[int] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)


@dataclass
class Event:
    done: bool = False

    def query(self) -> bool:
        return self.done

    def record(self, stream: Stream) -> None:
        pass


class Gpu:
    """What LaunchQueue asks of torch: the current stream, whether it captures, and how many launches have ended."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams = [Stream(i) for i in range(3)]
        self.now, self.capturing, self.counts = self.streams[0], False, [0]
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.now.cuda_stream, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(99))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch, "empty", lambda *size, dtype, pin_memory: torch.zeros(*size, dtype=dtype))
        patch.setattr(LaunchQueue, "_count", lambda queue: self.counts.pop(0) if len(self.counts) > 1 else self.counts[0])

    def queue(self, patience_s: float = 0.01) -> LaunchQueue:
        return LaunchQueue(torch.device("cpu"), STEPS, patience_s, 2.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return Gpu(monkeypatch)


def test_a_turn_on_another_stream_waits_for_the_one_before(gpu: Gpu) -> None:
    queue, asked = gpu.queue(), []
    queue.admit = asked.append
    for index in (0, 0, 1, 1, 2, 0):
        gpu.now = gpu.streams[index]
        with queue.turn(), queue.turn():  # a method may call another
            pass
    assert [s.waited for s in gpu.streams] == [[2], [0], [1]] and asked == [1, 2, 0]


def test_a_turn_asks_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the way of every launch: one question to torch, and nothing is made, recorded or waited for."""
    queue, asked = gpu.queue(), []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: asked.append(index) or gpu.now.cuda_stream)
    for slow in ("current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, slow, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", None)
    with queue.turn() as handle:
        assert handle == gpu.now.cuda_stream
    assert len(asked) == 1


def test_a_capture_takes_no_turn(gpu: Gpu) -> None:
    queue = gpu.queue()
    gpu.now, gpu.capturing = gpu.streams[1], True
    with queue.turn():
        pass
    gpu.now, gpu.capturing = gpu.streams[2], False
    with queue.turn():
        pass
    assert gpu.streams[1].waited == [] and gpu.streams[2].waited == [0]


def test_a_stream_that_is_refused_is_no_turn(gpu: Gpu) -> None:
    queue = gpu.queue()
    gpu.now = gpu.streams[1]

    def refuse(stream: int) -> None:
        raise ValueError(stream)

    queue.admit = refuse
    with pytest.raises(ValueError, match="1"), queue.turn():
        pass
    gpu.now = gpu.streams[0]
    with queue.turn():  # the lock is free, and the stream is still the last one
        pass
    assert all(s.waited == [] for s in gpu.streams)


def test_two_threads_take_turns(gpu: Gpu) -> None:
    queue, inside = gpu.queue(), []

    def work() -> None:
        for _ in range(20):
            with queue.turn():
                inside.append("in")
                time.sleep(1e-4)
                inside.append("out")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == ["in", "out"] * 40


def test_a_busy_gpu_is_a_diagnostic(gpu: Gpu) -> None:
    queue, event = gpu.queue(), Event()
    with pytest.raises(MegadslError) as caught:
        queue.wait(event)
    assert caught.value.code == "MK449" and "for 0.01 s none has ended" in str(caught.value)
    assert "call check() again" in str(caught.value) and "gives up by itself after 2 s" in str(caught.value)
    with pytest.raises(MegadslError, match="MK449"), queue.turn():
        pass
    with pytest.raises(MegadslError, match="MK449"):
        queue.settle()
    event.done = True
    queue.settle()
    with queue.turn():
        pass


def test_launches_that_end_are_waited_for(gpu: Gpu) -> None:
    queue, event = gpu.queue(), Event()
    gpu.counts = [*range(5), 5]
    with pytest.raises(MegadslError, match="MK449"):
        queue.wait(event)
    assert gpu.counts == [5], "each launch that ended gave new patience"
    event.done = True
    queue.wait(event)


class Driver:
    """Stands for cuda.bindings.driver: a grid fits ``per_sm`` times on each SM of a green context of ``sms`` (0: none)."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_NUM_REGS=4)
    CUstream = int

    def __init__(self, per_sm: int, sms: int) -> None:
        self.per_sm, self.sms = per_sm, sms

    def __getattr__(self, name: str) -> Any:
        green = SimpleNamespace(sm=SimpleNamespace(smCount=self.sms))
        answers = {
            **{"cuStreamGetGreenCtx": self.sms, "cuGreenCtxGetDevResource": green, "cuFuncGetAttribute": 146},
            **{"cuOccupancyMaxActiveBlocksPerMultiprocessor": self.per_sm, "cuOccupancyMaxActiveClusters": 15},
        }
        return lambda *arguments: (0, answers[name])


@pytest.mark.parametrize(("sms", "fits"), [(0, True), (64, False), (128, True)])
def test_a_stream_of_fewer_sms_is_a_diagnostic(sms: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver", Driver(1, sms))
    kernel = object.__new__(cuda.CudaKernel)
    kernel._functions, kernel._blocks, kernel._threads, kernel._smem, kernel._cluster = [None], 128, 288, 200_000, 1
    if fits:
        kernel.admit(7)
        return
    with pytest.raises(MegadslError) as caught:
        kernel.admit(7)
    assert caught.value.code == "MK444" and "128 blocks cannot be co-resident: there is room for 1 per SM x 64 SMs = 64" in str(
        caught.value
    )
    assert "146 registers per thread" in str(caught.value) and "schedule at most 64 blocks" in str(caught.value)


@pytest.mark.parametrize(("size", "fits"), [(8, False), (16, True)])
def test_clusters_that_find_no_room_are_a_diagnostic(size: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver", Driver(1, 132))
    kernel = object.__new__(cuda.CudaKernel)
    kernel._functions, kernel._blocks, kernel._threads, kernel._smem, kernel._cluster = [None], 128, 288, 200_000, size
    kernel._config = None
    if fits:
        kernel.admit(7)
        return
    with pytest.raises(MegadslError) as caught:
        kernel.admit(7)
    assert caught.value.code == "MK468" and "128 blocks in clusters of 8 cannot be co-resident: there is room for 15 clusters, 120" in str(
        caught.value
    )
    assert 'merge("exchange")' in str(caught.value)
