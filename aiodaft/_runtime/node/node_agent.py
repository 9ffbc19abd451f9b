"""The node agent: an ordinary actor that has the machine's resources, starts workers, and knows how they ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, PeerId, number_of
from aiodaft._protocol.ledger import Demand, Resources
from aiodaft._protocol.liveness import Order, Patience
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.connections.connection import introduce
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.diagnostics.native_dump import take_dump
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.launcher import ChildProcess, Ending, WorkerLauncher
from aiodaft._runtime.node.postmortem import OomKills, activity, died, given_up, silence
from aiodaft._runtime.node.worker_main import WorkerSettings
from aiodaft._runtime.node.worker_table import Conditions, Place, Worker, WorkerProcess
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import decode_error
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, DaftError, InsufficientResources, OutcomeUnknown, PeerLost
from aiodaft.methods import method

# How many threads OpenMP, MKL, OpenBLAS and torch compute with.
_THREADS: Final = "OMP_NUM_THREADS"
# Processes that ended and are remembered to say how.
_REMEMBERED: Final = 1024


class NodeAgent(Actor):
    """One machine."""

    def __init__(
        self,
        process: Process,
        connections: Connections,
        launcher: WorkerLauncher,
        ledger: Resources[ActorId],
        gpu_names: Sequence[str],
        *,
        uvloop: bool,
        patience: Patience,
    ) -> None:
        self._process = process
        self._connections = connections
        self._launcher = launcher
        # What actors have, by their numbers: a restart changes nothing.
        self._ledger = ledger
        # What CUDA calls the ledger's GPUs, whatever becomes of the environment.
        self._gpu_names = gpu_names
        # Those whose slots outlive their processes, with what the next one is started with.
        self._kept: dict[ActorId, Conditions] = {}
        self._uvloop = uvloop
        self._patience = patience
        self._oom_kills = OomKills()
        self._workers: dict[PeerId, Worker] = {}
        self._endings: dict[PeerId, OutcomeUnknown] = {}
        # Ended by accident, and perhaps somebody's calls still fail of it.
        self._unreported: dict[PeerId, Worker] = {}
        self._introduced: set[frozenset[PeerId]] = set()
        self._actor_numbers = itertools.count(FIRST_USER_ACTOR)
        # Told of an actor that died with nobody waiting for it, and of errors nobody holds.
        self.on_died: Callable[[PeerId, ActorId, OutcomeUnknown], object] = lambda peer, actor, error: None
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: None
        # Told of every process that ended, how, and whether that was wanted.
        self.on_ended: Callable[[PeerId, OutcomeUnknown, bool], object] = lambda peer, error, wanted: None
        launcher.on_ended = self._child_ended

    @method
    async def place(
        self, label: str, demand: Demand, beside: str | None, conditions: Conditions, keep: bool = False
    ) -> Place:
        """Find room for an actor, and a process: a new one, or the one of an actor that it is to live with.

        Args:
            label: What the actor is called.
            demand: What it needs.
            beside: The process it is to live in.
            conditions: What its process is started with.
            keep: Whether it may be restarted: what it has stays its own until it is vacated for good.

        Raises:
            InsufficientResources: There is not enough; nothing was reserved.
            SpawnFailed: The process did not start.
        """
        if beside is not None and demand.gpus:
            raise InsufficientResources(
                f"{label} lives in the process of another actor and shares its GPUs: ask for none"
            )
        actor = ActorId(next(self._actor_numbers))
        self._ledger.take(actor, label, demand)
        try:
            place = await self._move_in(label, actor, beside, conditions)
        except BaseException:
            self._ledger.give_back(actor)
            raise
        if keep:
            self._kept[actor] = conditions
        return place

    @method
    async def place_again(self, label: str, actor: int, beside: str | None) -> Place:
        """Find a process for the next incarnation of an actor that has its slot, started with what the first one had.

        Raises:
            ActorDied: The actor that it lives with is gone for good.
            SpawnFailed: The process did not start.
        """
        conditions = self._kept.get(number_of(ActorId(actor)))
        if conditions is None:
            raise ActorDied(f"{label} was stopped", executed=False)
        return await self._move_in(label, ActorId(actor), beside, conditions)

    async def _move_in(self, label: str, actor: ActorId, beside: str | None, conditions: Conditions) -> Place:
        if beside is None:
            assert conditions.worker_environment is not None
            worker = await self._start_worker(label, number_of(actor), conditions.worker_environment)
            worker.child.heartbeat.begin(conditions.patience or self._patience, worker.pid)
        else:
            worker = self._host(label, PeerId(beside))
            if conditions.patience is not None:
                worker.child.heartbeat.widen(conditions.patience)
        worker.add(actor, label)
        return Place(worker.id, actor, worker.gpus)

    def _host(self, label: str, beside: PeerId) -> Worker:
        worker = self._workers.get(beside)
        if worker is None or worker.wanted is not None:
            raise ActorDied(f"{label} was to live with an actor that is gone", executed=False)
        return worker

    async def _start_worker(self, label: str, number: ActorId, worker_environment: WorkerEnvironment) -> Worker:
        cpus, gpus = self._ledger.share_of(number)
        options = self._process.options
        worker_id = self._process.env.new_peer_id("worker")
        settings = WorkerSettings(
            id=worker_id,
            node=options.node,
            home=self._process.id,
            transport=options.transport,
            direct=options.direct,
            grace=options.grace,
            max_pending=options.max_pending,
            key=self._process.key.secret(),
            uvloop=self._uvloop,
            log_level=logging.getLogger().level,
            argv=worker_environment.argv,
        )
        environment = self._own_environment(cpus, gpus, worker_environment)
        child, sock = await self._launcher.spawn(settings.packed(), worker_environment, environment, label)
        worker = self._workers[worker_id] = Worker(worker_id, child, label, gpus=gpus)
        self._connections.attach(worker_id, sock)
        try:
            worker.pid = await asyncio.shield(child.started)
            worker.oom_counter = self._oom_kills.watch(worker.pid)
            child.heartbeat.on_order = partial(self._pulse_changed, worker)
            child.heartbeat.on_stall = partial(_report_stall, worker)
        except BaseException:
            # Nobody wants it any more. Once it has ended it is forgotten: by `_child_ended`, or here if it never began.
            worker.wanted = "it was not wanted any more"
            if child.number in self._launcher:
                await self._launcher.end(child)
            else:
                self._workers.pop(worker_id, None)
            raise
        return worker

    def _own_environment(self, cpus: float, gpus: tuple[int, ...], inherited: WorkerEnvironment) -> dict[str, str]:
        """What tells libraries in an actor's process of its share of the machine."""
        environment: dict[str, str] = {}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_names[gpu] for gpu in gpus)
        if cpus and _THREADS not in inherited.environment:
            environment[_THREADS] = str(max(1, int(cpus)))
        return environment

    @method
    async def vacate(self, peer: str, actor: int, reason: str, keep: bool = False, answers: bool = True) -> None:
        """An actor is stopped: free what it had, and end its process if it was the last one there.

        With `keep`, its slot stays its own, for its next incarnation. A process that does not answer gets no time to
        end by itself.
        """
        number = number_of(ActorId(actor))
        if not keep:
            self._kept.pop(number, None)
        worker = self._workers.get(PeerId(peer))
        if worker is None:
            self._free(number)
            return
        worker.actors.pop(ActorId(actor), None)
        if worker.actors:
            # The GPUs belong to the process: who shares them goes on using them.
            self._free(number, keep_gpus=True)
            return
        if worker.wanted is not None:
            await asyncio.shield(worker.child.ended)
            return
        worker.wanted = reason
        self._connections.to(worker.id).send(m.bye(reason))
        if not answers or not await self._launcher.wait_end(worker.child, self._process.grace):
            await self._launcher.end(worker.child)

    def _free(self, number: ActorId, *, keep_gpus: bool = False) -> None:
        if number not in self._kept:
            self._ledger.give_back(number, keep_gpus=keep_gpus)

    @method
    async def kill(self, peer: str, reason: str) -> None:
        """End a process at once, with all its actors."""
        worker = self._workers.get(PeerId(peer))
        if worker is not None:
            worker.wanted = worker.wanted or reason
            await self._launcher.end(worker.child)

    @method
    async def introduce(self, other: str) -> None:
        """Connect the calling process with another one of this node.

        Raises:
            ActorDied: The other one is gone.
            ResourceExhausted: There is no descriptor for the connection.
        """
        call = current_call.get()
        assert call is not None
        first, second = call.caller, PeerId(other)
        if second not in self._workers:
            raise self._endings.get(second) or ActorDied(f"there is no process {other}", executed=False)
        pair = frozenset((first, second))
        # Both may ask at the same time; the answer to the first is the answer to both.
        if pair not in self._introduced:
            self._introduced.add(pair)
            try:
                introduce(self._connections.to(first), self._connections.to(second))
            except OSError as error:
                self._introduced.discard(pair)
                raise exhausted(error, f"{first} and {second} cannot be connected") from error

    @method
    async def exit_report(self, peer: str, in_flight: int) -> DaftError:
        """How a process ended, as the error that its callers get.

        Args:
            peer: The process.
            in_flight: How many calls the asking process had under way there: they carry the news.
        """
        return await self.explain(PeerId(peer), in_flight)

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        """An error in a worker that no code there saw, and what has failed."""
        call = current_call.get()
        assert call is not None
        worker = self._workers.get(call.caller)
        self.on_unheld(decode_error(encoded), f"{what} (in {call.caller if worker is None else worker})")

    @method
    async def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """What this node has, and what is free."""
        return {**self._ledger.totals, "gpus": float(self._ledger.gpus)}, self._ledger.free()

    @method
    async def process_of(self, peer: str) -> WorkerProcess | None:
        """What is known of a worker without asking it; None if it is gone."""
        worker = self._workers.get(PeerId(peer))
        return None if worker is None or worker.lost is not None else worker.process()

    @method
    async def processes(self) -> tuple[WorkerProcess, ...]:
        """The worker processes, oldest first."""
        return tuple(worker.process() for worker in self._workers.values())

    @method
    async def dump(self, peer: str) -> str:
        """The stacks of a worker that does not answer; see `take_dump`."""
        worker = self._workers.get(PeerId(peer))
        if worker is None:
            return ""
        return await take_dump(worker.pid, partial(self._launcher.kill, worker.child))

    async def explain(self, peer: PeerId, in_flight: int) -> DaftError:
        """See `exit_report`."""
        worker = self._workers.get(peer) or self._unreported.get(peer)
        if worker is not None:
            worker.blamed = worker.blamed or in_flight > 0
            if not await self._launcher.wait_end(worker.child, self._process.env.timeouts.exit_report):
                if self._connections.to(peer).lost is None:
                    # Two processes fell out with each other; this one can still be worked with.
                    return PeerLost(f"the connection to {worker} ended")
                # It cannot be reached and does not end: nobody can work with it any more.
                await self._launcher.end(worker.child)
        return self._endings.get(peer) or ActorDied(f"there is no process {peer}")

    def _child_ended(self, child: ChildProcess, ending: Ending) -> None:
        worker = next((worker for worker in self._workers.values() if worker.child is child), None)
        if worker is None:
            return
        del self._workers[worker.id]
        self._connections.suspects.discard(worker.id)
        self._introduced = {pair for pair in self._introduced if worker.id not in pair}
        error = self._endings[worker.id] = worker.lost or self._post_mortem(worker, ending)
        if not child.pid:
            # If it is yet to start, it finds that nobody wants it.
            self._connections.to(worker.id).close(error)
        while len(self._endings) > _REMEMBERED:
            del self._endings[next(iter(self._endings))]
        for actor in worker.placed:
            self._free(number_of(actor))
        self.on_ended(worker.id, error, worker.wanted is not None)
        if worker.wanted is None:
            self._unreported[worker.id] = worker
            self._process.loop.call_later(self._process.env.timeouts.blame, self._report, worker, error)

    def _post_mortem(self, worker: Worker, ending: Ending) -> ActorDied:
        killed = worker.wanted is None and ending.signal == "SIGKILL"
        oom = killed and self._oom_kills.take(worker.oom_counter)
        return died(worker, ending, activity(worker, self._connections.to(worker.id)), oom=oom)

    def _pulse_changed(self, worker: Worker, order: Order) -> None:
        """A worker does not answer, or does again."""
        connection = self._connections.to(worker.id)
        if order is Order.CLEAR:
            self._connections.suspects.discard(worker.id)
            logger.warning("%s answers again", worker)
        elif order is Order.SUSPECT:
            self._connections.suspects.add(worker.id)
            logger.warning("%s", silence(worker, activity(worker, connection)))
        elif order is Order.GIVE_UP and worker.wanted is None:
            worker.lost = given_up(worker, activity(worker, connection))
            logger.error("%s", worker.lost)
            # What it may still say is not listened to.
            self._launcher.kill(worker.child)
            connection.close(worker.lost)

    def _report(self, worker: Worker, error: OutcomeUnknown) -> None:
        del self._unreported[worker.id]
        if not worker.blamed:
            for actor in worker.actors:
                self.on_died(worker.id, actor, error)


def _report_stall(worker: Worker, culprit: str, line: str, seconds: float) -> None:
    logger.warning(
        "%s (pid %d) has kept the event loop of its process from turning for %.1f s: %s. Other calls, streams and "
        "cancellations wait for it. Make it a `def` method, which runs on a thread, or await asyncio.to_thread(...)",
        culprit or f"a task or callback of {worker.names}",
        worker.pid,
        seconds,
        line,
    )
