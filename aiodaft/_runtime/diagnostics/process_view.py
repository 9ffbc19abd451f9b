"""The part of one process in `rt.overview()`, from counters that exist: only failures are noted for it."""

from __future__ import annotations

import asyncio
import heapq
import linecache
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast

from aiodaft._protocol.calls.mailbox import FETCHING
from aiodaft._protocol.diagnostics.failures import Failure
from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.diagnostics.await_chains import Frames, frames_of, is_ours, stack_of, users_line, wait_of_task
from aiodaft._runtime.diagnostics.wait_graph import WaitGraph, frames_on_thread
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.platform.linux import resident_bytes
from aiodaft.ref import Ref
from aiodaft.stack import CallStack, Frame, ProcessStack, TaskStack, ThreadStack

_MAX_RUNNING: Final = 100
_MAX_STORED: Final = 20


@dataclass(frozen=True, slots=True)
class ActorView:
    name: str
    class_name: str
    running: tuple[str, ...]
    running_besides: int
    queued: int
    done: int
    failed: int
    abandoned: int


@dataclass(frozen=True, slots=True)
class ChildView:
    """A supervised or dead actor, as its owner sees it; `peer` is the process of the current or last incarnation."""

    peer: PeerId
    label: str
    class_name: str
    state: Literal["up", "restarting", "dead"]
    epoch: int
    restarts: int
    # Encoded: another process may not be able to rebuild it.
    last_error: bytes | None


