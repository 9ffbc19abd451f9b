"""Looks at all processes of a runtime, each once, at the same time; and the answers to `aiodaft ps` and others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from heapq import nlargest
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from aiodaft._protocol.coordination.records import Member, NamedActor
from aiodaft._protocol.diagnostics.failures import Failure, by_cause
from aiodaft._protocol.ids import PeerId, is_node, is_worker
from aiodaft._protocol.node.worker import LastHeartbeat
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.diagnostics.attach import Answers
from aiodaft._runtime.diagnostics.process_view import ChildView, ProcessView, Viewer, answer_to, class_in
from aiodaft._runtime.logs.console import Recent, Said
from aiodaft._runtime.node.worker import WorkerProcess
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.serialization.errors import decode_error
from aiodaft.exceptions import DaftError
from aiodaft.overview import ActorInfo, Flow, NodeInfo, Overview, ProcessInfo, in_process, look_at_node
from aiodaft.tracing import Trace

__all__ = ["answers", "look_over", "overviews"]

# Stored values and failures that an overview has.
_MAX_STORED: Final = 100
_MAX_FAILURES: Final = 200
_ROLES: Final = ("controller", "node", "worker")

Role: TypeAlias = Literal["controller", "node", "worker"]


class Seen(NamedTuple):
    """A process: its node's record of it, and its own report; None if it did not answer in time."""

    process: WorkerProcess
    view: ProcessView | None

    @property
    def actors(self) -> tuple[str, ...]:
        """The names of its actors."""
        return self.process.actors if self.view is None else tuple(actor.name for actor in self.view.actors)


async def look_over(owner: Owner, patience: float) -> Overview:
    """One look at a runtime. Each process gets `patience` seconds, or the rest of them that its node leaves."""
    await owner.ready()
    survey = _Survey(owner, patience)
    taken, clock = time.time(), owner.process.env.monotonic()
    names, nodes = await asyncio.gather(survey.names(), survey.nodes())
    seen = sorted(survey.seen, key=lambda one: _order(one, owner.nodes.name_of(one.process.id)))
    views = [one.view for one in seen if one.view is not None]
    stored = chain.from_iterable(view.stored for view in views)
    failures = chain.from_iterable(_dated(view, taken) for view in views)
    return Overview(
        taken=taken,
        clock=clock,
        runtime=owner.process.id,
        nodes=nodes,
        processes=tuple(_process_info(one, owner.nodes.name_of(one.process.id)) for one in seen),
        actors=tuple(_actors(owner, seen, names)),
        flows=tuple(_flows(views)),
        stored=tuple(nlargest(_MAX_STORED, stored, key=lambda one: one.nbytes)),
        failures=by_cause(nlargest(_MAX_FAILURES, failures, key=lambda failure: failure.last)),
    )


