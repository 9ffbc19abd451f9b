"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from plain_words import count, files

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "aiodaft", ROOT / "aiodaft_pytest", ROOT / "benchmarks", ROOT / "transport" / "aiodaft_transport"]
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
EVERYTHING = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]

MAX_FILE, MAX_EXAMPLE, MAX_FUNCTION, MAX_ARGUMENTS = 600, 150, 50, 7
# Constructors and entry points with options, which users give by keyword.
MANY_OPTIONS = {"Runtime.__init__", "Spawner.on"}


PROSE = ["aiodaft", "transport", "benchmarks", "tests", "examples", "docs", *(path.name for path in ROOT.glob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Function(NamedTuple):
    name: str
    lines: int
    arguments: int
    # It has a docstring, or only declares.
    is_explained: bool


class Source(NamedTuple):
    """The facts about a file that several checks need: the tree itself is large."""

    is_explained: bool
    functions: list[Function]
    classes: list[str]
    # Also for types and inside functions: the level of a relative import, the module, and the names from it.
    imports: list[tuple[int, str, list[str]]]


@cache
def source_of(path: Path) -> Source:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    imports = [(0, "", [alias.name for alias in node.names]) for node in nodes if isinstance(node, ast.Import)]
    imports += [
        (node.level, node.module or "", [alias.name for alias in node.names])
        for node in nodes
        if isinstance(node, ast.ImportFrom)
    ]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return Source(bool(ast.get_docstring(tree)), list(functions(tree)), classes, imports)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield function(prefix + node.name, node)
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    docstring = ast.get_docstring(node)
    body = node.body[1:] if docstring else node.body
    lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
    declares_only = isinstance(node.body[-1], ast.Expr) and isinstance(node.body[-1].value, ast.Constant)
    return Function(name, lines, count, bool(docstring) or declares_only)


def test_files_can_be_read_in_ten_minutes() -> None:
    def limit(path: Path) -> int:
        return MAX_EXAMPLE if path.is_relative_to(ROOT / "examples") else MAX_FILE

    lengths = {name_of(path): (len(path.read_text().splitlines()), limit(path)) for path in EVERYTHING}
    assert {name: length for name, (length, most) in lengths.items() if length > most} == {}


def test_functions_are_short_and_take_few_arguments() -> None:
    found = []
    for path, function in ((file, function) for file in SOURCES for function in source_of(file).functions):
        if function.lines > MAX_FUNCTION:
            found.append(f"{name_of(path)}: {function.name} is too long")
        if function.arguments > MAX_ARGUMENTS and function.name not in MANY_OPTIONS:
            found.append(f"{name_of(path)}: {function.name} takes {function.arguments} arguments")
    assert found == []


def test_modules_and_public_functions_say_what_they_are() -> None:
    found = [name_of(path) for path in SOURCES if not source_of(path).is_explained]
    for path in (ROOT / "aiodaft").glob("*.py"):
        for function in source_of(path).functions:
            *outer, last = function.name.split(".")
            private = any(part[0] == "_" or part[0].islower() for part in outer) or last.startswith("_")
            if not (private or function.is_explained):
                found.append(f"{name_of(path)}: {function.name}")
    assert found == []


def test_exceptions_to_the_checks_say_why() -> None:
    found = []
    for path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            silent = "# noqa" in line and not re.search(r"# noqa: [A-Z0-9, ]+ - .+$", line)
            untyped = "type: ignore" in line and not re.search(r"# type: ignore\[[a-z, -]+\]  # .+$", line)
            if silent or untyped:
                found.append(f"{name_of(path)}:{number}")
    assert found == []


def imports_of(path: Path, module: str, files: dict[str, Path]) -> Iterator[str]:
    """The modules among `files` that a file imports."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for level, named, names in source_of(path).imports:
        above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        base = ".".join([*above, *filter(None, [named])])
        full = [f"{base}.{name}" if f"{base}.{name}" in files else base or name for name in names]
        yield from (name for name in full if name in files and name != module)


def test_no_files_import_each_other_in_a_circle() -> None:
    files: dict[str, Path] = {}
    for path in SOURCES:
        root = ROOT / "transport" if path.is_relative_to(ROOT / "transport") else ROOT
        parts = path.relative_to(root).with_suffix("").parts
        # A package's own file re-exports, and may be imported by what it imports.
        if path.name != "__init__.py":
            files[".".join(parts)] = path
    left = {module: set(imports_of(path, module, files)) for module, path in files.items()}
    assert sum(map(len, left.values())) > len(left)
    while free := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in free:
            del left[module]
    # What is left is in a circle, or imports one.
    assert sorted(left) == []


def test_files_that_are_named_exist() -> None:
    found = []
    for path in SOURCES:
        for named in re.findall(r"\b_(?:protocol|runtime)(?:[./]\w+)+", path.read_text()):
            # Of the last two names, one may be that of something in the file, or the ending of the file.
            parts = re.split(r"[./]", named)
            places = [ROOT.joinpath("aiodaft", *parts[:count]) for count in (len(parts), len(parts) - 1)]
            if not (places[0].is_dir() or any(place.with_suffix(".py").is_file() for place in places)):
                found.append(f"{name_of(path)}: {named}")
    assert found == []


def test_tasks_have_an_owner() -> None:
    # asyncio.create_task and ensure_future are found by ruff.
    owners = {"aiodaft/_runtime/platform/tasks.py"}
    raw = {name_of(path) for path in SOURCES if re.search(r"loop(\(\))?\.create_task\(", path.read_text())}
    assert raw == owners


def test_nothing_is_left_for_later() -> None:
    assert [name_of(path) for path in SOURCES if re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text())] == []


def test_nothing_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "helpers", "misc", "common", "core", "base", "manager"}
    assert {path.stem for path in SOURCES} & vague == set()
    classes = [name for path in SOURCES for name in source_of(path).classes]
    assert [name for name in classes if name.endswith(("Manager", "Helper", "Util"))] == []


@pytest.mark.parametrize("place", PROSE)
def test_sentences_name_their_nouns(place: str) -> None:
    words, marks = count(files(ROOT / place))
    found = "\n".join(f"{name_of(path)}:{line}: {sentence}" for path, line, sentence in marks)
    # Beginnings such as "What ...", and relative clauses that "what" or "who" heads; see tests/support/plain_words.py.
    assert 1000 * len(marks) < words, found
