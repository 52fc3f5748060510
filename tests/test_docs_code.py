"""The code in README.md and docs/ is true: each block runs here, in the emulator, or says why it cannot.

A page is one program, in a folder of its own. Blocks of python share their names; one with a file's name as its title is that file too, as
is any other block with such a title. Commands of sh are run one after the other, but for those whose remark begins with one of
``REASONS``; all are held to the options that there are. Text called "output" is in what the page has printed so far, "part of FILE" in that
file; three dots stand for anything. Other text has a title that says what it is.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import typer.main

from megadsl import cli
from megadsl.driver import compile_model
from megadsl.dsl import schedule_file
from tests.checkpoint_tools import saved
from tests.kernels import compiled
from tests.pages import PAGES, PROGRAMS, ROOT, Block, Command, blocks, commands, inline, name_of
from tests.test_checkpoints import MAX_KV, TOKENS, write_tokenizer
from tests.test_torch import device
from tests.wires import watched
from tools.regenerate import CASES, COMMAND, GENERATED, excerpt

__all__ = ["device"]  # a fixture

SHOWN = ("diagram", "layout", "output for ")  # begins of titles of text that is neither run nor compared
PART = "part of "  # and the name of a file
SECONDS = 240  # that a page may take
FILE = re.compile(r"[\w-]+\.(py|json|schedule|cuh)")

TINY = {"hidden": 128, "inter": 192, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 512}
HERE = f"tokens={TOKENS}, max_kv={MAX_KV}, blocks=2"
# What stands for large models, long texts and the GPU.
SWAPS: dict[str, Mapping[str, str]] = {
    "README.md": {
        'compile_model("smollm2-135m")': f'compile_model("checkpoint", {HERE})',
        "Generator(compiled, None,": 'Generator(compiled, Path("checkpoint"),',
        '"The capital of France is", 32': '"3 77", 3',
        "path/to/Qwen2.5-0.5B": "checkpoint",
        "max_kv=4096": HERE,
        '"cuda"': '"cpu"',
        '"Once upon", 32': '"3 77", 3',
        '"Once upon" --max-kv 4096': f'"3 77" --max-kv {MAX_KV} --tokens {TOKENS} --max-new-tokens 3 --device cpu',
        "prompt_ids, 100": "prompt_ids, 3",
    },
}


def test_every_block_runs_or_says_why() -> None:
    """Every block is of a kind that ``Program`` knows."""
    found = [f"{block}: {block.language!r}, title {block.title!r}" for page in PAGES for block in blocks(page) if not known(block)]
    assert found == []


def known(block: Block) -> bool:
    if block.language == "sh":
        return all(command.words[0] == "megadsl" or command.excused for command in commands(block.text))
    if block.language == "text":
        return block.title == "output" or block.title.startswith((PART, *SHOWN)) or FILE.fullmatch(block.title) is not None
    return block.language in ("python", "json", "cuda")


class Program:
    """A page that runs, in the current folder."""

    def __init__(self, page: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.page, self.names = page, names
        self.capsys, self.monkeypatch = capsys, monkeypatch
        self.printed = ""

    def run(self) -> None:
        for block in blocks(self.page):
            text = block.text
            for ours, here in SWAPS.get(name_of(self.page), {}).items():
                text = text.replace(ours, here)
            if FILE.fullmatch(block.title):
                Path(block.title).write_text(text)
            self._take(block, text)
            self.printed += self.capsys.readouterr().out

    def _take(self, block: Block, text: str) -> None:
        if block.language == "python":
            self._execute(block, text)
        elif block.language == "sh":
            for command in commands(text):
                if not command.excused:
                    self._call(command)
        elif block.title == "output":
            assert shows(text, self.printed), f"{block} is not in:\n{self.printed}"
        elif block.title.startswith(PART):
            assert shows(text, Path(block.title.removeprefix(PART)).read_text()), f"{block} is not there"
        elif block.title.endswith(".schedule"):
            schedule_file.parse(text, block.title)

    def _execute(self, block: Block, text: str) -> None:
        """With the lines of its own file, else of the page."""
        file, lines = (block.title, 0) if block.title else (str(block.page), block.line - 1)
        exec(compile("\n" * lines + text, file, "exec"), self.names)

    def _call(self, command: Command) -> None:
        self.monkeypatch.setattr(sys, "argv", list(command.words))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code, command.words


def shows(part: str, whole: str) -> bool:
    """Whether ``part`` is in ``whole``, but for spaces at the ends of lines. In it "..." is any text, in a line of its own any lines."""
    lines = [[re.escape(piece) for piece in re.split(r" ?\.\.\. ?", line)] for line in part.splitlines()]
    pattern = r"\n".join(r"(?s:.*)" if line == ["", ""] else ".*?".join(line) for line in lines)
    return re.search(pattern, "\n".join(line.rstrip() for line in whole.splitlines())) is not None


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def too_long(_: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{seconds} s were not enough")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a page of docs/ or the README, with some names given; its names."""

    def run(name: str, **names: Any) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        with at_most(SECONDS):
            Program(ROOT / name, names, capsys, monkeypatch).run()
        for path in tmp_path.glob("*.py"):
            sys.modules.pop(path.stem, None)
        return names

    return run


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("two 2\nthree", True),
        ("one ...\n...\nfour", True),
        ("t... 2", True),
        ("one ... 2", False),
        ("three\ntwo 2", False),
        ("one\n...\none", False),
    ],
)
def test_what_is_shown_can_be_wrong(part: str, found: bool) -> None:
    assert shows(part, "one 1  \ntwo 2\nthree\nfour") == found


