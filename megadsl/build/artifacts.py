"""The folder that ``megadsl compile --out`` leaves: all of its files, or none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megadsl.build.nvcc import STAGES, build_cubin, keep_text, kept_stages
from megadsl.build.report import resource_report
from megadsl.diagnostics import declare, error
from megadsl.machine import machine
from megadsl.resources import include

OUT_UNWRITABLE = declare(
    "MK310",
    "cannot write to {out}: {reason}",
    "give --out a folder that can be made or written",
)


def write_artifacts(source: str, plan_text: str, manifest: Mapping[str, object], arch: str, out: Path) -> dict[str, object]:
    """Compile ``source`` and write kernel.cu, kernel.cubin, plan.txt, report.txt and manifest.json into ``out``.

    ``manifest["smem_bytes"]`` is the dynamic shared memory of the launch. Returns the manifest with ``registers``,
    ``spill_bytes`` and ``sass_bytes`` ({"total": n, role: n, ...}) added, as written. Nothing is written when anything
    fails: MK301 and MK302 come before the first file, MK310 when ``out`` cannot be written.
    """
    smem_bytes = manifest["smem_bytes"]
    if not isinstance(smem_bytes, int):
        raise TypeError(f"manifest smem_bytes is {smem_bytes!r}, not a number of bytes")
    keep_text("plan", plan_text, kept_stages())
    cubin = build_cubin(source, arch, [include()], {})
    report = resource_report(cubin, source, machine(arch), smem_bytes)
    complete = {
        **manifest,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "sass_bytes": {"total": report.sass_bytes, **report.sass_by_role},
    }
    files = {
        STAGES["cu"]: source.encode(),
        STAGES["cubin"]: cubin.path.read_bytes(),
        STAGES["plan"]: plan_text.encode(),
        "report.txt": report.render().encode(),
        "manifest.json": (json.dumps(complete, indent=2) + "\n").encode(),
    }
    try:
        write_folder(out, files)
    except OSError as reason:
        raise error(OUT_UNWRITABLE, out=out, reason=reason.strerror or reason) from reason
    return complete


def write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (name to content) into ``out`` with no half-written state: a new folder appears in one rename.

    A folder that is there keeps its other files; its files of the same names are replaced, each in one rename, after all
    have been written next to it. Raises OSError.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for name, content in files.items():
            (staging / name).write_bytes(content)
        if out.exists():
            for name in files:
                os.replace(staging / name, out / name)
        else:
            staging.chmod(0o777 & ~_umask())
            os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
