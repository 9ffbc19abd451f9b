"""The end of a worker, as its node handles it, without processes: the error's receivers, and the free resources."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from rooms import Bench

from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, PeerId
from aiodaft._protocol.node.resources import Demand, Resources, Wish
from aiodaft._protocol.node.worker import Ending, LastHeartbeat
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.shipped_code import ShippedCode
from aiodaft._runtime.node.worker import (
    Conditions,
    NodeOptions,
    Place,
    Tenant,
    Worker,
    WorkerEnvironment,
    WorkerSettings,
)
from aiodaft._runtime.process import GpuClaims, Timeouts
from aiodaft.exceptions import ActorDied, InsufficientResources, PeerLost, SpawnFailed

OWNER = PeerId("owner")
CONDITIONS = Conditions(None, WorkerEnvironment({}, "/", [], []))


class Launcher:
    """Starts workers that live until the test ends them."""

    def __init__(self) -> None:
        self.workers: dict[PeerId, Worker] = {}
        # All that were started.
        self.made: list[Worker] = []
        self.killed: list[int] = []
        self.starts = True
        self.on_ended: Any = None
        # When the node waits for the end of a process, it gives up at once.
        self.patient = True

    async def spawn(self, settings: WorkerSettings, _: object, __: object, label: str) -> tuple[Worker, None]:
        output: Any = SimpleNamespace(last_lines=("a last line",), rename=lambda names, pid: None)
        heartbeat: Any = SimpleNamespace(begin=lambda *_: None, last=LastHeartbeat, close=lambda: None)
        worker = self.workers[settings.options.id] = Worker(settings.options.id, label, output, heartbeat)
        self.made.append(worker)
        worker.pid = 10_000_000 + len(self.made)
        if self.starts:
            worker.started.set_result(None)
        else:
            worker.fail(SpawnFailed("it did not start"))
        return worker, None

    def kill(self, worker: Worker) -> None:
        self.killed.append(self.made.index(worker))
        self.die(worker)

    async def end(self, worker: Worker) -> None:
        self.kill(worker)

    async def wait_end(self, worker: Worker, seconds: float) -> bool:
        if self.patient:
            await worker.ended
        return worker.ended.done()

    def die(self, worker: Worker, *, exit_code: int | None = None, signal: str | None = "SIGKILL") -> None:
        """A process ends."""
        if self.workers.pop(worker.id, None) is not None:
            ending = Ending(exit_code, signal)
            worker.ended.set_result(ending)
            self.on_ended(worker, ending)


class Links:
    """The node's connections to its workers."""

    def __init__(self) -> None:
        self.far = None
        self.suspects: set[PeerId] = set()
        self.far = None
        self._links: dict[PeerId, Any] = {}

    def attach(self, remote: PeerId, sock: None) -> None:
        self.to(remote)

    def get(self, remote: PeerId) -> None: ...

    def to(self, remote: PeerId) -> Any:
        session: Session[Any] = Session(PeerId("here"), 1, remote=remote, max_pending=1)
        link = SimpleNamespace(session=session, lost=None, send=lambda message: None, close=lambda error: None)
        return self._links.setdefault(remote, link)


