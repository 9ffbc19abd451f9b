"""Faults that a test makes: actors that are killed, stopped or slow, and connections that break."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.connections.connection import Connection, Handler
from aiodaft._runtime.node.local_node import LocalNode
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.linux import SEES_PROCESSES, is_stopped, status_of
from aiodaft._runtime.process import current_process
from aiodaft.actor import Actor, handle_of, target_of
from aiodaft.exceptions import ActorDied, DaftError
from aiodaft.methods import method
from aiodaft.runtime import Runtime
from aiodaft.testing.in_process import InProcessLauncher

# Calls, and messages about a call that is under way. Messages with descriptors are not among them.
_DELAYED: Final = (m.CALL, m.TELL, m.APPLY, m.SEND, m.FORWARD, m.CANCEL, m.CREDIT)


class Faults:
    """Makes faults of actors that the program of the test owns. Each method returns when the fault has happened.

    Args:
        nodes: The pids of the nodes of a cluster, for `kill_node`.
    """

    def __init__(self, nodes: Mapping[str, int] | None = None) -> None:
        self._nodes = nodes or {}
        self._stopped: set[int] = set()

    async def kill(self, actor: object) -> None:
        """Kill the process of an actor, as SIGKILL does: its calls under way have failed when this returns.

        The runtime takes it for an accident, so that the actor is restarted if it has a policy.

        Raises:
            ActorDied: It has no process.
        """
        runtime, target = _of(actor)
        remote = target.remote
        pid = await _pid_of(runtime, target)
        launcher = _launcher(runtime)
        if launcher is None:
            os.kill(pid, signal.SIGKILL)
        else:
            launcher.kill(launcher.workers[remote])
        self._stopped.discard(pid)
        await runtime._controller.nodes.of(remote).wait_end(remote)
        with suppress(DaftError):
            # Only its connection shows this process that it has ended.
            await runtime._controller.agent_of(remote).answer()

    async def stop(self, actor: object) -> None:
        """Stop the process of an actor, as SIGSTOP does: it takes calls, and answers none, until `resume`.

        Raises:
            ActorDied: It has no process.
            RuntimeError: It lives in the process of the test, which cannot be stopped.
        """
        runtime, target = _of(actor)
        if _launcher(runtime) is not None:
            raise RuntimeError(f"{target.label} lives in the process of the test: only one of `daft_cluster` can stop")
        pid = await _pid_of(runtime, target)
        self._stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        while SEES_PROCESSES and not is_stopped(pid) and status_of(pid) is None:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0)

    async def resume(self, actor: object) -> None:
        """Let a stopped process go on.

        Raises:
            ActorDied: It has no process any more.
        """
        self._resume(await _pid_of(*_of(actor)))

    def resume_all(self) -> None:
        """Let all processes go on that this has stopped. Idempotent."""
        for pid in list(self._stopped):
            self._resume(pid)

    def _resume(self, pid: int) -> None:
        self._stopped.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def delay(self, actor: object, seconds: float) -> None:
        """Have calls, and cancellations, reach the process of an actor so many seconds later, in order.

        Actors that share the process have the same delay. 0 ends it.

        Raises:
            ActorDied: The actor is gone.
            SpawnFailed: Another actor has spawned it.
        """
        await self._inside(actor, "delay", seconds)

    async def cut(self, actor: object, other: object | None = None) -> None:
        """Break the connection of an actor's process to that of another actor, or to the test.

        Calls that are under way over it fail with `PeerLost`. Between two machines a new connection is made for the
        next call; on one machine the connection stays cut, and a process that loses its controller ends.

        Raises:
            ActorDied: The actor is gone.
            SpawnFailed: Another actor has spawned it.
            ValueError: They are not connected: no call was made yet from one to the other.
        """
        runtime, target = _of(actor)
        if other is None:
            await _cut(runtime._controller.peer, target.remote)
        else:
            await self._inside(actor, "cut", _of(other)[1].remote)

    async def kill_node(self, name: str) -> None:
        """Kill a node of `daft_cluster`, with its actors.

        Raises:
            ValueError: There is none with this name.
        """
        if name not in self._nodes:
            has = f"it has {', '.join(self._nodes)}" if self._nodes else "mark the test with `daft(nodes=2)`"
            raise ValueError(f"`daft_cluster` has no node {name!r}: {has}")
        os.kill(self._nodes[name], signal.SIGKILL)

    async def _inside(self, actor: object, what: str, *args: object) -> None:
        """Do something in the process of an actor, by an actor that lives there meanwhile."""
        runtime, _ = _of(actor)
        async with runtime.on(with_=actor).spawn(_Inside) as inside:
            await getattr(inside, what)(*args)


class _Inside(Actor):
    @method
    async def delay(self, seconds: float) -> None:
        peer = current_process().part(Peer)
        delay = peer.process.find(_Delay)
        if delay is None:
            delay = _Delay(peer)
            peer.process.provide(_Delay, delay)
        delay.seconds = seconds

    @method
    async def cut(self, remote: str) -> None:
        await _cut(current_process().part(Peer), PeerId(remote))


class _Delay:
    """Hands calls to a process on some time after they have come."""

    def __init__(self, peer: Peer) -> None:
        self.seconds = 0.0
        self._loop = peer.process.loop
        # In the order in which they came, with any delays.
        self._held: deque[tuple[Handler, Connection, Message]] = deque()
        handlers = peer.connections.handlers
        for kind in _DELAYED:
            handlers[kind] = self._holding(handlers[kind])

    def _holding(self, handler: Handler) -> Handler:
        def hold(connection: Connection, message: Message) -> None:
            if not self.seconds and not self._held:
                handler(connection, message)
                return
            self._held.append((handler, connection, message))
            self._loop.call_later(self.seconds, self._hand_on)

        return hold

    def _hand_on(self) -> None:
        handler, connection, message = self._held.popleft()
        if connection.lost is None:
            handler(connection, message)


async def _cut(peer: Peer, remote: PeerId) -> None:
    connection = peer.connections.get(remote)
    if connection is None or connection._socket is None:
        raise ValueError(f"{peer.process.id} and {remote} are not connected")
    with socket.socket(fileno=os.dup(connection._socket.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    while connection.lost is None:  # noqa: ASYNC110 - the loop is about to read the end of it
        await asyncio.sleep(0)


def _of(actor: object) -> tuple[Runtime, Target]:
    target = cast("Target", target_of(handle_of(actor)))
    return target.caller.process.part(Runtime), target


def _launcher(runtime: Runtime) -> InProcessLauncher | None:
    site = runtime._opened.site
    launcher: Any = site.launcher if isinstance(site, LocalNode) else None
    return launcher if isinstance(launcher, InProcessLauncher) else None


async def _pid_of(runtime: Runtime, target: Target) -> int:
    process = await runtime._controller.nodes.of(target.remote).process_of(target.remote)
    if process is None or process.pid is None:
        raise ActorDied(f"{target.label} has no process any more", executed=False)
    return process.pid
