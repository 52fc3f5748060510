"""What ``megadsl bench`` can measure beside a kernel. Brings no torch: the command line names it in its help."""

from __future__ import annotations

from enum import StrEnum


class Baseline(StrEnum):
    """Nothing; torch's own kernels in a CUDA graph; these and torch.compile."""

    NONE = "none"
    EAGER_GRAPH = "eager-graph"
    COMPILE = "compile"
