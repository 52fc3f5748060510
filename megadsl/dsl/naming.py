"""How ops and tensors get their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence


def stem(weight: str) -> str:
    """``q_proj`` for ``model.layers.{layer}.self_attn.q_proj.weight``: the name an op takes from its weight."""
    parts = [p for p in weight.split(".") if p not in ("weight", "{layer}")]
    return re.sub(r"\W", "_", parts[-1])


def joint_stem(weights: Sequence[str]) -> str:
    """``qkv_proj`` for q_proj, k_proj, v_proj; ``gate_up_proj`` for gate_proj, up_proj; the stem itself for one weight."""
    stems = [stem(w) for w in weights]
    heads = [s.rpartition("_") for s in stems]
    if len(stems) == 1 or len({tail for _, _, tail in heads}) > 1 or not all(head for head, _, _ in heads):
        return "_".join(stems)
    glue = "" if all(len(head) == 1 for head, _, _ in heads) else "_"
    return glue.join(head for head, _, _ in heads) + "_" + heads[0][2]


def unique(name: str, taken: Collection[str]) -> str:
    """``name``, or ``name_2``, ``name_3`` ... when it is taken."""
    if name not in taken:
        return name
    return next(f"{name}_{i}" for i in range(2, len(taken) + 3) if f"{name}_{i}" not in taken)
