"""What every op means, in torch; the oracle, the torch bf16 baseline, and how results are compared with them."""

from megadsl.reference.compare import Gate, gate
from megadsl.reference.eager import EagerModel
from megadsl.reference.model import ReferenceModel

__all__ = ["EagerModel", "Gate", "ReferenceModel", "gate"]
