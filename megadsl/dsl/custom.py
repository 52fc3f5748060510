"""mk.custom_op: an op of the user's own, a torch function beside a header with its role function."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megadsl.diagnostics import declare
from megadsl.dsl.tensor import Tensor
from megadsl.dsl.tracer import Tracer, current
from megadsl.ir.custom import CustomCall, Header, Param
from megadsl.source import Span, caller_span

HEADER_MISSING = declare(
    "MK270",
    "custom op {name!r}: its header {path} cannot be read: {why}",
    "give header= a path relative to the file that declares the op",
)
FUNCTION_MISSING = declare(
    "MK271",
    "custom op {name!r}: {header} defines no function {name!r}",
    "write `template <class Op, class Out> MK_DEV void {name}(const Op& op, const Out& out)` there, or name the Python function after it",
)
NOT_PORTABLE = declare(
    "MK272",
    "custom op {name!r}: {header}, line {line}, has `{text}`, which the emulator cannot run",
    "{how}",
)
INCLUDES = declare(
    "MK273",
    "custom op {name!r}: {header}, line {line}, includes {included}",
    "keep what the op needs in one header: it becomes a part of kernel.cu, and may include headers of megadsl/ alone",
)
SIGNATURE = declare("MK274", "custom op {name!r}: {why}", "{how}")
BAD_PARAM = declare(
    "MK275",
    "custom op {name!r}: parameter {param!r} is {value}",
    "give an int of 32 bits, a finite float or a bool: parameters are compiled into the kernel",
)
BAD_RULE = declare(
    "MK279",
    "custom op {name!r}: {what} is {value}",
    "give {wanted}, or a function of the op's arguments by name that returns it: of tensors it is given the shapes",
)

Rule: TypeAlias = "int | tuple[int, ...] | Callable[..., int | tuple[int, ...]]"

_WRAPPERS = "use the wrappers of mk::ptx, each of which has a twin on the host"
_VIEW = "use op.thread(), op.warp(), op.lane(), op.sync(), and out.begin and out.end for what the block owns"
# What nvcc would take and g++ cannot, or what the emulator would not see: a pattern, and what is written instead.
_PORTABLE = (
    (r"\b(?:__)?asm(?:__)?\b", _WRAPPERS),
    (r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b", _VIEW),
    (
        r"\b__(?:syncthreads|syncwarp|threadfence|nanosleep)\w*",
        "use op.sync() for all that run the function, mk::ptx::syncwarp() for a warp",
    ),
    (r"\b__(?:shfl|ballot|any|all|activemask|reduce|match)_?\w*", _WRAPPERS),
    (r"\batomic[A-Z]\w*|\bcuda::\w+", "give each result one writer: blocks meet by what they publish"),
    (r"\b__(?:shared|device|global|constant|forceinline)__", "write MK_DEV, and take shared memory from op.scratch"),
)
_NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"][^>"\n]*[>"]?)', re.MULTILINE)
_OWN_INCLUDE = re.compile(r'"megadsl/[\w/.]+"')
# Names that mean something else where they would be emitted: words of C++; of arguments members of `op` and of Shape; of functions what
# the consumers' role calls its own.
_WORDS = (
    "auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false float"
    " for friend goto if inline int long namespace new operator private protected public register return short signed sizeof static"
    " struct switch template this throw true try typedef typename union unsigned using virtual void volatile while"
)
_MEMBERS = "block count tokens scratch thread warp lane sync kTokens kThreads kWarps exchange kept pause merge"
_LOCALS = "block out layer layers epoch cx s step steps buffers staged activations second angles gates more mk megakernel"
_ARGUMENTS, _FUNCTIONS = (frozenset(f"{_WORDS} {names}".split()) for names in (_MEMBERS, _LOCALS))
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MOST = 2**31


class CustomOp:
    """An op of the user's own: call it inside a kernel. See :func:`custom_op`."""

    def __init__(self, meaning: Callable[..., Any], header: str, features: Rule | None, scratch: Rule, flops: Rule, declared: Span) -> None:
        self.meaning = meaning
        self.name = meaning.__name__
        self.header = header
        self._features, self._scratch, self._flops, self._declared = features, scratch, flops, declared

    def __repr__(self) -> str:
        return f"CustomOp({self.name!r}, header={self.header!r})"

    def __call__(self, *tensors: Tensor, name: str | None = None, **params: Param) -> Any:
        """Record a call, named ``name`` (default: as the function). Returns a tensor, or as many as the op has outputs. MK270 to MK277,
        MK279; MK109 when another op has the name."""
        tracer, span = current(self.name), caller_span()
        if name is not None:
            tracer.require_new_name(tracer.text("the name of a custom op", name, '"router"', span), span)
        args, values = self._bound(tracer, span, tensors, params)
        known = {arg: t.shape for arg, t in zip(args, tensors, strict=True) if isinstance(t, Tensor)}
        first = next(iter(known.values()), (1,))
        parts = self._counts(tracer, span, "features", first[-1] if self._features is None else self._features, {**known, **values}, 1)
        (scratch,) = self._counts(tracer, span, "scratch", self._scratch, {**known, **values}, 0)[:1]
        (flops,) = self._counts(tracer, span, "flops", self._flops, {**known, **values}, 0)[:1]
        header = self._read(tracer)
        call = CustomCall(self.name, header, args, tuple(values.items()), parts, scratch, flops, self.meaning)
        outputs = [self.name] if len(parts) == 1 else [f"{self.name}_{i}" for i in range(len(parts))]
        results = tracer.node("custom", name or self.name, tensors, outputs, span, {"call": call})
        return results[0] if len(results) == 1 else results

    def _bound(
        self, tracer: Tracer, span: Span, tensors: tuple[Tensor, ...], params: Mapping[str, Param]
    ) -> tuple[tuple[str, ...], dict[str, Param]]:
        """Names of the tensors, and all parameters by name."""
        signature = inspect.signature(self.meaning)
        args = tuple(p.name for p in signature.parameters.values() if p.kind in _POSITIONAL)
        rest = [p for p in signature.parameters.values() if p.kind not in _POSITIONAL]
        taken = [p for p in signature.parameters if p in _ARGUMENTS or not p.isascii()]
        taken += [self.name] if self.name in _FUNCTIONS or not self.name.isascii() else []
        defaults = [a for a in args if signature.parameters[a].default is not inspect.Parameter.empty]
        why = how = ""
        if not args or defaults or any(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in rest):
            why = f"its function is {self.name}{signature}"
            how = "name its tensors one by one, without defaults, then its parameters behind a `*`: def mix(x, y, *, scale)"
        elif taken:
            why, how = f"the name {taken[0]!r} means something else in the kernel", "choose another name"
        if why:
            raise tracer.fail(SIGNATURE, self._declared, name=self.name, why=why, how=how)
        try:
            bound = signature.bind(*tensors, **params)
        except TypeError as wrong:
            raise tracer.fail(SIGNATURE, span, name=self.name, why=wrong, how=f"call it as {self.name}{signature}") from None
        bound.apply_defaults()
        values = {p.name: bound.arguments[p.name] for p in rest}
        for param, value in values.items():
            if not _is_param(value):
                tracer.found.add(BAD_PARAM, span, name=self.name, param=param, value=f"{type(value).__name__} {value!r}")
                values[param] = 1
        return args, values

    def _counts(self, tracer: Tracer, span: Span, what: str, rule: Rule, known: Mapping[str, object], least: int) -> tuple[int, ...]:
        """What a rule says, as a tuple; ``least`` where it says nothing that could be meant."""
        value: object = rule
        if callable(rule):
            names = [n for n in inspect.signature(rule).parameters if n in known]
            try:
                value = rule(**{n: known[n] for n in names})
            except Exception as wrong:
                value = f"a function that raises {type(wrong).__name__}: {wrong}"
        found = value if isinstance(value, tuple) else (value,)
        several = what == "features"
        if found and (several or len(found) == 1) and all(_is_count(each, least) for each in found):
            return found
        wanted = "a positive number of features, a tuple of such for several outputs" if several else "a number that is not negative"
        shown = value if isinstance(value, str) else repr(value)
        tracer.found.add(BAD_RULE, span, name=self.name, what=f"{what}=", value=shown, wanted=wanted)
        return (8 * least,)

    def _read(self, tracer: Tracer) -> Header:
        """The header, once it is one that runs everywhere. All but a missing one is collected."""
        path = Path(self.meaning.__code__.co_filename).parent / self.header
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as wrong:
            why = wrong.strerror if isinstance(wrong, OSError) else "it is not UTF-8 text"
            raise tracer.fail(HEADER_MISSING, self._declared, name=self.name, path=self.header, why=why) from None
        said = {"name": self.name, "header": path.name}
        code = _NOT_CODE.sub(_blank, text)
        if not re.search(rf"\bvoid\s+{re.escape(self.name)}\s*\(", code):
            tracer.found.add(FUNCTION_MISSING, self._declared, **said)
        for line, found, how in _not_portable(code):
            tracer.found.add(NOT_PORTABLE, self._declared, **said, line=line, text=found, how=how)
        for include in _INCLUDE.finditer(_COMMENT.sub(_blank, text)):
            if not _OWN_INCLUDE.fullmatch(include[1]):
                line = text[: include.start(1)].count("\n") + 1
                tracer.found.add(INCLUDES, self._declared, **said, line=line, included=include[1])
        return Header(path.name, text)


