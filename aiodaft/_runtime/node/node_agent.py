"""The node agent: the actor that assigns the machine's resources, starts workers, and reports how they ended.

The states of a worker are in `_protocol/node/worker.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.coordination.records import Member, NamedActor
from aiodaft._protocol.diagnostics.failures import Subject
from aiodaft._protocol.ids import ActorId, PeerId, incarnation, is_worker, node_of
from aiodaft._protocol.node.resources import Wish
from aiodaft._protocol.node.worker import Ending, OomKills, Order, Patience, WorkerEvent, WorkerState
from aiodaft._protocol.numbers import Latest
from aiodaft._protocol.placement import NodeState
from aiodaft._runtime.actors.hosted_actor import serving
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.diagnostics.await_chains import take_dump
from aiodaft._runtime.node.shipped_code import ShippedCode
from aiodaft._runtime.node.worker import (
    Conditions,
    Machine,
    NodeOptions,
    OtherNodes,
    Place,
    Tenant,
    Worker,
    WorkerProcess,
    WorkerSettings,
)
from aiodaft._runtime.node.workers import (
    Draining,
    Introductions,
    Launcher,
    activity,
    died,
    given_up,
    report_stall,
    silence,
    was_oom_kill,
    watch_oom_kills,
)
from aiodaft._runtime.peer import NodeContact, OwnerContact
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, PeerLost, SpawnFailed
from aiodaft.methods import method

# Seconds before a node that could not be asked is asked again.
_PAUSE: Final = 0.5


class NodeAgent(NodeContact):
    def __init__(
        self,
        process: Process,
        connections: Connections,
        owner_of: Callable[[PeerId], OwnerContact],
        others: OtherNodes,
        launcher: Launcher,
        machine: Machine,
        options: NodeOptions,
    ) -> None:
        self._process = process
        self._connections = connections
        self._owner_of = owner_of
        # Takes the end of a process that this one owns, at once: callers that hear of it find its actors restarting.
        self.on_own_ended: Callable[..., object] | None = None
        self._others = others
        self._launcher = launcher
        # Assigned to an actor's owner and number, which restarts do not change.
        self._resources = machine.resources
        self._gpu_names = machine.gpu_names
        self._claims = machine.claims
        self._options = options
        self._code = process.part(ShippedCode)
        # Shares without an actor so far, and slices; set whenever something was given back.
        self._reserved: set[Tenant] = set()
        self._given_back = asyncio.Event()
        # Actors that may be restarted, and so hold resources without a process.
        self._restartable: dict[Tenant, Conditions] = {}
        self._oom_kills = OomKills()
        # The workers that live, and for a while the ended ones.
        self._workers = launcher.workers
        self._ended = Latest[PeerId, Worker](process.env.remembered)
        why_gone = partial(self._why_ended, executed=False)
        self._introductions = Introductions(process.id, connections, others, self._workers, why_gone)
        # Workers of other nodes that own actors here.
        self._far_owners: set[PeerId] = set()

        def tell_draining(owner: PeerId, grace: float) -> None:
            owner_of(owner).node_draining.tell(process.id, grace)

        self.draining = Draining(process, self._resources, self._workers, self._restartable, self._end, tell_draining)
        # Called with a process that ended: names that it has are free.
        self.on_ended: Callable[[PeerId], object] = lambda peer: None
        # Called with an actor that left its process to others: its names are free, too.
        self.on_left: Callable[[PeerId, ActorId], object] = lambda peer, actor: None
        # Called with a name that an actor of this node has got.
        self.on_named: Callable[[NamedActor], object] = lambda named: None
        # Levels of loggers that programs have changed since they spawned actors here.
        self._levels: dict[PeerId, dict[str, int]] = {}
        # Tells a process that a program has changed levels.
        self.tell_levels: Callable[[PeerId, dict[str, int]], object]
        # Called by `end`.
        self.on_end: Callable[[], object] = lambda: None
        self.draining.on_over = lambda: self.on_end()
        launcher.on_ended = self._worker_ended

    @method
    async def state(self, within: Tenant | None = None) -> NodeState:
        held = self._resources
        return NodeState(held.stock(within), len(held), held.revision, self.draining.begun)

    @method
    async def changed(self, revision: int) -> None:
        """Wait until something was given back since a view with this revision, or by another runtime."""
        if self._resources.revision != revision:
            return
        waits: tuple[Coroutine[Any, Any, object], ...] = (self._given_back.wait(), self._claims.given_back())
        start = self._process.tasks.start
        tasks = [start(wait, name="wait for resources") for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    @method
    async def reserve(self, wishes: Sequence[Wish[Tenant]], within: Tenant | None) -> None:
        """Reserve the shares of actors that are placed later: all of them or none.

        Raises:
            InsufficientResources: The resources are missing; nothing was reserved.
        """
        for owner in {wish.holder.owner for wish in wishes}:
            self._check_owner(owner)
        self._resources.take_all(wishes, within)
        self._reserved |= {wish.holder for wish in wishes}

    @method
    async def carve(self, wish: Wish[Tenant]) -> tuple[int, ...]:
        self._check_owner(wish.holder.owner)
        gpus = self._resources.carve(wish.holder, wish.label, wish.demand)
        self._reserved.add(wish.holder)
        return gpus

    @method
    async def release(self, tenants: Sequence[Tenant]) -> None:
        """Give back shares without actors, and slices; one with actors, when these are gone. Idempotent."""
        for tenant in tenants:
            if tenant in self._reserved:
                self._reserved.remove(tenant)
                self._give_back(tenant)

    def _check_owner(self, owner: PeerId) -> None:
        """See that actors and shares of a worker end with it. Raises ActorDied if it has ended."""
        if not is_worker(owner):
            return
        if node_of(owner) != node_of(self._process.id):
            if owner not in self._far_owners:
                self._far_owners.add(owner)
                self._process.create_task(self._wait_far_end(owner), name=f"wait for the end of {owner}")
        elif owner not in self._workers:
            raise self._why_ended(owner, executed=False)

    async def _wait_far_end(self, owner: PeerId) -> None:
        while True:
            try:
                await self._others.contact(owner).wait_end(owner)
                break
            except ActorDied:
                break
            except DaftError as error:
                logger.debug("the node of %s is not heard: %s", owner, error)
                await asyncio.sleep(_PAUSE)
        self._far_owners.remove(owner)
        self.owner_lost(owner, f"its owner {owner} is gone")

    def _give_back(self, tenant: Tenant, *, keep_gpus: bool = False) -> None:
        self._resources.give_back(tenant, keep_gpus=keep_gpus)
        self._code.release(tenant)
        given_back, self._given_back = self._given_back, asyncio.Event()
        given_back.set()

    @method
    async def place(
        self,
        wish: Wish[Tenant],
        within: Tenant | None,
        beside: str | None,
        conditions: Conditions,
        epoch: int = 0,
    ) -> Place:
        """Reserve the resources of an actor, unless that is done, and find a process for it.

        Args:
            beside: The process of another actor, to share it; None for a new process.
            epoch: The number of its incarnation, if it was on another node before.

        Raises:
            InsufficientResources: The resources are missing; nothing was reserved.
            SpawnFailed: The process did not start, or has another owner.
        """
        tenant, label = wish.holder, wish.label
        self._check_owner(tenant.owner)
        self._resources.check_open(label)
        if tenant in self._reserved:
            self._reserved.remove(tenant)
        else:
            self._resources.take(tenant, label, wish.demand, within)
        try:
            actor = incarnation(tenant.number, epoch)
            place = await self._find_process(tenant, actor, label, beside, conditions)
        except BaseException:
            self._give_back(tenant)
            raise
        if conditions.restartable:
            self._restartable[tenant] = conditions
        return place

    @method
    async def place_again(self, owner: str, label: str, actor: int, beside: str | None) -> Place:
        """Find a process for the next incarnation of an actor, under the conditions of the first.

        Raises:
            ActorDied: The actor, or the one it shares a process with, is gone for good.
            InsufficientResources: The node is being drained.
            SpawnFailed: The process did not start.
        """
        self._resources.check_open(label)
        tenant = Tenant.of(owner, actor)
        conditions = self._restartable.get(tenant)
        if conditions is None:
            raise ActorDied(f"{label} was stopped", executed=False)
        return await self._find_process(tenant, ActorId(actor), label, beside, conditions)

    async def _find_process(
        self, tenant: Tenant, actor: ActorId, label: str, beside: str | None, conditions: Conditions
    ) -> Place:
        if beside is None:
            worker = await self._start_worker(label, tenant, conditions)
            worker.heartbeat.begin(conditions.patience or Patience(), worker.pid)
        else:
            shared = self._workers.get(PeerId(beside))
            if shared is None or shared.state is WorkerState.STOPPING:
                raise ActorDied(f"{label} was to live with an actor that is gone", executed=False)
            if shared.owner != tenant.owner:
                raise SpawnFailed(f"{label} cannot share the process of {shared.names}, which was spawned elsewhere")
            worker = shared
            if conditions.patience is not None:
                worker.heartbeat.widen(conditions.patience)
        worker.add(actor, label)
        return Place(worker.id, actor, worker.gpus)

    async def _start_worker(self, label: str, tenant: Tenant, conditions: Conditions) -> Worker:
        assert conditions.worker_environment is not None
        folders = await self._code.folders(conditions.code, tenant, *(() if conditions.outlives else (tenant.owner,)))
        worker_environment = conditions.worker_environment._replace(code=folders)
        cpus, gpus = self._resources.share_of(tenant)
        process = self._process
        here = process.options
        options = (conditions.options or here)._replace(
            id=process.env.new_peer_id("worker", node_of(here.id)),
            node=here.node,
            cluster=here.cluster,
            owner=tenant.owner,
            agent=here.agent,
            coordinator=here.coordinator,
            python=worker_environment.python,
        )
        if conditions.outlives:
            options = options._replace(owner=here.id, program=here.program)
        far = self._connections.far
        if far is not None or is_worker(tenant.owner):
            # The variables of a worker are for it alone, such as those with its share of the machine.
            worker_environment = worker_environment.as_far_as_it_is_here()
        secret = process.key.secret() if far is None else far.secret()
        argv, terminal, digests = worker_environment.argv, worker_environment.terminal, conditions.code.digests
        levels = {**worker_environment.levels, **self._levels.get(options.program, {})}
        settings = WorkerSettings(options, secret, self._options.uvloop, levels, argv, digests, terminal)
        environment = worker_environment.for_share(cpus, [self._gpu_names[gpu] for gpu in gpus])
        worker, sock = await self._launcher.spawn(settings, worker_environment, environment, label)
        worker.owner, worker.maker, worker.gpus = tenant.owner, tenant.owner, gpus
        worker.program = options.program
        self._connections.attach(worker.id, sock)
        try:
            await asyncio.shield(worker.started)
            # The owner may have ended before this worker was known to be its own.
            self._check_owner(tenant.owner)
            worker.handle(WorkerEvent.STARTED)
            worker.oom_counter = watch_oom_kills(self._oom_kills, worker.pid)
            worker.heartbeat.on_order = partial(self._heartbeat_changed, worker)
            worker.heartbeat.on_stall = partial(report_stall, worker)
        except BaseException:
            worker.stop("its spawn was cancelled")
            if worker.id in self._workers:
                await self._launcher.end(worker)
            raise
        return worker

    @method
    async def vacate(
        self, owner: str, peer: str, actor: int, reason: str, keep: bool = False, answers: bool = True
    ) -> None:
        """Remove an actor from its process, and end the process if no other actor is there.

        Args:
            keep: Whether the actor keeps its resources for its next incarnation.
            answers: Whether the process answers. If not, it is killed at once.
        """
        worker = self._leave(Tenant.of(owner, actor), PeerId(peer), ActorId(actor), keep=keep)
        if worker is None:
            return
        if worker.state is WorkerState.STOPPING:
            await asyncio.shield(worker.ended)
        else:
            worker.stop(reason)
            await self._end(worker, reason, answers=answers)
        await worker.show_output(self._process.grace)

    @method
    async def moved(self, owner: str, peer: str, actor: int) -> None:
        """Remove an actor that goes to another node; its process ends when the values that it stores are not needed."""
        worker = self._leave(Tenant.of(owner, actor), PeerId(peer), ActorId(actor), keep=False)
        if worker is not None and worker.state is not WorkerState.STOPPING:
            worker.stop("its actors have moved to other nodes")
            await self.draining.wait_unneeded(worker.id)
            await self._end(worker, worker.stop_reason)

    def _leave(self, tenant: Tenant, peer: PeerId, actor: ActorId, *, keep: bool) -> Worker | None:
        self.draining.note()
        worker = self._workers.get(peer)
        if worker is not None:
            # A process that stops an actor need not be its owner.
            tenant = Tenant.of(worker.maker, actor)
        if not keep:
            self._restartable.pop(tenant, None)
        if worker is not None:
            worker.actors.pop(actor, None)
            if not worker.actors:
                return worker
            if not keep:
                self.on_left(peer, actor)
        # Other actors of the process still use its GPUs.
        self._free(tenant, keep_gpus=worker is not None)
        return None

    async def _end(self, worker: Worker, reason: str, *, answers: bool = True) -> None:
        self._connections.to(worker.id).send(m.bye(reason))
        if not answers or not await self._launcher.wait_end(worker, self._process.grace):
            await self._launcher.end(worker)

    def _free(self, tenant: Tenant, *, keep_gpus: bool = False) -> None:
        if tenant not in self._restartable:
            self._give_back(tenant, keep_gpus=keep_gpus)

    @method
    async def keep(self, peer: str) -> None:
        """Let a process outlive the owner of its actor, which is made now: from here on, it belongs to this node.

        Raises:
            ActorDied: It has ended.
        """
        worker = self._workers.get(PeerId(peer))
        if worker is None:
            raise self._why_ended(PeerId(peer))
        worker.owner = self._process.id

    @method
    async def kill(self, peer: str, reason: str) -> None:
        worker = self._workers.get(PeerId(peer))
        if worker is not None:
            worker.stop(reason)
            await self._launcher.end(worker)

    @method
    async def introduce(self, other: str, known: int) -> str:
        return self._introductions.introduce(serving().caller, PeerId(other), known)

    @method
    async def open_stream(self, other: str, number: int) -> str:
        return self._introductions.open_stream(serving().caller, PeerId(other), number)

    @method
    async def locate(self, owner: str, number: int, wait: bool) -> Location:
        controller = PeerId(owner)
        if node_of(controller) != node_of(self._process.id):
            return await self._others.contact(controller).locate(controller, number, wait)
        return await self._owner_of(controller).locate(number, wait)

    @method
    async def wait_end(self, peer: str) -> None:
        worker = self._workers.get(PeerId(peer))
        if worker is not None:
            await asyncio.shield(worker.ended)

    @method
    async def exit_report(self, peer: str, in_flight: int) -> DaftError:
        """The end of a process, as the error for its callers.

        Args:
            in_flight: The number of calls that the asking process had under way there. They fail with this error.
        """
        ended = PeerId(peer)
        if node_of(ended) != node_of(self._process.id):
            if ended == self._others.process_of(ended):
                return PeerLost(f"the connection to the node {ended} ended")
            return await self._others.contact(ended).exit_report(ended, in_flight)
        if self._introductions.is_attached(ended):
            return PeerLost(f"the connection to {ended} ended")
        worker = self._workers.get(ended) or self._ended.get(ended)
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
        return self._why_ended(ended)

    def _why_ended(self, peer: PeerId, executed: bool | None = None) -> OutcomeUnknown:
        worker = self._ended.get(peer)
        error = None if worker is None else worker.error
        return error or ActorDied(f"there is no process {peer}", executed=executed)

    def owner_lost(self, owner: PeerId, reason: str) -> None:
        for worker in [worker for worker in self._workers.values() if worker.owner == owner]:
            worker.orphaned = worker.state is not WorkerState.STOPPING
            worker.stop(reason)
            self._launcher.kill(worker)
        for tenant in [tenant for tenant in self._restartable if tenant.owner == owner]:
            del self._restartable[tenant]
            self._give_back(tenant)
        for tenant in [tenant for tenant in self._reserved if tenant.owner == owner]:
            self._reserved.remove(tenant)
            self._give_back(tenant)
        self._code.release(owner)
        self._levels.pop(owner, None)
        # If its own node has left, any other may say so.
        if node_of(owner) == node_of(self._process.id) or not self._others.is_member(node_of(owner)):
            self.on_ended(owner)

    @method
    async def set_levels(self, program: str, levels: dict[str, int]) -> None:
        self._levels.setdefault(PeerId(program), {}).update(levels)
        for worker in self._workers.values():
            if worker.program == program:
                self.tell_levels(worker.id, levels)

    @method
    async def members(self) -> list[Member]:
        return self._others.members()

    @method
    async def named(self, granted: NamedActor) -> None:
        self.on_named(granted)

    @method
    async def drain(self, grace: float) -> None:
        """Take no new actors, and end when those that are here are gone, at most `grace` seconds from now.

        Returns when they are gone.
        """
        self.draining.begin(grace)
        await self.draining.over.wait()

    @method
    async def left(self, known: Sequence[str]) -> tuple[str, ...]:
        """The remaining work of a drain, process by process, as soon as it differs from `known`."""
        return await self.draining.wait_other(known)

    @method
    async def end(self) -> None:
        """End the process of the node, with its workers; nothing in a runtime of one machine."""
        # First, this call is answered.
        self._process.loop.call_soon(self.on_end)

    @method
    async def process_of(self, peer: str) -> WorkerProcess | None:
        worker = self._workers.get(PeerId(peer))
        return None if worker is None or worker.given_up is not None else worker.snapshot()

    @method
    async def processes(self) -> tuple[WorkerProcess, ...]:
        return tuple(worker.snapshot() for worker in self._workers.values())

    @method
    async def dump(self, peer: str) -> str:
        worker = self._workers.get(PeerId(peer))
        if worker is None:
            return ""
        return await take_dump(worker.pid, partial(self._launcher.kill, worker))

    def _worker_ended(self, worker: Worker, ending: Ending) -> None:
        wanted = worker.state is WorkerState.STOPPING and not worker.orphaned
        error = worker.error = worker.given_up or self._post_mortem(worker, ending)
        if worker.state is not WorkerState.STOPPING:
            death = Subject("death", worker.names, error.last_method, worker.id, worker.pid or None)
            self._process.failures.note(death, error, self._process.env.monotonic())
        worker.handle(WorkerEvent.ENDED)
        self.draining.note()
        self._ended[worker.id] = worker
        self._connections.suspects.discard(worker.id)
        self._introductions.forget(worker.id)
        if not worker.pid:
            # If the fork server still starts it, it finds no connection and ends.
            self._connections.to(worker.id).close(error)
        for actor in worker.placed:
            self._free(Tenant.of(worker.maker, actor))
        self.owner_lost(worker.id, f"its owner {worker} is gone")
        if self.on_own_ended is not None and worker.owner == self._process.id:
            self.on_own_ended(worker.id, error, wanted=wanted)
        else:
            self._owner_of(worker.owner).process_ended.tell(worker.id, error, wanted)
        if worker.state is WorkerState.DIED:
            self._process.loop.call_later(self._process.env.timeouts.blame, self._blame_over, worker, error)

    def _blame_over(self, worker: Worker, error: OutcomeUnknown) -> None:
        worker.handle(WorkerEvent.BLAME_OVER)
        if worker.state is WorkerState.UNHANDLED and self._process.closed is None:
            for actor in worker.actors:
                self._owner_of(worker.owner).actor_died.tell(worker.id, actor, error)

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
