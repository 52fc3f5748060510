"""Which schedule a compilation uses: the one that is asked for, else the stored one for its model, arch, tokens and sequences, else the
spec's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from megadsl import resources
from megadsl.diagnostics import declare, error, warn
from megadsl.dsl.kernel import Kernel
from megadsl.dsl.overrides import Overrides
from megadsl.dsl.schedule_file import SUFFIX, ScheduleFile, load
from megadsl.source import UNKNOWN

WRONG_ARCH = declare("MK268", "the schedule is for {meant}, the kernel is compiled for {arch}", "use one that was made for {arch}")
MEANT_OTHERWISE = declare(
    "MK269", "the schedule is meant for {what} {meant}, this is {got}", "write `{what} = any` in its head if it is good for both"
)

Asked: TypeAlias = str | Path | ScheduleFile | Overrides | None

DEFAULT, OWN, NOTHING = WORDS = ("default", "model", "none")  # what is asked for in place of a file


@dataclass(frozen=True)
class Chosen:
    """``origin``: "file", a schedule file, whose ``name`` (without folders) and ``digest`` are given; "model", the spec's mk.schedule;
    "none", the compiler's choices alone; "given", Overrides of the caller's."""

    overrides: Overrides
    origin: str
    name: str | None = None
    digest: str | None = None

    def fields(self) -> dict[str, str | None]:
        """What the manifest keeps."""
        return {"from": self.origin, "name": self.name, "sha256": self.digest}


def choose(
    asked: Asked, model: str | None, kernel: Kernel, arch: str, tokens: int, sequences: int = 1, *, as_measured: bool = True
) -> Chosen:
    """The decisions for ``model`` (its registered name, or what a file may call it; None for a bare kernel).

    ``asked``: a schedule file, its path, Overrides, or a word: "default" (as None: the stored schedule where there is one, else the
    spec's own), "model" (the spec's own), "none" (no decision). ``as_measured``: a registered model, as it is, on the
    whole machine; stored schedules are used only then. MK268 for another arch, a warning MK269 for another
    model, other tokens or sequences; and what reading the file finds.
    """
    if asked is None or asked == DEFAULT:
        path = None if model is None or not as_measured else stored(model, arch, tokens, sequences)
        return _own(kernel, arch) if path is None else _from_file(load(path), model, arch, tokens, sequences)
    if asked == OWN:
        return _own(kernel, arch)
    if asked == NOTHING:
        return Chosen(Overrides(arch, ()), "none")
    if isinstance(asked, Overrides):
        if asked.arch != arch:
            raise error(WRONG_ARCH, next((d.span for d in asked.decisions()), UNKNOWN), meant=asked.arch, arch=arch)
        return Chosen(asked, "given")
    return _from_file(asked if isinstance(asked, ScheduleFile) else load(Path(asked)), model, arch, tokens, sequences)


def stored(model: str, arch: str, tokens: int, sequences: int = 1) -> Path | None:
    """The file that is kept for a registered model: models/schedules/MODEL.ARCH.tokens-N.schedule, or without tokens, for any. A batch has
    its own, which end in .sequences-M, and no other: its attention is another one, with other words to say."""
    folder, batch = resources.models() / "schedules", f".sequences-{sequences}" if sequences > 1 else ""
    names = (f"{model}.{arch}.tokens-{tokens}{batch}{SUFFIX}", f"{model}.{arch}{batch}{SUFFIX}")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _own(kernel: Kernel, arch: str) -> Chosen:
    return Chosen(kernel.overrides_for(arch), "model")


def _from_file(file: ScheduleFile, model: str | None, arch: str, tokens: int, sequences: int) -> Chosen:
    head = file.head
    if head.arch != arch:
        raise error(WRONG_ARCH, file.places.get("arch", UNKNOWN), meant=head.arch, arch=arch)
    compared = ("model", head.model, model), ("tokens", head.tokens, tokens), ("sequences", head.sequences, sequences)
    for what, meant, got in compared:
        if None not in (meant, got) and meant != got:
            warn(MEANT_OTHERWISE, file.places.get(what, UNKNOWN), what=what, meant=meant, got=got)
    return Chosen(file.overrides, "file", Path(file.path).name or None, file.digest)
