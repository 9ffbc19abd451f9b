"""The health of actors, without waiting for their calls, and the resources of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from aiodaft._protocol.calls.outgoing import NOWHERE
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.supervision import REACHABLE
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.diagnostics.process_view import ActorView, is_answered
from aiodaft._runtime.node.worker import WorkerProcess
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.ref import Ref

__all__ = ["ActorInfo", "NodeInfo", "in_process", "look_at", "look_at_node", "look_at_nodes"]

ANSWERING: Final = ("busy", "idle")


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """The state of an actor.

    Attributes:
        name: Its name in errors.
        class_name: Its class.
        names: Its names, given by `rt.name`.
        pid: Its process; None if that has ended, also while it is restarted.
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
        last_error: The end of the previous incarnation, or the error of the last restart. Of a dead actor: its death.
        process: The id of its process; "" if that has ended.
        failed: Calls, and steps of compiled graphs, that raised; not those that were cancelled or late.
        restarting: Whether it has no process now, and is being restarted.
    """

    name: str
    class_name: str
    names: tuple[str, ...]
    pid: int | None
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
    process: str = ""
    failed: int = 0
    restarting: bool = False

    @property
    def state(self) -> Literal["busy", "idle", "silent", "restarting", "dead"]:
        """Its state in one word: "busy" if a call runs; "silent" if its process does not answer."""
        if self.restarting:
            return "restarting"
        if not self.alive:
            return "dead"
        if self.suspect or self.silent_for:
            return "silent"
        return "busy" if self.running else "idle"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node, and its resources.

    Attributes:
        name: The name of the node; of a runtime of one machine, that of the host.
        labels: Its labels.
        state: "ready"; "draining" if it takes no new actors; "silent" if it does not answer.
        total: The amount of each resource, "cpus" and "gpus" among them.
        free: The free amount of each; nothing of a node that is silent.
        actors: The number of shares in use, each of an actor or a slice of a mesh; 0 of a node that is silent.
        address: The address at which it listens, such as "tcp://10.0.0.1:7777"; "" in a runtime of one machine.
    """

    name: str
    labels: Mapping[str, str]
    state: Literal["ready", "draining", "silent"]
    total: Mapping[str, float]
    free: Mapping[str, float] = field(default_factory=dict[str, float])
    actors: int = 0
    address: str = ""


async def look_at_nodes(controller: Owner, patience: float) -> tuple[NodeInfo, ...]:
    """Ask each node for its resources, by name; one that does not answer within `patience` seconds is silent."""
    await controller.ready()
    found = await asyncio.gather(*(look_at_node(controller, node, patience) for node in controller.nodes.members()))
    return tuple(info for info in found if info is not None)


async def look_at_node(controller: Owner, node: Member, patience: float) -> NodeInfo | None:
    """A node and its resources; None if it is not in the cluster any more."""
    info = NodeInfo(controller.nodes.name_of(node.peer), node.labels, "silent", node.totals, address=node.address)
    with suppress(OutcomeUnknown):
        asked = controller.nodes.named(node.name).state()
        if await is_answered(asked, patience):
            said = await asked
            state: Literal["ready", "draining"] = "draining" if said.draining else "ready"
            stock = said.stock
            return replace(info, state=state, total=stock.totals, free=stock.free, actors=said.actors)
    return info if controller.nodes.is_member(node.name) else None


async def look_at(controller: Owner, target: Target, cls: type) -> ActorInfo:
    """Ask an actor's process how it is doing; if that does not answer within a second, its node."""
    names: tuple[str, ...] = ()
    await controller.ready()
    named: Ref[tuple[str, ...]] = controller.coordinator.names_of(*target.identity)
    # The coordinator of a cluster may be silent, or gone for a while.
    if await is_answered(named, controller.process.env.timeouts.report):
        with suppress(OutcomeUnknown):
            names = await named
    child = controller.directory.find(target)
    if child is None and isinstance(target, FollowingTarget):
        with suppress(DaftError):
            target.move(await target.locate(wait=False))
    before = await _process(controller, target)
    report = None if before is None else await _report(controller, target)
    process = await _process(controller, target)
    node_name = controller.nodes.name_of(target.remote if child is None else child.place.peer)
    info = ActorInfo(target.label, cls.__name__, names, None, node_name, (), alive=report is not None)
    if child is not None:
        info = replace(info, epoch=child.epoch, restarts=child.restarts, last_error=child.last_error)
    if process is None:
        if child is None:
            return replace(info, alive=False, last_error=controller.directory.death_of(target))
        return replace(info, alive=False, restarting=child.state not in REACHABLE)
    view, stored_bytes = report or (None, 0)
    return in_process(info, process, view, stored_bytes)


def in_process(info: ActorInfo, process: WorkerProcess, view: ActorView | None, stored_bytes: int) -> ActorInfo:
    """Add the known facts about the process of an actor; `view` is None if that has not answered."""
    last = process.heartbeat
    info = replace(info, pid=process.pid, gpus=process.gpus, process=process.id, loop_lag=last.loop_lag)
    if view is not None:
        # An answer is newer than the node's knowledge.
        return replace(
            info,
            class_name=view.class_name,
            running=view.running,
            running_besides=view.running_besides,
            queued=view.queued,
            done=view.done,
            failed=view.failed,
            abandoned=view.abandoned,
            stored_bytes=stored_bytes,
        )
    running = (last.last_method,) if info.alive and last.last_method else ()
    return replace(info, suspect=last.suspect, silent_for=last.silent_for, running=running)


async def _process(controller: Owner, target: Target) -> WorkerProcess | None:
    """Its node's record of its process; None if the process, or the node, is gone."""
    if isinstance(target, FollowingTarget) and target.place.peer == NOWHERE:
        return None
    try:
        return await controller.nodes.of(target.remote).process_of(target.remote)
    except OutcomeUnknown as error:
        logger.debug("the node of %s is gone: %s", target.label, error)
        return None


async def _report(controller: Owner, target: Target) -> tuple[ActorView, int] | tuple[()] | None:
    """The report of its process; None if the actor is gone, empty if the process did not answer in time."""
    report: Ref[tuple[ActorView, int]] = controller.agent_of(target.remote).report(target.actor)
    if not await is_answered(report, controller.process.env.timeouts.report):
        return ()
    try:
        return await report
    except DaftError as error:
        logger.debug("%s is gone: %s", target.label, error)
        return None
