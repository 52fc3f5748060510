"""What the clock of an SM and the timer that all SMs share (globaltimer) are worth on this GPU: docs/tracing.md.

python -m tools.timers --out docs/measurements/timers.json

One thread on every SM reads clock, globaltimer, clock, over and over. Reported: by how much the timer goes on when it does, what a
reading of it costs, how far an SM's clock is from one straight line through its readings, and how far the SMs' rates differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver

from megadsl.build.nvcc import build_cubin
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.resources import include
from megadsl.runtime.cuda import call

COUNT = 8192
PERCENTILES = (0, 10, 50, 90, 100)


def read(sms: int) -> npt.NDArray[np.int64]:
    """[sms, COUNT, 3]: clock before, globaltimer in ns, clock behind; from each SM's first reading on, without wraps."""
    source = (Path(__file__).parent / "timers.cu").read_text()
    cubin = build_cubin(source, DEFAULT_ARCH, [include()], {}).path
    out = torch.zeros((sms, COUNT, 3), dtype=torch.int32, device="cuda")
    library = call("cuLibraryLoadData", cubin.read_bytes(), [], [], 0, [], [], 0)
    function = call("cuKernelGetFunction", call("cuLibraryGetKernel", library, b"readings"))
    smem = machine(DEFAULT_ARCH).smem_per_block  # one block an SM
    call("cuFuncSetAttribute", function, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem)
    words = (ctypes.c_uint64(out.data_ptr()), ctypes.c_uint32(COUNT))
    arguments = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    for _ in range(2):  # the first launch is cold
        call("cuLaunchKernel", function, sms, 1, 1, 1, 1, 1, smem, stream, ctypes.addressof(arguments), 0)
        torch.cuda.synchronize()
    words32 = out.cpu().numpy().view(np.uint32).astype(np.int64)
    origin = words32[:, :1, :].copy()
    origin[:, :, 1], origin[:, :, 2] = origin[:, :, 1].min(), origin[:, :, 0]
    return (words32 - origin) % (1 << 32)


def spread(values: npt.NDArray[Any]) -> list[float]:
    """Its PERCENTILES."""
    return [round(float(v), 6) for v in np.percentile(values, PERCENTILES)]


def judge(readings: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The figures, in ns and cycles."""
    clocks, times, cost = readings[:, :, 0], readings[:, :, 1], readings[:, :, 2] - readings[:, :, 0]
    steps = np.diff(times, axis=1)
    sizes, counts = np.unique(steps[steps > 0], return_counts=True)
    often = np.argsort(-counts)[:8]
    rates, apart = [], []
    for clock, time in zip(clocks, times, strict=True):
        first = np.flatnonzero(np.diff(time) > 0) + 1  # just when the timer went on
        rate, offset = np.polyfit(clock[first], time[first], 1)
        rates.append(rate)
        apart.append(time[first] - (rate * clock[first] + offset))
    residual = np.concatenate(apart)
    return {
        "us_observed": round(float(times.max(axis=1).min()) / 1e3, 1),
        "timer_steps_ns": {int(sizes[i]): int(counts[i]) for i in often},
        "reading_cycles": spread(cost),
        "cycles_between_readings": spread(np.diff(clocks, axis=1)),
        "ns_from_one_line": spread(residual),
        "ns_per_cycle": spread(np.array(rates)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    figures = {"device": torch.cuda.get_device_name(), "sms": sms, "percentiles": PERCENTILES, **judge(read(sms))}
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
