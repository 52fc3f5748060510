"""The wheel carries templates, models and pages of diagnostics; a checkout finds them beside the package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from megadsl import resources


def test_a_checkout_uses_its_own_folders(repository: Path) -> None:
    assert resources.templates() == repository / "templates"
    assert resources.include() == repository / "templates" / "include"
    assert resources.models() == repository / "models"
    assert resources.diagnostics() == repository / "docs" / "diagnostics"


def test_a_wheel_carries_them(repository: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=repository, capture_output=True, text=True, check=True)
    (wheel,) = tmp_path.glob("megadsl-*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)

    # A process of its own, away from the checkout, sees only what the wheel brought.
    code = "from megadsl import resources; print(resources.templates(), resources.models(), resources.diagnostics(), sep='\\n')"
    environment = {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    templates, models, pages = (Path(line) for line in done.stdout.splitlines())
    assert templates == installed / "megadsl" / "_templates"
    folders = (("templates", templates), ("models", models), ("docs/diagnostics", pages), ("megadsl", installed / "megadsl"))
    for ours, theirs in ((repository / name, theirs) for name, theirs in folders):
        wanted = {path.relative_to(ours) for path in ours.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        carried = {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
        assert {path for path in carried if path.parts[0] not in ("_templates", "_models", "_diagnostics")} == wanted
    assert "License-Expression: Apache-2.0" in (next(installed.glob("*.dist-info")) / "METADATA").read_text()

    explain = [sys.executable, "-m", "megadsl", "explain", "MK113"]
    shown = subprocess.run(explain, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown == (repository / "docs" / "diagnostics" / "MK113.md").read_text()
