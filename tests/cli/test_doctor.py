"""`aiodaft doctor`, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys

import aiodaft
from aiodaft_transport import NAMES, default_name


def aiodaft_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiodaft.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_tries_every_transport_and_says_what_it_found() -> None:
    ended = aiodaft_command("doctor")
    assert ended.returncode == 0, ended.stderr
    found = {line[:16].strip(): line[17:] for line in ended.stdout.splitlines()}
    for name in (*NAMES, "cuda"):
        assert found[f"transport {name}"].startswith(("works", "does not work: "))
    assert found[f"transport {default_name()}"].startswith("works, the default: 1 MiB there and back in ")
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


def test_the_command_says_its_version_and_what_it_can_do() -> None:
    assert aiodaft_command("--version").stdout == f"aiodaft {aiodaft.__version__}\n"
    without = aiodaft_command()
    assert without.returncode == 2
    assert "doctor" in without.stderr
