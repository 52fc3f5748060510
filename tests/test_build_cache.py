"""The cache: one build per key, nothing half-made, no harm from many or from dying builders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megadsl.build.cache import cached, headers_digest
from megadsl.diagnostics import MegadslWarning
from megadsl.driver import compile_model
from megadsl.emit import emit
from megadsl.entries import SmallEntries, cache_root, digest

# A process that asks for one entry; each build adds a line to the log and takes a while, in two writes.
WORKER = """
import sys, time
from pathlib import Path
from megadsl.build.cache import cached

log, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build(path):
    with log.open("a") as lines:
        print("built", file=lines, flush=True)
    with path.open("w") as out:
        out.write("first half, ")
        out.flush()
        time.sleep(seconds)
        out.write("second half")

print(cached(["the", "key"], ".txt", build).read_text())
"""


def start(log: Path, seconds: float) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", WORKER, str(log), str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def write(text: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        path.write_text(text)

    return build


def test_an_entry_is_built_once_and_found_again(fresh_cache: Path) -> None:
    first = cached(["a", b"b"], ".txt", write("made"))
    again = cached(["a", b"b"], ".txt", write("never"))
    assert first == again
    assert first.read_text() == "made"
    assert first.parent == cache_root()
    assert cache_root().parent == fresh_cache


@pytest.mark.usefixtures("fresh_cache")
def test_every_part_of_the_key_and_its_borders_count() -> None:
    keys = [["ab", "c"], ["a", "bc"], ["abc"], ["ab", "c", ""], ["ab", "d"]]
    assert len({cached(key, ".txt", write("x")) for key in keys}) == len(keys)
    assert cached(["ab", "c"], ".bin", write("x")) != cached(["ab", "c"], ".txt", write("x"))
    assert digest(["text"]) == digest([b"text"])


@pytest.mark.usefixtures("fresh_cache")
def test_a_folder_can_be_an_entry() -> None:
    def build(path: Path) -> None:
        path.mkdir()
        (path / "one").write_text("1")

    assert (cached(["folder"], ".d", build) / "one").read_text() == "1"


@pytest.mark.usefixtures("fresh_cache")
def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again() -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("compiler fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        cached(["k"], ".txt", fail)
    assert [path.name for path in cache_root().iterdir()] == ["locks"]
    assert cached(["k"], ".txt", write("whole")).read_text() == "whole"


def test_sixteen_cold_processes_build_once(fresh_cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [start(log, 0.3) for _ in range(16)]
    answers = [worker.communicate(timeout=60)[0].strip() for worker in workers]
    assert answers == ["first half, second half"] * 16
    assert log.read_text().split() == ["built"]


def test_a_killed_builder_does_no_harm(fresh_cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = start(log, 60)
    deadline = time.monotonic() + 30
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    heir = start(log, 0)
    victim.send_signal(signal.SIGKILL)
    victim.wait(timeout=10)
    assert heir.communicate(timeout=60)[0].strip() == "first half, second half"
    assert log.read_text().split() == ["built", "built"]
    left = sorted(path.name for path in next(fresh_cache.iterdir()).iterdir())
    assert len(left) == 2  # the entry and the locks: the victim's temporary is swept
    assert left[1] == "locks"


def test_an_unwritable_cache_warns_once_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(MegadslWarning, match="MK303") as caught:
        entry = cached(["k"], ".txt", write("made"))
        assert cached(["k"], ".txt", write("never")) == entry
    assert entry.read_text() == "made"
    assert len(caught) == 1
    assert "mend: make the folder writable" in str(caught[0].message)


def test_an_entry_of_a_cache_that_only_can_be_read(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found without a lock, and without a warning."""
    entry = cached(["k"], ".txt", write("made"))
    monkeypatch.setattr("megadsl.build.cache._writable", lambda root: pytest.fail(f"{root} is asked whether it can be written"))
    assert cached(["k"], ".txt", write("never")) == entry and entry.read_text() == "made"


def test_headers_digest_sees_names_and_content_but_not_the_place(tmp_path: Path) -> None:
    def tree(name: str, files: dict[str, str]) -> str:
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return headers_digest([tmp_path / name])

    base = tree("a", {"x/one.h": "1", "two.cuh": "2"})
    assert tree("b", {"x/one.h": "1", "two.cuh": "2", "notes.md": "no header"}) == base
    assert tree("c", {"x/one.h": "1", "two.cuh": "3"}) != base
    assert tree("d", {"x/uno.h": "1", "two.cuh": "2"}) != base


def test_small_entries_are_kept_where_the_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(tmp_path / "cache"))
    entries = SmallEntries(".small")
    assert entries.load(["a", b"b"]) is None
    entries.store(["a", b"b"], b"made")
    assert entries.load(["a", b"b"]) == b"made" and entries.load(["ab"]) is None and SmallEntries(".other").load(["a", b"b"]) is None
    assert [path.name.startswith(".") for path in cache_root().iterdir()] == [False]
    (entry,) = cache_root().iterdir()
    whole = entry.read_bytes()
    entries.store(["c"], b"another")
    (other,) = set(cache_root().iterdir()) - {entry}
    for damaged in (whole[:-1], whole.replace(b"made", b"mad3"), b"made", b"", other.read_bytes()):
        entry.write_bytes(damaged)
        assert entries.load(["a", b"b"]) is None
    entry.write_bytes(whole)
    assert entries.load(["a", b"b"]) == b"made"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGADSL_CACHE_DIR", str(tmp_path / "file"))  # no folder, and none can be made
    entries.store(["a", b"b"], b"made")
    assert entries.load(["a", b"b"]) is None


def test_templates_are_translated_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        def __init__(self) -> None:
            self.entries: dict[object, bytes] = {}
            self.found = 0

        def load(self, key_parts: Sequence[str | bytes]) -> bytes | None:
            self.found += tuple(key_parts) in self.entries
            return self.entries.get(tuple(key_parts))

        def store(self, key_parts: Sequence[str | bytes], content: bytes) -> None:
            self.entries[tuple(key_parts)] = content

    plan, kept = compile_model("llama-tiny", blocks=2).plan, Kept()
    first = emit(plan)
    for expected in (0, 1):
        monkeypatch.setattr("megadsl.emit.kernel._Translated.codes", {})
        assert emit(plan, kept) == first and len(kept.entries) > 4
        assert kept.found == expected * len(kept.entries)