@dataclass(frozen=True, slots=True)
class StoredInfo:
    """A large value that a process stores for others.

    Attributes:
        label: The call that made it, such as "Model.execute"; "put"; "" for a copy that is passed on to others.
        owner: The process that has its ref.
    """

    label: str
    process: str
    owner: str
    nbytes: int
    on_device: bool
    readers: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The traffic of a process with another one; `calls` have ended."""

    remote: PeerId
    calls: int
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class ProcessView:
    id: PeerId
    pid: int
    owner: PeerId
    clock: float
    rss: int
    cpu_seconds: float
    threads: int
    stored_bytes: int
    stored_values: int
    blocks: int
    pooled_bytes: int
    traffic: Traffic
    actors: tuple[ActorView, ...]
    children: tuple[ChildView, ...]
    sent: tuple[Sent, ...]
    stored: tuple[StoredInfo, ...]
    failures: tuple[Failure, ...]
    deaths: tuple[tuple[str, int], ...]
    late: tuple[str, ...]


class Viewer:
    def __init__(self, host: Host, connections: Connections, objects: Objects) -> None:
        self._host = host
        self._connections = connections
        self._objects = objects
        self.supervised: Callable[[], Sequence[ChildView]] = lambda: ()

    def look(self) -> ProcessView:
        process, store = self._host.process, self._objects.store
        stored = self._stored()
        pools = [pool for transport in list(store.transports.values()) for pool in transport.pools()]
        return ProcessView(
            id=process.id,
            pid=process.pid,
            owner=process.options.owner,
            clock=process.env.monotonic(),
            rss=resident_bytes(),
            cpu_seconds=time.process_time(),
            threads=threading.active_count(),
            stored_bytes=sum(one.size for _, one in stored),
            stored_values=len(stored),
            blocks=sum(pool.live_blocks() for pool in pools),
            pooled_bytes=sum(pool.idle_bytes() for pool in pools),
            traffic=self._connections.traffic(),
            actors=tuple(map(look_at_actor, filter(_is_users, self._host.actors.values()))),
            children=tuple(self.supervised()),
            sent=tuple(
                Sent(remote, connection.session.answers, connection.traffic_so_far())
                for remote, connection in self._connections.items()
                if connection.is_up
            ),
            stored=tuple(map(self._stored_info, heapq.nlargest(_MAX_STORED, stored, key=lambda one: one[1].size))),
            failures=tuple(process.failures),
            deaths=tuple(process.failures.deaths.items()),
            late=process.part(Watchdog).late(),
        )

    def _stored(self) -> list[tuple[PeerId, StoredValue]]:
        objects = self._objects
        kept = [(owner, stored) for (owner, _), stored in objects.store.entries.items()]
        return kept + [(self._host.process.id, stored) for stored in objects.refs.put_values()]

    def _stored_info(self, kept: tuple[PeerId, StoredValue]) -> StoredInfo:
        owner, stored = kept
        blobs = stored.blobs()
        return StoredInfo(
            label=stored.label,
            process=self._host.process.id,
            owner=owner,
            nbytes=stored.size,
            on_device=any(on_device for _, on_device in blobs),
            readers=sum(block.grants for block, _ in blobs),
        )


def look_at_actor(hosted: HostedActor) -> ActorView:
    calls = hosted.under_way()
    begun = [call.label for call in calls if call.begun]
    return ActorView(
        name=hosted.name,
        class_name=type(hosted.instance).__name__,
        running=tuple(begun[:_MAX_RUNNING]),
        running_besides=len(begun[_MAX_RUNNING:]),
        # Calls of `def` methods wait for the actor's thread, also after they were cancelled and answered.
        queued=hosted.mailbox.queued + sum(not (call.begun or call.answered) for call in calls),
        done=hosted.done,
        failed=hosted.failed,
        abandoned=len(hosted.abandoned),
    )


def class_in(label: str) -> str:
    return label.partition("-")[0]


def _is_users(hosted: HostedActor) -> bool:
    return hosted.id >= FIRST_USER_ACTOR


T = TypeVar("T")


def stack_here(waits: WaitGraph) -> ProcessStack:
    calls = [call for call in waits.host.calls() if call.hosted.id >= FIRST_USER_ACTOR]
    calls.sort(key=lambda call: not call.begun)
    of_calls = {task for call in calls for task in (call.task, call.wait)}
    tasks = [task for task in asyncio.all_tasks(waits.process.loop) if task not in of_calls]
    return ProcessStack(
        id=waits.process.id,
        pid=waits.process.pid,
        actors=tuple(hosted.name for hosted in waits.host.actors.values() if hosted.id >= FIRST_USER_ACTOR),
        calls=tuple(_call(waits, call) for call in calls),
        threads=tuple(_threads()),
        tasks=tuple(_task(waits, task) for task in sorted(tasks, key=asyncio.Task.get_name) if _runs_users_code(task)),
        collectives=waits.process.part(Watchdog).open(),
    )


def _call(waits: WaitGraph, call: InboundCall) -> CallStack:
    state = "running" if call.begun else "needs arguments" if call.stage is FETCHING else "queued"
    seconds = waits.process.env.monotonic() - call.since if call.begun else None
    on_thread = call.task is None or call.rules.on_thread or call.step is not None
    frames = frames_on_thread(call) if on_thread else frames_of(cast("asyncio.Task[Any]", call.task).get_coro())
    waits_for = tuple(waits.name_of(at) for at in waits.wait_of(call).calls)
    return CallStack(call.hosted.name, call.label, call.caller, state, seconds, waits_for, _frames(frames))


def _task(waits: WaitGraph, task: asyncio.Task[object]) -> TaskStack:
    waits_for = tuple(waits.name_of(at) for at in wait_of_task(task).calls)
    return TaskStack(task.get_name(), waits_for, _frames(frames_of(task.get_coro())))


def _threads() -> list[ThreadStack]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # This thread makes the list; its tasks are listed by themselves.
    own = threading.get_ident()
    stacks = {ident: stack_of(frame) for ident, frame in sys._current_frames().items() if ident != own}
    return [
        ThreadStack(names.get(ident, str(ident)), _frames(frames))
        for ident, frames in stacks.items()
        if users_line(frames) or not any(map(is_ours, frames))
    ]


def _runs_users_code(task: asyncio.Task[object]) -> bool:
    return bool(users_line(frames_of(task.get_coro())))


def _frames(frames: Frames) -> tuple[Frame, ...]:
    shown = [frame for frame in frames if not is_ours(frame)] or frames
    found = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in shown]
    return tuple(Frame(file, line, name, linecache.getline(file, line).strip()) for file, line, name in found)


async def answer_to(question: Awaitable[T], patience: float) -> T:
    """The answer of another process to a question, which is a ref.

    Raises:
        DaftError: The process has ended.
        TimeoutError: There is no answer in time.

    Cancellation: the question is cancelled.
    """
    if not await is_answered(cast("Ref[T]", question), patience):
        raise TimeoutError
    async with asyncio.timeout(patience):
        return await question


async def is_answered(question: Ref[Any], patience: float) -> bool:
    """Wait for an answer; True if there is one, or an error. A question without an answer in time is cancelled.

    Cancellation: the question is cancelled, and its error counts as seen.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                # Awaiting the ref itself would wait for the cleanup after a cancellation.
                await question.ready()
        return question.done()
    finally:
        state_of(question).mark_seen()
        question.cancel()
