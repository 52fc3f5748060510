"""The C structures of templates/host/args.h."""

from __future__ import annotations

import ctypes
from enum import IntEnum

BUFFERS = ("control", "weights", "kv", "exchange", "logits", "rope", "stamps")  # in the order of mk::Buffers

SITE_BARRIER = 0xFFFFFFFF  # a hang in bar.sync, not in a wait of the kernel
SITE_CLUSTER = 0xFFFFFFFE  # a hang in barrier.cluster


class Status(IntEnum):
    """What mk_host_run returns."""

    OK = 0
    HUNG = 1
    FAULT = 2
    BAD_ARGS = 3


class HangRecord(ctypes.Structure):
    """One thread that waited when nobody could run; words as in mk::WaitInfo."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("site", "block", "warp", "lane", "layer", "tile", "expected", "observed")]


class LaunchResult(ctypes.Structure):
    """Filled by a launch, but for the first two fields."""

    _fields_ = [
        ("hangs", ctypes.POINTER(HangRecord)),
        ("hang_capacity", ctypes.c_uint32),
        ("hang_count", ctypes.c_uint32),
        ("steps", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("parks", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64),
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
        ("seed", ctypes.c_uint64),
        ("step_limit", ctypes.c_uint64),
        ("result", ctypes.POINTER(LaunchResult)),
    ]
