"""Actors that are restarted, as their callers see them: handles that follow them, and handles that do not.

A supervised actor has an owner, the process with its supervisor, and a number that stays. Where it is now is asked of
the owner when it is not where it was: a call costs no more than one to any other actor. Calls made while it is down
wait here, in order, within the bounds for calls that wait to be sent anywhere.
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from aiodaft._protocol.ids import SUPERVISOR, ActorId, CallId, PeerId, epoch_of, number_of
from aiodaft._protocol.liveness import Health
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._protocol.value import Status
from aiodaft._runtime.calls.backlog import Backlog
from aiodaft._runtime.calls.call import CallState, Request, Target, home_of
from aiodaft._runtime.serialization.errors import copy_error, unsent
from aiodaft.actor import Handle
from aiodaft.exceptions import (
    ActorDied,
    DaftError,
    NotDelivered,
    Overloaded,
    PeerLost,
    RuntimeClosed,
    StaleHandle,
)
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from aiodaft._runtime.calls.call import PendingCall
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.objects.ref_state import UnhandledErrors
    from aiodaft._runtime.peer import Peer
    from aiodaft._runtime.supervision.directory import Directory
    from aiodaft.methods import MethodSpec


@dataclass(frozen=True, slots=True)
class Location:
    """Where a supervised actor is.

    Attributes:
        peer: Its process; nobody's while it is down.
        actor: Its incarnation; the next one while it is down.
        ended: Why it will never be anywhere again.
    """

    peer: PeerId
    actor: ActorId
    ended: DaftError | None = None


NOWHERE = PeerId("")


class FollowingTarget(Target):
    """A supervised actor as this process reaches it: one object for all handles, so that they follow together.

    While the actor is down its address is this very process, where nobody has its number.
    """

    __slots__ = ("__weakref__", "_backlog", "_finding", "ended", "owner")

    def __init__(self, peer: Peer, place: Location, owner: PeerId, label: str, sink: UnhandledErrors | None) -> None:
        # A handle may have travelled for long: without a connection to that process it is worth asking.
        super().__init__(
            peer, place.peer if place.peer in peer.connections else peer.process.id, place.actor, label, sink
        )
        self.owner = owner
        self.ended: DaftError | None = None
        self._backlog = Backlog(peer, label)
        self._finding: asyncio.Task[None] | None = None

    @property
    def identity(self) -> tuple[PeerId, ActorId]:
        """What the actor is known by, whatever its incarnation."""
        return self.owner, self.number

    @property
    def number(self) -> ActorId:
        """What all its incarnations have in common."""
        return number_of(self.actor)

    @property
    def epoch(self) -> int:
        """How often the actor had been restarted when it was heard of last."""
        return epoch_of(self.actor)

    @property
    def place(self) -> Location:
        """Where it is, as far as this process knows."""
        down = self.remote == self.peer.process.id and self.actor not in self.peer.actors
        return Location(NOWHERE if down else self.remote, self.actor)

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        """Call a method and return a ref of its result at once."""
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        number = self.peer.process.next_number()
        state = FollowingCall(self, spec, number)
        request = state.request = Request(self, spec, args, kwargs, number, WANT_REPLY, state)
        request.again = spec.retries > 0
        self.peer.outgoing.submit(request)
        return Ref(state)

    def health(self) -> Health:
        """See `Target.health`. The owner tells its own process where the actor is; any other process asks once."""
        if self.ended is not None:
            return Health.LOST
        health = super().health()
        if health is not Health.LOST:
            return health
        if self.owner != self.peer.process.id and self._finding is None:
            self.peer.process.call_soon(self._look)
        return Health.SUSPECT

    def note_death(self, error: ActorDied) -> None:
        """One incarnation is gone; the next one may be there."""

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        return _rebuild, (self.peer.process.options.home, self.owner, self.place, self.label, cls, True)

    # Waiting for the next incarnation.

    def missed(self, request: Request, connection: Connection | None) -> None:
        """It is down, or somewhere else: the call waits.

        Raises:
            SerializationError: An argument cannot travel.
            Overloaded: Too many calls are waiting.
        """
        if self.ended is not None:
            request.state.on_error(unsent(self.ended))
            return
        # Its state frees the arguments; those of streams and tells are freed when they are sent.
        request.again = request.again or isinstance(request.state, FollowingCall)
        if self._backlog.admit(request):
            self._start_finding(connection)

    def _look(self) -> None:
        connection = self.peer.connections.get(self.remote)
        if (
            self.ended is None
            and self.peer.process.closed is None
            and (connection is None or connection.lost is not None)
        ):
            self._start_finding(connection)

    def _start_finding(self, connection: Connection | None) -> None:
        if self._finding is None:
            self._finding = self.peer.process.tasks.create_task(self._find(connection), name=f"find {self.label}")

    def forget(self, number: CallId) -> None:
        """A call does not wait any more."""
        self._backlog.forget(number)

    async def arrive(self) -> None:
        """Wait until it is somewhere.

        Raises:
            DaftError: It is gone for good; this says why.
        """
        if self.ended is None and self.place.peer == NOWHERE:
            found = await self.supervisor().locate(self.number, wait=True)
            if found.ended is None:
                self.move(found)
            else:
                self.end(found.ended)
        if self.ended is not None:
            raise unsent(self.ended)

    async def _find(self, connection: Connection | None) -> None:
        """Ask where it is, which is answered when it is somewhere."""
        try:
            # Its process is gone if the supervisor is to know more; two processes may also have fallen out.
            lost = None if connection is None else await self.peer.connections.explanation(connection)
            found = await self.supervisor().locate(self.number, wait=True)
        except asyncio.CancelledError:
            self._backlog.fail(RuntimeClosed(self.peer.process.closed or "the runtime is closed"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait get it
            self._finding = None
            self._backlog.fail(error)
            return
        self._finding = None
        if found.ended is not None:
            self.end(found.ended)
        elif lost is not None and connection is not None and found.peer == connection.remote:
            self._backlog.fail(lost)
        else:
            self.move(found)

    def supervisor(self) -> Directory:
        """Who knows where it is."""
        from aiodaft._runtime.supervision.directory import Directory  # noqa: PLC0415 - it is itself made of what callers see

        return cast("Directory", self.peer.handle(self.owner, SUPERVISOR, "supervisor", Directory))

    # Being told.

    def move(self, place: Location) -> None:
        """It is there now; news that are older than what is known are ignored."""
        if self.ended is None and epoch_of(place.actor) >= self.epoch:
            self.remote, self.actor = place.peer, place.actor
            for request in self._backlog.take_all():
                self.peer.sender.submit_later(request)

    def leave(self) -> None:
        """It is down."""
        self.remote = self.peer.process.id

    def end(self, error: DaftError) -> None:
        """It is gone for good."""
        if self.ended is None:
            self.ended = error
            self.leave()
            self._backlog.fail(error)


class FollowingCall(CallState):
    """The result of a call of a supervised actor: the call may wait for an incarnation, and be made again."""

    # What to make again; until it is settled, because it knows this state.
    request: Request | None = None
    # An attempt may have run.
    _doubtful = False

    def on_error(self, error: BaseException) -> None:
        if self.settled or self._made_again(error):
            return
        if self._doubtful and isinstance(error, DaftError) and error.executed is False:
            # Others may wait with the same error, and know more.
            error = copy_error(error).with_executed(None)
        super().on_error(error)

    def _made_again(self, error: BaseException) -> bool:
        request, target = self.request, cast("FollowingTarget", self.target)
        if not isinstance(error, NotDelivered | ActorDied | PeerLost) or error.executed:
            return False
        if isinstance(error, Overloaded):
            # The actor lives, and would refuse it again.
            return False
        turned_away = error.executed is False and isinstance(error, StaleHandle | ActorDied)
        told = target.owner == self.process.id
        if turned_away and not told and self.connection is not None and self.connection.remote == target.remote:
            # Perhaps its process lives, and has no such actor: the next call asks where that is. (Perhaps an argument
            # is lost.) The owner's own process is told of every move, and must not forget where the actor is.
            target.leave()
        if self._cancelling or target.ended is not None or request is None or request.attempt >= self.spec.retries:
            return False
        request.attempt += 1
        self._doubtful = self._doubtful or error.executed is None
        target.peer.sender.submit_later(request)
        return True

    def _settle(self, status: Status) -> None:
        super()._settle(status)
        self._let_go()

    def on_plain(self, value: Any) -> None:
        super().on_plain(value)
        self._let_go()

    def _let_go(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            cast("FollowingTarget", self.target).forget(request.number)
            if request.again and request.kept is not None:
                request.kept.release()


class PinnedTarget(Target):
    """One incarnation of a supervised actor: when that is gone, calls are refused."""

    __slots__ = ("life",)

    def __init__(self, life: FollowingTarget, place: Location) -> None:
        super().__init__(life.peer, place.peer, place.actor, life.label, life.sink)
        self.life = life

    @property
    def lane(self) -> Target:
        """All handles of the actor stand in one lane."""
        return self.life

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        place = Location(self.remote, self.actor)
        return _rebuild, (self.peer.process.options.home, self.life.owner, place, self.label, cls, False)

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        """Call a method and return a ref of its result at once."""
        spec.check(args, kwargs)
        number = self.peer.process.next_number()
        state = PinnedCall(self, spec, number)
        self.peer.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_REPLY, state))
        return Ref(state)

    def missed(self, request: Request, connection: Connection | None) -> None:
        """The incarnation is gone."""
        self.refuse(request.state, connection)

    def refuse(self, state: PendingCall, connection: Connection | None) -> None:
        """Fail a call that was not sent, and say why."""
        self.peer.process.tasks.create_task(self._refuse(state, connection), name=f"refuse a call of {self.label}")

    async def _refuse(self, state: PendingCall, connection: Connection | None) -> None:
        try:
            lost = None if connection is None else await self.peer.connections.explanation(connection)
            found = await self.life.supervisor().locate(number_of(self.actor), wait=False)
        except Exception as problem:  # noqa: BLE001 - the caller gets it
            state.on_error(unsent(problem))
            return
        stale = StaleHandle(f"{self.label} was restarted: this handle leads to its epoch {epoch_of(self.actor)}")
        # Two processes may have fallen out; then it is still there.
        state.on_error(unsent(found.ended or (lost if lost is not None and found.peer == self.remote else stale)))


class PinnedCall(CallState):
    """The result of a call of one incarnation."""

    def on_lost(self, error: DaftError) -> None:
        """The connection ended: what was not sent over it is refused as everything later is."""
        if error.executed is False and not self.settled:
            cast("PinnedTarget", self.target).refuse(self, self.connection)
        else:
            super().on_lost(error)


class Followers:
    """The supervised actors that one process knows of."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._known: weakref.WeakValueDictionary[tuple[PeerId, ActorId], FollowingTarget] = (
            weakref.WeakValueDictionary()
        )

    def get(self, owner: PeerId, place: Location, label: str, sink: UnhandledErrors | None = None) -> FollowingTarget:
        """The actor with this owner and number."""
        key = (owner, number_of(place.actor))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = FollowingTarget(self._peer, place, owner, label, sink)
        elif epoch_of(place.actor) > known.epoch:
            known.leave()
        return known


def _rebuild(runtime: PeerId, owner: PeerId, place: Location, label: str, cls: type, follow: bool) -> Any:
    peer = home_of(runtime, label)
    life = peer.followers.get(owner, place, label)
    return Handle(life if follow else PinnedTarget(life, place), cls)
