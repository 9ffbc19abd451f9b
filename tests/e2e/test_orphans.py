"""However a controller ends, nothing is left of it (C39-C44, C52 and C53 of the fault tests)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from actors import Echo
from inside import awaited
from leaks import descendants, ended, wait_gone

import aiodaft
from aiodaft._runtime.platform import linux as processes

CONTROLLERS = Path(__file__).parents[1] / "support" / "controllers.py"

# Some in the suite, twenty by `pytest -m soak`.
kill_points = pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20))]
)


@contextmanager
def controller(how: str, home: Path) -> Generator[tuple[subprocess.Popen[str], list[int]]]:
    """A controller program, and the pids of its fork server, its actor and that one's descendants."""
    environment = {**os.environ, "TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home)}
    command = [sys.executable, str(CONTROLLERS), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("its actor holds the interpreter", id="C40"),
        pytest.param("its fork server is stopped", id="its fork server is stopped"),
        pytest.param("waits", id="C39", marks=pytest.mark.soak),
    ],
)
def test_a_killed_controller_leaves_no_actor_and_nothing_that_one_has_started(how: str, tmp_path: Path) -> None:
    with controller(how, tmp_path) as (process, pids):
        assert len(pids) == 6
        process.kill()
        # The bound of row CR5, where it is measured.
        assert wait_gone(pids, within=2.0 if how == "waits" else 30.0) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["leaves the runtime open", "ends the thread of its loop"])
def test_c43_a_controller_that_goes_without_closing_leaves_nothing(how: str, tmp_path: Path) -> None:
    with controller(how, tmp_path) as (process, pids):
        assert len(pids) == 6
        assert wait_gone(pids) == set()
        if how == "leaves the runtime open":
            # Its actors may end before it does.
            process.wait(10)
        else:
            # Only the thread of its loop has ended.
            assert process.poll() is None


@pytest.mark.parametrize("others_too", [False, True], ids=["program", "every process"])
def test_c53_a_terminated_controller_closes_its_scopes(others_too: bool, tmp_path: Path) -> None:
    with controller("is terminated", tmp_path) as (process, pids):
        if others_too:
            # As Slurm and systemd do; the cleanup of the program calls its actor.
            for pid in descendants(process.pid):
                os.kill(pid, signal.SIGTERM)
        process.terminate()
        if others_too:
            # Slurm sends it twice at the end of a time limit.
            process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        assert process.stdout is not None
        assert process.stdout.read() == "sleep began, sleep cleaned up\n"
        assert wait_gone(pids) == set()


def test_g108_a_controller_that_is_killed_while_a_graph_runs_leaves_nothing(tmp_path: Path) -> None:
    with controller("runs a graph", tmp_path) as (process, pids):
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "passed\n"
        everybody = descendants(process.pid) | set(pids)
        process.kill()
        assert wait_gone(everybody) == set()
    assert list(tmp_path.iterdir()) == []


@kill_points
def test_c52_killed_while_payloads_move_nothing_stays(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with controller("moves payloads", tmp_path) as (process, pids):
        assert process.stdout is not None
        for _ in range(rng.randrange(40)):
            assert process.stdout.readline() in {"passing\n", "passed\n"}
        everybody = descendants(process.pid) | set(pids)
        # Every second time all of them, in any order.
        victims = [process.pid, *everybody] if seed % 2 else [process.pid]
        rng.shuffle(victims)
        for pid in victims:
            processes.kill(pid, signal.SIGKILL)
        assert wait_gone(everybody) == set()
    # At /dev/shm every test looks.
    assert list(tmp_path.iterdir()) == []


@kill_points
async def test_c44_a_worker_killed_while_it_starts_is_reported_at_any_moment(rt: aiodaft.Runtime, seed: int) -> None:
    rng = random.Random(seed)
    await rt.spawn(Echo)
    for _ in range(3):
        before = descendants()
        spawning = asyncio.get_running_loop().create_task(awaited(rt.spawn(Echo)))
        while not (new := descendants() - before):
            await asyncio.sleep(0)
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        processes.kill(min(new), signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises((aiodaft.SpawnFailed, aiodaft.ActorDied)):
                await (await spawning).echo(1)
        await ended(*new)
    assert await (await rt.spawn(Echo)).echo("goes on") == "goes on"
