"""Proofs that are kept: a plan that held is not proved again, as long as neither the plan nor this package changes.

What an entry is named by is all that a proof depends on: the plan and the machine whole, as pickle writes them (what plan.txt leaves out
is in it too), every source of the package as it was when this module was loaded, and the versions of Python and numpy.
"""

from __future__ import annotations

import json
import pickle
import sys
from importlib.metadata import version
from pathlib import Path

from megadsl.check.report import Report
from megadsl.entries import SmallEntries, digest
from megadsl.ir.plan import Plan
from megadsl.machine import Machine

_PACKAGE = Path(__file__).resolve().parent.parent
_PROOFS = SmallEntries(".proof.json")


def sources_digest(package: Path = _PACKAGE) -> str | None:
    """A digest of the name and content of every Python file of the package; None where it has none to read, as in an archive."""
    parts: list[str | bytes] = []
    for path in sorted(package.rglob("*.py")):
        parts += [path.relative_to(package).as_posix(), path.read_bytes()]
    return digest(parts) if parts else None


_SOURCES = sources_digest()  # now: a checker that is loaded later is compared with it


def prove(plan: Plan, on: Machine) -> Report:
    """The report of :func:`megadsl.check.checker.check_plan`; what it was, where this very plan has held before.

    Only proofs are kept, never findings, and none that cannot be told from another's: of a plan that cannot be written down whole, or by
    sources that have changed since this module was loaded.
    """
    key = _key(plan, on)
    if key is not None and (found := _PROOFS.load(key)) is not None:
        kept = json.loads(found)
        return Report((), float(kept["seconds"]), tuple(kept["proved"]), kept=True)
    from megadsl.check.checker import check_plan  # with numpy, a quarter of what a compilation takes that needs neither

    report = check_plan(plan, on)
    if key is not None and not report.findings and sources_digest() == _SOURCES:
        _PROOFS.store(key, json.dumps({"seconds": report.seconds, "proved": report.proved}).encode())
    return report


def _key(plan: Plan, on: Machine) -> tuple[str | bytes, ...] | None:
    if _SOURCES is None:
        return None
    try:
        written = pickle.dumps((plan, {**vars(on), "features": sorted(on.features)}))  # of a set, the order is the process's own
    except (pickle.PicklingError, AttributeError, TypeError):  # all that pickle raises for what it does not know
        return None
    return "proof", _SOURCES, sys.version, version("numpy"), written
