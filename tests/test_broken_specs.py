"""Hand-written mistakes in tests/specs/broken: every finding's code, line, column, words and mend; what is mended compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broken_specs import CASES, compiled, found, mended


@pytest.mark.parametrize("name", CASES)
def test_a_broken_spec_is_refused_at_its_place(name: str) -> None:
    case, shown = CASES[name], found(name)
    text = "\n".join(map(str, shown))
    for wanted in case.expected:
        here = [d for d in shown if (d.code, d.span.line, d.span.column) == (wanted.code, wanted.line, wanted.column)]
        assert any(wanted.message in d.message and wanted.mend in d.mend for d in here), f"{wanted}\n{text}"
    allowed = {(e.code, e.line) for e in case.expected}
    helpers = Path(__file__).parent / "dsl_tools.py"
    for d in shown:
        assert (d.code, d.span.line) in allowed or d.span.file == str(helpers), text
        assert (d.span.file in (str(case.path), str(helpers)) and f"{d.span.line}:{d.span.column}: error[" in str(d)) or not d.span.column
        assert "NoneType" not in str(d) and "{" not in d.mend.replace("{layer}", "")


@pytest.mark.parametrize("name", CASES)
def test_the_mend_compiles(name: str, tmp_path: Path) -> None:
    case, shown = CASES[name], found(name)
    path = tmp_path / "mended.py"
    path.write_text(case.path.read_text().replace(case.source, mended(case, shown)))
    compiled(path, case.name, blocks=4)
