"""What each architecture has. The only place that knows SM counts, shared-memory sizes and feature sets."""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.diagnostics import declare, error
from megadsl.source import UNKNOWN, Span
from megadsl.types import KIB, MIB

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
    run_on: str = ""  # the GPU on which kernels for this architecture have run and passed the fidelity gate; "": there is none yet
    clustered: tuple[tuple[int, int], ...] = ()  # (size of a cluster, blocks that run in such clusters at once, an SM each), as measured

    def clustered_blocks(self, size: int) -> int:
        """Most blocks, an SM each, that run at once in clusters of ``size``; all SMs that make whole clusters, where it is not measured."""
        return dict(self.clustered).get(size, self.sms // size * size)

    def smem_for(self, resident: int) -> int:
        """Most dynamic shared memory of a block where ``resident`` of them are to find room on an SM."""
        return min(self.smem_per_block, self.smem_per_sm // resident - self.smem_reserved)

    @property
    def bulk(self) -> bool:
        """Whether one lane can copy a stage of a ring (cp.async.bulk); else the lanes of a warp do, 16 bytes each (cp.async)."""
        return "bulk_copy" in self.features

    @property
    def proof(self) -> str:
        """What is known of kernels for it: on what they have run."""
        if self.run_on == self.name:
            return f"run on {self.name}"
        if self.run_on:
            return f"never run on {self.name}; its kernels have run on {self.run_on}, compiled for it from {virtual(self.arch)} PTX"
        return "never run on hardware: compiled, checked and emulated only"


_AMPERE = frozenset({"async_copy", "mbarrier", "mma_bf16", "relaxed_b128", "cache_hint"})
_HOPPER = _AMPERE | {"bulk_copy", "cluster", "st_async", "l2_bulk_prefetch", "dependent_launch", "setmaxnreg"}

# Of the bandwidth in the data sheet. An assumption, no measurement: of an H200's 4.8 TB/s 4.5 were measured.
_ACHIEVABLE = 0.9


def _machine(name: str, arch: str, sms: int, smem: int, l2: float, sheet: float, features: frozenset[str], run_on: str = "") -> Machine:
    """An entry from data sheets: ``smem`` bytes of an SM, ``l2`` bytes, ``sheet`` bytes per second. Nothing of it is measured."""
    return Machine(
        name=name,
        arch=arch,
        sms=sms,
        smem_per_block=smem - KIB,
        smem_per_sm=smem,
        smem_reserved=KIB,
        registers_per_sm=65536,
        registers_per_thread=255,
        max_warps_per_block=32,
        named_barriers=16,
        l2_bytes=int(l2),
        bandwidth=_ACHIEVABLE * sheet,
        hot_code_bytes=96 * KIB,  # the H200's
        features=features,
        min_driver=13000,
        run_on=run_on,
    )


# Limits: CUDA programming guide, "Compute capabilities". Cards, SMs, L2 and bandwidth: NVIDIA's data sheets, one named card of each
# architecture. Of the H200, bandwidth and hot code are measured (docs/performance.md).
_ENTRIES = (
    _machine("A100 80 GB SXM", "sm_80", 108, 164 * KIB, 40 * MIB, 2.039e12, _AMPERE, run_on="H200"),
    _machine("RTX 3090", "sm_86", 82, 100 * KIB, 6 * MIB, 0.936e12, _AMPERE),
    _machine("RTX 4090", "sm_89", 128, 100 * KIB, 72 * MIB, 1.008e12, _AMPERE),
    Machine(
        name="H200",
        arch="sm_90a",
        sms=132,
        smem_per_block=227 * KIB,
        smem_per_sm=228 * KIB,
        smem_reserved=KIB,
        registers_per_sm=65536,
        registers_per_thread=255,
        max_warps_per_block=32,
        named_barriers=16,
        l2_bytes=60 * 1000 * 1000,
        bandwidth=4.5e12,
        hot_code_bytes=96 * KIB,
        features=_HOPPER,
        min_driver=13000,
        run_on="H200",
        clustered=((2, 132), (4, 120), (8, 120)),  # docs/performance.md, "Clusters"
    ),
    _machine("B200", "sm_100a", 148, 228 * KIB, 126 * MIB, 8.0e12, _HOPPER),
    _machine("B300", "sm_103a", 148, 228 * KIB, 126 * MIB, 8.0e12, _HOPPER),
    _machine("RTX 5090", "sm_120a", 170, 100 * KIB, 96 * MIB, 1.792e12, _HOPPER),
)
MACHINES: dict[str, Machine] = {each.arch: each for each in _ENTRIES}


DEFAULT_ARCH = "sm_90a"
ARCHES = tuple(MACHINES)
"""The architectures that kernels can be compiled for, oldest first."""


def machine(arch: str, span: Span = UNKNOWN) -> Machine:
    """The machine table entry for ``arch`` ("sm_90a"); MK001, at ``span``, when there is none."""
    if arch not in MACHINES:
        raise error(ARCH_UNKNOWN, span, arch=arch, known=", ".join(ARCHES))
    return MACHINES[arch]


def virtual(arch: str) -> str:
    """The virtual architecture whose PTX kernels for ``arch`` are: "compute_80" for "sm_80"."""
    return arch.replace("sm_", "compute_")


def runs(arch: str, on: str) -> bool:
    """Whether kernels for ``arch`` run on a GPU of the architecture ``on`` ("sm_90"): those that use features of one architecture
    (sm_90a) on that one alone, others on it and all later ones, for which their PTX is compiled."""
    if arch != arch.rstrip("af"):
        return arch.rstrip("af") == on
    return _version(on) >= _version(arch)


def code_for(arch: str, on: str) -> str:
    """The architecture to compile kernels for ``arch`` to, where they are to run on a GPU of the architecture ``on`` ("sm_90")."""
    return arch if arch != arch.rstrip("af") else on


def running(arch: str, on: str) -> Machine:
    """The machine that a GPU of the architecture ``on`` ("sm_90") is; where the table does not have it, the one of ``arch``."""
    return next((each for each in _ENTRIES if each.arch.rstrip("af") == on), machine(arch))


def _version(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))
