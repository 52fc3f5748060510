"""What ``megadsl bench`` can measure beside a kernel. Brings no torch: the command line names it in its help."""

from __future__ import annotations

from enum import StrEnum


class Baseline(StrEnum):
    """Nothing; our own kernels under the other launch scopes; these and torch's own, both in a CUDA graph; all that and torch.compile."""

    NONE = "none"
    LAUNCHES = "launches"
    EAGER_GRAPH = "eager-graph"
    COMPILE = "compile"
