"""The coordinator: the actor that knows actors by their names, and the nodes. No call and no transfer waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from aiodaft._protocol.coordination.records import (
    Batch,
    Change,
    Kind,
    Member,
    NamedActor,
    check_name,
    check_node_name,
    check_prefix,
)
from aiodaft._protocol.coordination.registry import Registry, Stored
from aiodaft._protocol.ids import ActorId, PeerId, is_worker
from aiodaft._protocol.numbers import Latest
from aiodaft._runtime.platform.tasks import TaskOwner, logger
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, CoordinatorUnavailable
from aiodaft.methods import method


class StoreFailed(Exception):
    """It is not known whether the last changes are stored."""


class NotStored(StoreFailed):
    """This coordinator still is in charge: the disk is full, or there is no thread."""


class Deposed(Exception):
    """Another coordinator has opened the store since: nothing was stored."""


class Store(Protocol):
    """Keeps the records of a coordinator. One coordinator at a time is in charge of it: the last that opened it."""

    async def open(self) -> Stored:
        """Take charge, with a new term. After `StoreFailed`: read the records again.

        Raises:
            StoreFailed: It cannot be reached.
            Deposed: Another coordinator has opened it since; or it can have one user only.
            CorruptState: It is no store of a coordinator, or is damaged.
        """
        ...

    async def commit(self, changes: Sequence[Change]) -> None:
        """Store changes, all or none. Without changes: find out whether this coordinator is in charge.

        Raises:
            StoreFailed: If not all are stored, then the first ones.
            NotStored: It can be tried again.
        """
        ...

    async def lost(self) -> None: ...

    async def aclose(self) -> None: ...


T = TypeVar("T")

LEASE: Final = 10.0
# For this part of a lease, a coordinator believes that it is in charge of its store.
_CONFIRMED: Final = 0.125
_REMEMBERED: Final = 1024
_LAST_GRACE: Final = 1.0
_RESOLUTION: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Membership:
    """The answer to a node that joins.

    Attributes:
        epoch: Its incarnation, and its lease.
        good_for: Seconds of the lease from its request on.
        names: The names that its actors have: those that it named, without those that went to others, and those that it
            has not heard of, which it releases unless it waits for the answer to a registration.
    """

    epoch: int
    good_for: float
    ttl: float
    names: tuple[NamedActor, ...]


class Coordinator(Actor):
    """Names and members.

    Args:
        store: With one, `open` this before anything else.
        stored: The records to begin with, without a store. `forgot=True` where a coordinator without a store was
            before.
        clock: Seconds of a clock that never jumps.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        stored: Stored = Stored(term=1),  # noqa: B008 - it is immutable
        lease: float = LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lease = lease
        self._clock = clock
        self._registry = Registry(stored, lease, clock()) if store is None else None
        self._why_unknown = "it has not opened its store yet"
        self._failures = 0
        self._deposed = False
        # When it last began to ask whether it is in charge, and was.
        self._confirmed_at = clock()
        # A late request for one of their actors would hold a name for ever.
        self._ended = Latest[str, None](_REMEMBERED)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks = TaskOwner("aiodaft coordinator")

    async def open(self) -> None:
        """Take charge of the store, and read it.

        Raises:
            CoordinatorUnavailable: The store cannot be reached, or another coordinator has it.
            CorruptState: It is damaged.
        """
        async with self._lock:
            await self._opened()

    async def run(self) -> None:
        if self._store is not None:
            self._tasks.create_task(self._watch_charge(self._store), name="watch the store")
        while not self._deposed:
            registry = self._registry
            look_at = self._clock() + self._lease / 4 if registry is None else registry.leases.next_look()
            await asyncio.sleep(max(0.0, look_at - self._clock()))
            try:
                await self._change(lambda registry, now: registry.expire(now), lambda registry: None)
            except CoordinatorUnavailable as error:
                logger.warning("%s", error)
                await asyncio.sleep(self._lease / 4)

    async def aclose(self) -> None:
        self._deposed = True
        self._forget("it is closed")
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_GRACE), self._lock:
                self._forget("it is closed")
        await self._tasks.aclose()
        if self._store is not None:
            await self._store.aclose()

    @method
    async def register(self, wanted: NamedActor) -> NamedActor:
        """`wanted.epoch`: that of its reservation, if it has one."""
        self._check(wanted)
        await self._recovered(wanted.name)
        return await self._change(
            lambda registry, now: registry.register(wanted, now), lambda registry: registry.names.lookup(wanted.name)
        )

    @method
    async def get_or_reserve(self, wanted: NamedActor) -> NamedActor:
        """The actor with a name; or a reservation, so that the caller makes it and registers it.

        `wanted.actor` is any number that the process uses once. While another one has the reservation, this waits.
        """
        while True:
            self._check(wanted)
            await self._recovered(wanted.name)
            changed = self._changed
            held = await self._change(
                lambda registry, now: registry.reserve(wanted, now), lambda registry: registry.names.get(wanted.name)
            )
            if held is not None and (not held.reserved or (held.peer, held.actor) == (wanted.peer, wanted.actor)):
                return held
            await changed.wait()

    def _check(self, wanted: NamedActor) -> None:
        check_name(wanted.name)
        if wanted.peer in self._ended:
            raise ActorDied(f"{wanted.label} cannot have a name: the process {wanted.peer} has ended", executed=False)

    @method
    async def lookup(self, name: str) -> NamedActor:
        check_name(name)
        await self._recovered(name)
        return self._here().names.lookup(name)

    @method
    async def names(self, prefix: str) -> tuple[NamedActor, ...]:
        check_prefix(prefix)
        await self._recovered()
        return tuple(self._here().names.named(prefix))

    @method
    async def names_of(self, peer: str, actor: int) -> tuple[str, ...]:
        await self._recovered()
        return tuple(sorted(one.name for one in self._here().names.held_by(PeerId(peer), ActorId(actor))))

    @method
    async def release(self, peer: str, actor: int | None) -> None:
        gone = None if actor is None else ActorId(actor)
        if gone is None and is_worker(PeerId(peer)):
            self._ended[peer] = None
        await self._change(lambda registry, now: registry.release(PeerId(peer), gone), lambda registry: None)

    @method
    async def release_name(self, name: str, epoch: int) -> None:
        check_name(name)
        await self._change(lambda registry, now: registry.release_name(name, epoch), lambda registry: None)

    @method
    async def unreserve(self, name: str, peer: str, actor: int) -> None:
        check_name(name)
        await self._change(
            lambda registry, now: registry.unreserve(name, PeerId(peer), ActorId(actor)), lambda registry: None
        )

    @method
    async def watch_names(self, prefix: str, since: int) -> Batch:
        """Wait for changes of names after a revision; see `View`. 0: begin with the names that there are."""
        return await self._news(Kind.NAME, check_prefix(prefix), since)

    @method
    async def join(self, member: Member, names: tuple[NamedActor, ...]) -> Membership:
        """Take in a node: as a new incarnation (epoch 0), or with the epoch and the names that it holds."""
        check_node_name(member.name)
        came_at = self._clock()

        def membership(registry: Registry) -> Membership:
            now = registry.members.get(member.name)
            assert now is not None
            return Membership(now.epoch, self._good_for(came_at), self._lease, tuple(registry.names.under(now.epoch)))

        return await self._change(lambda registry, now: registry.join(member, names, now), membership)

    @method
    async def keepalive(self, epoch: int, free: Mapping[str, float]) -> float:
        """Returns the seconds of the lease from the request on."""
        came_at = self._clock()
        return await self._change(
            lambda registry, now: registry.keep(epoch, free, now), lambda registry: self._good_for(came_at)
        )

    @method
    async def leave(self, epoch: int) -> None:
        await self._change(lambda registry, now: registry.leave(epoch), lambda registry: None)

    @method
    async def members(self) -> tuple[Member, ...]:
        return tuple(self._here().members.all())

    @method
    async def lost_members(self) -> tuple[Member, ...]:
        """The nodes whose leases are over, and that have not come back."""
        return tuple(self._here().lost.values())

    @method
    async def watch_members(self, since: int) -> Batch:
        """Wait for changes of members after a revision; see `View`. 0: begin with the members that there are."""
        return await self._news(Kind.MEMBER, "", since)

    def _here(self) -> Registry:
        if self._registry is None:
            raise CoordinatorUnavailable(f"the coordinator does not answer: {self._why_unknown}")
        return self._registry

    async def _recovered(self, name: str | None = None) -> None:
        """Wait until the coordinator knows whether a name is held; None: which names are."""
        while (registry := self._registry) is not None and (left := registry.recovering_for(self._clock())) > 0:
            changed = self._changed
            if name is not None and registry.names.get(name) is not None:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left + _RESOLUTION):
                    await changed.wait()

    async def _news(self, kind: Kind, prefix: str, since: int) -> Batch:
        while True:
            changed = self._changed
            batch = self._here().news(kind, prefix, since)
            if batch is not None:
                return batch
            await changed.wait()

    def _good_for(self, came_at: float) -> float:
        # Another coordinator that takes over after this one was confirmed expires nothing for the time of a lease.
        return self._lease if self._store is None else self._lease - max(0.0, came_at - self._confirmed_at)

    async def _change(self, decide: Callable[[Registry, float], list[Change]], answer: Callable[[Registry], T]) -> T:
        if self._store is not None:
            return await asyncio.shield(self._tasks.start_ahead(self._store_change(decide, answer), name="change"))
        registry, now = self._here(), self._clock()
        self._apply(registry, decide(registry, now), now)
        return answer(registry)

    async def _store_change(
        self, decide: Callable[[Registry, float], list[Change]], answer: Callable[[Registry], T]
    ) -> T:
        failures = self._failures
        async with self._lock:
            if self._registry is None and self._failures != failures:
                # It has failed while this waited: one attempt is for all that wait.
                self._here()
            registry, now = await self._opened(), self._clock()
            changes = decide(registry, now)
            if changes or now - self._confirmed_at > _CONFIRMED * self._lease:
                await self._commit(changes, now)
            self._apply(registry, changes, now)
            return answer(registry)

    def _apply(self, registry: Registry, changes: list[Change], now: float) -> None:
        if changes:
            registry.apply(changes, now)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _commit(self, changes: list[Change], now: float) -> None:
        assert self._store is not None
        try:
            await self._store.commit(changes)
        except Deposed as error:
            raise self._lost_charge() from error
        except NotStored as error:
            raise CoordinatorUnavailable(f"the coordinator cannot store this: {error}") from error
        except StoreFailed as error:
            # The records are read again before the next decision.
            self._forget(f"its store has failed: {error}")
            failed = CoordinatorUnavailable(f"the coordinator cannot store this: {error}")
            raise failed.with_executed(None if changes else False) from error
        self._confirmed_at = now

    async def _opened(self) -> Registry:
        if self._registry is not None:
            return self._registry
        if self._store is None or self._deposed:
            return self._here()
        asked_at = self._clock()
        try:
            stored = await self._store.open()
        except Deposed as error:
            raise self._lost_charge() from error
        except StoreFailed as error:
            self._forget(f"its store cannot be opened: {error}")
            raise CoordinatorUnavailable(f"the coordinator does not answer: {self._why_unknown}") from error
        self._confirmed_at = asked_at
        self._registry = Registry(stored, self._lease, self._clock())
        self._wake()
        return self._registry

    async def _watch_charge(self, store: Store) -> None:
        await store.lost()
        self._lost_charge()

    def _lost_charge(self) -> CoordinatorUnavailable:
        self._deposed = True
        self._forget("another coordinator has taken over its store")
        return CoordinatorUnavailable(f"the coordinator does not answer: {self._why_unknown}")

    def _forget(self, why: str) -> None:
        self._registry = None
        self._why_unknown = why
        self._failures += 1
        self._wake()
