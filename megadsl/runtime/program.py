"""A compiled kernel with its buffers, on a GPU or in the emulator: launch, capture, check, recover."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from megadsl.build.host import build_library
from megadsl.build.nvcc import build_cubin
from megadsl.diagnostics import MegadslError, declare, error
from megadsl.emulate import Emulator, LaunchReport, Mutant
from megadsl.machine import machine
from megadsl.resources import include
from megadsl.runtime.control import (
    ERROR,
    MOST_STEPS,
    MOST_STOP_IDS,
    STEPS,
    Control,
    MegakernelHang,
    chains,
    describe_wait,
    even,
    recorded_wait,
)
from megadsl.runtime.cuda import CudaKernel, architecture, check_gpu, shape_of
from megadsl.runtime.kv import KvCache, PagedCache, rope_of, rope_table
from megadsl.runtime.pages import Pages, page_table
from megadsl.runtime.queue import LaunchQueue

ARENA_SIZE = declare(
    "MK447",
    "the weights arena has {got} bytes on {device}, the kernel reads {want} on {wanted}",
    "pack the weights with this kernel's manifest and device",
)
ONE_STEP = declare(
    "MK465",
    "a launch of kernel {model} makes one step, {count} were asked for: {why}",
    "ask for one step a launch, or {mend}",
)
STEP_COUNT = declare("MK466", "{count} steps a launch", "ask for 1 to {most}")
STOP_COUNT = declare("MK467", "{count} ids that end a launch", "give at most {most}, and look for others among the ids of each launch")
DEVICE_UNKNOWN = declare("MK448", "there is no device {device!r}", "choose cuda, cuda:N or cpu")

BUFFERS = ("control", "weights", "kv", "exchange", "logits", "rope", "trace", "pages")  # in the order of mk::PagedBuffers
TRACE = "MK_TRACE"  # the define of a build that leaves a timeline


class Snapshot:
    """A copy of the control block as it is after all launches so far; being copied until :meth:`words` has returned."""

    def __init__(self, control: torch.Tensor, queue: LaunchQueue | None) -> None:
        self._queue = queue
        if queue is not None:
            self._copy = torch.empty(control.shape, dtype=control.dtype, pin_memory=True)
            self._copy.copy_(control, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(control.device))  # the current device may be another
        else:
            self._copy = control.clone()

    def words(self) -> list[int]:
        """The 128 words, as signed integers; waits for the launches before it. Raises MK449."""
        if self._queue is not None:
            self._queue.wait(self._event)
        words: list[int] = self._copy.tolist()
        return words


class Replay:
    """Some launches, captured once. ``replay()`` enqueues them again on torch's current stream."""

    def __init__(self, replay: Callable[[], None], turn: Callable[[], AbstractContextManager[object]]) -> None:
        self._replay, self._turn = replay, turn

    def replay(self) -> None:
        """One more time all the launches, behind what was enqueued so far for the program."""
        with self._turn():
            self._replay()


