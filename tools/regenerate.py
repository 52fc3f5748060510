"""Write the committed kernels, plans and manifests under generated/ anew: ``make generated``.

What the compiler gives for every model there, without the cubin, so that no nvcc is needed. tests/test_generated.py compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from megadsl.driver import compile_model
from megadsl.machine import DEFAULT_ARCH

GENERATED = Path(__file__).resolve().parent.parent / "generated"
MODELS = ("smollm2-135m",)
COMMAND = "make generated"


def folder(model: str) -> str:
    """The folder of a model's files inside generated/."""
    return f"{model}.{DEFAULT_ARCH}"


def files(model: str) -> dict[str, str]:
    """File name to text, as the compiler gives it today."""
    compiled = compile_model(model, arch=DEFAULT_ARCH)
    manifest = json.dumps(compiled.manifest, indent=2) + "\n"
    return {"kernel.cu": compiled.source, "plan.txt": compiled.plan_text, "manifest.json": manifest}


def main() -> None:
    for model in MODELS:
        out = GENERATED / folder(model)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files(model).items():
            path = out / name
            changed = not path.exists() or path.read_text() != text
            path.write_text(text)
            print(f"{'changed' if changed else 'as it was':<10} {path.relative_to(GENERATED.parent)}")


if __name__ == "__main__":
    main()
