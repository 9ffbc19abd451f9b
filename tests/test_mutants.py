"""The default suite finds each planted bug of `support/mutants.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
COPIED = ("aiodaft", "aiodaft_pytest", "benchmarks", "examples", "tests", "transport", "pyproject.toml")
TESTS_FAILED = 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_the_place_of_a_planted_bug_is_there(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert all((ROOT / name).is_file() for name in mutant.tests.split())


@pytest.mark.mutants
@pytest.mark.timeout(200)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_a_planted_bug_is_found(mutant: Mutant, tmp_path: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tmp_path / name)
    file = tmp_path / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
    paths = os.pathsep.join(map(str, (tmp_path, tmp_path / "transport")))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == TESTS_FAILED, done.stdout
