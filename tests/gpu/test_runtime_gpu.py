"""What only a GPU can show of the runtime: graphs, streams, limits of the device, recovery in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.driver import compile_model
from megadsl.runtime import readahead
from megadsl.runtime.control import KV_LEN, MegakernelHang
from megadsl.runtime.generate import Generator
from megadsl.runtime.pack import pack_weights, unpack_record
from megadsl.runtime.program import Program
from megadsl.runtime.weights import open_weights, random_weights
from tests.gpu import probe
from tests.test_runtime_readahead import CONFIG, checkpoint
from tests.test_weights_pack import layered

pytestmark = pytest.mark.gpu


def program(**changes: Any) -> Program:
    manifest = probe.manifest(changes.pop("blocks", 100)) | changes
    return Program(manifest, probe.SOURCE, "cuda", pack_weights(manifest, probe.weights(), "cuda"), timeout_s=1.0)


def test_many_replays_are_bit_identical() -> None:
    run = program()
    run.control.set_inputs(5, [9], [5], [1])
    replay = run.capture()
    replay.replay()
    first = run.logits.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2000):
        run.logits[:1].fill_(float("nan"))
        replay.replay()
        different += (run.logits[:1].view(torch.int32) != first[:1].view(torch.int32)).sum()
    run.check()
    assert int(different) == 0


def test_launches_follow_the_current_stream() -> None:
    run = program()
    side = torch.cuda.Stream()
    run.control.set_inputs(0, [9], [0], [1], flags=1)
    run.launch()
    run.check()  # what is allocated once is allocated now
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        run.launch()
        snapshot = run.snapshot()
        assert not side.query(), "a launch must not wait"
        assert run.check(snapshot)[KV_LEN] == 2


def test_a_hang_ends_in_time_and_the_context_lives() -> None:
    generator = Generator(probe.Probe(probe.manifest(100)), probe.weights(), "cuda", timeout_s=1.0, progress=False)
    generator.program.buffers["kv"].view(torch.int32)[0] = 51
    began = time.perf_counter()
    with pytest.raises(MegakernelHang, match="tile 50"):
        generator.step([1, 2, 3])  # generate() would clear the KV arena, and with it the fault
    assert time.perf_counter() - began < 5
    assert generator.generate([1, 2, 3], 20).ids == probe.continuation([1, 2, 3], 20)
    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_limits_are_diagnostics() -> None:
    for changes, code, words in [
        ({"blocks": 100_000}, "MK444", "a grid of 100000 blocks cannot be co-resident"),
        ({"smem_bytes": 300 * 1024}, "MK445", "this GPU gives at most"),
    ]:
        with pytest.raises(MegadslError) as caught:
            program(**changes)
        assert caught.value.code == code and words in str(caught.value)


def test_wrong_arch_is_a_diagnostic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(MegadslError) as caught:
        program()
    assert caught.value.code == "MK443"


def test_packing_on_the_gpu_equals_packing_on_the_cpu() -> None:
    manifest = layered()
    source = random_weights(manifest, device="cuda")
    arena = pack_weights(manifest, source, "cuda", progress=False)
    assert arena.is_cuda and arena.cpu().equal(pack_weights(manifest, source, "cpu", progress=False))
    (back,) = unpack_record(manifest, manifest["pack"][0], arena)
    assert back.equal(source.load("embed"))


@pytest.mark.parametrize("piece", [readahead.PIECE, 1000])
def test_a_checkpoint_is_read_ahead(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into pinned memory that is used again as soon as it has been copied; also on a stream of one's own."""
    monkeypatch.setattr(readahead, "PIECE", piece)
    checkpoint(tmp_path / "made", CONFIG, torch.float32, files=3)
    manifest = compile_model(str(tmp_path / "made"), blocks=2, check=False).manifest
    wanted = pack_weights(manifest, open_weights(tmp_path / "made"), "cpu", progress=False)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            arena = pack_weights(manifest, open_weights(tmp_path / "made"), "cuda", progress=False)
            assert arena.is_cuda and arena.cpu().equal(wanted)


def test_launch_overhead_is_small() -> None:
    run = program(blocks=1)
    run.control.set_inputs(0, [9], [0], [1])
    run.launch()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(200):
        run.launch()
    spent = (time.perf_counter() - began) / 200
    run.check()
    print(f"\nhost time per launch: {spent * 1e6:.1f} us")
    assert spent < 100e-6
