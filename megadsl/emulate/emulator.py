"""Launching a kernel that g++ compiled: every CUDA thread a fiber, all blocks resident, one OS thread."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megadsl.diagnostics import declare, error
from megadsl.emulate.abi import BUFFERS, HangRecord, LaunchArgs, LaunchResult, PointRecord, Policy, RaceRecord, Status
from megadsl.emulate.mutants import Mutant
from megadsl.emulate.races import Race, describe_races

FAULT = declare(
    "MK360",
    "the emulated kernel did what the hardware forbids: {what}",
    "if the op is a custom one, mend its role function; else report the spec with this message",
)
BAD_LAUNCH = declare(
    "MK361",
    "a launch of {blocks} blocks (clusters of {cluster}) x {threads} threads with {words} words of shape does not fit this kernel, "
    "or there is no memory for it",
    "launch with the manifest that was emitted together with the kernel",
)

_MAX_HANGS = 256
_MAX_RACES = 64
_MAX_POINTS = 8192


@dataclass(frozen=True)
class Hang:
    """A thread that waited for what nobody would do. ``site`` is the kernel's site id, or abi.SITE_BARRIER or SITE_CLUSTER."""

    site: int
    block: int
    warp: int
    lane: int
    layer: int
    tile: int
    expected: int
    observed: int


@dataclass(frozen=True)
class LaunchReport:
    """How a launch went. ``hung``: it had to be told to leave; ``hangs`` are then the threads that waited, if any did.

    ``steps`` counts resumed warps, ``collectives`` the operations of whole warps, ``parks`` the polls that put a thread to
    sleep, ``copies`` the asynchronous operations. ``code_prefetches`` are those of lines of the kernel's code, ``code_lines`` of them
    different ones. ``fingerprint`` is a hash of the whole schedule: equal seeds, equal hash.

    The rest is for builds with the race detector. ``races`` are the first 64 distinct ones of ``races_found``. What rests on
    assumptions about hardware (docs/ptx-notes.md) is counted, in pieces of 2 bytes: ``observed`` are writes that come after a
    read only because a relaxed load saw a relaxed store, ``refilled`` copies onto what was read without a proxy fence between.
    ``stale`` counts relaxed loads that were given an older value. ``points`` are those that a launch was asked to record, and
    ``changes`` is how often its mutant made its mistake.
    """

    hangs: tuple[Hang, ...]
    steps: int
    collectives: int
    parks: int
    copies: int
    fingerprint: int
    code_prefetches: int = 0
    code_lines: int = 0
    races: tuple[Race, ...] = ()
    races_found: int = 0
    observed: int = 0
    refilled: int = 0
    stale: int = 0
    points: tuple[PointRecord, ...] = ()
    changes: int = 0
    hung: bool = False

    @staticmethod
    def of(reports: Sequence[LaunchReport]) -> LaunchReport:
        """Those of one step's launches as one: counts added, races and points one after the other, the rest of the last."""
        counts = ["steps", "collectives", "parks", "copies", "races_found", "observed", "refilled", "stale", "changes"]
        counts += ["code_prefetches", "code_lines"]
        lists = ("races", "points")
        together: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in counts}
        together |= {name: tuple(item for r in reports for item in getattr(r, name)) for name in lists}
        return replace(reports[-1], **together)


