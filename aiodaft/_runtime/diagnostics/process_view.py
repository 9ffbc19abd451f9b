"""The part of one process in `rt.overview()`, from counters that exist: only failures are noted for it."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from aiodaft._protocol.diagnostics.failures import Failure
from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.platform.linux import resident_bytes

# Running calls of an actor, and stored values of a process, that are named.
_MAX_RUNNING: Final = 100
_MAX_STORED: Final = 20


@dataclass(frozen=True, slots=True)
class ActorView:
    """An actor, as its process sees it; see `ActorInfo`."""

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
        process: The process that stores it.
        owner: The process that has its ref.
        nbytes: Its size.
        on_device: Whether part of it is in memory of an accelerator.
        readers: The number of readers now.
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
    """One process. `clock` is its time, on the clock of the failures."""

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


class Viewer:
    def __init__(self, host: Host, connections: Connections, objects: Objects) -> None:
        self._host = host
        self._connections = connections
        self._objects = objects
        # The actors that this process owns and restarts, or that are dead.
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
