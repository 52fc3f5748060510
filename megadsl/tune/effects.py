"""What a change of a schedule may gain, in microseconds of a step: a small cost model that says what to try first.

Negative where the model knows that it costs. It only orders the search: what counts is measured. Figures are those of an H200
(docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from megadsl.ir.graph import Attention, Graph, Linear
from megadsl.ir.schedule import Flag, Schedule, Sentinel, Tagged
from megadsl.ir.verify_graph import reads
from megadsl.lower.tiling import tiling
from megadsl.machine import Machine
from megadsl.ops.cost import cost, runs, total_cost
from megadsl.types import KIB, ceil_div

MICRO = 1e6
STALL_US = 4.0  # of a hand-off between blocks, from a block's last product to the next op's first, without a ring
QUEUE_US = 0.0108  # that a load waits for each KiB in flight in front of it
FENCE_US = 0.033  # that a fence waits for each KiB in flight
TAG_US = 0.4  # unpacking and the extra vectors of a tagged gather
STARVES = 48 * KIB  # fewer bytes in flight, and HBM idles
COLD_US = 2.0  # that a launch's first pass over code may wait for memory, where it has left L2
CATCH_UP = 1.6  # the rate of L2 behind loads, as a multiple of memory's
FETCH_US = 0.1  # that products may wait for their code, in each layer
TRIFLE_US = 0.5  # of a change that the model knows nothing of


@dataclass(frozen=True)
class Scene:
    """A schedule with everything in it decided, the graph that it runs, and where."""

    graph: Graph
    schedule: Schedule
    machine: Machine

    @property
    def hops(self) -> int:
        """Hand-offs between blocks in a step."""
        return sum(self.runs(edge.producer) for edge in self.schedule.edges)

    @property
    def bytes_per_us(self) -> float:
        """What HBM gives one block."""
        return self.machine.bandwidth / MICRO / self.schedule.blocks

    @property
    def floor_us(self) -> float:
        """A step's weights at full bandwidth."""
        return total_cost(self.graph, self.graph.tokens, 0).hbm_bytes / self.machine.bandwidth * MICRO

    def runs(self, op: str) -> int:
        return runs(self.graph, self.graph.op(op))

    def weight_us(self, op: str) -> float:
        """All runs of an op's weights at full bandwidth."""
        return cost(self.graph.op(op), self.graph.tokens, 0).weight_bytes * self.runs(op) / self.machine.bandwidth * MICRO


def depth(scene: Scene, before: int, after: int) -> float:
    """A ring of ``after`` bytes in place of ``before``: what it holds is what HBM still does while blocks wait for each other."""
    exposed = [max(0.0, STALL_US - held / scene.bytes_per_us) for held in (before, after)]
    return (exposed[0] - exposed[1]) * scene.hops + TRIFLE_US


def in_flight(scene: Scene, before: int, after: int) -> float:
    """Loads of every hand-off queue behind the window; a window that is too small starves HBM."""
    starved = [max(0, STARVES - window) / STARVES * 0.1 * scene.floor_us for window in (before, after)]
    return (before - after) / KIB * QUEUE_US * scene.hops + starved[0] - starved[1]


def own_window(scene: Scene, op: str, before: int, after: int) -> float:
    """As ``in_flight``, of the meetings for one op's input."""
    return in_flight(scene, before, after) * scene.runs(op) / max(1, scene.hops)


def dry(scene: Scene, op: str, *, on: bool) -> float:
    """Code of a loop that has been fetched, against one iteration of it, and tiles that are no more held in registers."""
    return (FETCH_US if on else -FETCH_US / 2) * scene.runs(op)


def code(scene: Scene, *, read: bool) -> float:
    """To read the kernel's code ahead, once a launch, or to leave it: what is gained is no more than what waits for it."""
    return COLD_US if read and scene.schedule.warm_up is None else TRIFLE_US if read else -COLD_US


def into_l2(scene: Scene, op: str, *, by_load: bool, size: int) -> float:
    """Bytes that L2 has when they are wanted come at up to CATCH_UP times memory's rate if they were loaded; a load's slots are a stage of
    the ring."""
    ahead = min(size / scene.bytes_per_us, STALL_US)
    stage = scene.schedule.rings[0][1].stage_bytes / scene.bytes_per_us
    return ((1 - 1 / CATCH_UP) * ahead - stage / 4) * scene.runs(op) * (1 if by_load else -1) / 4 + TRIFLE_US


def hand_off(scene: Scene, op: str, before: object, after: object) -> float:
    """Another wire for what ``op`` gives."""
    ring = scene.schedule.rings[0][1]
    window = (ring.meeting_window or ring.window) / KIB
    takes: dict[type[object], float] = {Flag: FENCE_US * window, Tagged: TAG_US, Sentinel: 0.0}
    return (takes[type(before)] - takes[type(after)]) * scene.runs(op) + TRIFLE_US


def held(scene: Scene, op: str, before: int, after: int) -> float:
    """Tiles that move on into registers make as much room in the ring."""
    found = scene.graph.op(op)
    size = tiling(found).tile_bytes if isinstance(found, Linear) else scene.schedule.rings[0][1].stage_bytes
    return min(abs(after - before) * size / scene.bytes_per_us, STALL_US / 4) * scene.runs(op) + TRIFLE_US


def shares(scene: Scene, blocks: int) -> float:
    """The largest shares of all linears, which a step waits for, and how many vectors an exchange has."""

    def busiest(count: int) -> float:
        linears = [op for op in scene.graph.ops if isinstance(op, Linear)]
        largest = sum(ceil_div(tiling(op).shares, count) * tiling(op).share_bytes * runs(scene.graph, op) for op in linears)
        return largest * scene.machine.sms / scene.machine.bandwidth * MICRO

    now = scene.schedule.blocks
    return min(abs(busiest(blocks) - busiest(now)), 0.05 * scene.floor_us) + abs(blocks - now) / now * scene.hops * 0.2


def ends(graph: Graph, value: str, producer: str) -> tuple[str, str]:
    """The names of an edge: the producer of a value and its first reader; of what an op's blocks hand to each other, the op twice."""
    if value != graph.op(producer).out:
        return producer, producer
    return producer, next((op.name for op in graph.ops if value in {ref.value for ref in reads(op)}), producer)


def attentions(graph: Graph) -> list[Attention]:
    return [op for op in graph.ops if isinstance(op, Attention)]


def linears(graph: Graph) -> list[Linear]:
    return [op for op in graph.ops if isinstance(op, Linear)]
