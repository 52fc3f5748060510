"""Python's own exceptions about a use of mk.* that is none: Python's words at the user's line, and the mend."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType

from megadsl.diagnostics import Diagnostic, declare, diagnose
from megadsl.source import Span, is_ours, place

RAISED = declare("MK220", "{kind}: {why}", "{how}")

_CALL = re.compile(r"(?:(\w+)\.)?(\w+)\(\) (?:missing|got|takes)")
_ITERATE = "iterate over it: `for layer in mk.layers(n):`"
_FIELDS = "read the configuration's fields as attributes, as in cfg.hidden_size"
_GENERIC = "mend this line; Python raised it while the function ran on symbolic tensors"


def user_span(raised: BaseException, default: Span) -> Span:
    """The innermost line of the user's code in the exception's traceback."""
    span, trace = default, raised.__traceback__
    while trace is not None:
        if not is_ours(trace.tb_frame.f_code.co_filename):
            span = place(trace.tb_frame.f_code, trace.tb_lasti, trace.tb_lineno)
        trace = trace.tb_next
    return span


def explain(raised: Exception, default: Span, owners: Iterable[ModuleType | type]) -> Diagnostic:
    """MK220 for an exception that the user's code raised; ``owners`` hold the functions whose signatures may be shown."""
    how = misuse(raised, owners) or _GENERIC
    return diagnose(RAISED, user_span(raised, default), kind=type(raised).__name__, why=str(raised) or "no more is said", how=how)


def misuse(raised: Exception, owners: Iterable[ModuleType | type]) -> str:
    """The mend of a misspelt attribute of ours or of a call that does not fit its signature; empty for anything else."""
    if isinstance(raised, AttributeError):
        return _attribute(raised.name or "", raised.obj)
    if isinstance(raised, TypeError):
        if "'Config'" in str(raised):
            return _FIELDS
        return _signature(str(raised), owners)
    return ""


def _attribute(name: str, owner: object) -> str:
    module = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    if module.partition(".")[0] != "megadsl":
        return ""
    known = list(owner.__all__) if isinstance(owner, ModuleType) else [n for n in dir(owner) if not n.startswith("_")]
    known = [n for n in known if not n.startswith("_")]
    if not known:
        return _ITERATE
    close = get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"it has: {', '.join(known)}"


def _signature(why: str, owners: Iterable[ModuleType | type]) -> str:
    call = _CALL.match(why)
    if call is None:
        return ""
    for owner in owners:
        function = getattr(owner, call[2], None)
        if inspect.isfunction(function) and call[1] in (None, owner.__name__):
            plain = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
            shown = re.sub("<[^>]*>", "...", str(inspect.Signature([p for p in plain if p.name != "self"])))
            return f"call it as {'mk' if isinstance(owner, ModuleType) else owner.__name__}.{call[2]}{shown}"
    return ""
