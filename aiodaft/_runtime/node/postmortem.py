"""Errors and warnings about workers that ended or do not answer, with the evidence."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Final, NamedTuple

from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._protocol.worker import WorkerState, how_it_ended
from aiodaft._runtime.calls.call import CallState, PendingCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.node.launcher import Ending
from aiodaft._runtime.node.worker_table import Worker
from aiodaft.exceptions import ActorDied, OutcomeUnknown, PeerLost

_CGROUPS: Final = "/sys/fs/cgroup"
# What the state of a thread in /proc says about a process that does not answer; the most telling state first.
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "R": "it computes, in C code that keeps the interpreter to itself",
    "D": "it waits for a device or a disk",
    "S": "it waits, in C code that keeps the interpreter to itself",
}


class Activity(NamedTuple):
    """The oldest call that a worker was running, as far as this process knows.

    Attributes:
        method: The call; "" if there is none.
        seconds: For how long the call has been seen; None if it was not seen before.
    """

    method: str
    seconds: float | None

    def __str__(self) -> str:
        if not self.method:
            return "no call is known to be under way"
        return f"under way: {self.method}" + ("" if self.seconds is None else f", for {self.seconds:.1f} s or more")


def activity(worker: Worker, connection: Connection) -> Activity:
    """The oldest call from this process to the worker, or else the one that its last heartbeat names."""
    last = worker.child.heartbeat.last()
    called = next((state.label for state in connection.session.under_way() if _is_of_a_user(state)), last.last_method)
    return Activity(called, last.last_method_for if called and called == last.last_method else None)


def _is_of_a_user(state: PendingCall) -> bool:
    # The call that makes an actor goes to the agent, and is labelled with the class alone.
    return not isinstance(state, CallState) or state.target.actor >= FIRST_USER_ACTOR or "." not in state.label


def died(worker: Worker, ending: Ending, doing: Activity, *, oom: bool) -> ActorDied:
    """The error for callers of a worker that ended."""
    wanted = worker.state is WorkerState.STOPPING
    how = how_it_ended(ending.exit_code, ending.signal, oom=oom)
    if wanted:
        how = f"was stopped: {worker.stop_reason}"
    known = f"; {doing}" if not wanted and doing.method else ""
    error = ActorDied(f"{worker} {how}{known}")
    error.actor = worker.names
    if not wanted:
        error.exit_code, error.signal, error.oom = ending.exit_code, ending.signal, oom
        _add_evidence(error, worker, doing)
    return error


def silence(worker: Worker, doing: Activity) -> str:
    """The warning about a worker that does not answer."""
    heartbeat = worker.child.heartbeat
    warning = f"{worker} has not answered for {heartbeat.last().silent_for:.1f} s: {condition(worker.pid)}; {doing}"
    if heartbeat.patience.give_up is not None or heartbeat.is_stopped:
        return warning
    return f"{warning}. Its calls wait for it; Patience(give_up=seconds) kills such a process after that time"


def given_up(worker: Worker, doing: Activity) -> PeerLost:
    """The error for callers of a worker that was silent for too long."""
    heartbeat = worker.child.heartbeat
    silent_for = heartbeat.last().silent_for
    error = PeerLost(
        f"{worker} has not answered for {silent_for:.1f} s and was killed, as Patience({heartbeat.limit}) demands: "
        f"{condition(worker.pid)}; {doing}"
    )
    _add_evidence(error, worker, doing)
    return error


def _add_evidence(error: OutcomeUnknown, worker: Worker, doing: Activity) -> None:
    error.actor = worker.names
    error.last_method, error.last_method_for = doing.method, doing.seconds
    error.last_lines = worker.child.output.last_lines
    if error.last_lines:
        error.add_note("its last lines on standard error:\n" + "\n".join(f"  {line}" for line in error.last_lines))


def condition(pid: int) -> str:
    """Why a process does not answer, by the states of its threads."""
    states: set[str] = set()
    threads = f"/proc/{pid}/task"
    with suppress(OSError):
        for thread in os.listdir(threads):
            # The name in brackets may contain any character; the thread may have ended.
            with suppress(OSError), open(f"{threads}/{thread}/stat", encoding="utf-8", errors="replace") as stat:
                states.add(stat.read().rpartition(")")[2].split()[0])
    return next((meaning for state, meaning in _STATES.items() if state in states), "nothing is known of it")


class OomKills:
    """Tells which killed workers the kernel killed for want of memory.

    The kernel only counts such kills per control group. So each increase of a group's count explains one death by
    SIGKILL in that group.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def watch(self, pid: int) -> str | None:
        """Start counting; returns the counter, for `take`. None where the kernel has none."""
        counter = _counter_of(pid)
        if counter is not None and counter not in self._seen:
            self._seen[counter] = _kills(counter)
        return counter

    def take(self, counter: str | None) -> bool:
        """Whether the kernel has counted one more kill."""
        if counter is None or _kills(counter) <= self._seen[counter]:
            return False
        self._seen[counter] += 1
        return True


def _counter_of(pid: int) -> str | None:
    """The file with the count of a process's control group: version 2 or 1, inside a container or not."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            groups = file.read()
    except OSError:
        return None
    candidates: list[str] = []
    for controllers, group in re.findall(r"^\d+:(.*?):/(.*)$", groups, re.MULTILINE):
        if "memory" in controllers.split(","):
            folder, name = f"{_CGROUPS}/memory", "memory.oom_control"
        elif not controllers:
            folder, name = _CGROUPS, "memory.events"
        else:
            continue
        candidates += [f"{folder}/{group}/{name}", f"{folder}/{name}"]
    return next((path for path in candidates if os.path.exists(path)), None)


def _kills(counter: str) -> int:
    try:
        with open(counter, encoding="ascii") as file:
            found = re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        # The group went with its last process.
        return 0
    return int(found[1]) if found else 0
