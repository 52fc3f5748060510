"""How long a checkpoint takes from the disk to packed weights, beside how long its disk takes to be read.

    python -m tools.load_time /fast/disk --gb 8                                      # llama-3.1-8b's shapes, as many layers as 8 GB hold
    python -m tools.load_time /fast/disk --model llama-tiny --gb 0.01 --device cpu   # without a GPU

Makes a checkpoint of random bf16 numbers in the given folder, safetensors files of at most 4 GB with an index, and removes it at the
end. Then in turn: its files are read as they are, by as many threads as the product uses, into memory that is used over and over; and
they are opened, validated and packed as every command does it (megadsl.runtime.pack), until the device is done. Before each, the
kernel is told to forget the files. Prints one JSON line; ``ratio`` is of the medians. On a CPU it is that of packing, not of reading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megadsl.driver import Compiled, compile_model
from megadsl.dsl.registry import load
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.readahead import PIECE, THREADS
from megadsl.runtime.safetensors import INDEX
from megadsl.runtime.weights import needed, open_weights

SHARD = 4 << 30
NOISE = 1 << 25  # random numbers, used again and again
FOLDER = "megadsl-load-time"  # made in the folder that is given


def config_of(model: str, size: float) -> dict[str, Any]:
    """The registered model's configuration, with as many layers as ``size`` bytes hold, at least one."""
    config = dict(load(model)[1])

    def total(layers: int) -> int:
        return sum(2 * math.prod(need.shape) for need in needed(made(model, config | {"num_hidden_layers": layers}).manifest).values())

    one, two = total(1), total(2)
    return config | {"num_hidden_layers": 1 + max(0, round((size - one) / (two - one)))}


def made(model: str, config: dict[str, Any]) -> Compiled:
    return compile_model(load(model)[0], config=config, check=False)


def write_checkpoint(folder: Path, compiled: Compiled) -> int:
    """Files, an index and an empty configuration; the bytes of all tensors."""
    noise = (0.02 * torch.randn(NOISE, generator=torch.Generator().manual_seed(1))).bfloat16()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    shards: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}
    total = held = 0
    for name, need in sorted(needed(compiled.manifest).items()):
        size = 2 * math.prod(need.shape)
        if held and held + size > SHARD:
            save_file(shards[-1], folder / f"model-{len(shards)}.safetensors")
            shards[-1].clear()
            shards.append({})
            held = 0
        begin = total // 2 % NOISE
        count = math.prod(need.shape)
        shards[-1][name] = noise[torch.arange(begin, begin + count) % NOISE].view(need.shape)
        places[name] = f"model-{len(shards)}.safetensors"
        total, held = total + size, held + size
    save_file(shards[-1], folder / f"model-{len(shards)}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return total


def forget(folder: Path) -> None:
    """Nothing of the files is left in the page cache."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)  # what is not on the disk yet cannot be forgotten
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_all(folder: Path) -> None:
    """Every byte of the files, in pieces, by several threads."""
    files = {path: os.open(path, os.O_RDONLY) for path in sorted(folder.glob("*.safetensors"))}
    pieces = [(file, begin) for path, file in files.items() for begin in range(0, path.stat().st_size, PIECE)]
    buffers = [bytearray(PIECE) for _ in range(THREADS)]

    def read(job: tuple[list[tuple[int, int]], bytearray]) -> None:
        for file, begin in job[0]:
            os.preadv(file, [job[1]], begin)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, ((pieces[i::THREADS], buffers[i]) for i in range(THREADS))))
    for file in files.values():
        os.close(file)


def load_all(folder: Path, compiled: Compiled, device: str) -> None:
    pack_weights(compiled.manifest, open_weights(folder), device, progress=False)
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(folder: Path, run: Callable[[], None]) -> float:
    forget(folder)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--model", default="llama-3.1-8b", help="a registered model, whose shapes are used")
    parser.add_argument("--gb", type=float, default=8.0, help="about the size of the checkpoint, in 1e9 bytes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder: Path = args.folder / FOLDER
    compiled = made(args.model, config_of(args.model, 1e9 * args.gb))
    torch.zeros(1, device=args.device)  # a context of its own takes as long as a small checkpoint
    try:
        size = write_checkpoint(folder, compiled)
        runs = {"read": lambda: read_all(folder), "load": lambda: load_all(folder, compiled, args.device)}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for name, _ in zip(cycle(runs), range(len(runs) * args.rounds), strict=False):
            times[name].append(seconds(folder, runs[name]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    where = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    about = {"model": args.model, "layers": compiled.graph.layers, "bytes": size, "device": where, "rounds": args.rounds}
    rates = {f"{name}_gb_s": round(size / 1e9 / medians[name], 3) for name in medians}
    print(
        json.dumps(
            {**about, **{f"{n}_s": round(m, 4) for n, m in medians.items()}, **rates, "ratio": round(medians["load"] / medians["read"], 3)}
        )
    )


if __name__ == "__main__":
    main()
