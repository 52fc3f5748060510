"""Proofs over a plan, before any code is built: see docs/verification.md for what is proved, tested and assumed."""

from megadsl.check.barriers import without_needless_barriers
from megadsl.check.checker import check_plan
from megadsl.check.report import Report

__all__ = ["Report", "check_plan", "without_needless_barriers"]
