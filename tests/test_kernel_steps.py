"""Several decode steps in one launch: the ids, logits, cached rows and control words of as many launches of one step, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from megadsl.build.host import DETECT
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled
from megadsl.emulate import Emulator, LaunchReport, Mutant, Policy
from megadsl.emulate.abi import Point
from megadsl.emulate.boundary import copied_elsewhere_at_once, copies_wait_for_stages
from megadsl.emulate.mutants import mutants, places
from megadsl.resources import include
from megadsl.runtime.control import (
    ADVANCE,
    ANCESTORS,
    CHOSEN,
    EPOCH,
    KV_LEN,
    MOST_STEPS,
    MOST_STOP_IDS,
    N_TOKENS,
    NEXT_IDS,
    POSITIONS,
    STEPS_MADE,
    STOP_IDS,
    TOKEN_IDS,
    WORDS,
    MegakernelHang,
)
from megadsl.runtime.generate import Generator
from megadsl.runtime.weights import TensorSource
from tests.kernels import Bench, Configure, Step, bits, compiled, weights_for
from tests.schedules import alone, everywhere, gated, in_two_splits, kv_loader_and_held_shares, settled
from tests.wires import SYNCS, watched, wires

IDS = (3, 141, 59, 26)


@dataclass(frozen=True)
class Left:
    """What some steps have left: the ids of each, the last one's logits, all cached rows, the words of the next launch's inputs."""

    ids: tuple[int, ...]
    logits: torch.Tensor
    kv: torch.Tensor
    words: tuple[int, ...]

    def same(self, other: Left) -> bool:
        return (self.ids, self.words) == (other.ids, other.words) and self.logits.equal(other.logits) and self.kv.equal(other.kv)


def begin(bench: Bench, kv: int, tokens: int = 1, epoch: int = 1, flags: int = ADVANCE) -> None:
    """A fresh program with ``kv`` cached rows and ``tokens`` new tokens."""
    program = bench.program
    program.reset()
    bench.put_rows(Step(IDS[:tokens], kv, seed=5))
    program.control.words[EPOCH] = epoch - 2**32 if epoch >= 2**31 else epoch
    program.control.set_inputs(kv, IDS[:tokens], range(kv, kv + tokens), [(2 << i) - 1 for i in range(tokens)], flags)


def left(bench: Bench, ids: list[int]) -> Left:
    words = bench.program.check()
    inputs = (words[i] for i in (EPOCH, KV_LEN, N_TOKENS, TOKEN_IDS, POSITIONS, ANCESTORS))
    return Left(tuple(ids), bits(bench.program.logits[:1]).clone(), bench.program.buffers["kv"].clone(), tuple(inputs))


def singles(bench: Bench, steps: int, kv: int, tokens: int = 1, epoch: int = 1) -> Left:
    """So many launches of one step."""
    begin(bench, kv, tokens, epoch)
    ids = []
    for index in range(steps):
        bench.program.launch()
        ids.append(bench.program.check()[NEXT_IDS + (0 if index else tokens - 1)])
    return left(bench, ids)


def together(bench: Bench, steps: int, kv: int, tokens: int = 1, epoch: int = 1, stops: tuple[int, ...] = ()) -> Left:
    """One launch of so many steps."""
    begin(bench, kv, tokens, epoch)
    bench.program.set_steps(steps, stops)
    bench.program.launch()
    words = bench.program.check()
    bench.program.set_steps(1)
    return left(bench, words[CHOSEN : CHOSEN + words[STEPS_MADE]])


@cache
def made(wire: str, tokens: int, blocks: int) -> Compiled:
    """Of two tokens kernels that other tests build as well."""
    if tokens != 2:
        assert blocks == 3
        return wires()[wire, tokens]
    then = [everywhere(SYNCS[wire]), *([settled] if blocks > 5 else [])]
    return compiled("llama-tiny", tokens=tokens, blocks=blocks, configure=in_two_splits(*then))


@cache
def plain(wire: str, tokens: int, blocks: int) -> Bench:
    return Bench(made(wire, tokens, blocks))


@pytest.mark.parametrize(
    ("wire", "tokens", "blocks"),
    [*((wire, 1, 3) for wire in SYNCS), ("Tagged", 4, 3), ("Sentinel", 2, 5), ("Flag", 2, 3), ("Tagged", 2, 17)],
)
def test_a_launch_of_several_steps_is_as_many_launches(wire: str, tokens: int, blocks: int) -> None:
    """From 13 and 29 rows on, six steps cross the border of a chunk, and its rows move from the last split to another."""
    bench = plain(wire, tokens, blocks)
    for seed, kv in enumerate((13, 29)):
        expected = singles(bench, 6, kv, tokens)
        for policy in (0, 1 + (seed + blocks) % (len(Policy) - 1)):
            bench.program.seed, bench.program.policy = seed + 1, policy
            assert together(bench, 6, kv, tokens).same(expected), f"{kv} rows, policy {Policy(policy).name}"
        bench.program.policy = 0


@pytest.mark.parametrize("wire", SYNCS)
def test_rounds_wrap_within_a_launch(wire: str) -> None:
    bench = Bench(made(wire, 1, 3))
    for epoch in (2**32 - 2, 2**31 - 2, 2**16 - 2, 2**16 // 3 - 1, 2**32 // 3 - 1):
        assert together(bench, 4, 15, epoch=epoch).same(singles(bench, 4, 15, epoch=epoch)), f"from epoch {epoch}"


@pytest.mark.parametrize(("wire", "tokens"), [("Tagged", 1), ("Tagged", 4), ("Sentinel", 2), ("Flag", 1)])
def test_no_race_between_steps(wire: str, tokens: int) -> None:
    """Rows that one block has appended are copied by another in the same launch: with several tokens in the step behind, else two later.
    Steps one by one are those of the build without the detector."""
    blocks = 5 if (wire, tokens) == ("Sentinel", 2) else 3
    kernel = made(wire, tokens, blocks) if tokens == 2 else watched()[wire, tokens]
    bench = Bench(kernel, defines={DETECT: "1"})
    for seed, kv in enumerate((0, 15 if tokens == 2 else 13, 30)):
        bench.program.seed = seed + 1
        found = together(bench, 4, kv, tokens)
        report = bench.program.report
        assert report is not None and not report.races, "\n".join(map(str, report.races))
        assert found.same(singles(plain(wire, tokens, blocks), 4, kv, tokens))


@pytest.mark.parametrize("function", ["release_rows", "acquire_rows", "Tape::pass_gate"])
def test_what_stands_between_a_row_and_its_copies_is_needed(function: str) -> None:
    """Every fence, barrier, release and acquire on the way, left out: the detector sees each missing. The kernel is one where nothing else
    orders them: its ring holds more than a step streams before its cached rows, and with several tokens a block copies at once what
    another has appended (megadsl/emulate/boundary.py)."""
    kernel = made("Sentinel", 2, 3)
    assert not copies_wait_for_stages(kernel.plan, of_the_head=False) and copied_elsewhere_at_once(kernel.plan)
    bench = Bench(kernel, defines={DETECT: "1"})
    program, emulator = bench.program, bench.program.emulator
    assert emulator is not None
    program.record_points = True
    crossing(bench)
    program.record_points = False
    assert program.report is not None
    kinds = (Point.FENCE, Point.WARP_BARRIER, Point.ACQUIRE, Point.RELEASE)
    points = places(list(program.report.points), emulator.path, kernel.source, include())
    found = [p for p in points if p.kind in kinds and p.within(function)]
    assert len(found) == {"release_rows": 2, "acquire_rows": 3, "Tape::pass_gate": 1}[function]
    assert not noticed(bench, None)
    for mutant in mutants(found, 0):
        assert noticed(bench, mutant), str(mutant)


def crossing(bench: Bench) -> None:
    """Two steps: the rows of the first fill a chunk and begin the next, the second copies that chunk in another block."""
    begin(bench, 15, 2)
    bench.program.set_steps(2)
    bench.program.launch()


def noticed(bench: Bench, mutant: Mutant | None) -> bool:
    """Whether some schedule of a launch shows a mistake as a race or a hang; its number of steps has no limit."""
    bench.program.mutant = mutant
    try:
        for seed in (3, 1):
            bench.program.seed, bench.program.policy = seed, seed % len(Policy)
            crossing(bench)
            if bench.program.report is not None and bench.program.report.races:
                return True
    except MegakernelHang:
        return True
    finally:
        bench.program.mutant, bench.program.policy = None, 0
    return False


@pytest.mark.parametrize("schedule", [kv_loader_and_held_shares, gated])
def test_other_loaders(schedule: Configure) -> None:
    """Loaders run ahead into the next step, each as far as its ring and gates let it."""
    kernel = compiled("llama-tiny", tokens=2, blocks=5, configure=in_two_splits(schedule))
    bench = Bench(kernel)
    expected = singles(bench, 4, 14)
    for seed in (1, 2):
        bench.program.seed = seed
        assert together(bench, 4, 14).same(expected)


def test_the_number_of_steps_is_data_of_a_captured_launch() -> None:
    """And each launch goes on from where the one before has ended."""
    bench = Bench(made("Tagged", 1, 3))
    expected = singles(bench, 6, 20)
    begin(bench, 20)
    replay, ids = bench.program.capture(), []
    for steps in (1, 3, 2):
        bench.program.set_steps(steps)
        replay.replay()
        words = bench.program.check()
        assert words[STEPS_MADE] == steps
        ids += words[CHOSEN : CHOSEN + steps]
    assert left(bench, ids).same(expected)


def test_without_the_flag_the_inputs_stay() -> None:
    bench = Bench(made("Tagged", 1, 3))
    begin(bench, 20, flags=0)
    before = bench.program.control.words.clone()
    bench.program.set_steps(3)
    for _ in range(2):
        bench.program.launch()
        words = bench.program.check()
        assert words[STEPS_MADE] == 3 and words[KV_LEN] == 20 and words[TOKEN_IDS] == IDS[0]
        assert torch.tensor(words)[TOKEN_IDS:NEXT_IDS].equal(before[TOKEN_IDS:NEXT_IDS])


def test_a_launch_ends_with_a_stop_id() -> None:
    """Loaders have begun the next step by then: what they wait for is given up, nothing is left in flight, the next launch is right."""
    bench, one_by_one = Bench(watched()["Tagged", 1], defines={DETECT: "1"}), plain("Tagged", 1, 3)
    every = singles(one_by_one, 6, 20)
    for seed, at in enumerate((2, 0)):
        bench.program.seed = seed
        stop = every.ids[at]
        first = every.ids.index(stop)
        found = together(bench, 6, 20, stops=(1000, stop))
        report = bench.program.report
        assert report is not None and not report.races
        assert found.ids == every.ids[: first + 1]
        assert found.same(singles(one_by_one, first + 1, 20))
    assert together(bench, 6, 20).same(every)


def test_a_launch_given_up_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs stay, and the launch can be repeated."""
    bench = Bench(made("Sentinel", 1, 3))
    expected = together(bench, 5, 14)
    report = bench.program.report
    assert report is not None
    launch, whole = Emulator.launch, report.steps
    for place in (5, 6, 7, 9):  # tenths of a launch: in its third step and later
        begin(bench, 14)
        bench.program.set_steps(5)
        before = bench.program.control.words.clone()

        def hurried(self: Emulator, *args: object, limit: int = whole * place // 10, **options: object) -> LaunchReport:
            return launch(self, *args, **{**options, "step_limit": limit})  # type: ignore[arg-type]

        monkeypatch.setattr(Emulator, "launch", hurried)
        with pytest.raises(MegakernelHang):
            bench.program.launch()
        monkeypatch.setattr(Emulator, "launch", launch)
        for words in (slice(KV_LEN, N_TOKENS + 1), slice(TOKEN_IDS, NEXT_IDS)):
            assert bench.program.control.words[words].equal(before[words])
        bench.program.launch()
        words_now = bench.program.check()
        assert left(bench, words_now[CHOSEN : CHOSEN + words_now[STEPS_MADE]]).same(expected)


def test_what_cannot_be_is_refused() -> None:
    program = Bench(made("Tagged", 1, 3)).program
    apart = Bench(compiled("llama-tiny", tokens=2, blocks=3, configure=alone)).program
    cases = [
        (program, 0, (), "MK466"),
        (program, MOST_STEPS + 1, (), "MK466"),
        (program, 2, range(MOST_STOP_IDS + 1), "MK467"),
        (apart, 2, (), "MK465"),
    ]
    for refusing, steps, stops, code in cases:
        with pytest.raises(MegadslError) as refused:
            refusing.set_steps(steps, list(stops))
        assert refused.value.diagnostics[0].code == code
    apart.set_steps(1)


def test_the_control_block_is_the_headers() -> None:
    text = (include() / "megadsl" / "base.h").read_text()
    assert f"kMaxSteps = {MOST_STEPS};" in text and f"kMaxStopIds = {MOST_STOP_IDS};" in text
    assert CHOSEN + MOST_STEPS + 5 == WORDS and STOP_IDS + MOST_STOP_IDS == STEPS_MADE and "u32 reserved[5];" in text


def test_greedy_decoding_gives_the_same_ids() -> None:
    """Whatever a launch decodes: the prompt alone makes one step a launch, the last launch as many as are left."""
    kernel = made("Tagged", 1, 3)
    source = TensorSource(weights_for(kernel))
    texts = [Generator(kernel, source, "cpu", progress=False, steps_per_launch=n).generate(IDS, 8).ids for n in (1, 3, None)]
    assert len(texts[0]) == 8 and texts[1] == texts[0] == texts[2]