class Machine(Bench):
    """A node with two CPUs that notes its reports."""

    def __init__(self) -> None:
        super().__init__(grace=0, timeouts=Timeouts(blame=0))
        self.launcher, self.links = Launcher(), Links()
        self.resources: Resources[Tenant] = Resources(cpus=2, gpus=0)
        launcher: Any = self.launcher
        links: Any = self.links
        others: Any = SimpleNamespace()
        machine: Any = SimpleNamespace(resources=self.resources, gpu_names=(), claims=GpuClaims(()))
        self.process.provide(ShippedCode, ShippedCode(self.process, self.fetch))
        self.agent = NodeAgent(
            self.process,
            links,
            self.owner_of,
            others,
            launcher,
            machine,
            NodeOptions(True, (), False),
        )
        self.unheld: list[ActorId] = []
        self.ended: list[tuple[PeerId, bool]] = []
        self._actors = itertools.count(FIRST_USER_ACTOR)
        self._names = itertools.count(1)

    async def place(self, *, beside: str | None = None, restartable: bool = False) -> Place:
        name = f"Desk-{next(self._names)}"
        conditions = CONDITIONS if beside is None else Conditions(None, None)
        conditions = conditions._replace(restartable=restartable)
        tenant = Tenant(OWNER, ActorId(next(self._actors)))
        place: Place = await self.agent.place(Wish(tenant, name, Demand(cpus=1)), None, beside, conditions)
        return place

    async def fetch(self, source: PeerId, digest: str) -> bytes:
        raise AssertionError("no code was shipped")

    def owner_of(self, owner: PeerId) -> Any:
        assert owner == OWNER
        return SimpleNamespace(
            process_ended=SimpleNamespace(tell=lambda peer, error, wanted: self.ended.append((peer, wanted))),
            actor_died=SimpleNamespace(tell=lambda peer, actor, error: self.unheld.append(actor)),
        )

    async def blame_time_over(self) -> None:
        """The time passes in which callers report their lost calls."""
        over = asyncio.Event()
        self.process.loop.call_later(0, over.set)
        await over.wait()

    @property
    def free(self) -> float:
        return self.resources.free()["cpus"]


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    made = Machine()
    yield made
    await made.process.tasks.aclose()


async def test_a_death_that_failed_no_call_is_reported_for_each_actor(machine: Machine) -> None:
    first = await machine.place()
    second = await machine.place(beside=first.peer)
    machine.launcher.die(machine.launcher.made[0])
    assert (machine.unheld, machine.ended, machine.free) == ([], [(first.peer, False)], 2)
    await machine.blame_time_over()
    assert machine.unheld == [first.actor, second.actor]
    error = await machine.agent.exit_report(first.peer, 0)
    assert isinstance(error, ActorDied)
    assert (error.actor, error.signal, error.last_lines) == ("Desk-1 and Desk-2", "SIGKILL", ("a last line",))


@pytest.mark.parametrize("asked_first", [False, True])
async def test_a_death_that_failed_a_call_belongs_to_its_caller(machine: Machine, asked_first: bool) -> None:
    place = await machine.place()
    (worker,) = machine.launcher.made
    if asked_first:
        asking = machine.agent.exit_report(place.peer, 1)
        report = asyncio.ensure_future(asking)  # noqa: TID251 - the test waits for it
        await asyncio.sleep(0)
        machine.launcher.die(worker, exit_code=3, signal=None)
        error = await report
    else:
        machine.launcher.die(worker, exit_code=3, signal=None)
        error = await machine.agent.exit_report(place.peer, 1)
    assert isinstance(error, ActorDied)
    assert error.exit_code == 3
    await machine.blame_time_over()
    assert machine.unheld == []


async def test_a_caller_without_calls_under_way_takes_no_error(machine: Machine) -> None:
    place = await machine.place()
    machine.launcher.die(machine.launcher.made[0])
    await machine.agent.exit_report(place.peer, 0)
    await machine.blame_time_over()
    assert machine.unheld == [place.actor]


async def test_a_death_just_before_the_runtime_is_closed_is_told_to_nobody(machine: Machine) -> None:
    await machine.place()
    machine.launcher.die(machine.launcher.made[0])
    machine.process.closed = "the runtime is closed"
    await machine.blame_time_over()
    assert machine.unheld == []


async def test_a_broken_connection_between_workers_does_not_excuse_a_later_death(machine: Machine) -> None:
    place = await machine.place()
    machine.launcher.patient = False
    error = await machine.agent.exit_report(place.peer, 1)
    assert (type(error), machine.launcher.killed) == (PeerLost, [])
    machine.launcher.die(machine.launcher.made[0])
    await machine.blame_time_over()
    assert machine.unheld == [place.actor]


async def test_a_worker_that_lives_and_cannot_be_reached_is_killed(machine: Machine) -> None:
    place = await machine.place()
    machine.launcher.patient = False
    machine.links.to(place.peer).lost = PeerLost("broken")
    error = await machine.agent.exit_report(place.peer, 1)
    assert (type(error), machine.launcher.killed) == (ActorDied, [0])
    await machine.blame_time_over()
    assert machine.unheld == []


