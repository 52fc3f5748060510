"""A compiled model inside a torch program: ``from megadsl.torch import DecodeStep``.

docs/torch.md is the tutorial. ``import megadsl`` does not import this, for this imports torch.
"""

from megadsl.torch.arguments import SupportsDLPack
from megadsl.torch.op import decode_step
from megadsl.torch.sampling import Sampling
from megadsl.torch.step import DecodeStep, StepOutput

__all__ = ["DecodeStep", "Sampling", "StepOutput", "SupportsDLPack", "decode_step"]
