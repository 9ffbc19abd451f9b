"""The examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str) -> str:
    """What an example prints; it must end well."""
    command = [sys.executable, str(EXAMPLES / name)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_hello_says_hello() -> None:
    assert run_example("hello.py") == "hello, world\n"


@pytest.mark.timeout(60)
def test_two_models_equal_one_and_nothing_passes_the_controller() -> None:
    output = run_example("two_models.py")
    assert "the controller: 0 payload bytes" in output
    assert "are equal, bit for bit" in output
    assert "RuntimeError: Given normalized_shape=[64]" in output
    assert "needed by Front.backward, which did not run" in output
    assert "hosting.py" not in output
