"""Pass ``infer``: the contract that a spec keeps before anything is made of it."""

from __future__ import annotations

from megadsl.diagnostics import collecting
from megadsl.ir.spec import Spec
from megadsl.ops import wellformed


def infer(spec: Spec) -> Spec:
    """The spec itself, once every tensor has one earlier producer, shapes agree with the ops' rules and everything is used.

    Raises MegadslError with all findings: MK110 to MK125 for shapes, MK130 to MK136 for order and use.
    """
    with collecting() as found:
        wellformed.check(spec, found)
    return spec
