"""Formats of weights: their codes on the device and in torch, what quantising makes of numbers, and kernels against torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from dsl_tools import findings
from emulator.harness import launch
from torch import Tensor

import megadsl as mk
from megadsl.build.host import DETECT
from megadsl.driver import Compiled, compile_model
from megadsl.dsl.schedule import ScheduleBlock
from megadsl.ir.formats import DEVICE_SCALE, FORMATS
from megadsl.ir.graph import Linear
from megadsl.machine import ARCHES
from megadsl.reference.formats import E2M1, Quantised, dequantised, operands, quantised
from megadsl.runtime.pack import arranged
from tests.kernels import Bench, check, compiled, one_build, steps

NARROW = tuple(name for name in FORMATS if name != "bf16")


def every_code(name: str) -> Quantised:
    """Eight rows in which each code meets each scale that its format has; of int4's, many, the smallest and the largest."""
    found = FORMATS[name]
    if found.bits == 8:
        codes = torch.arange(256, dtype=torch.uint8)
        codes[codes % 128 == 127] = 0 if name == "fp8" else 127  # E4M3 has NaN there
        return Quantised(torch.stack([codes.roll(row) for row in range(8)]), None, None)
    codes = torch.stack([torch.arange(8 * 32 * 16).roll(row) % 16 for row in range(8)]).to(torch.uint8)
    blocks = torch.arange(codes.shape[1] // found.block)
    if name == "nvfp4":
        return Quantised(codes, ((blocks + 0x60) % 0x7F).expand(8, -1).to(torch.uint8), None)
    if name == "mxfp4":
        return Quantised(codes, torch.stack([(blocks + 32 * row) % 252 for row in range(8)]).to(torch.uint8), None)
    words = np.random.default_rng(0).integers(0, 0x7D00, (8, len(blocks)))
    words[:, :4] = (0, 1, 0x80, 0x7D00)
    return Quantised(codes, torch.from_numpy(words.astype(np.int16)).view(torch.bfloat16), None)


def matrix(name: str, q: Quantised) -> dict[str, Any]:
    rows, columns = q.codes.shape
    source = {"weight": "w", "rows": rows, "order": "natural", "head_dim": 0, "rotary_dim": 0}
    shape = {"rows": rows, "columns": columns, "columns_padded": columns, "tile_columns": columns}
    return {"kind": "matrix", "sources": [source], "interleave": False, "format": name, **shape}


@pytest.mark.parametrize("name", NARROW)
def test_every_code_and_scale_on_the_device(name: str) -> None:
    """What a lane multiplies is the bf16 number that torch has for it, bit for bit."""
    q = every_code(name)
    panels = q.codes.shape[1] // 32
    tile = arranged(matrix(name, q), [q]).flatten().numpy()
    assert tile.nbytes == panels * FORMATS[name].panel_bytes
    filled = np.zeros(-(-tile.nbytes // 16) * 16, np.uint8)
    filled[: tile.nbytes] = tile
    out = np.zeros(panels * 512, np.uint8)
    launch("formats", [NARROW.index(name), panels], smem_bytes=filled.nbytes, weights=filled, kv=out)
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).view(panels, 8, 4, 8).permute(1, 0, 2, 3).flatten(1).float()
    expected = operands(name, q) / DEVICE_SCALE.get(name, 1.0)
    assert got.equal(expected) and got.signbit().equal(expected.signbit())


@pytest.mark.parametrize("name", NARROW)
def test_what_has_codes_is_kept(name: str) -> None:
    """A matrix of numbers that the format has comes back as it is, but for the rounding of fp32 scales."""
    q = quantised(name, torch.randn(24, 96, generator=torch.Generator().manual_seed(1)))
    once = operands(name, q) * (1 if q.row_scales is None else q.row_scales[:, None])
    assert torch.allclose(dequantised(name, once), once, rtol=1e-6, atol=0) or name == "int4", "int4 rounds its products"
    bound = {"fp8": 2**-4, "int8": 0.5 / 127, "nvfp4": 1 / 6 + 2**-4, "mxfp4": 1 / 4, "int4": 0.5 / 7 + 2**-7}[name]
    w = torch.randn(64, 200, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    blocks = FORMATS[name].block or 200
    largest = (
        torch.nn.functional.pad(w.float().abs(), (0, -200 % blocks))
        .unflatten(1, (-1, blocks))
        .amax(2)
        .repeat_interleave(blocks, 1)[:, :200]
    )
    assert (dequantised(name, w) - w.float()).abs().le(bound * largest + 1e-7).all()


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """The distance to the nearest of some numbers."""
    return (x[..., None] - numbers).abs().amin(-1)


def test_nearest_codes_of_e2m1() -> None:
    """To nearest, ties to the code with an even last bit; too large becomes the largest."""
    numbers = torch.tensor(E2M1)
    x = torch.arange(-2400, 2401) / 400  # exact in the middle between two numbers
    block = torch.cat([torch.full((4801, 1), 6.0), x[:, None], torch.zeros(4801, 30)], 1)  # a scale of 1
    got = dequantised("mxfp4", block)[:, 1]
    assert (got - x).abs().equal(nearest(x.abs(), numbers)) and got.sign().mul(x).ge(0).all()
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    for tie, expected in ties.items():
        assert float(got[(x - tie).abs().argmin()]) == expected and float(got[(x + tie).abs().argmin()]) == -expected


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("fill", [0.0, 2.0**-30, 1e30])
def test_rows_of_zeros_and_of_extremes(name: str, fill: float) -> None:
    w = torch.zeros(16, 64)
    w[3, 5] = fill
    got = dequantised(name, w)
    assert got.isfinite().all() and int((got != 0).sum()) == (fill != 0)
    assert fill == 0 or abs(float(got[3, 5]) / fill - 1) < 0.26


# -- kernels

SIZES = {1: [(0, 1), (17, 1)], 3: [(0, 3), (16, 2)], 6: [(15, 6)], 16: [(0, 16), (31, 5)]}
KERNELS = [
    ("llama-tiny", "fp8", 1, 3), ("llama-tiny", "nvfp4", 16, 3), ("llama-tiny-odd", "mxfp4", 1, 5), ("llama-tiny-odd", "int4", 3, 5),
    ("llama-tiny-biased", "nvfp4", 6, 2), ("qwen3-tiny", "int8", 1, 2),
]  # fmt: skip


def key(model: str, name: str, tokens: int, blocks: int) -> str:
    return f"{model}-{name}-{tokens}-{blocks}"


@cache
def kernels() -> dict[str, Compiled]:
    made = {key(*one): compiled(one[0], tokens=one[2], blocks=one[3], formats=f"{one[1]}, lm_head={one[1]}", max_kv=64) for one in KERNELS}
    for case, (tokens, configure, options) in SCHEDULED.items():
        made[case] = compiled("llama-tiny", tokens=tokens, blocks=3, configure=configure, max_kv=64, **options)
    return one_build(made)


def split(s: ScheduleBlock) -> None:
    """Chunks, parts of the columns, sentinels, and an input in shared memory."""
    s["qkv_proj"].gather("shared")
    for op in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        s[op].sync(mk.Sentinel(4))


def by_block(s: ScheduleBlock) -> None:
    s.finish("block")
    for op in ("qkv_proj", "gate_up_proj"):
        s[op].prefetch(registers=1).gather("shared")


# case -> (tokens, schedule, what compile_model takes)
SCHEDULED: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "sentinels": (3, split, {"formats": "nvfp4"}),
    "held, by the block": (1, by_block, {"formats": "fp8, o_proj=bf16, down_proj=int4"}),
    "lanes copy": (3, None, {"formats": "mxfp4", "arch": "sm_80"}),
    "a batch": (4, None, {"formats": "nvfp4, lm_head=int8", "sequences": 2}),
}


@pytest.mark.parametrize("case", [key(*one) for one in KERNELS])
def test_against_torch(case: str) -> None:
    made = kernels()[case]
    check(made, SIZES[made.manifest["tokens"]], seeds=(1,))


@pytest.mark.parametrize("case", [name for name in SCHEDULED if name != "a batch"])
def test_under_a_schedule(case: str) -> None:
    made = kernels()[case]
    check(made, SIZES[made.manifest["tokens"]], seeds=(1,))


def test_without_races() -> None:
    made = compiled("llama-tiny", tokens=1, blocks=3, formats="nvfp4, lm_head=fp8", max_kv=64)
    bench = Bench(made, defines={DETECT: "1"}, seed=2)
    bench.play(steps(made, [(0, 1), (17, 1)]))
    assert bench.program.report is not None and not bench.program.report.races


def test_bytes() -> None:
    """A weight takes as many bytes as its format says, in the arena and in the floor."""

    def weight_bytes(formats: str | None) -> int:
        return int(compile_model("llama-3.1-8b", formats=formats, check=False, schedule="model").manifest["weight_bytes"])

    whole, layers = weight_bytes(None), 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 14336 * 4096)
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert whole - weight_bytes("fp8") == layers - rows * 4
    assert whole - weight_bytes("nvfp4") == layers * 2 - layers * 9 // 16 - rows * 4
    assert whole - weight_bytes("mxfp4") == layers * 2 - layers * 17 // 32


@pytest.mark.parametrize("arch", ARCHES)
def test_every_architecture_takes_every_format(arch: str) -> None:
    formats = dict(zip(("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"), NARROW, strict=True))
    made = compile_model("llama-3.2-1b", arch=arch, formats=formats, schedule="model")
    assert made.report is not None and not made.report.findings


def test_declared_in_the_spec() -> None:
    @mk.kernel
    def own(cfg: Any, tokens: int = 1) -> mk.Tensor:
        x = mk.embed(mk.weight("e", (256, 64)), mk.input_ids(tokens))
        return mk.argmax(mk.linear(x, mk.weight("w", (256, 64)), format=cfg.format))

    for name in NARROW:
        assert compile_model(own, config={"format": name}, blocks=2, max_kv=16).graph.op("w").format == name  # type: ignore[union-attr]
    (wrong,) = findings(lambda: compile_model(own, config={"format": "fp7"}, blocks=2, max_kv=16))
    assert wrong.code == "MK288" and wrong.span.line == own.function.__code__.co_firstlineno + 3
    assert "there is no format 'fp7'" in wrong.message and "bf16, fp8, int8, nvfp4, mxfp4, int4" in wrong.mend


def test_asked_for_at_compilation() -> None:
    found = findings(lambda: compile_model("llama-tiny", formats="fp9, o_proj=int8, x_proj=int3"))
    assert [one.code for one in found] == ["MK288", "MK288", "MK289"]
    assert "no linear called 'x_proj'" in found[2].message and "qkv_proj" in found[2].mend
    graph = compile_model("llama-tiny", formats="nvfp4, o_proj=bf16, lm_head=fp8", blocks=2, max_kv=64).graph
    assert {op.name: op.format for op in graph.ops if isinstance(op, Linear)} == {
        "qkv_proj": "nvfp4", "o_proj": "bf16", "gate_up_proj": "nvfp4", "down_proj": "nvfp4", "lm_head": "fp8"
    }  # fmt: skip
