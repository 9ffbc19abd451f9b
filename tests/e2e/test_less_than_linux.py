"""Programs where the system has less than Linux; on Linux, functions that others lack are hidden.

These tests use no fixture of conftest.py, which looks into /proc: CI runs them also on macOS, where nothing is hidden.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import is_alive

from aiodaft._runtime.platform.capabilities import missing

SUPPORT = Path(__file__).parent.parent / "support"
# Longer than a worker takes to end that blocks its event loop.
PATIENCE = 10.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables for a program that has less than Linux; at its end, it has left no temporary file."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    hiding = [] if missing() else [str(SUPPORT / "less_than_linux")]
    path = os.pathsep.join([*hiding, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    yield {**os.environ, "TMPDIR": str(folder), "HOME": str(tmp_path), "PYTHONPATH": path}
    assert list(folder.iterdir()) == []


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)


def runs(pid: int) -> bool:
    if Path("/proc/self/stat").exists():
        return is_alive(pid)
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1] not in {"", "Z"}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param([], id="by itself"),
        pytest.param(["-m", "aiodaft.cli", "run"], id="in a cluster", marks=pytest.mark.programs),
    ],
)
def test_actors_work_die_and_come_back(environment: dict[str, str], start: list[str]) -> None:
    ended = python(environment, *start, str(SUPPORT / "spare.py"), "journeys")
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert len({*seen["pids"]}) == 2
    assert (seen["total"], seen["array"], seen["stream"]) == (2.0 * (1 << 18), 1 << 18, [0, 1, 2])
    assert (seen["died"]["signal"], seen["came back"]) == ("SIGKILL", True)
    assert [pid for pid in (*seen["pids"], seen["died"]["left"]) if runs(pid)] == []


def test_what_a_killed_program_has_started_ends(environment: dict[str, str]) -> None:
    command = [sys.executable, str(SUPPORT / "spare.py"), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as program:
        assert program.stdout is not None
        try:
            # In any order: the lines of the program and of its actor.
            lines = [program.stdout.readline() for _ in range(2)]
            printed, shown = sorted(lines, key=lambda line: line.startswith("("))
            pids = json.loads(printed)
            assert shown == f"(Worker-1 pid={pids[0]}) the loop is blocked\n"
            assert all(map(runs, pids))
        finally:
            program.kill()
    deadline = time.monotonic() + PATIENCE
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert left == []


def test_actors_without_processes_work(environment: dict[str, str]) -> None:
    ended = python(environment, str(SUPPORT / "spare.py"), "in_process")
    assert (ended.returncode, ended.stdout) == (0, f"{1 << 18}.0\n"), ended.stderr


def test_the_doctor_says_what_is_not_to_be_had(environment: dict[str, str]) -> None:
    ended = python(environment, "-m", "aiodaft.cli", "doctor", "--json")
    document = json.loads(ended.stdout)
    assert (ended.returncode, document["works"], document["transports"]["tcp"]["works"]) == (0, True, True)
    assert document["transports"]["shm"]["why"].endswith("use 'tcp'")
    assert {"fork server", "shared memory", "/proc", "commands"} <= document["missing"].keys()


def test_what_needs_more_says_so(environment: dict[str, str]) -> None:
    asked = python(environment, "-m", "aiodaft.cli", "ps")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert "cannot ask programs: use `rt.overview()`" in asked.stderr
    forking = python(environment, str(SUPPORT / "spare.py"), "forking")
    assert forking.returncode == 1
    assert forking.stderr.endswith(
        "SpawnFailed: fork=True needs a fork server, which this system does not have: leave it out\n"
    )
