"""@mk.kernel: a function that is traced to a Spec, and the schedule overrides that go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from megadsl.diagnostics import Diagnostic, MegadslError, declare, diagnose, error
from megadsl.dsl import functions
from megadsl.dsl.mistakes import explain, user_span
from megadsl.dsl.overrides import Override, Overrides
from megadsl.dsl.tensor import KVCache, Layer, Tensor
from megadsl.dsl.tracer import Tracer, tracing
from megadsl.ir.spec import Spec
from megadsl.ops import wellformed
from megadsl.source import UNKNOWN, Span, caller_span

NO_OUTPUT = declare(
    "MK126", "kernel {kernel!r} returns {value}", "return the logits, or mk.argmax of them: `return mk.argmax(mk.linear(x, lm_head))`"
)
LOOP_LEFT = declare(
    "MK127", "the body of mk.layers is left by break or return", "let the loop run to its end; the body is traced once for all layers"
)
NAME_UNBOUND = declare("MK128", "{message}", "give the name a value before this line (for a loop variable: before mk.layers)")
CONFIG_FIELD = declare("MK129", "the configuration has no field {field!r}", "add it to the configuration; it has: {known}")
TOKENS_DIFFER = declare(
    "MK137", "traced for tokens={asked}, but mk.input_ids asks for {got}", "pass the function's tokens on: mk.input_ids(tokens)"
)
NO_INPUT = declare("MK138", "kernel {kernel!r} never calls mk.input_ids", "embed the token ids: mk.embed(table, mk.input_ids(tokens))")
NO_TOKENS = declare(
    "MK187", "kernel {kernel!r} takes no tokens", "declare it as `def {kernel}(cfg, tokens=1):` and pass tokens to mk.input_ids"
)
NOT_A_KERNEL = declare("MK224", "{value} is no kernel", "decorate the function with @mk.kernel")

_OWNERS = (functions, Layer, KVCache, Tensor)  # whose signatures a mend may show


class MissingField(AttributeError):
    """A configuration field that is not there; getattr(cfg, field, default) still works."""

    def __init__(self, field: str, known: list[str], span: Span) -> None:
        super().__init__(f"the configuration has no field {field!r}")
        self.field = field
        self.known = known
        self.span = span


class Config:
    """Attribute access to a dict or an object; remembers which plain fields were read."""

    def __init__(self, source: Mapping[str, Any] | object) -> None:
        self._source = source
        self._read: dict[str, Any] = {}

    def __getattr__(self, field: str) -> Any:
        source = self._source
        if isinstance(source, Mapping) and field in source:
            return source[field]
        if not isinstance(source, Mapping) and hasattr(source, field):
            value = getattr(source, field)
            if isinstance(value, str | int | float | bool | None):
                self._read[field] = value
            return value
        known = list(source) if isinstance(source, Mapping) else [n for n in vars(source) if not n.startswith("_")]
        raise MissingField(field, sorted(known), caller_span())

    def fields(self) -> Mapping[str, Any]:
        """All fields of a dict; of an object the plain ones that the kernel read."""
        return MappingProxyType(dict(self._source if isinstance(self._source, Mapping) else self._read))


class Kernel:
    """A traced function. ``overrides_for(arch)`` gives what ``with mk.schedule(kernel, ...)`` recorded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.span = Span(function.__code__.co_filename, function.__code__.co_firstlineno)
        self.records: dict[str | None, tuple[Override, ...]] = {}  # by architecture, None for all

    def __repr__(self) -> str:
        return f"Kernel({self.name!r} at {self.span.short})"

    def overrides_for(self, arch: str) -> Overrides:
        """What was recorded for every architecture and, over it, for ``arch``; empty where nothing was."""
        return Overrides(arch, self.records.get(None, ()) + self.records.get(arch, ()))

    def trace(self, config: Mapping[str, Any] | object, tokens: int | None = None) -> Spec:
        """Run the function on symbolic tensors.

        ``config`` is a dict or any object with attributes; ``tokens`` the most new tokens of a launch (1 to 16), by default
        the function's own default. Raises MegadslError with everything that was found wrong (MK100 to MK149, MK187, MK201 to
        MK223); an exception of the function's own is the cause of its MK220.
        """
        code = self.function.__code__
        if tokens is not None and "tokens" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            raise error(NO_TOKENS, self.span, kernel=self.name)
        tracer = Tracer(self.name)
        cfg = Config(config)
        keywords = {} if tokens is None else {"tokens": tokens}
        with tracing(tracer):
            result = self._run(tracer, cfg, keywords)
        return self._finish(tracer, result, cfg, tokens)

    def _run(self, tracer: Tracer, cfg: Config, keywords: dict[str, int]) -> object:
        try:
            return self.function(cfg, **keywords)
        except MegadslError as raised:
            seen = tracer.found.found
            raise MegadslError([*seen, *(d for d in raised.diagnostics if d not in seen)]) from raised.__cause__
        except (NameError, MissingField) as missing:
            raise MegadslError([*tracer.found.found, self._explain(missing)]) from missing
        except Exception as failed:
            # what the function trips over is most often a consequence of what was collected before
            raise MegadslError(tracer.found.found or [explain(failed, self.span, _OWNERS)]) from failed

    def _explain(self, missing: NameError | MissingField) -> Diagnostic:
        if isinstance(missing, MissingField):
            return diagnose(CONFIG_FIELD, missing.span, field=missing.field, known=", ".join(missing.known) or "nothing")
        return diagnose(NAME_UNBOUND, user_span(missing, self.span), message=str(missing))

    def _finish(self, tracer: Tracer, result: object, cfg: Config, tokens: int | None) -> Spec:
        outputs = result if isinstance(result, tuple) else (result,)
        found = tracer.found
        if tracer.open is not None:
            raise tracer.fail(LOOP_LEFT, tracer.open.loop.span)
        if not outputs or not all(isinstance(t, Tensor) and t.tracer is tracer for t in outputs):
            value = "nothing" if result is None else f"{result!r}, which is no tensor of it"
            raise tracer.fail(NO_OUTPUT, self.span, kernel=self.name, value=value)
        ids = tracer.tensors.get("input_ids")
        if ids is None:
            raise tracer.fail(NO_INPUT, self.span, kernel=self.name)
        if tokens is not None and ids.shape[0] != tokens and not found.found:
            found.add(TOKENS_DIFFER, ids.span, asked=tokens, got=ids.shape[0])
        spec = Spec(
            name=self.name,
            tokens=ids.shape[0],
            tensors=MappingProxyType(dict(tracer.tensors)),
            nodes=tuple(tracer.nodes),
            loops=tuple(tracer.loops),
            outputs=tuple(t.name for t in outputs if isinstance(t, Tensor)),
            span=self.span,
            config=cfg.fields(),
        )
        wellformed.check_used(spec, found)
        found.raise_if_any()
        return spec


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorator: ``@mk.kernel def decode_step(cfg, tokens=1): ...`` gives a Kernel to trace and schedule."""
    return Kernel(function)


def require_kernel(value: object, span: Span = UNKNOWN) -> None:
    """MK224 when ``value`` is anything but a Kernel."""
    if not isinstance(value, Kernel):
        shown = f"the function {value.__name__!r}" if isinstance(value, FunctionType) else repr(value)
        raise error(NOT_A_KERNEL, span, value=shown)
