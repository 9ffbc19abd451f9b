"""The objects that the documents name are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_blocks import BLOCK

import aiodaft
from aiodaft import (
    checkpoint,
    exceptions,
    logs,
    memory,
    pipeline,
    policies,
    resharding,
    state,
    supervision,
    telemetry,
    topics,
    typing,
)
from aiodaft.tensor import aggregation

ROOT = Path(__file__).parent.parent
PROMISES = ROOT / "docs" / "promises.md"
FAULTS = ROOT / "docs" / "faults.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in DOCUMENTS if BLOCK.search(page.read_text())]

# Each of them lists its names.
PUBLIC = [
    aiodaft,
    aggregation,
    checkpoint,
    logs,
    memory,
    pipeline,
    policies,
    resharding,
    state,
    supervision,
    telemetry,
    topics,
    typing,
]

LINK = re.compile(r"\[([^]]*)\]\(([^)]+)\)")


def links(document: Path) -> list[tuple[str, str]]:
    prose = BLOCK.sub("", document.read_text())
    return [(text, target) for text, target in LINK.findall(prose) if "://" not in target]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    assert [target for _, target in links(document) if not (document.parent / target).is_file()] == []


@pytest.mark.programs
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "support" / "run_blocks.py"), str(page)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # Some write files.
    ended = subprocess.run(command, cwd=tmp_path, text=True, check=False, **output)
    assert ended.returncode == 0, ended.stdout


def test_a_page_with_a_program_names_every_exported_name() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for module in PUBLIC:
        assert [name for name in module.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_the_reference_has_every_exported_name() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r":: aiodaft\.([\w.]+)$", text, re.MULTILINE))
    whole_modules = set(re.findall(r"automodule:: ([\w.]+)$", text, re.MULTILINE))
    missing = {
        f"{module.__name__}.{name}"
        for module in PUBLIC
        for name in module.__all__
        if name not in {found.rpartition(".")[2] for found in named}
        and {module.__name__, getattr(getattr(module, name), "__module__", "")}.isdisjoint(whole_modules)
        and name != "__version__"
    }
    assert missing == set()


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target for _, target in links(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - linked == set()


def test_every_promise_names_a_test_file() -> None:
    tests = [(text, target) for text, target in links(PROMISES) if "/tests/" in target]
    assert {text for text, _ in tests} == {Path(target).stem for _, target in tests}
    # Up to the part that is not promised, each paragraph is a promise; a table belongs to the paragraph after it.
    promised = PROMISES.read_text().partition("## Not promised")[0]
    paragraphs = [part for part in promised.strip().split("\n\n")[2:] if not part.startswith(("#", "|", "Every `ref"))]
    assert [part for part in paragraphs if "/tests/" not in part] == []


def test_the_promises_know_every_error_and_no_other() -> None:
    named = set(re.findall(r"`(\w+)`", PROMISES.read_text()))
    errors = {
        name for name, found in vars(exceptions).items() if isinstance(found, type) and issubclass(found, Exception)
    }
    assert errors - named == set()
    looks_like_one = re.compile(r"[A-Z]\w+(Error|Exceeded|Died|Lost|Closed|Failed|Cancelled|Detected|Reached|Handle)$")
    builtin = {"AttributeError", "TypeError", "CancelledError"}
    assert {name for name in named - errors - builtin if looks_like_one.match(name)} == set()


def test_every_fault_names_tests_that_there_are() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \|$", FAULTS.read_text(), re.MULTILINE)
    assert [int(number[1:]) for number, _, _ in rows] == [*range(1, 121)]
    shown = {number: LINK.findall(tests) for number, _, tests in rows}
    why_not = {tests for number, _, tests in rows if not shown[number]}
    assert why_not == {
        "not so: torch listens on the loopback interface, or on the one that the program names",
        "not promised: the actors of a runtime trust each other",
    }
    named = [link for links in shown.values() for link in links]
    assert [name for name, at in named if f"def test_{name}(" not in (FAULTS.parent / at).read_text()] == []


def test_every_fault_that_a_test_is_named_after_names_that_test() -> None:
    text = FAULTS.read_text()
    named = re.compile(r"def test_((?:[a-h]\d+_(?:and_)?)+\w+)\(")
    tests = [name for path in (ROOT / "tests").rglob("test_*.py") for name in named.findall(path.read_text())]
    assert [name for name in tests if f"[{name}]" not in text] == []
