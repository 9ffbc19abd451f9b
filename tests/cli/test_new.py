"""`aiodaft new` makes projects whose own tests pass."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.programs

COMMON = {"README.md", "actors.py", "pyproject.toml", "tests/test_actors.py"}
OWN = {
    "script": {"main.py", "tests/test_main.py"},
    "web": {"app.py", "tests/test_app.py"},
    "notebook": {"notebook.ipynb", "tests/test_notebook.py"},
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)


def new(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "aiodaft.cli", "new", *arguments, cwd=cwd)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", OWN)
def test_the_tests_of_a_new_project_pass(kind: str, tmp_path: Path) -> None:
    made = new("word-count", f"--{kind}", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "cd word-count" in made.stdout
    project = tmp_path / "word-count"
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == COMMON | OWN[kind]
    assert not any("PROJECT" in (project / name).read_text() for name in files)
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "word-count"
    tests = run("-m", "pytest", "-p", "aiodaft_pytest", "-p", "no:cacheprovider", "-q", cwd=project)
    assert tests.returncode == 0, tests.stdout
    assert " passed" in tests.stdout


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name, message in (("there", "is there already"), ("there/file", "is there already"), ("a b", "be the name")):
        refused = new(name, cwd=tmp_path)
        assert refused.returncode == 1
        assert message in refused.stderr
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]
    assert new("empty", cwd=tmp_path).returncode == 0


@pytest.mark.programs
@pytest.mark.timeout(240)
def test_a_type_checker_accepts_new_projects(tmp_path: Path) -> None:
    for kind in OWN:
        assert new(kind, f"--{kind}", cwd=tmp_path).returncode == 0
        code = [str(path) for path in (tmp_path / kind).rglob("*.py")]
        # nbformat has no types.
        options = "--strict", "--allow-untyped-calls", "--cache-dir", str(tmp_path / "cache")
        checked = run("-m", "mypy", *options, *code, cwd=tmp_path / kind)
        assert checked.returncode == 0, checked.stdout