class Emulator:
    """A library from :func:`megadsl.build.host.build_library`; ``source`` is the text it was made from, for reports of races."""

    def __init__(self, library: Path, source: str = "") -> None:
        self.path = library
        self._source = source
        self._library = ctypes.CDLL(str(library))
        self._run = self._library.mk_host_run
        self._run.argtypes = [ctypes.POINTER(LaunchArgs)]
        self._run.restype = ctypes.c_int

    def launch(
        self,
        manifest: Mapping[str, Any],
        buffers: Mapping[str, int],
        *,
        seed: int = 0,
        step_limit: int = 0,
        policy: int = 0,
        mutant: Mutant | None = None,
        record_points: bool = False,
        part: tuple[int, int] = (0, 0),
    ) -> LaunchReport:
        """Run one launch to its end.

        ``manifest`` gives blocks, threads, cluster (default 1), smem_bytes, shape (the words of the Shape argument), buffers (bytes by
        name), code_bytes (default 0). ``buffers`` are host addresses by the names of abi.BUFFERS; a name left out is null. Global accesses
        outside them are faults. ``seed`` 0 is round robin; any other one is a random schedule, the same for the same seed, ``policy`` (an
        abi.Policy) and contents. ``step_limit`` > 0 calls a launch hung after that many steps.
        ``part`` says which kernel it is and of which layer, where a step is several (the manifest's ``launches``).
        ``mutant`` and ``record_points`` are for builds with the race detector; others take no notice. A
        deadlock is no error: the kernel is told to leave and the report lists who waited. Raises MK360 for a fault
        (misaligned or outside access, misused barrier, divergent collective) and MK361 for a launch that does not fit.
        """
        shape = [word & 0xFFFFFFFF for word in manifest["shape"]]
        hangs = (HangRecord * _MAX_HANGS)()
        races = (RaceRecord * _MAX_RACES)()
        points = (PointRecord * (_MAX_POINTS if record_points else 0))()
        keys = mutant.place.keys if mutant is not None else ()
        result = LaunchResult(hangs=hangs, hang_capacity=_MAX_HANGS, races=races, race_capacity=_MAX_RACES)
        args = LaunchArgs(
            buffers=(ctypes.c_void_p * len(BUFFERS))(*(buffers.get(name) or None for name in BUFFERS)),
            buffer_bytes=(ctypes.c_uint64 * len(BUFFERS))(*(manifest.get("buffers", {}).get(name, 0) for name in BUFFERS)),
            shape=(ctypes.c_uint32 * max(len(shape), 1))(*shape),
            shape_words=len(shape),
            blocks=manifest["blocks"],
            threads=manifest["threads"],
            cluster=manifest.get("cluster", 1),
            smem_bytes=manifest["smem_bytes"],
            code_bytes=manifest.get("code_bytes", 0),
            kernel=part[0],
            layer=part[1],
            seed=seed,
            step_limit=step_limit or (mutant.step_limit if mutant is not None else 0),
            policy=Policy(policy),
            result=ctypes.pointer(result),
            points=points,
            point_capacity=len(points),
            change=mutant.change if mutant is not None else 0,
            changed=mutant.place.kind if mutant is not None else 0,
            changed_count=len(keys),
            changed_points=(ctypes.c_uint64 * len(keys))(*keys),
        )
        status = Status(self._run(ctypes.byref(args)))
        found = describe_races(races[: result.race_count], self.path, self._source)
        if status == Status.FAULT:
            raise error(FAULT, what=result.message.decode(errors="replace"), detail="\n".join(map(str, found)))
        if status == Status.BAD_ARGS:
            raise error(BAD_LAUNCH, blocks=args.blocks, cluster=args.cluster, threads=args.threads, words=len(shape))
        report = _report(result, hangs)
        return replace(report, races=found, points=tuple(points[: result.point_count]), hung=status == Status.HUNG)

    def switch_ns(self) -> float:
        """Nanoseconds of one switch between fibers, measured now."""
        measure = self._library.mk_host_switch_ns
        measure.restype = ctypes.c_double
        return float(measure())


def _report(result: LaunchResult, hangs: ctypes.Array[HangRecord]) -> LaunchReport:
    fields = [name for name, *_ in HangRecord._fields_]
    return LaunchReport(
        hangs=tuple(Hang(**{name: getattr(hangs[i], name) for name in fields}) for i in range(result.hang_count)),
        steps=result.steps,
        collectives=result.collectives,
        parks=result.parks,
        copies=result.copies,
        fingerprint=result.fingerprint,
        code_prefetches=result.code_prefetches,
        code_lines=result.code_lines,
        races_found=result.races_found,
        observed=result.observed,
        refilled=result.refilled,
        stale=result.stale,
        changes=result.changes,
    )
