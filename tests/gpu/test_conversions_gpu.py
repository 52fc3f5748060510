"""Conversions to bf16 on a GPU never make the empty value of sentinels, whichever NaN they are given (mk::Converted)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda.bindings import driver

from megadsl.build.nvcc import build_cubin
from megadsl.machine import DEFAULT_ARCH
from megadsl.resources import include
from megadsl.runtime.cuda import call

pytestmark = pytest.mark.gpu


def test_every_nan_becomes_one_that_is_not_all_ones() -> None:
    """All NaNs with 12 bits of mantissa, both signs, and some numbers: as the emulator's twin, bit for bit."""
    heads = np.arange(1, 1 << 12, dtype=np.uint32) << 11
    nans = np.concatenate([0x7F800000 | heads, 0xFF800000 | heads, 0x7F800000 | heads >> 11, 0xFF800000 | heads >> 11])
    numbers = np.random.default_rng(1).standard_normal(4096).astype(np.float32).view(np.uint32)
    patterns = np.concatenate([nans, [0xFFFFFFFF, 0x7FFFFFFF], numbers]).astype(np.uint32)
    given = torch.from_numpy(patterns.view(np.int32)).cuda()
    made = torch.full((2 * len(patterns),), -1, dtype=torch.int32, device="cuda")
    cubin = build_cubin((Path(__file__).parent / "conversions.cu").read_text(), DEFAULT_ARCH, [include()], {}).path
    torch.cuda.synchronize()
    library = call("cuLibraryLoadData", cubin.read_bytes(), [], [], 0, [], [], 0)
    function = call("cuKernelGetFunction", call("cuLibraryGetKernel", library, b"convert"))
    words = (ctypes.c_uint64(given.data_ptr()), ctypes.c_uint64(made.data_ptr()), ctypes.c_uint32(len(patterns)))
    arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(word) for word in words))
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    call("cuLaunchKernel", function, 8, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(arguments), 0)
    torch.cuda.synchronize()
    pairs, singles = made.cpu().numpy().view(np.uint32).reshape(-1, 2).T
    rounded = (patterns + 0x7FFF + (patterns >> 16 & 1)) >> 16
    expected = np.where((patterns & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded & 0xFFFF)
    assert (singles == expected).all()
    assert (pairs == (expected | expected << 16)).all()
