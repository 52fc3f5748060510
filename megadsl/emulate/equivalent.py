"""Mutants that nothing can notice, and why."""

from __future__ import annotations

from megadsl.emulate.mutants import Mutant


def argument_for(mutant: Mutant) -> str:
    return ""
