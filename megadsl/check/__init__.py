"""Proofs over a plan, before any code is built: see docs/verification.md for what is proved, tested and assumed."""

from megadsl.check.checker import check_plan
from megadsl.check.report import Report

__all__ = ["Report", "check_plan"]
