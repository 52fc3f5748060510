"""Which kernels a change has changed: every model is compiled by two commits, and what comes out is compared.

    python -m tools.process_replay                 # the working tree against HEAD: plans and kernel.cu of all models
    python -m tools.process_replay --base main~3   # against another commit
    python -m tools.process_replay --sass          # their machine code as well, of a few models: minutes, needs nvcc

A refactor changes none. Plans and sources are the compiler's; headers are not in them, so that a change of one shows as SASS alone:
instructions without their line numbers, and the resources that nvcc reports. Ends with 1 where anything differs, after the first lines of
what does.
Each commit compiles its own models with its own schedules, in a process of its own; this file is the only one that both share.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_90a"
TOKENS = (1, 5, 16)
SASS_CASES = ("smollm2-135m/1", "qwen3-0.6b/1", "llama-3.2-1b/1", "llama-3.2-1b/16")  # one of each kind of gather and product
KINDS = ("plan", "source", "sass")
SHOWN = 12  # lines of a difference
Kernels = dict[str, dict[str, str]]


def kernels(sass: bool) -> Kernels:
    """"model/tokens" to the text of each kind, by the megadsl that this interpreter finds; what cannot be compiled, with the reason."""
    from megadsl.diagnostics import MegadslError
    from megadsl.driver import compile_model
    from megadsl.dsl.registry import models

    found: Kernels = {}
    for case in [f"{model}/{tokens}" for model in sorted(models()) for tokens in TOKENS]:
        model, tokens = case.split("/")
        try:
            compiled = compile_model(model, arch=ARCH, tokens=int(tokens), check=False)
        except MegadslError as refusal:
            found[case] = {"plan": f"refused: {refusal}"}
            continue
        found[case] = {"plan": compiled.plan_text, "source": compiled.source}
        if sass and case in SASS_CASES:
            found[case]["sass"] = machine_code(compiled.source)
    return found


def machine_code(source: str) -> str:
    """The instructions of a kernel without the lines that they come from, and its resources."""
    from megadsl.build.nvcc import build_cubin
    from megadsl.build.toolchain import find_tool
    from megadsl.resources import include

    built = build_cubin(source, ARCH, [include()], {})
    command = [str(find_tool("nvdisasm").path), "--print-code", str(built.path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [line.rstrip() for line in listing.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/|\.L_x_", line)]
    return "\n".join([f"{built.registers} registers, {built.spill_bytes} bytes spilled, {built.stack_bytes} of stack", *code])


def differences(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str, list[str]]]:
    """(case, kind, first lines of the difference) of what is not the same, cases and kinds that only one side has included."""
    found = []
    for case in sorted({*before, *after}):
        old, new = before.get(case, {}), after.get(case, {})
        for kind in KINDS:
            if old.get(kind) != new.get(kind):
                texts = old.get(kind, "").splitlines(), new.get(kind, "").splitlines()
                lines = difflib.unified_diff(*texts, "before", "after", lineterm="", n=0)
                found.append((case, kind, list(islice(lines, SHOWN))))
    return found


def of_tree(tree: Path, sass: bool) -> Kernels:
    """The kernels of a checkout, by an interpreter that imports from it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--dump", *(["--sass"] if sass else [])]
    done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{tree} does not compile its models:\n{done.stderr[-2000:]}")
    kernels_of: Kernels = json.loads(done.stdout.replace(f"{tree}/", ""))  # messages name files
    return kernels_of


def of_commit(repository: Path, commit: str, sass: bool) -> Kernels:
    """The kernels of a commit, checked out into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=repository, capture_output=True, check=False)
        if archive.returncode != 0:
            raise SystemExit(f"no commit {commit}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return of_tree(Path(folder), sass)


def report(found: Sequence[tuple[str, str, list[str]]], cases: int) -> str:
    """What a person reads."""
    shown = [line for case, kind, lines in found for line in (f"{case}: another {kind}", *(f"    {line}" for line in lines))]
    changed = len({case for case, _, _ in found})
    return "\n".join([*shown, f"{cases - changed} of {cases} kernels are as they were"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the commit that the working tree is compared with")
    parser.add_argument("--sass", action="store_true", help="compare machine code too")
    parser.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump:
        print(json.dumps(kernels(args.sass)))
        return
    before, after = of_commit(ROOT, args.base, args.sass), of_tree(ROOT, args.sass)
    found = differences(before, after)
    print(report(found, len({*before, *after})))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
