"""Where the host's time of one launch goes, part by part: what ``Program.launch`` costs in Python, in the driver, and on an idle GPU.

    python tools/host_time.py llama-3.2-1b --out build/host_time.json

Each part is called ``--calls`` times, alone, with the GPU idle before each call, and some back to back as well, when the queue holds
work. Microseconds: median, 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from megadsl.driver import compile_model
from megadsl.runtime.bench_timing import Spread
from megadsl.runtime.generate import Generator
from megadsl.runtime.program import Program
from megadsl.runtime.weights import random_weights

BACK_TO_BACK = 8  # launches that are queued between two waits
SPIN_S = 2e-3


def spent(part: Callable[[], object], calls: int, pause: Callable[[], object]) -> Spread:
    """Microseconds of each call of ``part``, with ``pause`` before it."""
    found = []
    for _ in range(calls):
        pause()
        began = time.perf_counter()
        part()
        found.append(1e6 * (time.perf_counter() - began))
    return Spread.of(found)


def queued(part: Callable[[], object], calls: int) -> Spread:
    """Microseconds of each call while earlier ones are still queued."""
    found = []
    for _ in range(-(-calls // BACK_TO_BACK)):
        torch.cuda.synchronize()
        part()
        for _ in range(BACK_TO_BACK):
            began = time.perf_counter()
            part()
            found.append(1e6 * (time.perf_counter() - began))
    return Spread.of(found)


def warm() -> None:
    """Wait for the GPU and keep this core busy for a while: what a sleeping core costs is then not in the next call."""
    torch.cuda.synchronize()
    until = time.perf_counter() + SPIN_S
    while time.perf_counter() < until:
        pass


def config_of(program: Program, attributes: list[Any]) -> Any:
    """A launch of the program's grid, with other attributes."""
    manifest = program.manifest
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = manifest["blocks"], 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = manifest["threads"], 1, 1
    config.sharedMemBytes, config.hStream = manifest["smem_bytes"], driver.CUstream(torch.cuda.current_stream().cuda_stream)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def parts_of(program: Program) -> dict[str, Callable[[], object]]:
    """What a launch is made of, each as a call of its own."""
    kernel, queue, replay = program.kernel, program._queue, program.capture()
    assert kernel is not None and queue is not None
    stream = torch.cuda.current_stream().cuda_stream
    plain = config_of(program, [])

    def turn() -> None:
        with queue.turn():
            pass

    def uncooperative() -> None:
        (status,) = driver.cuLaunchKernelEx(plain, *kernel._launches[0], 0)
        assert status == driver.CUresult.CUDA_SUCCESS

    return {
        "nothing (the clock)": lambda: None,
        "torch.cuda.current_device": torch.cuda.current_device,
        "torch.cuda.current_stream": torch.cuda.current_stream,
        "turn of the queue": turn,
        "cuCtxGetCurrent (a driver call that does nothing)": driver.cuCtxGetCurrent,
        "cuLaunchKernelEx, cooperative": lambda: kernel.launch(stream),
        "cuLaunchKernelEx, without the attribute": uncooperative,
        "Program.launch": program.launch,
        "replay of a graph": replay.replay,
        "Event.record": torch.cuda.Event().record,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--kv", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compiled = compile_model(args.model)
    program = Generator(compiled, random_weights(compiled.manifest, device="cuda"), "cuda", progress=False).program
    program.control.set_inputs(args.kv, [1], [args.kv], [1])
    rows = {}
    for name, part in parts_of(program).items():
        spent(part, 10, torch.cuda.synchronize)
        rows[name] = {
            "idle": spent(part, args.calls, torch.cuda.synchronize),
            "idle, core awake": spent(part, args.calls // 4, warm),
            "queued": queued(part, args.calls),
        }
        program.check()
        print(f"{name:<50}" + "".join(f"  {how} {s.median:6.1f} ({s.p10:5.1f}-{s.p90:5.1f})" for how, s in rows[name].items()), flush=True)
    if args.out:
        found = {name: {how: vars(spread) for how, spread in row.items()} for name, row in rows.items()}
        args.out.write_text(json.dumps({"model": args.model, "unit": "us", "parts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
