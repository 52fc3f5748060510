"""What every op means, in torch; the oracle, the torch bf16 baseline, and how results are compared with them."""

from megadsl.reference.compare import Gate, gate
from megadsl.reference.eager import EagerModel
from megadsl.reference.model import ReferenceModel
from megadsl.reference.plain import ATTENTION_FORMS, PlainModel

__all__ = ["ATTENTION_FORMS", "EagerModel", "Gate", "PlainModel", "ReferenceModel", "gate"]
