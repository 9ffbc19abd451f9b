"""How an actor is doing, without waiting for its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.controller import Controller
from aiodaft._runtime.diagnostics.process_stack import is_answered
from aiodaft._runtime.node.worker import WorkerProcess
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError
from aiodaft.ref import Ref

__all__ = ["ActorInfo", "look_at"]


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """How an actor is doing.

    Attributes:
        name: What it is called in errors.
        class_name: Its class.
        names: Its names, given by `rt.name`.
        pid: Its process; 0 if that has ended.
        node: Its machine.
        gpus: Numbers of the GPUs of its process.
        alive: Whether it takes calls.
        suspect: Whether it has been silent for longer than its `Patience`: its process is stopped, or C code holds the
            interpreter.
        silent_for: Seconds since its process last gave a sign of life; 0 if it answers now.
        loop_lag: Seconds for which its process's event loop had not turned at the last look.
        running: The methods that run now, oldest first, at most 100.
        running_besides: The number of other running methods.
        queued: Calls that wait in its mailbox.
        done: Calls that have ended.
        abandoned: Calls that still run after they were cancelled, their deadline passed, or their caller died.
        stored_bytes: Bytes of results that its process stores for others.
        epoch: The number of its incarnation; each attempt to restart it takes the next.
        restarts: The number of successful restarts.
        last_error: What ended the previous incarnation, or made the last restart fail.
    """

    name: str
    class_name: str
    names: tuple[str, ...]
    pid: int
    node: str
    gpus: tuple[int, ...]
    alive: bool
    suspect: bool = False
    silent_for: float = 0.0
    loop_lag: float = 0.0
    running: tuple[str, ...] = ()
    running_besides: int = 0
    queued: int = 0
    done: int = 0
    abandoned: int = 0
    stored_bytes: int = 0
    epoch: int = 0
    restarts: int = 0
    last_error: BaseException | None = None


async def look_at(controller: Controller, target: Target, cls: type) -> ActorInfo:
    """Ask an actor's process how it is doing; if that does not answer within a second, its node."""
    node, node_name = controller.node, controller.options.process.node
    names = await controller.coordinator.names_of(*target.identity)
    child = controller.directory.find(target)
    before: WorkerProcess | None = await node.process_of(target.remote)
    report = None if before is None else await _report(controller, target)
    process = await node.process_of(target.remote)
    restarts: dict[str, Any] = {}
    if child is not None:
        restarts = {"epoch": child.epoch, "restarts": child.restarts, "last_error": child.last_error}
    if process is None:
        return ActorInfo(target.label, cls.__name__, names, 0, node_name, (), alive=False, **restarts)
    last = process.heartbeat
    known: dict[str, Any] = {"running": (last.last_method,)} if report == {} and last.last_method else {}
    return ActorInfo(
        name=target.label,
        class_name=cls.__name__,
        names=names,
        pid=process.pid,
        node=node_name,
        gpus=process.gpus,
        alive=report is not None,
        # An answer is newer than what the node knows.
        suspect=last.suspect and not report,
        silent_for=0.0 if report else last.silent_for,
        loop_lag=last.loop_lag,
        **(report or known),
        **restarts,
    )


async def _report(controller: Controller, target: Target) -> dict[str, Any] | None:
    """The report of its process; None if the actor is gone, nothing in it if the process did not answer in time."""
    report: Ref[dict[str, Any]] = controller.agent_of(target.remote).report(target.actor)
    if not await is_answered(report, controller.options.env.timeouts.report):
        return {}
    try:
        return await report
    except DaftError as error:
        logger.debug("%s is gone: %s", target.label, error)
        return None
