"""What is said of a worker that has ended."""

from __future__ import annotations

from typing import Any

from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId
from aiodaft._runtime.node.launcher import Ending
from aiodaft._runtime.node.postmortem import Activity, died
from aiodaft._runtime.node.worker_table import Worker


def test_a_worker_that_never_started_is_named_by_the_actor_it_was_started_for() -> None:
    child: Any = None
    worker = Worker(PeerId("worker"), child, "Echo-1")
    worker.stop("its spawn was cancelled")
    ending, idle = Ending(0, None, "SIGKILL"), Activity("", None)
    error = died(worker, ending, idle, oom=False)
    assert str(error) == "Echo-1 (not started yet) was stopped: its spawn was cancelled"
    assert error.actor == "Echo-1"
    worker.pid = 5
    worker.placed[FIRST_USER_ACTOR] = "Echo-2"
    assert str(worker) == "Echo-2 (pid 5)"
