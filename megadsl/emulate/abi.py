"""The C structures of templates/host/args.h."""

from __future__ import annotations

import ctypes
from enum import IntEnum

BUFFERS = ("control", "weights", "kv", "exchange", "logits", "rope", "trace", "pages")  # in the order of mk::PagedBuffers

SITE_BARRIER = 0xFFFFFFFF  # a hang in bar.sync, not in a wait of the kernel
SITE_CLUSTER = 0xFFFFFFFE  # a hang in barrier.cluster


class Status(IntEnum):
    """What mk_host_run returns."""

    OK = 0
    HUNG = 1
    FAULT = 2
    BAD_ARGS = 3


class Policy(IntEnum):
    """How a seeded scheduler treats some; as mk::host::Policy."""

    EVEN = 0  # all alike
    SLOW_LOADER = 1  # warps that issue copies get one turn in 16
    STARVED_WARP = 2  # one warp that does not, chosen by the seed, gets one turn in 64
    LATE_COPIES = 3  # copies take up to 32 times as long
    FROZEN_BLOCK = 4  # one block, chosen by the seed, gets one turn in 4096 while any other can run


class Point(IntEnum):
    """Where a kernel synchronises, by what it does there; as mk::host::Point."""

    WAIT = 0
    PHASE = 1
    ARRIVE = 2
    EXPECT = 3
    INIT = 4
    BLOCK_BARRIER = 5
    WARP_BARRIER = 6
    FENCE = 7
    LOAD = 8
    STORE = 9
    ACQUIRE = 10
    RELEASE = 11
    SHARED = 12
    POLL = 13
    FREE = 14
    EMPTY = 15
    ZERO_TRIP = 16
    SEND = 17
    CLUSTER = 18


class Change(IntEnum):
    """Mistakes that a mutant can make at its points; as mk::host::Change."""

    NONE = 0
    DROP = 1
    TWICE = 2
    HALVE = 3
    MORE = 4
    FLIP = 5
    RELAX = 6
    NARROW = 7


class HangRecord(ctypes.Structure):
    """One thread that waited when nobody could run; words as in mk::WaitInfo."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("site", "block", "warp", "lane", "layer", "tile", "expected", "observed")]


class RaceSide(ctypes.Structure):
    """One of two accesses; as mk::host::RaceSide."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("block", "warp", "lane", "flags", "site", "layer", "width")),
        ("stack", ctypes.c_uint32 * 8),
    ]


class RaceRecord(ctypes.Structure):
    """Two accesses that nothing orders; as mk::host::RaceRecord."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "space", "home", "spare")),
        ("offset", ctypes.c_uint64),
        ("now", RaceSide),
        ("before", RaceSide),
    ]


class PointRecord(ctypes.Structure):
    """A point that a launch has passed; as mk::host::PointRecord."""

    _fields_ = [("key", ctypes.c_uint64), ("kind", ctypes.c_uint32), ("stack", ctypes.c_uint32 * 8)]


class LaunchResult(ctypes.Structure):
    """Filled by a launch, but for the room for hangs and races."""

    _fields_ = [
        ("hangs", ctypes.POINTER(HangRecord)),
        ("races", ctypes.POINTER(RaceRecord)),
        ("race_capacity", ctypes.c_uint32),
        ("race_count", ctypes.c_uint32),
        ("races_found", ctypes.c_uint64),
        ("observed", ctypes.c_uint64),
        ("refilled", ctypes.c_uint64),
        ("stale", ctypes.c_uint64),
        ("hang_capacity", ctypes.c_uint32),
        ("hang_count", ctypes.c_uint32),
        ("steps", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("parks", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64),
        ("changes", ctypes.c_uint64),
        ("code_prefetches", ctypes.c_uint64),
        ("code_lines", ctypes.c_uint64),
        ("point_count", ctypes.c_uint32),
        ("message", ctypes.c_char * 256),
    ]


class LaunchArgs(ctypes.Structure):
    """One launch. Sizes in bytes; buffers in the order of BUFFERS."""

    _fields_ = [
        ("buffers", ctypes.c_void_p * len(BUFFERS)),
        ("buffer_bytes", ctypes.c_uint64 * len(BUFFERS)),
        ("shape", ctypes.POINTER(ctypes.c_uint32)),
        ("shape_words", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("smem_bytes", ctypes.c_uint32),
        ("code_bytes", ctypes.c_uint32),
        ("kernel", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("step_limit", ctypes.c_uint64),
        ("policy", ctypes.c_uint64),
        ("result", ctypes.POINTER(LaunchResult)),
        ("points", ctypes.POINTER(PointRecord)),
        ("point_capacity", ctypes.c_uint32),
        ("change", ctypes.c_uint32),
        ("changed", ctypes.c_uint32),
        ("changed_count", ctypes.c_uint32),
        ("changed_points", ctypes.POINTER(ctypes.c_uint64)),
    ]
