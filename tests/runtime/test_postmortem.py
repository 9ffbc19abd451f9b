"""The report on a worker that has ended."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId
from aiodaft._protocol.node.worker import Activity, Ending
from aiodaft._runtime.node.worker import Worker
from aiodaft._runtime.node.workers import died
from aiodaft._runtime.platform.linux import UNKNOWN, status_of


async def test_a_worker_that_never_started_is_named_by_the_actor_it_was_started_for() -> None:
    output: Any = SimpleNamespace()
    worker = Worker(PeerId("worker"), "Echo-1", output, output)
    worker.stop("its spawn was cancelled")
    ending, idle = Ending(None, "SIGKILL"), Activity("", None)
    error = died(worker, ending, idle, oom=False)
    assert str(error) == "Echo-1 (not started yet) was stopped: its spawn was cancelled"
    assert error.actor == "Echo-1"
    worker.pid = 5
    worker.placed[FIRST_USER_ACTOR] = "Echo-2"
    assert str(worker) == "Echo-2 (pid 5)"


def test_the_end_of_a_process_that_was_reaped_elsewhere_is_unknown() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert status_of(process.pid) == UNKNOWN
    assert status_of(os.getpid()) is None
