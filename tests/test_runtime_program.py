"""Programs and generators, with a kernel written by hand: launches, the control protocol, hangs, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megadsl.diagnostics import MegadslError
from megadsl.runtime.control import EPOCH, KV_LEN, STEPS, MegakernelHang
from megadsl.runtime.generate import Generator, Text
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import TRACE, Program
from megadsl.trace.activity import activities
from megadsl.trace.records import read_timeline
from tests.gpu import probe
from tests.test_runtime_gguf import write_small

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT = [3, 1, 4, 1, 5, 9, 2]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def generator(device: str) -> Generator:
    return Generator(probe.Probe(), probe.weights(), device, timeout_s=0.5, progress=False)


def program_on(device: str, **options: object) -> Program:
    manifest = probe.manifest()
    return Program(manifest, probe.SOURCE, device, pack_weights(manifest, probe.weights(), device), **options)


def test_generates_what_the_kernel_means(generator: Generator) -> None:
    seen: list[int] = []
    made = generator.generate(PROMPT, 9, on_token=lambda token, text: seen.append(token))
    assert made.ids == probe.continuation(PROMPT, 9) == seen and made.prompt_ids == PROMPT and made.text == ""
    assert made.ms_per_token > 0 and generator.kv_len == len(PROMPT) + 8
    assert generator.generate(PROMPT, 1).ids == made.ids[:1]
    assert generator.generate(PROMPT, 0).ids == [] and generator.kv_len == len(PROMPT)


def test_steps_give_logits_and_keep_count(generator: Generator) -> None:
    last = generator.prefill(PROMPT)
    assert generator.kv_len == len(PROMPT) and int(last.argmax()) == probe.continuation(PROMPT, 1)[0]
    assert float(last.max()) == PROMPT[-1] + 1
    logits = generator.step([10, 11], positions=[20, 30], ancestors=[1, 2])
    assert logits.shape == (2, probe.VOCAB) and logits.dtype == torch.float32
    assert logits.argmax(1).tolist() == [70, 85] and generator.kv_len == len(PROMPT) + 2
    assert logits.data_ptr() == generator.program.buffers["logits"].data_ptr(), "a view, not a copy"
    generator.kv_len -= 2
    assert generator.step([10]).argmax(1).tolist() == [(50 + len(PROMPT)) % probe.VOCAB]


def test_a_hang_names_its_wait_and_the_next_launch_is_right(generator: Generator) -> None:
    generator.prefill(PROMPT[:3])
    generator.program.buffers["kv"].view(torch.int32)[0] = 2
    with pytest.raises(MegakernelHang) as caught:
        generator.step([5])
    (wait,) = caught.value.waits
    assert (wait.role, wait.op, wait.site, wait.layer, wait.tile, wait.block, wait.warp) == ("consumer", "gather", 0, 0, 1, 0, 0)
    assert (wait.expected, wait.observed) == (2, 1)
    for words in ("role consumer", "op gather (probe.cu:20)", "tile 1", "expected 0x2, observed 0x1", "the epoch of block tile"):
        assert words in str(caught.value)
    generator.program.buffers["kv"].zero_()
    assert generator.kv_len == 3
    assert generator.step([5]).argmax(1).tolist() == [28]
    assert generator.generate(PROMPT, 5).ids == probe.continuation(PROMPT, 5)


def test_a_hang_among_queued_replays(generator: Generator) -> None:
    generator.generate(PROMPT, 2)
    generator.program.buffers["kv"].view(torch.int32)[0] = 3
    replay = generator.program.capture()

    def queue() -> None:
        for _ in range(5):
            replay.replay()
        generator.program.check()

    with pytest.raises(MegakernelHang):
        queue()
    generator.program.buffers["kv"].zero_()
    replay.replay()
    assert generator.program.check()[STEPS] == 1


def test_a_launch_in_other_memory(device: str) -> None:
    program = program_on(device)
    own, other = program.buffers["logits"], torch.zeros_like(program.buffers["logits"])
    program.control.set_inputs(0, [7], [0], [1])

    def fail() -> None:
        with program.using(logits=other):
            program.launch()
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    program.check()
    assert int(other.view(torch.float32)[: probe.VOCAB].argmax()) == probe.continuation([7], 1)[0] and not own.any()
    assert program.buffers["logits"] is own
    program.launch()
    program.check()
    assert own.equal(other)


def test_capture_and_reset(device: str) -> None:
    program = program_on(device)
    program.control.set_inputs(0, [7], [0], [1], flags=1)
    two = program.capture(launches=2)
    program.launch()
    two.replay()
    words = program.check()
    assert (words[EPOCH], words[KV_LEN], words[STEPS]) == (4, 3, 3)
    program.reset()
    words = program.check()
    assert (words[EPOCH], words[KV_LEN], words[STEPS]) == (1, 0, 0)
    assert program.buffers["exchange"].tolist() == [255] * 48
    assert program.addresses()["rope"] == 0 and program.addresses()["control"] % 16 == 0


def test_a_timeline_of_the_last_launch(device: str) -> None:
    program = program_on(device, defines={TRACE: "1"})
    program.control.set_inputs(0, [7], [0], [1])
    for _ in range(2):
        program.launch()
    program.check()
    timeline = read_timeline(program.manifest, program.buffers["trace"].cpu().numpy())
    assert (len(timeline.blocks), timeline.epoch, timeline.lost) == (3, 2, 0)
    first, *others = (activity.executions for activity in activities(timeline, 1.0))
    assert [run.phase for run in first] == ["signal", "gather"] and len(first[1].waits) == 1
    assert all(not run.waits for runs in others for run in runs), "only block 0 waits"
    assert 0 <= first[1].waits[0][1] - first[1].waits[0][0] <= first[1].end - first[1].began <= timeline.step_us
    assert program_on(device).buffers["trace"].numel() == 0, "no room is taken without the define"


@pytest.mark.parametrize(
    ("code", "words", "action"),
    [
        ("MK452", "empty", lambda g: g.generate([], 3)),
        ("MK451", "token id 97 at index 1", lambda g: g.generate([0, 97, -1], 3)),
        ("MK450", "at most 37 more", lambda g: (g.prefill([1, 2, 3]), g.prefill([1] * 38))),
        ("MK450", "KV cache is full", lambda g: g.generate([1] * 30, 12)),
        ("MK453", "a step of 5 tokens", lambda g: g.step([1] * 5)),
        ("MK453", "a step of 0 tokens", lambda g: g.step([])),
        ("MK454", "position 40", lambda g: g.step([1], positions=[40])),
        ("MK455", "mask 0x1 of new token 1", lambda g: g.step([1, 2], ancestors=[1, 1])),
        ("MK455", "mask 0x7 of new token 1", lambda g: g.step([1, 2], ancestors=[1, 7])),
        ("MK456", "positions has 1 entries for 2", lambda g: g.step([1, 2], positions=[0])),
        ("MK458", "tokenizer", lambda g: g.generate("text", 3)),
    ],
)
def test_bad_input(code: str, words: str, action: object) -> None:
    generator = Generator(probe.Probe(), probe.weights(), "cpu", progress=False)
    with pytest.raises(MegadslError) as caught:
        action(generator)
    assert caught.value.code == code and words in str(caught.value) and "mend:" in str(caught.value)
    assert generator.generate([1] * 30, 11).ids == probe.continuation([1] * 30, 11), "nothing was half done"


def test_all_bad_ids_are_listed() -> None:
    generator = Generator(probe.Probe(), probe.weights(), "cpu", progress=False)
    with pytest.raises(MegadslError) as caught:
        generator.step([0, 97, -1])
    assert [d.code for d in caught.value.diagnostics] == ["MK451", "MK451"]


def test_wrong_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rotating = probe.Probe(probe.manifest() | {"rope": {"head_dim": 16, "theta": 5e5, "style": "half", "scaling": None, "rotary_dim": 16}})
    cases = [
        ("MK459", lambda: Generator(probe.Probe(), None, "cpu")),
        ("MK401", lambda: Generator(probe.Probe(), tmp_path / "absent.gguf", "cpu")),
        ("MK424", lambda: Generator(rotating, write_small(tmp_path / "small.gguf"), "cpu")),
        ("MK448", lambda: Generator(probe.Probe(), probe.weights(), "tpu")),
        ("MK447", lambda: Program(probe.manifest(), probe.SOURCE, "cpu", torch.zeros(3, dtype=torch.uint8))),
        ("MK457", lambda: Generator(probe.Probe(graph=probe.graph("logits")), probe.weights(), "cpu").generate([1], 2)),
    ]
    for code, action in cases:
        with pytest.raises(MegadslError) as caught:
            action()
        assert caught.value.code == code
    if not torch.cuda.is_available():
        with pytest.raises(MegadslError) as caught:
            Generator(probe.Probe(), probe.weights(), "cuda")
        assert caught.value.code in ("MK440", "MK441")
    monkeypatch.setattr("megadsl.runtime.cuda.bindings_installed", lambda: True)
    monkeypatch.setattr("megadsl.runtime.cuda.driver_version", lambda: 12040)
    with pytest.raises(MegadslError, match=r"supports CUDA 12\.4, .* need 13\.0"):
        Generator(probe.Probe(), probe.weights(), "cuda")


def test_text_is_held_back_while_utf8_is_incomplete() -> None:
    class Bytes:
        """One token per byte."""

        stop_ids: frozenset[int] = frozenset()

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    pieces: list[str] = []
    text = Text(Bytes(), lambda token, piece: pieces.append(piece))
    for byte in "a☃b".encode():
        text.add(byte)
    assert pieces == ["a", "", "", "☃", "b"] and text.whole() == "a☃b"


def test_every_seed_gives_the_same(fresh_cache: Path) -> None:
    for seed in (1, 2):
        generator = Generator(probe.Probe(), probe.weights(), "cpu", seed=seed, progress=False)
        assert generator.generate(PROMPT, 4).ids == probe.continuation(PROMPT, 4)
