"""Op families: what shapes each op takes and gives, and what it costs."""

from megadsl.ops.base import Cost, Family, Outline
from megadsl.ops.cost import cost, floor_seconds, kv_bytes_per_token, total_cost
from megadsl.ops.registry import FAMILIES, outline

__all__ = ["FAMILIES", "Cost", "Family", "Outline", "cost", "floor_seconds", "kv_bytes_per_token", "outline", "total_cost"]