async def test_an_end_that_was_wanted_is_no_accident(machine: Machine) -> None:
    place = await machine.place()
    machine.launcher.patient = False
    await machine.agent.vacate(OWNER, place.peer, place.actor, "a test")
    assert (machine.ended, machine.launcher.killed, machine.free) == ([(place.peer, True)], [0], 2)
    await machine.blame_time_over()
    assert machine.unheld == []
    assert "was stopped: a test" in str(await machine.agent.exit_report(place.peer, 1))


async def test_the_process_of_two_actors_ends_with_the_last_of_them(machine: Machine) -> None:
    first = await machine.place()
    second = await machine.place(beside=first.peer)
    machine.launcher.patient = False
    await machine.agent.vacate(OWNER, first.peer, first.actor, "a test")
    assert (machine.ended, machine.free) == ([], 1)
    await machine.agent.vacate(OWNER, second.peer, second.actor, "a test")
    assert (machine.ended, machine.free) == ([(first.peer, True)], 2)


async def test_a_restartable_actor_holds_its_resources_without_a_process(machine: Machine) -> None:
    place = await machine.place(restartable=True)
    other = await machine.place()
    machine.launcher.die(machine.launcher.made[0])
    assert machine.free == 0
    with pytest.raises(InsufficientResources):
        await machine.place()
    again = await machine.agent.place_again(OWNER, "Desk-1", place.actor, None)
    assert again.peer not in (place.peer, other.peer)
    await machine.agent.kill(again.peer, "a test")
    await machine.agent.vacate(OWNER, again.peer, place.actor, "a test")
    assert machine.free == 1
    with pytest.raises(ActorDied, match="Desk-1 was stopped"):
        await machine.agent.place_again(OWNER, "Desk-1", place.actor, None)


async def test_a_worker_that_does_not_start_holds_nothing_and_is_no_accident(machine: Machine) -> None:
    machine.launcher.starts = False
    with pytest.raises(SpawnFailed):
        await machine.place()
    assert (machine.free, await machine.agent.processes()) == (2, ())
    assert [wanted for _, wanted in machine.ended] == [True]
    await machine.blame_time_over()
    assert machine.unheld == []


async def test_an_actor_does_not_move_in_with_one_that_is_gone(machine: Machine) -> None:
    place = await machine.place()
    machine.launcher.die(machine.launcher.made[0])
    with pytest.raises(ActorDied, match="Desk-2 was to live with an actor that is gone"):
        await machine.place(beside=place.peer)
    assert machine.free == 2


# Shares that are reserved before there is an actor.


def shares(*numbers: int) -> list[Wish[Tenant]]:
    return [Wish(Tenant(OWNER, ActorId(number)), f"Desk-{number}", Demand(cpus=1)) for number in numbers]


async def test_a_reserved_share_is_that_of_its_actor_as_soon_as_there_is_one(machine: Machine) -> None:
    first, second = shares(20, 21)
    await machine.agent.reserve([first, second], None)
    place = await machine.agent.place(first, None, None, CONDITIONS)
    assert machine.free == 0
    # A failure elsewhere gives back the whole gang: not the share of a live process.
    await machine.agent.release([first.holder, second.holder])
    await machine.agent.release([first.holder, second.holder])
    assert machine.free == 1
    machine.launcher.patient = False
    await machine.agent.vacate(OWNER, place.peer, place.actor, "a test")
    assert machine.free == 2


async def test_a_reserved_share_is_given_back_if_there_is_no_process_for_it(machine: Machine) -> None:
    [share] = shares(20)
    await machine.agent.reserve([share], None)
    machine.launcher.starts = False
    with pytest.raises(SpawnFailed):
        await machine.agent.place(share, None, None, CONDITIONS)
    assert machine.free == 2


async def test_what_a_lost_owner_has_reserved_is_given_back(machine: Machine) -> None:
    share, part, inner = shares(20, 21, 22)
    await machine.agent.reserve([share], None)
    assert await machine.agent.carve(part) == ()
    await machine.agent.place(inner, part.holder, None, CONDITIONS)
    state = await machine.agent.state()
    assert (state.stock.free["cpus"], state.actors) == (0, 3)
    assert (await machine.agent.state(part.holder)).stock.free["cpus"] == 0
    machine.agent.owner_lost(OWNER, "a test")
    assert machine.free == 2
    await machine.agent.changed(state.revision)
