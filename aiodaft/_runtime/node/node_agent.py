"""The node agent: the actor that assigns the machine's resources, starts workers, and reports how they ended.

The states of a worker are in `_protocol/node/worker.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, PeerId, number_of
from aiodaft._protocol.node.liveness import Order, Patience
from aiodaft._protocol.node.postmortem import Ending, OomKills
from aiodaft._protocol.node.resources import Demand, Resources
from aiodaft._protocol.node.worker import WorkerEvent, WorkerState
from aiodaft._runtime.agent import serving
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.diagnostics.native_dump import take_dump
from aiodaft._runtime.node.environment import WorkerEnvironment, WorkerSettings
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.postmortem import activity, died, given_up, silence, was_oom_kill, watch_oom_kills
from aiodaft._runtime.node.worker import Conditions, Place, Worker, WorkerProcess
from aiodaft._runtime.peer import NodeContact
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import decode_error
from aiodaft.exceptions import ActorDied, DaftError, InsufficientResources, OutcomeUnknown, PeerLost
from aiodaft.methods import method

# Read by OpenMP, MKL, OpenBLAS and torch.
_THREADS: Final = "OMP_NUM_THREADS"


class NodeAgent(NodeContact):
    """The agent of one machine."""

    def __init__(
        self,
        process: Process,
        connections: Connections,
        launcher: WorkerLauncher,
        resources: Resources[ActorId],
        gpu_names: Sequence[str],
        *,
        uvloop: bool,
        patience: Patience,
    ) -> None:
        self._process = process
        self._connections = connections
        self._launcher = launcher
        # Assigned to actor numbers, which restarts do not change.
        self._resources = resources
        # The names of the GPUs in CUDA_VISIBLE_DEVICES.
        self._gpu_names = gpu_names
        # Actors that may be restarted, and so hold resources without a process.
        self._restartable: dict[ActorId, Conditions] = {}
        self._uvloop = uvloop
        self._patience = patience
        self._oom_kills = OomKills()
        # The workers that live, and for a while the ended ones.
        self._workers = launcher.workers
        self._ended: dict[PeerId, Worker] = {}
        self._introduced: set[frozenset[PeerId]] = set()
        self._actor_numbers = itertools.count(FIRST_USER_ACTOR)
        # Called for each actor of a process that ended by accident, if no call failed because of that.
        self.on_died: Callable[[PeerId, ActorId, OutcomeUnknown], object] = lambda peer, actor, error: None
        # Called with an error in a worker that no code there saw.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: None
        # Called for each process that ended, with the error of its callers and whether the runtime wanted its end.
        self.on_ended: Callable[[PeerId, OutcomeUnknown, bool], object] = lambda peer, error, wanted: None
        launcher.on_ended = self._worker_ended

    @method
    async def place(
        self, label: str, demand: Demand, beside: str | None, conditions: Conditions, restartable: bool = False
    ) -> Place:
        """Reserve the resources of an actor, and find a process for it.

        Args:
            label: The actor's name in errors.
            demand: The resources it needs.
            beside: The process of another actor, to share it; None for a new process.
            conditions: The conditions for the process of each incarnation.
            restartable: Whether it keeps its resources until `vacate`, also while it has no process.

        Raises:
            InsufficientResources: The resources are missing; nothing was reserved.
            SpawnFailed: The process did not start.
        """
        if beside is not None and demand.gpus:
            raise InsufficientResources(
                f"{label} lives in the process of another actor and shares its GPUs: ask for none"
            )
        actor = ActorId(next(self._actor_numbers))
        self._resources.take(actor, label, demand)
        try:
            place = await self._find_process(label, actor, beside, conditions)
        except BaseException:
            self._resources.give_back(actor)
            raise
        if restartable:
            self._restartable[actor] = conditions
        return place

    @method
    async def place_again(self, label: str, actor: int, beside: str | None) -> Place:
        """Find a process for the next incarnation of an actor, under the conditions of the first.

        Raises:
            ActorDied: The actor, or the one it shares a process with, is gone for good.
            SpawnFailed: The process did not start.
        """
        conditions = self._restartable.get(number_of(ActorId(actor)))
        if conditions is None:
            raise ActorDied(f"{label} was stopped", executed=False)
        return await self._find_process(label, ActorId(actor), beside, conditions)

    async def _find_process(self, label: str, actor: ActorId, beside: str | None, conditions: Conditions) -> Place:
        if beside is None:
            assert conditions.worker_environment is not None
            worker = await self._start_worker(label, number_of(actor), conditions.worker_environment)
            worker.heartbeat.begin(conditions.patience or self._patience, worker.pid)
        else:
            shared = self._workers.get(PeerId(beside))
            if shared is None or shared.state is WorkerState.STOPPING:
                raise ActorDied(f"{label} was to live with an actor that is gone", executed=False)
            worker = shared
            if conditions.patience is not None:
                worker.heartbeat.widen(conditions.patience)
        worker.add(actor, label)
        return Place(worker.id, actor, worker.gpus)

    async def _start_worker(self, label: str, number: ActorId, worker_environment: WorkerEnvironment) -> Worker:
        cpus, gpus = self._resources.share_of(number)
        process, log_level = self._process, logging.getLogger().level
        options = process.options._replace(id=process.env.new_peer_id("worker"))
        settings = WorkerSettings(options, process.key.secret(), self._uvloop, log_level, worker_environment.argv)
        environment = self._environment(cpus, gpus, worker_environment)
        worker, sock = await self._launcher.spawn(settings, worker_environment, environment, label)
        worker.gpus = gpus
        self._connections.attach(worker.id, sock)
        try:
            await asyncio.shield(worker.started)
            worker.handle(WorkerEvent.STARTED)
            worker.oom_counter = watch_oom_kills(self._oom_kills, worker.pid)
            worker.heartbeat.on_order = partial(self._heartbeat_changed, worker)
            worker.heartbeat.on_stall = partial(_report_stall, worker)
        except BaseException:
            worker.stop("its spawn was cancelled")
            if worker.id in self._workers:
                await self._launcher.end(worker)
            raise
        return worker

    def _environment(self, cpus: float, gpus: tuple[int, ...], inherited: WorkerEnvironment) -> dict[str, str]:
        environment: dict[str, str] = {}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_names[gpu] for gpu in gpus)
        if cpus and _THREADS not in inherited.environment:
            environment[_THREADS] = str(max(1, int(cpus)))
        return environment

    @method
    async def vacate(self, peer: str, actor: int, reason: str, keep: bool = False, answers: bool = True) -> None:
        """Remove an actor from its process, and end the process if no other actor is there.

        Args:
            peer: The process.
            actor: The actor.
            reason: Why it was stopped.
            keep: Whether the actor keeps its resources for its next incarnation.
            answers: Whether the process answers. If not, it is killed at once.
        """
        number = number_of(ActorId(actor))
        if not keep:
            self._restartable.pop(number, None)
        worker = self._workers.get(PeerId(peer))
        if worker is None:
            self._free(number)
            return
        worker.actors.pop(ActorId(actor), None)
        if worker.actors:
            # The other actors still use the GPUs of the process.
            self._free(number, keep_gpus=True)
            return
        if worker.state is WorkerState.STOPPING:
            await asyncio.shield(worker.ended)
            return
        worker.stop(reason)
        self._connections.to(worker.id).send(m.bye(reason))
        if not answers or not await self._launcher.wait_end(worker, self._process.grace):
            await self._launcher.end(worker)

    def _free(self, number: ActorId, *, keep_gpus: bool = False) -> None:
        if number not in self._restartable:
            self._resources.give_back(number, keep_gpus=keep_gpus)

    @method
    async def kill(self, peer: str, reason: str) -> None:
        worker = self._workers.get(PeerId(peer))
        if worker is not None:
            worker.stop(reason)
            await self._launcher.end(worker)

    @method
    async def introduce(self, other: str) -> None:
        """Connect the calling process with another one of this node.

        Raises:
            ActorDied: The other process is gone.
            ResourceExhausted: There is no descriptor for the connection.
        """
        first, second = serving().caller, PeerId(other)
        if second not in self._workers:
            raise self._why_ended(second, executed=False)
        pair = frozenset((first, second))
        # Both processes may ask at the same time: they get one connection.
        if pair not in self._introduced:
            self._introduced.add(pair)
            try:
                self._connections.to(first).introduce(self._connections.to(second))
            except OSError as error:
                self._introduced.discard(pair)
                raise exhausted(error, f"{first} and {second} cannot be connected") from error

    @method
    async def exit_report(self, peer: str, in_flight: int) -> DaftError:
        """How a process ended, as the error for its callers.

        Args:
            peer: The process.
            in_flight: The number of calls that the asking process had under way there. They fail with this error.
        """
        worker = self._workers.get(PeerId(peer)) or self._ended.get(PeerId(peer))
        if worker is not None:
            if in_flight:
                worker.handle(WorkerEvent.CALLS_LOST)
            if not await self._launcher.wait_end(worker, self._process.env.timeouts.exit_report):
                if self._connections.to(worker.id).lost is None:
                    # Only the connection between two workers broke.
                    worker.handle(WorkerEvent.ALIVE)
                    return PeerLost(f"the connection to {worker} ended")
                # The process lives, but this process has lost the connection to it.
                await self._launcher.end(worker)
        return self._why_ended(PeerId(peer))

    def _why_ended(self, peer: PeerId, executed: bool | None = None) -> OutcomeUnknown:
        worker = self._ended.get(peer)
        error = None if worker is None else worker.error
        return error or ActorDied(f"there is no process {peer}", executed=executed)

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        """Report an error that no code in a worker saw; `what` says what failed."""
        caller = serving().caller
        self.on_unheld(decode_error(encoded), f"{what} (in {self._workers.get(caller, caller)})")

    @method
    async def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """The resources of this node, and how much of each is free."""
        return {**self._resources.totals, "gpus": float(self._resources.gpus)}, self._resources.free()

    @method
    async def process_of(self, peer: str) -> WorkerProcess | None:
        """What the node knows of a worker without asking it; None if it is gone."""
        worker = self._workers.get(PeerId(peer))
        return None if worker is None or worker.given_up is not None else worker.snapshot()

    @method
    async def processes(self) -> tuple[WorkerProcess, ...]:
        return tuple(worker.snapshot() for worker in self._workers.values())

    @method
    async def dump(self, peer: str) -> str:
        """The stacks of a worker that does not answer; see `take_dump`."""
        worker = self._workers.get(PeerId(peer))
        if worker is None:
            return ""
        return await take_dump(worker.pid, partial(self._launcher.kill, worker))

    def _worker_ended(self, worker: Worker, ending: Ending) -> None:
        wanted = worker.state is WorkerState.STOPPING
        error = worker.error = worker.given_up or self._post_mortem(worker, ending)
        worker.handle(WorkerEvent.ENDED)
        self._ended[worker.id] = worker
        while len(self._ended) > self._process.env.remembered:
            del self._ended[next(iter(self._ended))]
        self._connections.suspects.discard(worker.id)
        self._introduced = {pair for pair in self._introduced if worker.id not in pair}
        if not worker.pid:
            # If the fork server still starts it, it finds no connection and ends.
            self._connections.to(worker.id).close(error)
        for actor in worker.placed:
            self._free(number_of(actor))
        self.on_ended(worker.id, error, wanted)
        if worker.state is WorkerState.DIED:
            self._process.loop.call_later(self._process.env.timeouts.blame, self._blame_over, worker, error)

    def _blame_over(self, worker: Worker, error: OutcomeUnknown) -> None:
        worker.handle(WorkerEvent.BLAME_OVER)
        if worker.state is WorkerState.UNHANDLED:
            for actor in worker.actors:
                self.on_died(worker.id, actor, error)

    def _post_mortem(self, worker: Worker, ending: Ending) -> ActorDied:
        killed = worker.state is not WorkerState.STOPPING and ending.signal == "SIGKILL"
        oom = killed and was_oom_kill(self._oom_kills, worker.oom_counter)
        return died(worker, ending, activity(worker, self._connections.to(worker.id)), oom=oom)

    def _heartbeat_changed(self, worker: Worker, order: Order) -> None:
        connection = self._connections.to(worker.id)
        if order is Order.CLEAR:
            self._connections.suspects.discard(worker.id)
            logger.warning("%s answers again", worker)
        elif order is Order.SUSPECT:
            self._connections.suspects.add(worker.id)
            logger.warning("%s", silence(worker, activity(worker, connection)))
        elif order is Order.GIVE_UP and worker.state is not WorkerState.STOPPING:
            worker.given_up = given_up(worker, activity(worker, connection))
            logger.error("%s", worker.given_up)
            # Closing the connection drops its later messages.
            self._launcher.kill(worker)
            connection.close(worker.given_up)


def _report_stall(worker: Worker, culprit: str, line: str, seconds: float) -> None:
    logger.warning(
        "%s (pid %d) has kept the event loop of its process from turning for %.1f s: %s. Other calls, streams and "
        "cancellations wait for it. Make it a `def` method, which runs on a thread, or await asyncio.to_thread(...)",
        culprit or f"a task or callback of {worker.names}",
        worker.pid,
        seconds,
        line,
    )
