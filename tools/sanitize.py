"""Small models under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck, synccheck, on a GPU.

    python -m tools.sanitize --out DIR

Every case (model, tokens, kind of sync) takes two steps, twice; each tool must see the same logits as a run without it.
tools/barriers.cu runs under racecheck and synccheck beside it: a race that racecheck also reports of a kernel there that is right is
justified by that kernel (tools/sanitizer_reports.py); any other finding is UNJUSTIFIED, and makes this program exit with 1.

DIR gets the tools' whole reports, the kernels' cubins, summary.json, and record.json: the same without lines and logits, small enough
to be committed. --again reads the reports that lie in DIR once more, without a GPU. A cubin that DIR lacks is compiled again: by the
line tables it must be the one that ran.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

import megadsl as mk
from megadsl.build.nvcc import build_cubin
from megadsl.build.toolchain import find_tool
from megadsl.driver import Compiled, compile_model
from megadsl.machine import DEFAULT_ARCH
from megadsl.resources import include
from megadsl.runtime.pack import pack_weights
from megadsl.runtime.program import Program
from megadsl.runtime.weights import random_weights
from tools.line_table import Instruction, line_table, placed
from tools.sanitizer_reports import headers, judge, record, summarise
from tools.syncs import SYNCS, synced

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MODELS = ("llama-tiny", "llama-tiny-odd")
TOKENS = (1, 4)
CASES = tuple(f"{model}/{tokens}/{sync}" for model in MODELS for tokens in TOKENS for sync in SYNCS)

BUILD = {"MK_SANITIZE": "1"}  # the teams of a block meet in a form that the tools understand: kernels `teams` and `turns`
BLOCKS, MAX_KV = 8, 64
KV = (0, 17)  # cached rows of the two steps
PATIENCE_S = 900.0  # a tool makes a kernel hundreds of times slower

BARRIERS = ("arrive", "copy", "refill", "elect", "hint", "teams", "turns", "race")  # the kernels of tools/barriers.cu, by number
OPTIONS = {
    "memcheck": ("--report-api-errors", "no"),  # cuda-python looks for its functions by asking for versions that may not exist
}


def compiled(case: str) -> Compiled:
    """A case's kernel: one kind of sync on every edge."""
    model, tokens, sync = case.split("/")
    kernel, config = synced(model, sync)
    return compile_model(kernel, config=config, tokens=int(tokens), blocks=BLOCKS, max_kv=MAX_KV)


def play(case: str) -> str:
    """Run a case; a hash of what its steps left."""
    made = compiled(case)
    arena = pack_weights(made.manifest, random_weights(made.manifest, 3), "cuda", progress=False, cache=False)
    program = Program(made.manifest, made.source, "cuda", arena, defines=BUILD, timeout_s=PATIENCE_S, patience_s=2 * PATIENCE_S)
    tokens, vocab, digest = made.manifest["tokens"], made.manifest["vocab"], hashlib.sha256()
    for repeat in range(2):
        program.reset()
        for kv in KV:
            ids = [(13 * kv + 7 * i + 1) % vocab for i in range(tokens)]
            program.control.set_inputs(kv, ids, range(kv, kv + tokens), [(2 << i) - 1 for i in range(tokens)])
            program.launch()
            program.check()
            found = program.logits[:tokens].cpu()
            assert bool(found.isfinite().all()), f"{case}: logits are not finite"
            digest.update(found.numpy().tobytes() if repeat == 0 else b"")
    return digest.hexdigest()[:16]


def child(cases: Sequence[str]) -> None:
    """In a process of its own, perhaps under a tool: one line a case."""
    for case in cases:
        began = time.perf_counter()
        print(f"case {case} {play(case)} {time.perf_counter() - began:.1f}", flush=True)


def under(tool: str | None, command: Sequence[str], report: Path, limit_s: float, options: Sequence[str]) -> dict[str, Any]:
    """Run a command under a tool (None: without), with its report in a file, which is not read yet; how it went."""
    wrapped = list(command)
    if tool is not None:
        options = [*OPTIONS.get(tool, ()), *options, "--log-file", str(report)]
        wrapped = ["compute-sanitizer", "--tool", tool, "--print-limit", "0", *options, *command]
    # without torch's cache every tensor is an allocation of its own, and an access behind its end is found
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        wrapped, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
        output, _ = process.communicate()
    found = {"tool": tool or "none", "seconds": round(time.perf_counter() - began, 1), "exit": code, "timed_out": code is None}
    return found | {"output": output.splitlines()[-40:]}


def report_of(out: Path, tool: str, cases: Sequence[str]) -> Path:
    """Where the report of a run lies. racecheck gets a process a case: its report does not say which kernel it means."""
    return out / ("-".join(["models", tool, *(cases[0].split("/") if tool == "racecheck" else [])]) + ".txt")


def build(cases: Sequence[str], out: Path, anew: bool) -> None:
    """All cubins into ``out``, beside the reports, side by side; a kernel takes one schedule at a time, so that compiling is not."""
    places = {case: report_of(out, "racecheck", [case]).with_suffix(".cubin") for case in cases}
    sources = {case: compiled(case).source for case, place in places.items() if anew or not place.exists()}

    def one(case: str) -> None:
        shutil.copyfile(build_cubin(sources[case], DEFAULT_ARCH, [include()], BUILD).path, places[case])

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, sources))


