"""Write the committed kernels, plans and manifests under generated/ anew: ``make generated``.

What the compiler gives for every case there, without the cubin, so that no nvcc is needed; and in the README the excerpt of
the first one and the table of architectures. tests/test_generated.py and tests/test_docs_code.py compare.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from megadsl.driver import compile_model
from megadsl.machine import DEFAULT_ARCH, MACHINES
from megadsl.types import KIB

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "generated"
README = ROOT / "README.md"
COMMAND = "make generated"
EXCERPT = "// down_proj: "  # the op that the README shows, in the consumer role


class Case(NamedTuple):
    """A kernel in generated/: of a model for so many new tokens, with the schedule that it has there."""

    model: str
    tokens: int = 1
    arch: str = DEFAULT_ARCH

    def __str__(self) -> str:
        """The name of its folder."""
        return f"{self.model}.{self.arch}" + (f".tokens-{self.tokens}" if self.tokens > 1 else "")


# The models that are measured, and each way of filling a ring; the README shows a part of the first.
CASES = (
    Case("smollm2-135m"),
    Case("llama-3.2-1b"),
    Case("llama-3.2-1b", tokens=16),
    Case("llama-3.1-8b"),
    Case("qwen3-0.6b"),
    Case("gemma-2b"),
    Case("smollm2-135m", arch="sm_80"),
    Case("llama-3.2-1b", arch="sm_89"),
    Case("llama-3.2-1b", arch="sm_100a"),
)


def files(case: Case) -> dict[str, str]:
    """File name to text, as the compiler gives it today."""
    compiled = compile_model(case.model, tokens=case.tokens, arch=case.arch)
    manifest = json.dumps(compiled.manifest, indent=2) + "\n"
    return {"kernel.cu": compiled.source, "plan.txt": compiled.plan_text, "manifest.json": manifest}


def excerpt(kernel: str) -> str:
    """The lines of one op in the consumer role, from its title to the brace that closes it."""
    lines = kernel[kernel.index("// role: consumer") :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(EXCERPT))
    indent = lines[first][: -len(lines[first].lstrip())]
    last = next(i for i in range(first, len(lines)) if lines[i] == f"{indent}}}")
    return textwrap.dedent("\n".join(lines[first : last + 1])) + "\n"


def architectures() -> str:
    """The README's table: a line for each entry of megadsl/machine.py."""
    head = "| arch | the table's card | SMs | shared memory of a block | a stage is copied by | kernels |\n|---|---|---|---|---|---|\n"
    cells = (
        (f"`{m.arch}`", m.name, m.sms, f"{m.smem_per_block // KIB} KB", "one lane, in bulk" if m.bulk else "the lanes of a warp", m.proof)
        for m in MACHINES.values()
    )
    return head + "".join(f"| {' | '.join(map(str, row))} |\n" for row in cells)


def readme_with(shown: str) -> str:
    """The README with ``shown`` and the table between their marks."""
    text = README.read_text()
    for mark, inside in (("excerpt", f"```cuda\n{shown}```\n"), ("architectures", f"\n{architectures()}\n")):
        begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
        text = re.sub(f"{begin}.*{end}", lambda _, block=f"{begin}\n{inside}{end}": block, text, flags=re.DOTALL)
    return text


def write(path: Path, text: str) -> None:
    changed = not path.exists() or path.read_text() != text
    path.write_text(text)
    print(f"{'changed' if changed else 'as it was':<10} {path.relative_to(ROOT)}")


def main() -> None:
    for case in CASES:
        out = GENERATED / str(case)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files(case).items():
            write(out / name, text)
    write(README, readme_with(excerpt((GENERATED / str(CASES[0]) / "kernel.cu").read_text())))


if __name__ == "__main__":
    main()
