"""Checkers see the API as users mean it: right code passes, and wrong code is reported on its line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOOD, BAD = HERE / "good.py", HERE / "bad.py"
GOOD_WEB, BAD_WEB = HERE / "good_web.py", HERE / "bad_web.py"

# An overload that mypy chooses by the wrong argument: it takes any ref for the value.
MYPY_MAY_MISS = {"E04", "E05", "E12"}

# Each checker runs once with all mistakes, and has to read everything then.
pytestmark = [pytest.mark.programs, pytest.mark.timeout(300)]

# file name -> line -> messages
Findings = dict[str, dict[int, list[str]]]


def run_checker(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr + done.stdout
    return done.stdout


def by_line(found: Iterable[tuple[str, int, str]]) -> Findings:
    findings: Findings = defaultdict(lambda: defaultdict(list))
    for file, line, message in found:
        findings[Path(file).name][line].append(message)
    return findings


@pytest.fixture(scope="module")
def pyright() -> Findings:
    pytest.importorskip("pyright")
    output = run_checker(["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(HERE)])
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    assert report["summary"]["filesAnalyzed"] == 4
    # One message may span lines; the mistake is where it begins.
    return by_line(
        (item["file"], item["range"]["start"]["line"] + 1, item["message"]) for item in report["generalDiagnostics"]
    )


@pytest.fixture(scope="module")
def strict_mypy(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """mypy as users have it, without the settings of this project: it reads the package once for all tests."""
    return ["mypy", "--config-file=", "--strict", "--cache-dir", str(tmp_path_factory.mktemp("mypy"))]


@pytest.fixture(scope="module")
def mypy(strict_mypy: list[str]) -> Findings:
    pytest.importorskip("mypy")
    output = run_checker(
        [*strict_mypy, "--output", "json", str(GOOD), str(BAD), str(GOOD_WEB), str(BAD_WEB)],
        MYPYPATH=os.pathsep.join([str(HERE), str(ROOT), str(ROOT / "transport")]),
    )
    items = [json.loads(line) for line in output.splitlines()]
    return by_line((item["file"], item["line"], item["message"]) for item in items if item["severity"] == "error")


@pytest.fixture(scope="module")
def pyrefly() -> Findings:
    pytest.importorskip("pyrefly")
    paths = [option for path in (ROOT, ROOT / "transport", HERE) for option in ("--search-path", str(path))]
    command = ["pyrefly", "check", "--preset", "strict", "--output-format", "json", *paths]
    output = run_checker([*command, "--python-interpreter-path", sys.executable, str(GOOD_WEB), str(BAD_WEB)])
    return by_line((item["path"], item["line"], item["description"]) for item in json.loads(output)["errors"])


@pytest.fixture(scope="module")
def ty() -> Findings:
    pytest.importorskip("ty")
    paths = [option for path in (ROOT, ROOT / "transport", HERE) for option in ("--extra-search-path", str(path))]
    command = ["ty", "check", "--output-format", "gitlab", *paths, "--python", sys.executable]
    items = json.loads(run_checker([*command, str(GOOD_WEB), str(BAD_WEB)]))
    return by_line(
        (item["location"]["path"], item["location"]["positions"]["begin"]["line"], item["description"])
        for item in items
    )


def planted(file: Path = BAD) -> dict[int, str]:
    """The lines of a file that are wrong, and the names of the mistakes."""
    lines = file.read_text(encoding="utf-8").splitlines()
    marks = {number: re.search(r"# (E\d\d) ", line) for number, line in enumerate(lines, start=1)}
    return {number: mark[1] for number, mark in marks.items() if mark is not None}


def missed(findings: Findings, file: Path = BAD) -> set[str]:
    return {name for line, name in planted(file).items() if line not in findings[file.name]}


def unplanted(findings: Findings, file: Path = BAD) -> dict[int, list[str]]:
    return {line: messages for line, messages in findings[file.name].items() if line not in planted(file)}


@pytest.mark.parametrize("file", [BAD, BAD_WEB], ids=lambda file: file.stem)
def test_every_mistake_is_planted_once(file: Path) -> None:
    names = list(planted(file).values())
    assert sorted(names) == [f"E{number:02}" for number in range(1, len(names) + 1)]


def test_pyright_accepts_what_is_right(pyright: Findings) -> None:
    assert pyright["good.py"] == {}


def test_pyright_reports_every_mistake_and_nothing_else(pyright: Findings) -> None:
    assert missed(pyright) == set()
    assert unplanted(pyright) == {}


def test_mypy_accepts_what_is_right(mypy: Findings) -> None:
    assert mypy["good.py"] == {}


def test_mypy_reports_nearly_every_mistake_and_nothing_else(mypy: Findings) -> None:
    assert missed(mypy) <= MYPY_MAY_MISS
    assert unplanted(mypy) == {}
    assert set(mypy) <= {"good.py", "bad.py", "good_web.py", "bad_web.py"}


@pytest.mark.parametrize("checker", ["mypy", "pyright", "pyrefly", "ty"])
def test_web_apps_of_three_frameworks_are_checked_by_four_checkers(
    checker: str, request: pytest.FixtureRequest
) -> None:
    findings: Findings = request.getfixturevalue(checker)
    assert findings["good_web.py"] == {}
    assert missed(findings, BAD_WEB) == set()
    assert unplanted(findings, BAD_WEB) == {}


@pytest.mark.parametrize("checker", ["mypy", "pyright", "pyrefly", "ty"])
@pytest.mark.parametrize("page", ["coming_from", "graphs"])
def test_checkers_accept_the_first_example_of_a_page(
    page: str, checker: str, tmp_path: Path, strict_mypy: list[str]
) -> None:
    pytest.importorskip(checker)
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    file = tmp_path / "example.py"
    file.write_text(example[1], encoding="utf-8")
    python, paths = sys.executable, (str(ROOT), str(ROOT / "transport"))
    commands = {
        "mypy": strict_mypy,
        "pyright": ["pyright", "--pythonpath", python],
        "pyrefly": ["pyrefly", "check", "--preset", "strict", "--python-interpreter-path", python]
        + [option for path in paths for option in ("--search-path", path)],
        "ty": [
            "ty",
            "check",
            "--python",
            python,
            *[option for path in paths for option in ("--extra-search-path", path)],
        ],
    }
    done = subprocess.run(
        [python, "-m", *commands[checker], str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": os.pathsep.join(paths)},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_checkers_accept_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(GOOD)]
    # It writes a trace.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout == "all of it ran\n"
