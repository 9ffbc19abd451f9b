"""Errors and warnings about workers that ended or do not answer, with the evidence."""

from __future__ import annotations

import os
from contextlib import suppress

from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._protocol.node.worker import (
    Activity,
    Ending,
    OomKills,
    WorkerState,
    condition,
    how_it_ended,
    oom_counters,
    oom_kills,
)
from aiodaft._runtime.calls.call import CallState, PendingCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.node.worker import Worker
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import ActorDied, OutcomeUnknown, PeerLost


def activity(worker: Worker, connection: Connection) -> Activity:
    """The oldest call from this process to the worker, or else the one that its last heartbeat names."""
    last = worker.heartbeat.last()
    called = next((state.label for state in connection.session.under_way() if is_of_a_user(state)), last.last_method)
    return Activity(called, last.last_method_for if called and called == last.last_method else None)


def is_of_a_user(state: PendingCall) -> bool:
    # The call that makes an actor goes to the agent, and is labelled with the class alone.
    return not isinstance(state, CallState) or state.target.actor >= FIRST_USER_ACTOR or "." not in state.label


def died(worker: Worker, ending: Ending, doing: Activity, *, oom: bool) -> ActorDied:
    wanted = worker.state is WorkerState.STOPPING
    how = f"was stopped: {worker.stop_reason}" if wanted else how_it_ended(ending.exit_code, ending.signal, oom=oom)
    error = ActorDied(f"{worker} {how}" + (f"; {doing}" if doing.method and not wanted else ""))
    error.actor = worker.names
    if not wanted:
        error.exit_code, error.signal, error.oom = ending.exit_code, ending.signal, oom
        _add_evidence(error, worker, doing)
    return error


def silence(worker: Worker, doing: Activity) -> str:
    heartbeat = worker.heartbeat
    warning = f"{worker} has not answered for {heartbeat.last().silent_for:.1f} s: {condition_of(worker.pid)}; {doing}"
    if heartbeat.liveness.patience.give_up is not None or heartbeat.is_stopped(worker.pid):
        return warning
    return f"{warning}. Its calls wait for it; Patience(give_up=seconds) kills such a process after that time"


def given_up(worker: Worker, doing: Activity) -> PeerLost:
    heartbeat = worker.heartbeat
    error = PeerLost(
        f"{worker} has not answered for {heartbeat.last().silent_for:.1f} s and was killed, as "
        f"Patience({heartbeat.liveness.limit}) demands: {condition_of(worker.pid)}; {doing}"
    )
    _add_evidence(error, worker, doing)
    return error


def _add_evidence(error: OutcomeUnknown, worker: Worker, doing: Activity) -> None:
    error.actor = worker.names
    error.last_method, error.last_method_for = doing.method, doing.seconds
    error.last_lines = worker.output.last_lines
    if error.last_lines:
        error.add_note("its last lines on standard error:\n" + "\n".join(f"  {line}" for line in error.last_lines))


def condition_of(pid: int) -> str:
    """Why a process does not answer."""
    states: set[str] = set()
    threads = f"/proc/{pid}/task"
    with suppress(OSError):
        for thread in os.listdir(threads):
            # The name in brackets may contain any character. The thread may have ended.
            states.update(_read(f"{threads}/{thread}/stat").rpartition(")")[2].split()[:1])
    return condition(states)


def watch_oom_kills(kills: OomKills, pid: int) -> str | None:
    """The file that counts the kills in the control group of a process; None where the kernel has none."""
    counter = next((path for path in oom_counters(_read(f"/proc/{pid}/cgroup")) if os.path.exists(path)), None)
    if counter is not None:
        kills.watch(counter, oom_kills(_read(counter)))
    return counter


def was_oom_kill(kills: OomKills, counter: str | None) -> bool:
    return counter is not None and kills.take(counter, oom_kills(_read(counter)))


def _read(path: str) -> str:
    """The content of a file of the kernel; "" if it is gone, as with the last process of a control group."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def report_stall(worker: Worker, culprit: str, line: str, seconds: float) -> None:
    logger.warning(
        "%s (pid %d) has kept the event loop of its process from turning for %.1f s: %s. Other calls, streams and "
        "cancellations wait for it. Make it a `def` method, which runs on a thread, or await asyncio.to_thread(...)",
        culprit or f"a task or callback of {worker.names}",
        worker.pid,
        seconds,
        line,
    )
