"""The coordinator answers from its store, waits for unknown facts, and stops when another one has its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import pytest

from aiodaft._protocol.coordination.records import Change, Kind, Member, NamedActor, Record, View
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.coordination.coordinator import Coordinator, Deposed, NotStored, StoreFailed
from aiodaft.exceptions import CoordinatorUnavailable, LeaseLost, NameNotFound, NameTaken
from aiodaft.testing import AutojumpLoop

P = ParamSpec("P")
T = TypeVar("T")

FREE: Final = {"cpus": 1.0}


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def start(awaitable: Awaitable[T]) -> asyncio.Task[T]:
    async def wait() -> T:
        return await awaitable

    return asyncio.get_running_loop().create_task(wait())


class SharedRecords:
    """The common part of several stores: the records, and the coordinator in charge."""

    def __init__(self) -> None:
        self.term = 0
        self.owner: object = None
        self.records: dict[tuple[Kind, str], Record] = {}
        self.commits: list[list[str]] = []


class FakeStore:
    """A store in memory that can be slow, fail, or fail after it has stored."""

    def __init__(self, shared: SharedRecords) -> None:
        self.shared = shared
        self.delay = 0.0
        self.fails = ""
        self._opened = False
        self.is_closed = False
        self.is_lost = asyncio.Event()

    async def open(self) -> Stored:
        await asyncio.sleep(self.delay)
        if self.fails:
            raise StoreFailed("no connection")
        if self._opened and self.shared.owner is not self:
            raise Deposed
        self._opened = True
        self.shared.owner = self
        self.shared.term += 1
        return Stored(self.shared.term, tuple(self.shared.records.values()))

    async def commit(self, changes: Sequence[Change]) -> None:
        await asyncio.sleep(self.delay)
        if self.fails == "full" and changes:
            raise NotStored("the disk is full")
        if self.fails == "before":
            raise StoreFailed("no connection")
        if self.shared.owner is not self:
            raise Deposed
        self.shared.commits.append([change.key for change in changes])
        for change in changes:
            self.shared.records.pop((change.kind, change.key), None)
            if change.record is not None:
                self.shared.records[change.kind, change.key] = change.record
        if self.fails == "after":
            raise StoreFailed("the answer is lost")

    async def lost(self) -> None:
        await self.is_lost.wait()

    async def aclose(self) -> None:
        self.is_closed = True


def named(name: str, actor: int = 16, peer: str = "controller-1", epoch: int = 0) -> NamedActor:
    return NamedActor(name, PeerId(peer), ActorId(actor), f"Model-{actor}", ("m.Model",), epoch=epoch)


def node(name: str, epoch: int = 0) -> Member:
    return Member(name, PeerId(f"node-1@{name}"), "tcp://10.0.0.1:7777", {}, FREE, FREE, epoch)


def now() -> float:
    return asyncio.get_running_loop().time()


def new(store: FakeStore | None = None, **options: Any) -> Coordinator:
    return Coordinator(store, clock=asyncio.get_running_loop().time, **options)


@asynccontextmanager
async def running(coordinator: Coordinator) -> AsyncGenerator[Coordinator, None]:
    run = asyncio.get_running_loop().create_task(coordinator.run())
    try:
        yield coordinator
    finally:
        run.cancel()
        await asyncio.wait([run])
        await coordinator.aclose()


# Without a store.


@in_virtual_time
async def test_watchers_wait_for_changes() -> None:
    coordinator, view = new(), View(Kind.NAME)
    view.take(await coordinator.watch_names("", 0))
    waiting = start(coordinator.watch_names("", view.revision))
    await asyncio.sleep(1)
    assert not waiting.done()
    made = await coordinator.register(named("x"))
    assert [change.record for change in view.take(await waiting)] == [made]
    assert await coordinator.names("x") == (made,)
    assert await coordinator.names_of("controller-1", 16) == ("x",)
    await coordinator.release("controller-1", 16)
    assert [change.record for change in view.take(await coordinator.watch_names("", view.revision))] == [None]


@in_virtual_time
async def test_of_twenty_callers_one_makes_the_actor_and_all_get_it() -> None:
    coordinator, made = new(), []

    async def get_or_create(caller: int) -> NamedActor:
        held = await coordinator.get_or_reserve(named("x", actor=caller, peer=f"controller-{caller}"))
        if held.reserved:
            made.append(caller)
            await asyncio.sleep(1)
            held = await coordinator.register(named("x", actor=16, peer=held.peer, epoch=held.epoch))
        return held

    found = await asyncio.gather(*map(get_or_create, range(20)))
    assert len(made) == 1
    assert found == [await coordinator.lookup("x")] * 20


@pytest.mark.parametrize("how", ["gives up", "ends"])
@in_virtual_time
async def test_the_next_caller_makes_the_actor_if_the_first_one_does_not(how: str) -> None:
    coordinator = new()
    first = await coordinator.get_or_reserve(named("x", actor=1, peer="controller-1"))
    second = start(coordinator.get_or_reserve(named("x", actor=2, peer="controller-2")))
    await asyncio.sleep(1)
    assert not second.done()
    if how == "gives up":
        await coordinator.release_name("x", first.epoch + 1)
        await asyncio.sleep(1)
        assert not second.done()
        await coordinator.release_name("x", first.epoch)
    else:
        await coordinator.release("controller-1", None)
    held = await second
    assert (held.reserved, held.peer) == (True, "controller-2")
    assert held.epoch > first.epoch


@in_virtual_time
async def test_names_and_nodes_are_checked_before_anything_else() -> None:
    coordinator = new(FakeStore(SharedRecords()))
    for attempt in (
        coordinator.register(named("a/b")),
        coordinator.get_or_reserve(named("a/b")),
        coordinator.lookup("a/b"),
        coordinator.names("a/b"),
        coordinator.release_name("a/b", 1),
        coordinator.watch_names("a/b", 0),
        coordinator.join(node("a/b"), ()),
    ):
        with pytest.raises(ValueError, match="cannot name|begins with"):
            await attempt


@in_virtual_time
async def test_a_node_that_is_silent_is_taken_out_and_its_names_are_free() -> None:
    async with running(new(lease=10.0)) as coordinator:
        joined = await coordinator.join(node("a"), ())
        assert (joined.good_for, joined.ttl, joined.names) == (10.0, 10.0, ())
        other = await coordinator.join(node("b"), ())
        made = await coordinator.register(named("x", peer="worker-1@a"))
        assert made.lease == joined.epoch
        view = View(Kind.MEMBER)
        view.take(await coordinator.watch_members(0))
        for _ in range(3):
            await asyncio.sleep(2.5)
            assert await coordinator.keepalive(other.epoch, FREE) == 10.0
        (change,) = view.take(await coordinator.watch_members(view.revision))
        assert (change.key, change.record, now()) == ("a", None, 10.0)
        assert await coordinator.names("") == ()
        with pytest.raises(LeaseLost):
            await coordinator.keepalive(joined.epoch, FREE)
        assert [member.name for member in await coordinator.members()] == ["b"]
        await coordinator.leave(other.epoch)
        assert await coordinator.members() == ()


@in_virtual_time
async def test_free_resources_are_told_to_who_asks_and_not_to_every_watcher() -> None:
    coordinator, view = new(), View(Kind.MEMBER)
    joined = await coordinator.join(node("a"), ())
    view.take(await coordinator.watch_members(0))
    await coordinator.keepalive(joined.epoch, {"cpus": 0.5})
    (member,) = await coordinator.members()
    assert member.free == {"cpus": 0.5}
    await coordinator.join(node("b"), ())
    (change,) = view.take(await coordinator.watch_members(view.revision))
    assert change.key == "b"


@in_virtual_time
async def test_after_a_restart_without_a_store_new_names_wait_for_the_nodes() -> None:
    first = new(lease=10.0)
    joined = await first.join(node("a"), ())
    x = await first.register(named("x", peer="worker-1@a"))
    async with running(new(stored=Stored(term=2, forgot=True), lease=10.0)) as coordinator:
        began = now()
        fresh = start(coordinator.register(named("y", peer="worker-1@a")))
        reserved = start(coordinator.get_or_reserve(named("z", peer="worker-1@a")))
        # Names that may be held are waited for, by all that ask.
        found = start(coordinator.lookup("x"))
        asked = [start(coordinator.names("")), start(coordinator.names_of(x.peer, x.actor))]
        missing = start(coordinator.lookup("no"))
        await asyncio.sleep(5)
        assert not any(one.done() for one in (found, missing, *asked))
        assert await coordinator.join(node("a", joined.epoch), (x,)) is not None
        assert await found == x
        with pytest.raises(NameTaken):
            await coordinator.register(named("x", actor=17, peer="worker-1@a"))
        assert now() == began + 5
        assert (await fresh).epoch > x.epoch
        assert (await reserved).reserved
        assert [("x",), (x,)] == [await asked[1], tuple(one for one in await asked[0] if one == x)]
        with pytest.raises(NameNotFound, match="no actor is named 'no'"):
            await missing
        assert now() == pytest.approx(began + 10, abs=0.1)


# With a store.


@in_virtual_time
async def test_nothing_is_answered_before_it_is_stored() -> None:
    shared = SharedRecords()
    store = FakeStore(shared)
    coordinator = new(store)
    with pytest.raises(CoordinatorUnavailable, match="has not opened its store"):
        await coordinator.lookup("x")
    async with running(coordinator):
        await coordinator.open()
        store.delay = 1.0
        registering = start(coordinator.register(named("x")))
        await asyncio.sleep(0.5)
        assert await coordinator.names("") == ()
        made = await registering
        assert shared.records == {(Kind.NAME, "x"): made}
    assert store.is_closed
    with pytest.raises(CoordinatorUnavailable, match="it is closed"):
        await coordinator.lookup("x")
    again = new(FakeStore(shared))
    await again.open()
    assert await again.lookup("x") == made
    await again.aclose()


@in_virtual_time
async def test_a_caller_that_gives_up_leaves_what_is_stored_and_answered_alike() -> None:
    store = FakeStore(SharedRecords())
    async with running(new(store)) as coordinator:
        await coordinator.open()
        store.delay = 1.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await coordinator.register(named("x"))
        with pytest.raises(NameTaken):
            await coordinator.register(named("x", actor=17))


@in_virtual_time
async def test_keepalives_are_not_stored() -> None:
    store = FakeStore(SharedRecords())
    async with running(new(store)) as coordinator:
        await coordinator.open()
        joined = await coordinator.join(node("a"), ())
        for _ in range(3):
            await coordinator.keepalive(joined.epoch, {"cpus": 0.0})
    assert store.shared.commits == [["a"]]


@pytest.mark.parametrize(("fails", "is_stored"), [("before", False), ("after", True)])
@in_virtual_time
async def test_when_the_store_fails_it_is_read_again(fails: str, is_stored: bool) -> None:
    store = FakeStore(SharedRecords())
    async with running(new(store, lease=10.0)) as coordinator:
        await coordinator.open()
        y = await coordinator.register(named("y"))
        watching = start(coordinator.watch_names("", y.revision))
        await asyncio.sleep(0)
        store.fails = fails
        with pytest.raises(CoordinatorUnavailable, match="cannot store this") as caught:
            await coordinator.register(named("x"))
        assert caught.value.executed is None
        with pytest.raises(CoordinatorUnavailable, match="its store has failed"):
            await watching
        with pytest.raises(CoordinatorUnavailable, match="its store cannot be opened: no connection") as caught:
            await coordinator.register(named("x"))
        assert caught.value.executed is False
        store.fails = ""
        # It opens its store by itself.
        await asyncio.sleep(5)
        assert await coordinator.lookup("y") == y
        assert [one.name for one in await coordinator.names("x")] == ["x"] * is_stored
        assert (await coordinator.register(named("x"))).epoch > y.epoch


@in_virtual_time
async def test_while_its_disk_is_full_it_grants_nothing_and_keeps_what_it_has() -> None:
    store = FakeStore(SharedRecords())
    async with running(new(store, lease=10.0)) as coordinator:
        joined = await coordinator.join(node("a"), ())
        y = await coordinator.register(named("y"))
        store.fails = "full"
        for _ in range(6):
            with pytest.raises(CoordinatorUnavailable, match="cannot store this: the disk is full") as caught:
                await coordinator.register(named("x"))
            assert caught.value.executed is False
            assert await coordinator.keepalive(joined.epoch, FREE) == 10.0
            assert await coordinator.names("") == (y,)
            await asyncio.sleep(5)
        store.fails = ""
        assert (await coordinator.register(named("x"))).epoch == y.epoch + 1


@in_virtual_time
async def test_all_that_wait_for_a_store_that_does_not_answer_fail_with_its_first_attempt() -> None:
    store = FakeStore(SharedRecords())
    coordinator = new(store)
    store.delay, store.fails = 6.0, "before"
    for until in (6.0, 12.0):
        asked = await asyncio.gather(*(coordinator.register(named(name)) for name in "xyz"), return_exceptions=True)
        assert [getattr(error, "executed", None) for error in asked] == [False] * 3
        assert now() == pytest.approx(until)
    asking = start(coordinator.register(named("x")))
    await asyncio.sleep(0.5)
    # It does not wait for the store until that has given up.
    await coordinator.aclose()
    assert now() == pytest.approx(13.5)
    assert (asking.done(), store.is_closed) == (True, True)


@in_virtual_time
async def test_the_coordinator_that_opened_a_store_last_is_in_charge() -> None:
    shared = SharedRecords()
    async with running(new(FakeStore(shared), lease=10.0)) as first, running(new(FakeStore(shared))) as second:
        await first.open()
        joined = await first.join(node("a"), ())
        x = await first.register(named("x"))
        await second.open()
        # It may answer for a moment.
        assert await first.keepalive(joined.epoch, FREE) <= 10.0
        with pytest.raises(CoordinatorUnavailable, match="another coordinator has taken over") as caught:
            await first.register(named("y"))
        assert caught.value.executed is False
        with pytest.raises(CoordinatorUnavailable, match="another coordinator has taken over"):
            await first.lookup("x")
        with pytest.raises(CoordinatorUnavailable, match="another coordinator has taken over"):
            await first.open()
        assert await second.lookup("x") == x
        assert (await second.register(named("y"))).epoch > x.epoch


@in_virtual_time
async def test_a_coordinator_that_may_have_been_replaced_prolongs_no_lease_beyond_what_it_knows() -> None:
    shared = SharedRecords()
    async with running(new(FakeStore(shared), lease=10.0)) as first, running(new(FakeStore(shared))) as second:
        await first.open()
        joined = await first.join(node("a"), ())
        await asyncio.sleep(1.0)
        assert await first.keepalive(joined.epoch, FREE) == 9.0
        await asyncio.sleep(1.0)
        assert await first.keepalive(joined.epoch, FREE) == 10.0
        await second.open()
        await asyncio.sleep(1.0)
        assert await first.keepalive(joined.epoch, FREE) == 9.0
        await asyncio.sleep(1.0)
        with pytest.raises(CoordinatorUnavailable):
            await first.keepalive(joined.epoch, FREE)
        assert await second.keepalive(joined.epoch, FREE) == 10.0


@in_virtual_time
async def test_a_coordinator_whose_store_tells_it_that_it_is_lost_answers_nothing_more() -> None:
    store = FakeStore(SharedRecords())
    async with running(new(store)) as coordinator:
        await coordinator.open()
        watching = start(coordinator.watch_names("", (await coordinator.register(named("x"))).revision))
        await asyncio.sleep(0.1)
        store.is_lost.set()
        with pytest.raises(CoordinatorUnavailable, match="another coordinator has taken over"):
            await watching
        with pytest.raises(CoordinatorUnavailable, match="another coordinator has taken over"):
            await coordinator.register(named("y"))


@in_virtual_time
async def test_a_lease_is_not_prolonged_while_its_end_is_stored() -> None:
    store = FakeStore(SharedRecords())
    async with running(new(store, lease=10.0)) as coordinator:
        await coordinator.open()
        joined = await coordinator.join(node("a"), ())
        await asyncio.sleep(9)
        store.delay = 2.0
        await asyncio.sleep(1.5)
        with pytest.raises(LeaseLost):
            await coordinator.keepalive(joined.epoch, FREE)
        assert store.shared.records == {}
