"""Write the table of knobs into docs/schedules.md anew: ``python -m tools.knobs``. tests/test_knobs.py compares."""

from __future__ import annotations

import re
from pathlib import Path

from megadsl.dsl.knobs import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schedules.md"


def page() -> str:
    """The page with today's table between its marks."""
    columns, lines = table()
    rows = [columns, ["-" * len(name) for name in columns], *([line[0], f"`{line[1]}`", *line[2:]] for line in lines)]
    shown = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return re.sub(
        r"<!-- knobs -->.*<!-- /knobs -->", lambda _: f"<!-- knobs -->\n{shown}\n<!-- /knobs -->", PAGE.read_text(), flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(page())