class Program:
    """One kernel and the memory it works in.

    ``manifest`` and ``source`` (the text of kernel.cu) are the compiler's; ``weights`` is the packed arena on ``device``
    ("cuda", "cuda:N" or "cpu", which is the emulator). ``cubin`` spares the build on a GPU; ``kv`` is a KV arena of the manifest's size
    that programs share, in place of one of its own. ``timeout_s`` is how long a wait
    may last on a GPU, ``patience_s`` how long the host waits while no launch ends (other work may keep the GPU); ``seed`` and
    ``policy`` order the emulator's schedule. ``defines`` are compile-time switches; with TRACE among them each launch leaves its
    timeline in ``buffers["trace"]`` (megadsl.trace), which is empty otherwise.

    Launches and all else that methods of a program and its ``control`` enqueue run one after the other in the order of the
    calls, whichever streams were torch's current ones. What the caller enqueues himself (reading ``logits`` on another stream,
    a graph of his own that he captured launches into) is his to order: :meth:`using` makes it a turn.

    ``buffers`` are the live uint8 tensors by name; ``logits`` (tokens, vocab) fp32, ``control``, ``kv`` are views of them. Where cached
    rows lie in pages, ``pages`` says which of them each sequence has.
    ``report`` is what the emulator said of the last launch (None: there was none), ``emulator`` the emulator itself, ``kernel`` what
    is loaded on a GPU; ``mutant`` and ``record_points`` go to the emulator's launches. Raises MK440 to MK448.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        source: str,
        device: str,
        weights: torch.Tensor,
        *,
        cubin: Path | None = None,
        kv: torch.Tensor | None = None,
        timeout_s: float = 2.0,
        patience_s: float = 30.0,
        seed: int = 0,
        policy: int = 0,
        defines: Mapping[str, str] | None = None,
    ) -> None:
        self.manifest = {
            **manifest,
            "buffers": {**manifest["buffers"], "trace": manifest["trace"]["bytes"] if TRACE in (defines or {}) else 0},
        }
        self.device = resolve_device(device, manifest["arch"])
        self.seed, self.policy = seed, policy
        self.mutant: Mutant | None = None
        self.record_points = False
        self.emulator: Emulator | None = None
        self.kernel: CudaKernel | None = None
        self.report: LaunchReport | None = None
        self.buffers = self._allocate(weights, kv)
        self._queue = self._make_queue(patience_s, timeout_s) if self.device.type == "cuda" else None
        self._fill_exchange()
        self.control = Control(self.buffers["control"].view(torch.int32), round(timeout_s * 1e6), self._turn)
        self.logits = self.buffers["logits"].view(torch.float32).view(-1, manifest["vocab"])
        self.pages = Pages(manifest, page_table(manifest, self.buffers["pages"]), self._turn) if manifest["kv_page"] else None
        self.kv = self.rows() if manifest["kv"] else None
        self._launch = self._loader(source, cubin, dict(defines or {}))

    def set_steps(self, count: int, stop_ids: Sequence[int] = ()) -> None:
        """How many decode steps each of the next launches makes, those of captured graphs included: 1 until this is called.

        The first one has the inputs that :attr:`control` was given, each of the others the token that the one before has chosen
        behind its last. A launch of several steps ends early with the step that chooses one of ``stop_ids`` (at most 8). How many it
        made and what they chose stands in the control block (STEPS_MADE, CHOSEN); logits are the last step's, and so are the next ids,
        of which earlier steps tell the last new token's alone. The KV cache must have room for all new rows. Raises MK465 where
        the kernel makes one step a launch, MK466 and MK467.
        """
        if not 1 <= count <= MOST_STEPS:
            raise error(STEP_COUNT, count=count, most=MOST_STEPS)
        if len(stop_ids) > MOST_STOP_IDS:
            raise error(STOP_COUNT, count=len(stop_ids), most=MOST_STOP_IDS)
        if count > 1 and not self.manifest["several_steps"]:
            apart = len(self.manifest["launches"]) > 1
            why, mend = (
                ("a step is a chain of launches", "compile with launch scope 'step'")
                if apart
                else ("it returns logits and chooses no token", "return mk.argmax(...) from the spec")
            )
            raise error(ONE_STEP, model=self.manifest["model"], count=count, why=why, mend=mend)
        self.control.set_steps(count, stop_ids)

    def set_chain(self, kv_len: int | Sequence[int], ids: Sequence[int], flags: int = 0) -> None:
        """The next launch's inputs: new tokens behind ``kv_len`` cached rows, each of which sees those before it. Of a batch, every
        sequence has so many rows (or its own entry), and the tokens are dealt out to the sequences in stretches that differ by one at most.
        Where rows lie in pages, sequences get those that they need for this and as many steps as a launch may have; MK469.
        """
        sequences = self.manifest["sequences"]
        lens = [kv_len] * sequences if isinstance(kv_len, int) else list(kv_len)
        counts = even(len(ids), sequences)
        positions = [kv + i for kv, count in zip(lens, counts, strict=True) for i in range(count)]
        self.reserve([kv + count + MOST_STEPS * min(count, 1) for kv, count in zip(lens, counts, strict=True)])
        if sequences == 1:
            self.control.set_inputs(lens[0], ids, positions, chains(counts), flags)
        else:
            self.control.set_batch(lens, counts, ids, positions, chains(counts), flags)

    def reserve(self, rows: Sequence[int]) -> None:
        """Where cached rows lie in pages: each sequence has them for ``rows[i]`` rows (at most max_kv) from now on, and no more. MK469."""
        if self.pages is not None:
            self.pages.hold({i: min(count, int(self.manifest["max_kv"])) for i, count in enumerate(rows)})

    def rows(self, sequence: int = 0) -> KvCache:
        """Reads and writes K and V rows of a sequence."""
        if self.pages is not None:
            return PagedCache(self.manifest, self.buffers["kv"], self.pages.table, sequence)
        return KvCache(self.manifest, self.buffers["kv"], sequence)

    def launch(self) -> None:
        """Run one step, or as many as :meth:`set_steps` says: on a GPU enqueued on torch's current stream, in the emulator to its end.

        The emulator raises MegakernelHang itself; on a GPU :meth:`check` does. Raises MK444 and MK449 as LaunchQueue.turn does.
        """
        self._launch()

    def capture(self, launches: int = 1) -> Replay:
        """``launches`` launches as one CUDA graph; in the emulator, as a plain loop."""

        def run() -> None:
            for _ in range(launches):
                self.launch()

        if self.device.type == "cpu":
            return Replay(run, self._turn)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            run()
        return Replay(graph.replay, self._turn)

    @contextmanager
    def using(self, **tensors: torch.Tensor) -> Iterator[None]:
        """For a ``with`` around :meth:`launch`: the launch works in these tensors in place of the buffers of those names, each of as many
        bytes on the same device. All that is enqueued inside is one turn of the queue, also without any tensor.

        A launch that is captured keeps the addresses; whoever replays it keeps the memory.
        """
        with self._turn():
            own = dict(self.buffers)
            self._point(tensors)
            try:
                yield
            finally:
                self._point({name: own[name] for name in tensors})

    def share_cache(self, arena: torch.Tensor, pages: Pages | None = None) -> None:
        """From now on ``buffers["kv"]`` is the KV arena of another program with the same layout, and ``pages`` are that one's, of which a
        program of fewer sequences has the first ones'; this one's own are let go of."""
        self._point({"kv": arena})
        if pages is not None:
            self.pages = pages
            own = pages.table[: self.manifest["sequences"]]
            self._point({"pages": own.view(-1).view(torch.uint8)})
        self.kv = self.rows()

    def snapshot(self) -> Snapshot:
        """A copy of the control block after the launches so far, without waiting for them."""
        with self._turn():
            return Snapshot(self.control.words, self._queue)

    def check(self, snapshot: Snapshot | None = None) -> list[int]:
        """Wait for the launches so far (or those before ``snapshot``); the control block's 128 words.

        Raises MegakernelHang when one was aborted, after making the program ready for its next launch; MK449 when none ended
        for ``patience_s``.
        """
        if self._queue is not None:
            self._queue.settle()
        words = (snapshot or self.snapshot()).words()
        if words[ERROR]:
            self._recover()
            raise MegakernelHang([recorded_wait(self.manifest, words)])
        return words

    def reset(self) -> None:
        """As after construction, with the same weights: an empty KV cache, all pages free, epoch 1."""
        with self._turn():
            if self.pages is not None:
                self.pages.clear()
            self.buffers["kv"].zero_()
            self._fill_exchange()
            self.control.reset()

    def addresses(self) -> dict[str, int]:
        """The address of each buffer by name; 0 for one of no bytes."""
        return {name: t.data_ptr() if t.numel() else 0 for name, t in self.buffers.items()}

    def _allocate(self, weights: torch.Tensor, kv: torch.Tensor | None) -> dict[str, torch.Tensor]:
        sizes = self.manifest["buffers"]
        if weights.numel() * weights.element_size() != sizes["weights"] or weights.device != self.device:
            got = weights.numel() * weights.element_size()
            raise error(ARENA_SIZE, got=got, device=weights.device, want=sizes["weights"], wanted=self.device)
        given = {"weights": weights} | ({"kv": kv} if kv is not None else {})
        buffers = {name: torch.zeros(sizes[name], dtype=torch.uint8, device=self.device) for name in BUFFERS if name not in given}
        buffers |= given
        rope = self.manifest["rope"]
        if rope is not None:
            table = torch.stack([rope_table(one, self.manifest["max_kv"]) for one in rope_of(rope).tables])
            buffers["rope"].view(torch.float32).copy_(table.flatten())
        return {name: buffers[name] for name in BUFFERS}

    def _point(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.buffers.update(tensors)
        if self.kernel is not None:
            for name, tensor in tensors.items():
                self.kernel.point(BUFFERS.index(name), tensor.data_ptr() if tensor.numel() else 0)

    def _fill_exchange(self) -> None:
        exchange = self.buffers["exchange"].zero_()
        for offset, size, value in self.manifest["exchange_fill"]:
            exchange[offset : offset + size] = value

    def _recover(self) -> None:
        with self._turn():
            self._fill_exchange()
            self.control.clear_error()

    def _turn(self) -> AbstractContextManager[object]:
        return self._queue.turn() if self._queue is not None else nullcontext()

    def _make_queue(self, patience_s: float, timeout_s: float) -> LaunchQueue:
        return LaunchQueue(self.device, self.buffers["control"].view(torch.int32)[STEPS : STEPS + 1], patience_s, timeout_s)

    def _loader(self, source: str, cubin: Path | None, defines: dict[str, str]) -> Callable[[], None]:
        if self.device.type == "cpu":
            self.emulator = emulator = Emulator(build_library(source, [include()], defines), source)
            nominal = machine(self.manifest["arch"]).hot_code_bytes  # the emulator has no machine code
            self.manifest |= {"code_bytes": nominal, "shape": shape_of(self.manifest, nominal)}
            return lambda: self._emulate(emulator)
        path = cubin or build_cubin(source, self.manifest["arch"], [include()], defines, on=architecture(self.device)).path
        with torch.cuda.device(self.device):
            kernel = CudaKernel(path, self.manifest, list(self.addresses().values()), self.device)
        queue, index = self._queue, self.device.index
        assert queue is not None
        queue.admit = kernel.admit
        self.kernel = kernel

        def launch() -> None:
            if torch.cuda.current_device() != index:  # a context manager costs more than the question
                with torch.cuda.device(index):
                    return launch()
            with queue.turn() as stream:
                kernel.launch(stream)

        return launch

    def _emulate(self, emulator: Emulator) -> None:
        try:
            report = self._launch_all(emulator)
        except MegadslError:
            self._recover()
            raise
        self.report = report
        if report.hung:
            self._recover()
            # the threads of a warp wait together: once is enough
            raise MegakernelHang(list(dict.fromkeys(describe_wait(self.manifest, vars(hang)) for hang in report.hangs)))

    def _launch_all(self, emulator: Emulator) -> LaunchReport:
        """Every launch of a step, until one hangs; what they report, together."""
        reports: list[LaunchReport] = []
        for kernel, layer in self.manifest["launches"]:
            reports.append(
                emulator.launch(
                    self.manifest,
                    self.addresses(),
                    seed=self.seed,
                    policy=self.policy,
                    mutant=self.mutant,
                    record_points=self.record_points,
                    part=(kernel, layer),
                )
            )
            if reports[-1].hung:
                break
        return LaunchReport.of(reports)


def resolve_device(device: str, arch: str) -> torch.device:
    """The device that ``device`` names: "cpu", "cuda:N", or "cuda" for torch's current one.

    Raises MK448 for another name, MK440 to MK443 for a GPU that cannot run kernels built for ``arch``.
    """
    if device == "cpu":
        return torch.device("cpu")
    if re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise error(DEVICE_UNKNOWN, device=device)
    chosen = torch.device(device)
    check_gpu(arch, chosen)
    return chosen if chosen.index is not None else torch.device("cuda", torch.cuda.current_device())
