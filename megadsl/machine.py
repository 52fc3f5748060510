"""What each architecture has. The only place that knows SM counts, shared-memory sizes and feature sets."""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.diagnostics import declare, error
from megadsl.source import UNKNOWN, Span

ARCH_UNKNOWN = declare("MK001", "unknown architecture {arch!r}", "choose one of: {known}")


@dataclass(frozen=True)
class Machine:
    """One kind of GPU (or the emulated one). Bytes are bytes, bandwidth is bytes per second, times are seconds."""

    name: str
    arch: str
    sms: int
    smem_per_block: int  # most dynamic shared memory one block can have
    smem_per_sm: int
    smem_reserved: int  # of each block, by the system
    registers_per_sm: int
    registers_per_thread: int  # most that one thread can have
    max_warps_per_block: int
    named_barriers: int
    l2_bytes: int
    bandwidth: float  # best read bandwidth of a persistent kernel
    hot_code_bytes: int  # SASS a layer loop may run over before the instruction cache thrashes
    features: frozenset[str]
    min_driver: int  # CUDA driver version, cuDriverGetVersion's encoding

    def smem_for(self, resident: int) -> int:
        """Most dynamic shared memory of a block where ``resident`` of them are to find room on an SM."""
        return min(self.smem_per_block, self.smem_per_sm // resident - self.smem_reserved)


_HOPPER = frozenset(
    {
        *("bulk_copy", "mbarrier", "cluster", "st_async", "mma_bf16", "relaxed_b128", "l2_bulk_prefetch", "cache_hint"),
        *("dependent_launch", "setmaxnreg"),
    }
)

# Figures: CUDA programming guide (limits) and docs/performance.md (bandwidth, hot code: measured on an H200).
MACHINES: dict[str, Machine] = {
    "sm_90a": Machine(
        name="H200",
        arch="sm_90a",
        sms=132,
        smem_per_block=227 * 1024,
        smem_per_sm=228 * 1024,
        smem_reserved=1024,
        registers_per_sm=65536,
        registers_per_thread=255,
        max_warps_per_block=32,
        named_barriers=16,
        l2_bytes=60 * 1000 * 1000,
        bandwidth=4.5e12,
        hot_code_bytes=96 * 1024,
        features=_HOPPER,
        min_driver=13000,
    ),
}


DEFAULT_ARCH = "sm_90a"


def machine(arch: str, span: Span = UNKNOWN) -> Machine:
    """The machine table entry for ``arch`` ("sm_90a"); MK001, at ``span``, when there is none."""
    if arch not in MACHINES:
        raise error(ARCH_UNKNOWN, span, arch=arch, known=", ".join(sorted(MACHINES)))
    return MACHINES[arch]