def table_of(cubin: Path) -> dict[int, Instruction]:
    """The line table of a kernel; empty without nvdisasm, or if that refuses the cubin."""
    try:
        command = [str(find_tool("nvdisasm").path), "-gi", str(cubin)]
        return placed(line_table(subprocess.run(command, capture_output=True, text=True, check=True).stdout, "megakernel"))
    except (mk.MegadslError, subprocess.CalledProcessError) as refusal:
        print(refusal, flush=True)
        return {}


def read(row: dict[str, Any], out: Path) -> dict[str, Any]:
    """A row of models with what its report says."""
    tool, report = row["tool"], report_of(out, row["tool"], row["cases"])
    table = table_of(report.with_suffix(".cubin")) if tool == "racecheck" else {}
    return row | summarise(tool, report.read_text(errors="replace") if report.exists() else "", headers(), table)


def models(
    tools: Sequence[str], cases: Sequence[str], out: Path, limit_s: float, jobs: int, options: Sequence[str]
) -> list[dict[str, Any]]:
    """All cases without a tool, then under each."""

    def run(tool: str | None, chosen: Sequence[str]) -> dict[str, Any]:
        own = [] if tool in (None, "initcheck") else ["--kernel-name", "kns=megakernel"]  # initcheck must see torch's writes
        report = report_of(out, tool or "none", chosen)
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tools.sanitize", "--child", "--cases", *chosen]
        found = under(tool, command, report, limit_s, [*own, *options]) | {"cases": list(chosen)}
        found |= read(found, out) if tool else {}
        digests = dict(re.findall(r"case (\S+) (\S+) ", "\n".join(found["output"])))
        print(
            f"{found['tool']:<10} {found['seconds']:>6} s  exit {found['exit']}  cases {len(digests)}  findings {found.get('findings')}",
            flush=True,
        )
        return found | {"digests": digests}

    plain = run(None, cases)
    each = [(tool, chosen) for tool in tools for chosen in ([[case] for case in cases] if tool == "racecheck" else [cases])]
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda job: run(*job), each))
    for row in rows:
        expected = {case: plain["digests"].get(case, "none") for case in row["cases"]}
        row["as_without"] = {case: row["digests"].get(case) == digest for case, digest in expected.items()}
    return [plain, *rows]


def barriers(tools: Sequence[str], out: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """tools/barriers.cu under the tools that know about shared memory."""
    binary, report, rows = out / "barriers", out / "barrier.txt", []
    nvcc = shutil.which("nvcc") or str(find_tool("nvcc").path)  # an executable needs a toolkit to link with, not a wheel
    arch = f"-gencode=arch=compute_{DEFAULT_ARCH.removeprefix('sm_')},code={DEFAULT_ARCH}"
    source = str(Path(__file__).parent / "barriers.cu")
    command = [nvcc, arch, "-std=c++17", "-O3", "-lineinfo", f"-I{include()}", source, "-o", str(binary)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        return [{"kernel": "none", "error": built.stdout + built.stderr}]
    with (out / "barriers.txt").open("w") as reports:
        for (number, name), tool in product(enumerate(BARRIERS), tools):
            report.unlink(missing_ok=True)
            found = under(tool, [str(binary), str(number)], report, 120, options)
            said = report.read_text(errors="replace") if report.exists() else ""
            rows.append({"kernel": name} | found | summarise(tool, said, headers(), {}))
            print(f"barriers {name:<8} {tool:<10} exit {found['exit']}  findings {rows[-1]['findings']}", flush=True)
            reports.write(f"==== {name}, {tool}\n{said}\n")
    report.unlink(missing_ok=True)
    binary.unlink()
    return rows


def again(out: Path) -> dict[str, Any]:
    """The summary in a folder, its reports read once more."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    said = dict(re.findall(r"^==== (\w+, \w+)\n(.*?)(?=^==== |\Z)", (out / "barriers.txt").read_text(), re.MULTILINE | re.DOTALL))
    found["barriers"] = [
        row if "error" in row else row | summarise(row["tool"], said[f"{row['kernel']}, {row['tool']}"], headers(), {})
        for row in found["barriers"]
    ]
    build([case for row in found["models"] if row["tool"] == "racecheck" for case in row["cases"]], out, anew=False)
    found["models"] = [row if row["tool"] == "none" else read(row, out) for row in found["models"]]
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything that the arguments ask for."""
    options = args.options.split()
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")
    build(args.cases, args.out, anew=True)
    shared = [tool for tool in args.tools if tool in ("racecheck", "synccheck")]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "version": version}
    found["barriers"] = barriers(shared, args.out, options)
    found["models"] = models(args.tools, args.cases, args.out, args.limit, args.jobs, options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one tool may take")
    parser.add_argument("--jobs", type=int, default=4, help="tools that run at the same time")
    parser.add_argument("--options", default="", help="more options for compute-sanitizer, separated by spaces")
    parser.add_argument("--again", action="store_true", help="read the reports in DIR again instead of running anything")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.cases)
        return
    if args.out is None:
        parser.error("--out is missing")
    args.out.mkdir(parents=True, exist_ok=True)
    found = again(args.out) if args.again else measure(args)
    judge(found)
    (args.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "record.json").write_text(json.dumps(record(found), indent=1) + "\n")
    counts = ", ".join(f"{kind} {found[kind]}" for kind in ("justified", "unjustified", "unread"))
    print("\n".join([counts, *found["complaints"]]))
    sys.exit(1 if found["complaints"] else 0)


if __name__ == "__main__":
    main()
