"""One look at a whole runtime, and the changes between two of them: the results of `rt.overview()`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal

from aiodaft._protocol.diagnostics.failures import Cause, Failure
from aiodaft._protocol.numbers import amount, count
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.diagnostics.process_view import StoredInfo
from aiodaft.causes import message_of
from aiodaft.html import Branch, page, table, tree
from aiodaft.info import ActorInfo, NodeInfo

__all__ = [
    "ActorRate",
    "Cause",
    "Failure",
    "Flow",
    "FlowRate",
    "Overview",
    "ProcessInfo",
    "ProcessRate",
    "Rates",
    "StoredInfo",
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
