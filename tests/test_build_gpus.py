"""What the driver says, where there is one, and the silence where there is none."""

from __future__ import annotations

import pytest

from megadsl.build import gpus as module
from megadsl.build.gpus import Gpu, driver_version, gpus


def test_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_driver", None)
    assert driver_version() is None
    assert gpus() == []


def test_which_gpu_runs_what() -> None:
    hopper = Gpu("H200", "sm_90", 1, 1, True)
    assert hopper.runs("sm_90a")
    assert hopper.runs("sm_90")
    assert not hopper.runs("sm_100a")


@pytest.mark.gpu
def test_a_real_gpu_describes_itself() -> None:
    version = driver_version()
    assert version is not None
    assert version >= 13000
    hopper = next(gpu for gpu in gpus() if gpu.runs("sm_90a"))
    assert hopper.sms > 64
    assert hopper.memory > 2**34
    assert hopper.cooperative
