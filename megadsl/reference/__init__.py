"""What every op means, in torch; the oracle, torch bf16 op by op and as a user writes it for speed, and how results are compared."""

from megadsl.reference.compare import Gate, gate
from megadsl.reference.eager import EagerModel
from megadsl.reference.model import ReferenceModel
from megadsl.reference.plain import ATTENTION_FORMS, PlainModel

__all__ = ["ATTENTION_FORMS", "EagerModel", "Gate", "PlainModel", "ReferenceModel", "gate"]
