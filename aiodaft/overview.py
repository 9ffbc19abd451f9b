"""Looks at actors, nodes and a whole runtime, without waiting for calls, and the changes between two of the latter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Literal

from aiodaft._protocol.calls.outgoing import NOWHERE
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.diagnostics.failures import Cause, Failure
from aiodaft._protocol.ids import node_of
from aiodaft._protocol.numbers import amount, count
from aiodaft._protocol.supervision import REACHABLE
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.diagnostics.process_view import ActorView, StoredInfo, is_answered
from aiodaft._runtime.node.worker import WorkerProcess
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.platform.tasks import logger
from aiodaft.causes import message_of
from aiodaft.exceptions import DaftError, OutcomeUnknown, PeerLost
from aiodaft.html import Branch, page, table, tree
from aiodaft.ref import Ref

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
    for _ in range(2):
        try:
            return await controller.nodes.of(target.remote).process_of(target.remote)
        except OutcomeUnknown as error:
            logger.debug("the node of %s does not answer: %s", target.label, error)
            if not controller.nodes.is_member(node_of(target.remote)):
                return None
        # The connection to it was reset: the next question makes another one.
    return None


async def _report(controller: Owner, target: Target) -> tuple[ActorView, int] | tuple[()] | None:
    """The report of its process; None if the actor is gone, empty if the process did not answer in time."""
    for _ in range(2):
        report: Ref[tuple[ActorView, int]] = controller.agent_of(target.remote).report(target.actor)
        if not await is_answered(report, controller.process.env.timeouts.report):
            break
        try:
            return await report
        except PeerLost as error:
            # The connection was reset, perhaps: the next question makes another one, and its node knows of a death.
            logger.debug("%s is out of reach: %s", target.label, error)
        except DaftError as error:
            logger.debug("%s is gone: %s", target.label, error)
            return None
    return ()


__all__ = [
    "ActorInfo",
    "ActorRate",
    "Cause",
    "Failure",
    "Flow",
    "FlowRate",
    "NodeInfo",
    "Overview",
    "ProcessInfo",
    "ProcessRate",
    "Rates",
    "StoredInfo",
    "in_process",
    "look_at",
    "look_at_node",
    "look_at_nodes",
]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The state of a process.

    Attributes:
        id: Its id in the runtime.
        pid: Its pid; None if it has not started yet, or is not known.
        node: The name of its node.
        role: "controller": it has opened a runtime. "node": it serves a machine of a cluster. "worker": it has actors.
        owner: The id of the process that owns its actors.
        actors: The names of its actors.
        gpus: The numbers of its GPUs.
        answered: Whether it answered in time. If not, all that follows but `suspect`, `silent_for` and `loop_lag` is 0.
        suspect: Whether it has been silent for longer than its `Patience`.
        silent_for: Seconds since its last sign of life; 0 if it answered.
        loop_lag: Seconds for which its event loop had not turned at the last look of its node.
        rss: Bytes of memory that it has in RAM, with those that it shares with others.
        cpu_seconds: Seconds for which its threads have used a CPU.
        threads: The number of its Python threads.
        stored_bytes: Bytes of values that it stores for others.
        stored_values: The number of these values.
        blocks: The number of blocks of its pools of memory that are in use.
        pooled_bytes: Bytes of its pools that are kept for values to come.
        traffic: The traffic that it sent and received.
        deaths: Of a node or controller, the number of processes of actors that ended by accident there, by the class of
            their first actor.
        late: The collectives that members are late for, with their ranks: of groups whose members meet at one of its
            actors, and those on refs that it has issued.
    """

    id: str
    pid: int | None
    node: str
    role: Literal["controller", "node", "worker"]
    owner: str
    actors: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    answered: bool = False
    suspect: bool = False
    silent_for: float = 0.0
    loop_lag: float = 0.0
    rss: int = 0
    cpu_seconds: float = 0.0
    threads: int = 0
    stored_bytes: int = 0
    stored_values: int = 0
    blocks: int = 0
    pooled_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    deaths: tuple[tuple[str, int], ...] = ()
    late: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The names of its actors, or a name for another kind of process."""
        if self.actors:
            return " and ".join(self.actors)
        return {"controller": "the controller", "node": f"node {self.node}", "worker": self.id}[self.role]


@dataclass(frozen=True, slots=True)
class Flow:
    """The traffic from one process to another one, since they were connected.

    Attributes:
        source: The id of the process that sends.
        target: The id of the process that receives.
        calls: Calls of `source` to actors in `target` that have ended.
        messages: Control messages: calls, answers, and messages that keep values alive.
        control_bytes: Bytes of these, with the small values inside them.
        payload_bytes: Bytes of large values.
        device_bytes: Bytes of `payload_bytes` that go from GPU to GPU.
    """

    source: str
    target: str
    calls: int
    messages: int
    control_bytes: int
    payload_bytes: int
    device_bytes: int

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.control_bytes + self.payload_bytes


_NO_FLOW: Final = Flow("", "", 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ActorRate:
    """The work of an actor per second.

    Attributes:
        calls: Calls that ended.
        failed: Calls, and steps of compiled graphs, that raised; not those that were cancelled or late.
    """

    calls: float
    failed: float


@dataclass(frozen=True, slots=True)
class ProcessRate:
    """The work of a process per second.

    Attributes:
        cpu: Seconds for which its threads used a CPU: 1.0 is one CPU.
        sent: Bytes sent to other processes.
        received: Bytes received from them.
    """

    cpu: float
    sent: float
    received: float


@dataclass(frozen=True, slots=True)
class FlowRate:
    """The traffic from one process to another one per second.

    Attributes:
        calls: Calls that ended.
        bytes: Bytes of messages and of large values.
        payload_bytes: Bytes of large values.
    """

    calls: float
    bytes: float
    payload_bytes: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The changes per second between two overviews, of the objects that were there, and answered, both times.

    Attributes:
        seconds: The time between them.
        actors: By the names of actors.
        processes: By the ids of processes.
        flows: By the ids of the sending and the receiving process.
    """

    seconds: float
    actors: Mapping[str, ActorRate]
    processes: Mapping[str, ProcessRate]
    flows: Mapping[tuple[str, str], FlowRate]

    def as_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and numbers; each flow has its `source` and `target`."""
        flows = [{"source": source, "target": target, **_plain(flow)} for (source, target), flow in self.flows.items()]
        totals = {"seconds": self.seconds, "calls": self.calls, "bytes": self.bytes}
        return {**totals, "actors": _plain(self.actors), "processes": _plain(self.processes), "flows": flows}

    @property
    def calls(self) -> float:
        """Calls that ended, of all actors."""
        return sum(actor.calls for actor in self.actors.values())

    @property
    def bytes(self) -> float:
        """Bytes that all processes sent to each other."""
        return sum(flow.bytes for flow in self.flows.values())


@dataclass(frozen=True, slots=True)
class Overview:
    """One look at a runtime.

    Counters only grow, as long as the process, or the connection of two processes, is the same.

    Attributes:
        taken: When it was taken, in seconds since the epoch.
        clock: The same on a clock that never jumps.
        runtime: The id of the process that has asked.
        nodes: The nodes, by name.
        processes: The processes: controllers, nodes, workers.
        actors: The actors, in the order of their processes; then those that are being restarted.
        flows: The traffic between processes.
        stored: The largest values that processes store for others, the largest first; at most 100.
        failures: The last failures, at most 200: those that no other one led to, the newest first.
    """

    taken: float
    clock: float
    runtime: str
    nodes: tuple[NodeInfo, ...]
    processes: tuple[ProcessInfo, ...]
    actors: tuple[ActorInfo, ...]
    flows: tuple[Flow, ...]
    stored: tuple[StoredInfo, ...]
    failures: tuple[Failure, ...]

    @property
    def silent(self) -> tuple[ProcessInfo, ...]:
        """The processes that did not answer in time."""
        return tuple(process for process in self.processes if not process.answered)

    def title(self, process: str) -> str:
        """The name of a process for people: the names of its actors, or "the controller"; its id if it is not known."""
        return next((one.title for one in self.processes if one.id == process), process)

    def __repr__(self) -> str:
        found = [count(len(self.nodes), "node"), count(len(self.processes), "process", "processes")]
        found += [count(len(self.actors), "actor"), count(len(self.failures), "failure")]
        return f"<Overview of {self.runtime}: {', '.join(found)}>"

    def _repr_html_(self) -> str:
        nodes = [(one.name, one.state, one.actors, _used("cpus", one), _used("gpus", one)) for one in self.nodes]
        actors = [
            (one.name, one.class_name, one.state, ", ".join(one.running), one.queued, one.done, one.failed, one.node)
            for one in self.actors
        ]
        processes = [
            (one.title, one.pid or "", one.node, amount(one.rss), amount(one.stored_bytes)) for one in self.processes
        ]
        return page(
            f"Runtime {self.runtime}",
            table(["node", "state", "actors", "CPUs used", "GPUs used"], nodes),
            table(["actor", "class", "state", "runs", "waiting", "ended", "failed", "node"], actors),
            table(["process of", "pid", "node", "memory", "stored"], processes),
            tree(list(map(_branch, self.failures))),
        )

    def rates(self, earlier: Overview) -> Rates:
        """The changes per second since an earlier overview of the same runtime."""
        seconds = self.clock - earlier.clock

        def grown(now: float, before: float) -> float:
            # A new connection counts from 0.
            return max(0.0, now - before) / seconds if seconds > 0 else 0.0

        known = {one.id: one for one in earlier.processes if one.answered}
        processes = {one.id: (one, known[one.id]) for one in self.processes if one.answered and one.id in known}
        actors = {(one.process, one.name): one for one in earlier.actors if one.process in processes}
        flows = {(one.source, one.target): one for one in earlier.flows}
        return Rates(
            seconds,
            {
                now.name: ActorRate(grown(now.done, before.done), grown(now.failed, before.failed))
                for now in self.actors
                if (before := actors.get((now.process, now.name))) is not None
            },
            {
                process: ProcessRate(
                    grown(now.cpu_seconds, before.cpu_seconds),
                    grown(_sent(now.traffic), _sent(before.traffic)),
                    grown(_received(now.traffic), _received(before.traffic)),
                )
                for process, (now, before) in processes.items()
            },
            {
                (now.source, now.target): FlowRate(
                    grown(now.calls, past.calls),
                    grown(now.bytes, past.bytes),
                    grown(now.payload_bytes, past.payload_bytes),
                )
                for now in self.flows
                # The first one of a process that had answered began in between.
                if (past := flows.get((now.source, now.target), _NO_FLOW if now.source in processes else None))
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and numbers; an exception is a dict with its `type` and `message`."""
        found: dict[str, Any] = _plain(self)
        for plain, actor in zip(found["actors"], self.actors, strict=True):
            plain["state"] = actor.state
        for plain, process in zip(found["processes"], self.processes, strict=True):
            plain["title"] = process.title
        return found

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(), indent=indent)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return list(map(_plain, value))
    if isinstance(value, BaseException):
        return {"type": type(value).__name__, "message": message_of(value)}
    return value


def _used(resource: str, node: NodeInfo) -> str:
    total = node.total.get(resource, 0)
    return f"{total - node.free.get(resource, 0):g} of {total:g}" if total else ""


def _branch(failure: Failure) -> Branch:
    where = f"{failure.method} of {failure.actor}" if failure.method else failure.actor
    times = f", {failure.times} times" if failure.times > 1 else ""
    line = f" at {failure.line}" if failure.line else ""
    return Branch(f"{failure.error} ({where}{line}{times})", list(map(_branch, failure.followed)))


def _sent(traffic: Traffic) -> int:
    return traffic.control_sent + traffic.payload_sent


def _received(traffic: Traffic) -> int:
    return traffic.control_received + traffic.payload_received
