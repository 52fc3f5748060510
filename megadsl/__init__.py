"""megadsl: a model step written in Python becomes one persistent CUDA kernel. ``import megadsl as mk``."""

from megadsl.diagnostics import MegadslError
from megadsl.dsl.custom import CustomOp, custom_op
from megadsl.dsl.functions import (
    argmax,
    attention,
    embed,
    input_ids,
    kv_cache,
    layers,
    linear,
    logits,
    map,
    per_layer,
    rms_norm,
    rope,
    weight,
)
from megadsl.dsl.kernel import Kernel, kernel
from megadsl.dsl.schedule import schedule
from megadsl.dsl.tensor import KVCache, Layer, Tensor
from megadsl.ir.schedule import Flag, Sentinel, Tagged
from megadsl.machine import ARCHES
from megadsl.types import DType, Level
from megadsl.version import __version__

__all__ = [
    "ARCHES",
    "CustomOp",
    "DType",
    "Flag",
    "KVCache",
    "Kernel",
    "Layer",
    "Level",
    "MegadslError",
    "Sentinel",
    "Tagged",
    "Tensor",
    "__version__",
    "argmax",
    "attention",
    "custom_op",
    "embed",
    "input_ids",
    "kernel",
    "kv_cache",
    "layers",
    "linear",
    "logits",
    "map",
    "per_layer",
    "rms_norm",
    "rope",
    "schedule",
    "weight",
]
