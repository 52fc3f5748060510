"""Write the pages of docs/diagnostics anew: ``make diagnostics``. megadsl explain CODE prints one of them.

A page has the message and the mend as they are declared, what is meant (tools/meanings.toml), and an example: of the tests' broken
specs a bad one and the mended one, or else the message that a test shows (tools/shown.json, which --record takes from the tests
themselves). tests/test_diagnostics.py compares.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from megadsl.diagnostics import CATALOGUE, Diagnostic
from tests.broken_specs import CASES, Case, found, mended
from tests.shown import FILE as SHOWN
from tests.shown import shown

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "diagnostics"
MEANINGS = ROOT / "tools" / "meanings.toml"
INDEX = "README.md"
COMMAND = "make diagnostics"
TITLES = {
    "specs": "Specs",
    "expressions": "Expressions",
    "fusion": "What kernels can run of a spec",
    "schedules": "Schedules",
    "models": "Models and the command line",
    "building": "Building",
    "emulator": "The emulator and the race detector",
    "weights": "Weights and text",
    "running": "Running",
    "checker": "The plan checker",
}
HELPERS = {
    "start": "`start(tokens)` embeds the new token ids",
    "head": "`head(x)` returns the argmax of logits",
    "square": "`square(name)` is a weight of HIDDEN rows and columns",
    "out": "`out(layer, a)` is an output projection",
    "inner": "`inner(layer, x)` is a linear",
    "custom_op": "`HEADERS` is a folder of headers, and `scale` a torch function",
    "three": "`three(layer, x)` is one linear that gives queries, keys and values",
}


def meanings() -> dict[str, dict[str, str]]:
    """Section to code to text."""
    return tomllib.loads(MEANINGS.read_text())


def pages(codes: Iterable[str]) -> dict[str, str]:
    """File name to text, for all ``codes``; their modules have been imported."""
    texts = {code: text for section in meanings().values() for code, text in section.items()}
    names = _examples()
    written = {f"{code}.md": _page(code, texts[code], names.get(code)) for code in sorted(codes)}
    return {INDEX: _index(), **written}


def _examples() -> dict[str, str]:
    """Code to the case that shows it with the fewest other findings."""
    chosen: dict[str, str] = {}
    for name, case in CASES.items():
        for code in {e.code for e in case.expected}:
            if code not in chosen or len(case.expected) < len(CASES[chosen[code]].expected):
                chosen[code] = name
    return chosen


def _page(code: str, meaning: str, example: str | None) -> str:
    entry = CATALOGUE[code]
    parts = [f"# {code}", f"Message: `{_plain(entry.message)}`", f"Mend: `{_plain(entry.mend)}`", meaning]
    if example is not None:
        parts += _spec_example(code, CASES[example], found(example))
    elif code in shown():
        recorded = shown()[code]
        parts += ["## As it is shown", f"```text\n{recorded.text}\n```", f"By {recorded.test}."]
    else:
        parts += ["It is shown on a GPU only, by a test of tests/gpu."]
    return "\n\n".join(parts) + "\n"


def _plain(template: str) -> str:
    """A format string as people read it."""
    return re.sub(r"(?<!\{)\{(\w+)(![rs])?(:[^{}]*)?\}(?!\})", r"<\1>", template).replace("{{", "{").replace("}}", "}").replace("`", "'")


def _spec_example(code: str, case: Case, findings: tuple[Diagnostic, ...]) -> list[str]:
    first = next(d for d in findings if d.code == code)
    used = [text for name, text in HELPERS.items() if re.search(rf"\b{name}\(", case.plain)]
    notes = [f"{', '.join(used)}."] if used else []
    if "ScheduleBlock" in case.plain:
        notes.append(f"The schedule: `with mk.schedule(step) as s: {case.name}(s)`, where `step` is a kernel like Llama's.")
    bad, good = case.plain.strip(), mended(case, findings).strip()
    shown_there = f"```text\n{_placed(first, case)}\n```"
    return ["## Example", f"```python\n{bad}\n```", shown_there, "Mended:", f"```python\n{good}\n```", *notes]


def _placed(diagnostic: Diagnostic, case: Case) -> str:
    """The diagnostic as it is printed, with the place in the example instead of that in the file it is from."""
    line, last = diagnostic.span.line, case.first + case.source.count("\n")
    inside = diagnostic.span.file == str(case.path) and case.first < line <= last
    old = f"{diagnostic.span.file}:{line}"
    return str(diagnostic).replace(old, f"spec.py:{case.plain_line(line)}" if inside else "spec.py", 1)


def _index() -> str:
    lines = [
        "# Diagnostics",
        "",
        "Every message that megadsl can show. `megadsl explain CODE` prints a code's page. The pages are made by `make diagnostics`.",
    ]
    for section, texts in meanings().items():
        lines += ["", f"## {TITLES[section]}", ""]
        lines += [f"- [{code}]({code}.md): {_plain(CATALOGUE[code].message)}" for code in sorted(texts)]
    return "\n".join(lines) + "\n"


def record(tests: dict[str, str]) -> None:
    """Run the tests by code (``file.py::function``), and keep what the first one that shows a code shows; a GPU's stay as they are."""
    here = sorted({f"tests/{test}" for test in tests.values() if not test.startswith("gpu/")})
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "shown.jsonl"
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--record-shown={lines}", *here], cwd=ROOT, check=True)
        kept: dict[str, dict[str, str]] = {}
        for line in map(json.loads, lines.read_text().splitlines()):
            code = line.pop("code")
            if code in tests and line["test"].partition("[")[0] == f"tests/{tests[code]}":
                kept.setdefault(code, line)
    SHOWN.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n")
    shown.cache_clear()


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))  # broken specs import their helpers from there
    from tests.test_diagnostics import ELSEWHERE, catalogue

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="first run the tests that show what no spec provokes")
    codes = catalogue()
    if parser.parse_args().record:
        record(ELSEWHERE)
    PAGES.mkdir(parents=True, exist_ok=True)
    texts = pages(codes)
    for path in PAGES.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (PAGES / name).write_text(text)
    print(f"{len(texts)} pages in {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
