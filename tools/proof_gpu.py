"""What only a GPU can show of a kernel's synchronisation: many launches, delays, other work, other streams, fewer SMs.

    python -m tools.proof_gpu llama-3.2-1b replays chaos busy streams fewer --replays 100000 --out docs/measurements/proof.json

replays   Launches with inputs and cache lengths that take turns; after each one, logits, chosen ids and the whole KV cache are
          compared on the GPU with the first launch of the same input, bit for bit. Logits and new rows are poisoned before.
chaos     The same with a build that delays signals and waits, another seed each launch, against the build without delays.
busy      Launches while another stream keeps the GPU busy, and while a kernel holds some SMs.
streams   Launches of one program that take turns over three streams, and from two threads, with no synchronisation by the caller.
fewer     A green context with fewer SMs than the kernel has blocks; a kernel with more blocks than the GPU has SMs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from megadsl.build.nvcc import build_cubin
from megadsl.diagnostics import MegadslError
from megadsl.driver import Compiled, compile_model
from megadsl.machine import DEFAULT_ARCH, machine
from megadsl.resources import include, models
from megadsl.runtime.control import ADVANCE, KV_LEN, NEXT_IDS, STEPS, TIMEOUT_US, TOKEN_IDS
from megadsl.runtime.cuda import call
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import random_weights
from tools.occupant import Occupant, copies, loaded, matmuls, small_kernels

CHAOS = {"MK_CHAOS": "1"}
SLOW = ("anybody", "one block", "loaders", "one warp", "signals")  # mk::Slow, by seed % 5
SHARES = (0.0, 0.25, 0.2505, 0.95)  # of max_kv: cached rows of the inputs that take turns

Row = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """One launch's input, its captured launch with poison before and comparison behind, and what its first launch left."""

    kv: int
    head: torch.Tensor
    lists: torch.Tensor
    results: tuple[torch.Tensor, ...]
    replay: Callable[[], None]


class Subject:
    """A program with random weights and a cache full of random rows, whose launches are compared on the GPU.

    ``wrong`` counts the words that differ, over all replays.
    """

    def __init__(self, compiled: Compiled, arena: torch.Tensor, defines: dict[str, str] | None = None, **options: Any) -> None:
        self.compiled = compiled
        self.program = Program(compiled.manifest, compiled.source, "cuda", arena, defines=defines, **options)
        kv = self.program.kv
        assert kv is not None
        random = torch.Generator("cuda").manual_seed(5)
        for layer in range(compiled.manifest["layers"]):
            k, v = torch.randn(2, kv.kv_heads, kv.max_kv, kv.head_dim, generator=random, device="cuda").bfloat16()
            kv.write(layer, k, v)
        self.rows = self.program.buffers["kv"].view(torch.int64).clone()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.inputs: list[Input] = []

    def prepare(self, expected: Sequence[Input] = ()) -> None:
        """Launch each input once and capture it; ``expected``: the inputs of another subject, whose results must come."""
        count, most = self.compiled.manifest["tokens"], self.compiled.manifest["max_kv"]
        for index, share in enumerate(SHARES):
            kv = min(int(share * most), most - count)
            ids = [(97 * index + 31 * i + 1) % self.compiled.manifest["vocab"] for i in range(count)]
            self.program.control.set_inputs(kv, ids, range(kv, kv + count), [(2 << i) - 1 for i in range(count)])
            words = self.program.control.words
            fresh = Input(kv, words[KV_LEN : TIMEOUT_US + 1].clone(), words[TOKEN_IDS:NEXT_IDS].clone(), (), lambda: None)
            self._poison(fresh)
            self.program.launch()
            self.program.check()
            results = tuple(t.clone() for t in self._results())
            if expected:
                self.wrong += self.differences(expected[index].results)
            self.inputs.append(replace(fresh, results=results, replay=self._capture(replace(fresh, results=results))))

    def differing(self) -> int:
        """Wait for all launches; how many words have differed so far."""
        self.program.check()
        return int(self.wrong)

    def _capture(self, an_input: Input) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._poison(an_input)
            self.program.launch()
            self.wrong += self.differences(an_input.results)
        return graph.replay

    def _poison(self, an_input: Input) -> None:
        """NaN logits, no ids, and the cache as it was at first: rows that the launch appends hold other numbers."""
        words = self.program.control.words
        words[KV_LEN : TIMEOUT_US + 1] = an_input.head
        words[TOKEN_IDS:NEXT_IDS] = an_input.lists
        words[NEXT_IDS : NEXT_IDS + 16] = -1
        self.program.logits.fill_(float("nan"))
        self.program.buffers["kv"].view(torch.int64).copy_(self.rows)

    def _results(self) -> tuple[torch.Tensor, ...]:
        program = self.program
        return (program.logits.view(torch.int32), program.buffers["kv"].view(torch.int64), program.control.words[NEXT_IDS : NEXT_IDS + 16])

    def differences(self, expected: Sequence[torch.Tensor]) -> torch.Tensor:
        """How many words of the results in memory now are not the expected ones, as a scalar on the GPU."""
        return torch.stack([(now != then).sum() for now, then in zip(self._results(), expected, strict=True)]).sum()