def test_the_readme(run_page: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    saved("qwen2", tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "checkpoint")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    names = run_page("README.md", Path=Path, ids=torch.tensor([3]), kv_len=torch.tensor(0), prompt_ids=[3, 77])
    made = compile_model(names["decode_step"], config=TINY, blocks=2)
    assert [op.name for op in made.graph.ops] == ["embed", "q_k_v", "attention", "o", "gate_up", "down", "lm_head"]
    assert made.schedule.ring("loader").stages == 12 and made.schedule.op("down").prefetch.ahead_of == "attention"
    assert type(made.schedule.edge("o").sync).__name__ == "Sentinel"


def test_the_readme_shows_the_committed_kernel_and_the_folders() -> None:
    (shown,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "cuda"]
    assert shown == excerpt((GENERATED / str(CASES[0]) / "kernel.cu").read_text()), f"run: {COMMAND}"
    (layout,) = [block.text for block in blocks(ROOT / "README.md") if block.title == "layout"]
    assert all((ROOT / line.split()[0]).is_dir() for line in layout.splitlines())


def test_the_page_on_torch(run_page: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("megadsl.driver.compile_model", lambda model, **options: compiled(model, **options))  # what other tests build
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    assert str(run_page("docs/torch.md")["device"]) == device


def test_the_page_on_races(run_page: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadsl.driver.compile_model", lambda model, **_: watched()["Tagged", 1])  # what other tests build
    assert run_page("docs/race-detector.md")["program"].report.races == ()


OTHERS = [name_of(page) for page in PAGES if page.name not in ("README.md", "torch.md", "race-detector.md") and blocks(page)]


@pytest.mark.parametrize("name", OTHERS)
def test_other_pages(name: str, run_page: Callable[..., dict[str, Any]]) -> None:
    run_page(name)


def test_every_swap_is_needed() -> None:
    for name, swaps in SWAPS.items():
        text = (ROOT / name).read_text()
        assert [ours for ours in swaps if ours not in text] == []


def written_commands(page: Path) -> Iterator[tuple[str, ...]]:
    """The commands of a page: of its blocks, and those that its text names."""
    for block in blocks(page):
        if block.language == "sh":
            yield from (command.words for command in commands(block.text))
    for token in inline(page):
        if token.type == "code_inline" and re.match(rf"({'|'.join(PROGRAMS)}) [\w-]", token.content):
            yield from (command.words for command in commands(token.content))


def mistake(words: tuple[str, ...]) -> str:
    """What is wrong with a command, "" if nothing is: its program, option, module or target does not exist."""
    program, *rest = words
    if program == "make":
        return "" if re.search(rf"^{re.escape(rest[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else f"no target {rest[0]}"
    if program == "python":
        path = ROOT / (rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0])
        return "" if path.is_file() else f"no {path}"
    command = typer.main.get_group(cli.app).commands.get(rest[0])
    if command is None:
        return f"no command {rest[0]}"
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in rest[1:] if word.startswith("--") and word.partition("=")[0] not in options]
    return f"{rest[0]} has no {', '.join(unknown)}" if unknown else ""


def test_commands_have_the_options_that_are_written() -> None:
    found = [
        f"{name_of(page)}: {' '.join(words)}: {wrong}" for page in PAGES for words in written_commands(page) if (wrong := mistake(words))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("megadsl", "run", "llama-tiny", "--prompts", "x"), "run has no --prompts"),
        (("megadsl", "start"), "no command start"),
        (("make", "tea"), "no target tea"),
        (("python", "-m", "tools.nothing"), f"no {ROOT / 'tools' / 'nothing.py'}"),
        (("megadsl", "check", "llama-tiny", "--no-check"), "check has no --no-check"),
    ],
)
def test_the_command_test_can_fail(words: tuple[str, ...], wrong: str) -> None:
    assert mistake(words) == wrong
