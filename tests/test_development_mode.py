"""Python's development mode, in every process: there is nothing to warn of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [path for folder in ("e2e", "runtime") for path in sorted((TESTS / folder).glob("test_*.py"))]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_h119_the_suite_warns_of_nothing(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--timeout=180", str(path)]
    # Workers and fork servers inherit these; they print their warnings.
    environment = {**os.environ, "PYTHONDEVMODE": "1", "PYTHONASYNCIODEBUG": "1"}
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # Some tests leave a runtime open.
    signs = re.compile(r"Warning: (?!a runtime was left open)|was never retrieved|was never awaited")
    assert [line for line in done.stdout.splitlines() if signs.search(line)] == []