def timed(subject: Subject, launches: int, before: Callable[[int], None] = lambda index: None) -> list[float]:
    """Milliseconds of each launch, poison and comparison included; checked every 500."""
    times: list[float] = []
    for first in range(0, launches, 500):
        count = min(500, launches - first)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for i in range(count):
            before(first + i)
            subject.inputs[(first + i) % len(subject.inputs)].replay()
            marks[i + 1].record()
        subject.program.check()
        times += [a.elapsed_time(b) for a, b in pairwise(marks)]
    return times


def spread(times: Sequence[float]) -> Row:
    """Median and extremes, ms."""
    return {"ms": statistics.median(times), "ms_least": min(times), "ms_most": max(times)}


class Proof:
    """One model on this GPU; each part gives the rows of its table."""

    def __init__(self, model: str, tokens: int, max_kv: int, blocks: int | None, replays: int, steps: int) -> None:
        self.model, self.replays_wanted, self.steps = model, replays, steps
        self.compiled = compile_model(model, tokens=tokens, max_kv=max_kv, blocks=blocks)
        self.max_kv, self.tokens = max_kv, tokens
        with ThreadPoolExecutor() as pool:  # both builds side by side
            list(pool.map(lambda d: build_cubin(self.compiled.source, DEFAULT_ARCH, [include()], d), ({}, CHAOS)))
        self.arena = pack_weights(self.compiled.manifest, random_weights(self.compiled.manifest, 7, "cuda"), "cuda", progress=False)
        self.quiet = self.subject()
        self.quiet.prepare()

    def subject(self, defines: dict[str, str] | None = None, **options: Any) -> Subject:
        """Another program on the same weights and the same cache."""
        return Subject(self.compiled, self.arena, defines, **options)

    def replays(self) -> list[Row]:
        began = time.perf_counter()
        times = timed(self.quiet, self.replays_wanted)
        row = {"replays": len(times), "words_that_differ": self.quiet.differing(), "seconds": time.perf_counter() - began}
        return [row | spread(times)]

    def chaos(self) -> list[Row]:
        delayed = self.subject(CHAOS)
        delayed.prepare(self.quiet.inputs)
        none = spread(timed(delayed, 100))
        rows: list[Row] = [{"slow": "nobody (seed 0)", "steps": 100, "words_that_differ": delayed.differing()} | none]
        times = timed(delayed, self.steps, lambda index: delayed.program.control.set_chaos(index + 1))
        for kind, name in enumerate(SLOW):
            chosen = [t for index, t in enumerate(times) if (index + 1) % len(SLOW) == kind]
            rows.append({"slow": name, "steps": len(chosen)} | (spread(chosen) if chosen else {}))
        return [*rows, {"slow": "all seeds", "steps": len(times), "words_that_differ": delayed.differing()} | spread(times)]

    def busy(self) -> list[Row]:
        subject = self.subject(patience_s=5.0)
        subject.prepare(self.quiet.inputs)
        rows: list[Row] = [{"load": "none"} | self._under(subject)]
        for make in (matmuls, small_kernels, copies):
            with loaded(make()) as calls:
                rows.append({"load": make.__name__} | self._under(subject) | {"load_calls": calls[0]})
            rows[-1]["after"] = self._under(subject, 20)["words_that_differ"]
        return [*rows, self._held()]

    def streams(self) -> list[Row]:
        return [self._self_fed([torch.cuda.Stream() for _ in range(3)]), self._threads()]

    def fewer(self) -> list[Row]:
        sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        rows: list[Row] = [self._in_green_context(sms // 2)]
        larger = replace(machine(DEFAULT_ARCH), sms=2 * sms)
        made = compile_model(self.model, tokens=self.tokens, max_kv=self.max_kv, blocks=sms + 1, on=larger)
        refused = refusal(lambda: Program(made.manifest, made.source, "cuda", self.arena))
        rows.append({"case": f"a grid of {sms + 1} blocks", "refused": refused})
        too_many = refusal(lambda: compile_model(self.model, tokens=self.tokens, blocks=machine(DEFAULT_ARCH).sms + 1))
        return [*rows, {"case": "compiled for more blocks than the machine has SMs", "refused": too_many}]

    def _under(self, subject: Subject, steps: int = 200) -> Row:
        """Steps one by one, each waited for: wall times, words that differ, refusals."""
        before, times, refused = subject.differing(), [], []
        for index in range(steps):
            began = time.perf_counter()
            subject.inputs[index % len(subject.inputs)].replay()
            found = refusal(subject.program.check)
            times.append(1e3 * (time.perf_counter() - began))
            if found is not None:
                refused.append(found)
                break
        if refused:
            return {"steps": len(times), "refused": refused[0]} | spread(times)
        return {"steps": steps, "words_that_differ": subject.differing() - before} | spread(times)

    def _held(self) -> Row:
        """A kernel holds more SMs than the grid leaves free: the launch waits, the host says so, and the result is right in the end."""
        subject = self.subject(patience_s=1.0)
        subject.prepare(self.quiet.inputs)
        occupant, other = Occupant(), torch.cuda.Stream()
        free = torch.cuda.get_device_properties("cuda").multi_processor_count - self.compiled.manifest["blocks"]
        before = subject.differing()
        occupant.hold(free + 1, 4.0, other)
        began = time.perf_counter()
        subject.inputs[0].replay()
        refused = refusal(subject.program.check)
        refused_after, again = time.perf_counter() - began, refusal(subject.program.launch)
        other.synchronize()
        found = {"sms_held": free + 1, "refused": refused, "refused_after_s": refused_after, "launch_meanwhile": again}
        return {"load": "a kernel that holds SMs for 4 s"} | found | {"words_that_differ": subject.differing() - before}

    def _self_fed(self, streams: Sequence[torch.cuda.Stream]) -> Row:
        """Each launch prepares the next one's input; the same ids on one stream as in turns on several."""
        program, found = self.quiet.program, []
        for used in ([torch.cuda.current_stream()], streams):
            program.reset()
            program.control.set_inputs(0, [7], [0], [1], flags=ADVANCE)
            snapshots = []
            for index in range(min(200, self.max_kv)):
                with torch.cuda.stream(used[index % len(used)]):
                    if index % 7 == 3:
                        torch.cuda._sleep(1_000_000)
                    program.launch()
                    snapshots.append(program.snapshot())
            found.append([program.check(s)[NEXT_IDS] for s in snapshots])
        same = sum(a == b for a, b in zip(*found, strict=True))
        return {
            "case": f"turns over {len(streams)} streams",
            "launches": len(found[0]),
            "ids_equal": same,
            "distinct_ids": len(set(found[0])),
        }

    def _threads(self) -> Row:
        """Two threads, each on its own stream, launch one program as fast as they can."""
        program, first = self.quiet.program, self.quiet.inputs[0]
        program.reset()
        program.control.words[KV_LEN : TIMEOUT_US + 1] = first.head
        program.control.words[TOKEN_IDS:NEXT_IDS] = first.lists
        replay = program.capture()

        def work() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for index in range(200):
                    replay.replay() if index % 2 else program.launch()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        steps = program.check()[STEPS]
        differ = int((program.logits.view(torch.int32) != first.results[0]).sum())
        return {"case": "two threads", "launches": 400, "steps_counted": steps, "words_that_differ": differ}

    def _in_green_context(self, sms: int) -> Row:
        """Launches on a stream that may use only ``sms`` SMs: the model's own grid, then one that fits."""
        stream, given = green_stream(sms)
        row: Row = {"case": f"green context of {given} SMs", "blocks": self.compiled.manifest["blocks"]}
        with torch.cuda.stream(stream):
            row["refused"] = refusal(self.quiet.program.launch)
        fitting = compile_model(self.model, tokens=self.tokens, max_kv=self.max_kv, blocks=given)
        subject = Subject(fitting, self.arena, patience_s=5.0)  # packed tiles depend on no schedule
        subject.prepare()
        before = subject.differing()
        subject.program.logits.fill_(float("nan"))
        with torch.cuda.stream(stream):
            row["fitting_refused"] = refusal(subject.program.launch)
        subject.program.check()
        subject.wrong += subject.differences(subject.inputs[-1].results)
        return row | {"fitting_blocks": given, "words_that_differ": subject.differing() - before}


def green_stream(sms: int) -> tuple[torch.cuda.Stream, int]:
    """A stream of a green context with at least ``sms`` SMs, and how many it has."""
    device, kind = call("cuDeviceGet", torch.cuda.current_device()), driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = call("cuDeviceGetDevResource", device, kind)
    groups, _, _ = call("cuDevSmResourceSplitByCount", 1, whole, 0, sms)
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = call("cuGreenCtxCreate", call("cuDevResourceGenerateDesc", groups, 1), device, flags)
    handle = call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
    return torch.cuda.ExternalStream(int(handle)), groups[0].sm.smCount


def refusal(action: Callable[[], object]) -> str | None:
    """The diagnostic that ``action`` raises, files by their place in the project, or torch's own error; None when it raises nothing."""
    try:
        action()
    except (MegadslError, RuntimeError) as problem:
        return str(problem).replace(f"{models().parent}/", "")
    return None


PARTS: dict[str, Callable[[Proof], list[Row]]] = {
    **{"replays": Proof.replays, "chaos": Proof.chaos, "busy": Proof.busy, "streams": Proof.streams, "fewer": Proof.fewer}
}


def table(rows: Sequence[Row]) -> str:
    """One line a row, figures by name."""
    return "\n".join("  " + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--max-kv", type=int, default=2048)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--chaos-steps", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    proof = Proof(args.model, args.tokens, args.max_kv, args.blocks, args.replays, args.chaos_steps)
    found: Row = {"model": args.model, "tokens": args.tokens, "blocks": proof.compiled.manifest["blocks"]}
    found |= {"device": torch.cuda.get_device_name(), "parts": {}}
    for part in args.parts:
        began = time.perf_counter()
        rows = PARTS[part](proof)
        found["parts"][part] = rows
        print(f"{args.model} {part} ({time.perf_counter() - began:.1f} s)\n{table(rows)}", flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
