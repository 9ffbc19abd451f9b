"""The drain of a node: nothing new comes, its actors move or are ended, then the node leaves its cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

from aiodaft._protocol.ids import PeerId, node_of
from aiodaft._protocol.node.resources import Resources
from aiodaft._protocol.node.worker import Drain, DrainState, WorkerState, describe
from aiodaft._runtime.node.worker import Tenant, Worker
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft.exceptions import ActorDied, DaftError


class Draining:
    """Drains one node.

    Args:
        restartable: Its actors that may be restarted, also those without a process.
    """

    def __init__(
        self,
        process: Process,
        resources: Resources[Tenant],
        workers: Mapping[PeerId, Worker],
        restartable: Iterable[Tenant],
        end: Callable[[Worker, str], Awaitable[object]],
    ) -> None:
        self._process = process
        self._clock = process.env.monotonic
        self._resources = resources
        self._workers = workers
        self._restartable = restartable
        self._end = end
        # Tells an owner that this node is being drained, and how many seconds its actors have.
        self.tell: Callable[[PeerId, PeerId, float], object] = lambda owner, node, grace: None
        self._drain = Drain()
        self._changed = asyncio.Event()
        self.over = asyncio.Event()
        # Waits until the values of a process are not needed any more. Raises DaftError if it ends.
        self.unneeded: Callable[[PeerId], Awaitable[object]]
        # Called when no process is left.
        self.on_over: Callable[[], object] = lambda: None

    @property
    def begun(self) -> bool:
        return self._drain.begun

    @property
    def _name(self) -> str:
        return node_of(self._process.id)

    def begin(self, grace: float) -> None:
        first = not self.begun
        self._drain.begin(grace, self._clock())
        self.note()
        if first:
            logger.info("node %s is being drained, within %g s", self._name, grace)
            self._resources.refusal = f"node {self._name!r} is being drained"
            self._process.tasks.create_task(self._run(), name="drain the node")
        for owner in {worker.owner for worker in self._workers.values()} | {one.owner for one in self._restartable}:
            self.tell(owner, self._process.id, grace)

    def note(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def left(self) -> tuple[str, ...]:
        return tuple(
            describe(list(worker.actors.values()), worker.names, worker.pid, worker.owner)
            for worker in self._workers.values()
        )

    async def wait_other(self, known: Iterable[str]) -> tuple[str, ...]:
        seen = tuple(known)
        while (left := self.left()) == seen:
            await self._changed.wait()
        return left

    async def wait_unneeded(self, worker: PeerId) -> None:
        """Wait until the values of a process are not needed any more, at most for the grace."""
        with suppress(TimeoutError, DaftError):
            async with asyncio.timeout(self._drain.left(self._clock())):
                await self.unneeded(worker)

    async def _run(self) -> None:
        while (state := self._drain.step(len(self._workers), self._clock())) is not DrainState.OVER:
            changed = self._changed
            if state is DrainState.EVICTING:
                await asyncio.gather(*(self._evict(worker) for worker in list(self._workers.values())))
                # Its owners and callers ask why, before the node is gone.
                await asyncio.sleep(2 * self._process.env.timeouts.blame)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain.left(self._clock())):
                    await changed.wait()
        logger.info("node %s is drained", self._name)
        self.over.set()
        # Callers that wait for that have their answer first.
        await asyncio.sleep(self._process.env.timeouts.blame)
        self.on_over()

    async def _evict(self, worker: Worker) -> None:
        reason = f"its node {self._name!r} was drained, and the grace was over"
        if worker.state is not WorkerState.STOPPING:
            worker.given_up = ActorDied(f"{worker} was ended: {reason}")
            worker.given_up.actor = worker.names
        await self._end(worker, reason)