class _Survey:
    """The questions of one look, and the answers."""

    def __init__(self, owner: Owner, patience: float) -> None:
        self._owner = owner
        self._until = owner.process.env.monotonic() + patience
        own = owner.process.part(Viewer).look()
        # The reports of processes, None if they have not answered in time; and the nodes' records of their processes.
        self._views: dict[PeerId, ProcessView | None] = {own.id: own}
        self._asked = {own.id}
        self._known: dict[PeerId, WorkerProcess] = {}

    @property
    def seen(self) -> list[Seen]:
        """The processes, without those that have ended."""
        return [Seen(self._known.get(peer) or _unknown(peer, view), view) for peer, view in self._views.items()]

    @property
    def _left(self) -> float:
        return max(0.0, self._until - self._owner.process.env.monotonic())

    async def names(self) -> tuple[NamedActor, ...]:
        """The actors with names; none if the coordinator does not answer."""
        with suppress(DaftError, TimeoutError):
            return await answer_to(self._owner.coordinator.names(""), self._left)
        return ()

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes, by name; looks at all processes as well."""
        members = self._owner.nodes.members()
        # The workers to which this process is connected may answer also if their nodes do not.
        near = [peer for peer, there in self._owner.connections.items() if there.is_up and is_worker(peer)]
        async with asyncio.TaskGroup() as group:
            infos = [group.create_task(look_at_node(self._owner, member, self._left)) for member in members]
            for peer in (*near, *(member.peer for member in members)):
                self._ask(group, peer)
            for member in members:
                group.create_task(self._ask_workers_of(group, member))
        return tuple(info for task in infos if (info := task.result()) is not None)

    async def _ask_workers_of(self, group: asyncio.TaskGroup, member: Member) -> None:
        with suppress(DaftError, TimeoutError):
            for process in await answer_to(self._owner.nodes.named(member.name).processes(), self._left):
                self._known[process.id] = process
                self._ask(group, process.id)

    def _ask(self, group: asyncio.TaskGroup, peer: PeerId) -> None:
        if peer not in self._asked:
            self._asked.add(peer)
            group.create_task(self._look_at(peer))

    async def _look_at(self, peer: PeerId) -> None:
        # One that has ended is left out.
        with suppress(DaftError):
            try:
                self._views[peer] = await answer_to(self._owner.agent_of(peer).look(), self._left)
            except TimeoutError:
                self._views[peer] = None


def _unknown(peer: PeerId, view: ProcessView | None) -> WorkerProcess:
    """A process that no node has reported, with its own report."""
    pid, owner = (None, PeerId("")) if view is None else (view.pid, view.owner)
    return WorkerProcess(peer, pid, owner, (), (), LastHeartbeat())


def _role(peer: PeerId) -> Role:
    return "worker" if is_worker(peer) else "node" if is_node(peer) else "controller"


def _order(seen: Seen, node: str) -> tuple[object, ...]:
    peer = seen.process.id
    return _ROLES.index(_role(peer)), node, seen.actors, peer


def _dated(view: ProcessView, taken: float) -> Iterator[Failure]:
    ahead = taken - view.clock
    return (replace(failure, first=failure.first + ahead, last=failure.last + ahead) for failure in view.failures)


def _process_info(seen: Seen, node: str) -> ProcessInfo:
    process, view = seen
    last, role = process.heartbeat, _role(process.id)
    known = process.id, process.pid, node, role, process.owner, seen.actors, process.gpus
    info = ProcessInfo(*known, loop_lag=last.loop_lag)
    if view is None:
        return replace(info, suspect=last.suspect, silent_for=last.silent_for)
    return replace(
        info,
        answered=True,
        rss=view.rss,
        cpu_seconds=view.cpu_seconds,
        threads=view.threads,
        stored_bytes=view.stored_bytes,
        stored_values=view.stored_values,
        blocks=view.blocks,
        pooled_bytes=view.pooled_bytes,
        traffic=view.traffic,
        deaths=view.deaths,
        late=view.late,
    )


def _actors(owner: Owner, seen: Iterable[Seen], names: Iterable[NamedActor]) -> Iterator[ActorInfo]:
    """The actors in processes, then those that have none: they are being restarted, or dead."""
    named: dict[tuple[PeerId, str], tuple[str, ...]] = {}
    for one in names:
        named[one.peer, one.label] = (*named.get((one.peer, one.label), ()), one.name)
    # The owner of a supervised actor has its name. One that counts as dead may have been only out of reach.
    children = {
        (child.peer, child.label): (child, named.get((view.id, child.label), ()))
        for _, view in seen
        if view is not None
        for child in view.children
    }
    for process, view in seen:
        views = dict.fromkeys(process.actors) if view is None else {one.name: one for one in view.actors}
        for label, actor in views.items():
            child, child_names = children.pop((process.id, label), (None, ()))
            own_names = child_names or named.get((process.id, label), ())
            info = ActorInfo(label, class_in(label), own_names, None, owner.nodes.name_of(process.id), (), alive=True)
            info = in_process(info, process, actor, 0 if view is None else view.stored_bytes)
            yield info if child is None or child.state == "dead" else _with_restarts(info, child)
    for (peer, label), (child, child_names) in children.items():
        if child.state != "up":
            info = ActorInfo(label, "", child_names, None, owner.nodes.name_of(peer), (), alive=False)
            yield _with_restarts(replace(info, restarting=child.state == "restarting"), child)


def _with_restarts(info: ActorInfo, child: ChildView) -> ActorInfo:
    return replace(
        info,
        class_name=child.class_name,
        epoch=child.epoch,
        restarts=child.restarts,
        last_error=None if child.last_error is None else decode_error(child.last_error),
    )


def _flows(views: Iterable[ProcessView]) -> Iterator[Flow]:
    """The traffic from process to process, as the sender has counted; if it has not told, as the receiver has."""
    told = {view.id for view in views}
    for view in views:
        for one in view.sent:
            yield _flow(view.id, one.remote, one.calls, one.traffic)
            if one.remote not in told:
                yield _flow(one.remote, view.id, 0, _reversed(one.traffic))


def _flow(source: str, target: str, calls: int, traffic: Traffic) -> Flow:
    return Flow(
        source, target, calls, traffic.messages_sent, traffic.control_sent, traffic.payload_sent, traffic.device_sent
    )


def _reversed(traffic: Traffic) -> Traffic:
    return Traffic(
        messages_sent=traffic.messages_received,
        control_sent=traffic.control_received,
        payload_sent=traffic.payload_received,
        device_sent=traffic.device_received,
    )


# Seconds that a process gets to answer the program.
_PATIENCE: Final = 1.0
_TRACE_PATIENCE: Final = 5.0


def answers(owner: Owner) -> Answers:
    """The answers of one runtime, by the names of the questions."""
    return {
        "overview": partial(overviews, owner),
        "logs": partial(_logs, owner),
        "stack": partial(_stack, owner),
        "trace": partial(_trace, owner),
        "kill": partial(_kill, owner),
    }


async def overviews(owner: Owner, *, interval: float | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """Overviews as plain data, `interval` seconds apart, with `rates` from the second one on; without it, just one."""
    earlier = None
    while True:
        now = await look_over(owner, _PATIENCE)
        yield {**now.as_dict(), **({} if earlier is None else {"rates": now.rates(earlier).as_dict()})}
        if interval is None:
            return
        earlier = now
        await asyncio.sleep(interval)


async def _logs(owner: Owner, *, actor: str | None, last: int, follow: bool) -> AsyncGenerator[Any, None]:
    """The last lines and records of one actor or all, then new ones.

    Each is a JSON object as text. A number says how many are left out.
    """
    process, news, recent = owner.process, asyncio.Event(), owner.process.part(Recent)

    def of_actor(said: Iterable[Said]) -> list[Said]:
        return [one for one in said if actor is None or one.is_of(actor)]

    kept, follower = recent.follow(lambda: process.call_soon(news.set))
    try:
        wanted = of_actor(kept)
        for one in wanted[max(0, len(wanted) - last) :]:
            yield one.as_json()
        while follow:
            await news.wait()
            news.clear()
            said, dropped = follower.take()
            for one in of_actor(said):
                yield one.as_json()
            if dropped:
                yield dropped
    finally:
        recent.leave(follower)


async def _stack(owner: Owner, *, as_json: bool) -> AsyncGenerator[Any, None]:
    stack = await owner.stack(_PATIENCE)
    yield asdict(stack) if as_json else str(stack)


async def _trace(owner: Owner, path: str, seconds: float, limit: int) -> AsyncGenerator[Any, None]:
    async with Trace(owner, path, limit, _TRACE_PATIENCE) as trace:
        # It records.
        yield None  # noqa: ASYNC119 - the asker closes this
        await asyncio.sleep(seconds)
    yield {"path": trace.path, "left_out": trace.left_out, "dropped": trace.dropped}


async def _kill(owner: Owner, process: str) -> AsyncGenerator[Any, None]:
    await owner.nodes.kill(PeerId(process), "killed by `aiodaft kill`")
    yield None
