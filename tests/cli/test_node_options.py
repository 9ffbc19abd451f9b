"""What `aiodaft up` refuses before it listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "aiodaft.cli"]


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--label", "=a", "'=a' is not NAME=VALUE"),
        ("--label", " =a", "' =a' is not NAME=VALUE"),
        ("--label", "zone", "'zone' is not NAME=VALUE"),
        ("--resource", "=2", "'=2' is not NAME=VALUE"),
        ("--resource", "disk=two", "--resource disk=two: 'two' is not a number"),
        ("--resource", "disk=-1", "disk=-1.0: resources are numbers that are not negative"),
    ],
)
def test_an_option_that_says_nothing_is_refused(tmp_path: Path, option: str, value: str, why: str) -> None:
    key = str(tmp_path / "key")
    assert subprocess.run([*COMMAND, "key", "new", key], capture_output=True).returncode == 0
    command = [*COMMAND, "up", "--listen", "tcp://127.0.0.1:0", "--key-file", key, option, value]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"aiodaft: {why}\n")