def custom_op(*, header: str, features: Rule | None = None, scratch: Rule = 0, flops: Rule = 0) -> Callable[[Callable[..., Any]], CustomOp]:
    """Declares an op of the user's own; what it decorates is the op's meaning in torch.

    The decorated function's positional arguments are the op's tensors: activations (tokens, features) in bf16, whose rows every block
    gathers, and weights of one or two dimensions, which stream through the ring as one stage each. Its keyword-only arguments are
    parameters: ints, floats, bools, compiled in. It takes fp32 torch tensors and returns fp32 (tokens, features), or a tuple for several
    outputs; only the comparison with torch calls it. ``header``, relative to the file of the function, defines a role function of the same
    name (templates/include/megadsl/custom.h says what it is given), which runs on the GPU and in the emulator.

    ``features``: of the output, of each one in a tuple; by default as many as the first tensor has. ``scratch``: bytes of a block's shared
    memory beside the inputs. ``flops``: of a token, for reports. Each is a number, or a function of arguments of the op by name, which is
    given the shapes of tensors and the values of parameters. MK270 to MK277 and MK279, when the op is called inside a kernel.
    """
    declared = caller_span()

    def made(meaning: Callable[..., Any]) -> CustomOp:
        return CustomOp(meaning, header, features, scratch, flops, declared)

    return made


def _blank(found: re.Match[str]) -> str:
    """As many lines, and nothing on them."""
    return re.sub(r"[^\n]", " ", found[0])


def _not_portable(code: str) -> Iterator[tuple[int, str, str]]:
    """(line, text, what is written instead) of what only a GPU could run, the first of each kind."""
    for pattern, how in _PORTABLE:
        if found := re.search(pattern, code):
            yield code[: found.start()].count("\n") + 1, found[0], how


def _is_param(value: object) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return -_MOST <= value < _MOST
    return isinstance(value, float) and math.isfinite(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
