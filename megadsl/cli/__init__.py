"""The ``megadsl`` command. Each command imports what it needs when it runs, so that ``--help`` stays quick."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

import typer

from megadsl.cli import bench as _bench
from megadsl.cli import check as _check
from megadsl.cli import compile as _compile
from megadsl.cli import doctor as _doctor
from megadsl.cli import explain as _explain
from megadsl.cli import run as _run
from megadsl.cli import trace as _trace
from megadsl.cli import tune as _tune
from megadsl.cli.options import Command
from megadsl.diagnostics import MegadslError, MegadslWarning
from megadsl.version import __version__

app = typer.Typer(
    name="megadsl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compile a model step to one persistent CUDA kernel, run it, and see what it will do.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megadsl {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version.")) -> None:
    pass


app.command("compile", cls=Command, epilog=_compile.EXAMPLE)(_compile.command)
app.command("check", cls=Command, epilog=_check.EXAMPLE)(_check.command)
app.command("run", cls=Command, epilog=_run.EXAMPLE)(_run.command)
app.command("bench", cls=Command, epilog=_bench.EXAMPLE)(_bench.command)
app.command("explain", cls=Command, epilog=_explain.EXAMPLE)(_explain.command)
app.command("tune", cls=Command, epilog=_tune.EXAMPLE)(_tune.command)
app.command("trace", cls=Command, epilog=_trace.EXAMPLE)(_trace.command)
app.command("doctor", cls=Command, epilog=_doctor.EXAMPLE)(_doctor.command)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """Print megadsl's own warnings as diagnostics, without the Python line that raised them."""
    if issubclass(category, MegadslWarning):
        text = f"{message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def main() -> None:
    """Run the command line. A diagnostic is printed plainly on stderr and exits with 1; a wrong usage exits with 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except MegadslError as problem:
        sys.stdout.flush()
        print(problem, file=sys.stderr)
        sys.exit(1)
