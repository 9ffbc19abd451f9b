"""Calls of supervised actors: a `FollowingTarget` follows restarts, a `PinnedTarget` does not.

A supervised actor has an owner (the process of its supervisor) and a number that restarts do not change. If a call does
not find the actor, the target asks the owner's directory for the location. Calls made while the actor is down wait in
the backlog, in order; `max_pending` bounds them.

    call ──> the process of `remote` ──> answered
              │ lost, or has no such actor: `missed`
              v
            backlog ──> `_find` asks the directory ──> `move`: sent, in order
                                                   └─> `end`: all fail, for good
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeAlias, cast

from aiodaft._protocol.calls.outgoing import NOWHERE, Failure, Location, Whereabouts, failure_of
from aiodaft._protocol.connections.messages import WANT_NOTHING, WANT_REPLY, WANT_STREAM
from aiodaft._protocol.ids import ActorId, CallId, PeerId, epoch_of, number_of
from aiodaft._protocol.node.worker import Health
from aiodaft._protocol.objects.value import Phase, Status
from aiodaft._runtime.calls.call import Caller, CallState, PendingCall, Request, Target, TellState, home_of
from aiodaft._runtime.calls.outgoing import Backlog
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import UnhandledErrors
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.platform.tasks import current_terms
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import all_plain
from aiodaft._runtime.serialization.errors import copy_error, unsent
from aiodaft.actor import ActorFacts, Handle
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, StaleHandle
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref, Stream

# Asks the directory of an owner for the location of an actor by its number; True: wait until it is up.
Locate: TypeAlias = Callable[[PeerId, ActorId, bool], Ref[Location]]


class FollowingTarget(Target):
    """A supervised actor as the target of calls; all handles that follow it share this object.

    While the actor is down, its address is this process, which hosts no actor with its number.
    """

    __slots__ = ("__weakref__", "_backlog", "_finding", "_followers", "_known", "owner")

    def __init__(
        self, followers: Followers, place: Location, owner: PeerId, label: str, sink: UnhandledErrors | None
    ) -> None:
        caller = followers.caller
        told = owner == caller.process.id
        # An old handle may have an old place: without a connection to that process, the first call asks.
        known = told or place.peer == caller.process.id or place.peer in caller.connections
        place = Location(place.peer if known else NOWHERE, place.actor)
        super().__init__(caller, place.peer or caller.process.id, place.actor, label, sink)
        self._followers = followers
        self.owner = owner
        self._known = Whereabouts(place, told=told)
        self._backlog = Backlog(caller, label)
        self._finding: asyncio.Task[None] | None = None

    @property
    def identity(self) -> tuple[PeerId, ActorId]:
        return self.owner, self.number

    @property
    def number(self) -> ActorId:
        return number_of(self.actor)

    @property
    def place(self) -> Location:
        return self._known.place

    @property
    def is_down(self) -> bool:
        return self.ended is None and self.place.peer == NOWHERE

    @property
    def ended(self) -> DaftError | None:
        return self._known.place.ended

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]:
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        state = FollowingCall(self, spec, self.caller.next_number() if number is None else number)
        self._submit(state, spec, args, kwargs, WANT_REPLY)
        return Ref(state)

    def stream(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        spec.check(args, kwargs)
        state = FollowingStream(self.caller.objects, self.caller.next_number(), spec.label)
        self._submit(state, spec, args, kwargs, WANT_STREAM)
        return Stream(state)

    def tell(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spec.check(args, kwargs)
        state = FollowingTell(self.caller.next_number(), spec.label)
        self._submit(state, spec, args, kwargs, WANT_NOTHING)

    def _submit(
        self,
        state: FollowingCall | FollowingStream | FollowingTell,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: int,
    ) -> None:
        request = state.request = Request(self, spec, args, kwargs, state.number, mode, state)
        # It may be made again, with the arguments as they are now.
        request.again = spec.retries > 0 or bool(kwargs) or not all_plain(args)
        self.caller.outgoing.submit(request)

    def health(self) -> Health:
        """The owner tells its own process where the actor is; any other process asks once."""
        seen = super().health()
        if seen is Health.LOST and self.ended is None and not self._known.told and self._finding is None:
            self.caller.process.call_soon(self._look)
        return self._known.health(seen)

    def facts(self) -> ActorFacts:
        return ActorFacts(self.label, "restarting", NOWHERE) if self.is_down else super().facts()

    def note_death(self, error: ActorDied) -> None:
        """Do nothing: the next incarnation may be up."""

    def reduce(self, cls: type) -> tuple[Any, ...]:
        cluster = self.caller.process.options.cluster
        return _rebuild, (cluster, self.owner, self.place.peer, self.actor, self.label, cls, True)

    def missed(self, request: Request, connection: Connection | None) -> None:
        """Put a call into the backlog: the actor is down or has moved.

        Raises:
            SerializationError: An argument cannot travel.
            Overloaded: Too many calls are waiting.
        """
        if self.ended is not None:
            request.state.on_error(unsent(self.ended))
            return
        # The state of the call frees the arguments.
        request.again = True
        if self._backlog.admit(request):
            self._start_finding(connection)

    def _look(self) -> None:
        connection = self.caller.connections.get(self.remote)
        lost = connection is None or connection.lost is not None
        if lost and self.ended is None and self.caller.process.closed is None:
            self._start_finding(connection)

    def _start_finding(self, connection: Connection | None) -> None:
        if self._finding is None:
            self._finding = self.caller.process.tasks.create_task(self._find(connection), name=f"find {self.label}")

    def turned_away(self, request: Request, remote: PeerId) -> None:
        """Make a call again that the actor has not accepted, because it moves to another process."""
        self.not_found(remote)
        self.caller.sender.submit_later(request)

    def missed_late(self, request: Request, connection: Connection | None) -> None:
        request.had_turn = True
        try:
            self.missed(request, connection)
        except Exception as error:  # noqa: BLE001 - the caller is not here any more; its ref is where errors go
            request.state.on_error(error)

    def left(self, remote: PeerId) -> None:
        self.not_found(remote)
        connection = self.caller.connections.get(remote)
        if connection is None:
            return
        for state in list(connection.session.calls.values()):
            request = state.request if isinstance(state, _Followed) else None
            if request is not None and request.target is self and connection.withdraw(request.number):
                self.missed_late(request, None)

    def forget(self, number: CallId) -> None:
        self._backlog.forget(number)

    async def arrive(self) -> PeerId:
        """The process where it is, once it is up. Raises DaftError: the actor is gone for good."""
        if self.is_down:
            self.move(await self.locate(wait=True))
        if self.ended is not None:
            raise unsent(self.ended)
        return self.remote

    async def _find(self, connection: Connection | None) -> None:
        try:
            found, problem = await self.find(connection, wait=True)
        except asyncio.CancelledError:
            self._backlog.fail(self.caller.process.closing)
            raise
        except Exception as error:  # noqa: BLE001 - the waiting calls fail with it
            self._finding = None
            self._backlog.fail(error)
            return
        self._finding = None
        if found.ended is None and problem is not None:
            self._backlog.fail(problem)
        else:
            self.move(found)

    async def find(self, connection: Connection | None, *, wait: bool) -> tuple[Location, DaftError | None]:
        """The location, and why a lost `connection` there cannot carry calls."""
        remote = lost = None
        # The lost one may have been renewed: then the actor is called over the new one.
        if connection is not None and connection.lost is not None:
            # First its process has to be known to be gone.
            remote, lost = connection.remote, await self.caller.connections.explanation(connection)
        found = await self.locate(wait=wait)
        return found, found.why_missed(remote, lost)

    def locate(self, *, wait: bool) -> Ref[Location]:
        """Ask the owner's directory for the location; with `wait`, it answers when the actor is up."""
        return self._followers.locate(self.owner, self.number, wait)

    def move(self, place: Location) -> None:
        """Note a location, unless a newer one is known: send the backlog, or fail it if the actor is gone for good."""
        if self._known.move(place):
            self._aim()
            if place.ended is not None:
                self._backlog.fail(place.ended)
            else:
                for request in self._backlog.take_all():
                    self.caller.sender.submit_later(request)

    def leave(self) -> None:
        self._known.leave()
        self._aim()

    def not_found(self, remote: PeerId) -> None:
        self._known.not_found(remote)
        self._aim()

    def heard(self, place: Location) -> None:
        self._known.heard(place)
        self._aim()

    def end(self, error: DaftError) -> None:
        self.move(Location(NOWHERE, self.actor, error))

    def _aim(self) -> None:
        self.remote, self.actor = self.place.peer or self.caller.process.id, self.place.actor


class _Followed:
    number: CallId
    # Dropped when the call is over: it refers to this state.
    request: Request | None = None

    def on_away(self, remote: PeerId) -> None:
        request = self.request
        if request is not None:
            cast("FollowingTarget", request.target).turned_away(request, remote)

    def _is_unsent(self, error: DaftError) -> bool:
        request = self.request
        if request is None or error.executed is not False:
            return False
        target = cast("FollowingTarget", request.target)
        target.missed_late(request, target.caller.connections.get(target.remote))
        return True

    def _let_go(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            cast("FollowingTarget", request.target).forget(request.number)
            if request.again and request.stored is not None:
                request.stored.release()


class FollowingStream(_Followed, StreamState):
    """A stream of a supervised actor. Once it has begun, it is not made again."""

    def on_away(self, remote: PeerId) -> None:
        if self.consumption.phase is Phase.OPEN:
            super().on_away(remote)
        else:
            self._end(None)

    def on_lost(self, error: DaftError) -> None:
        if not self._is_unsent(error):
            super().on_lost(error)

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._let_go()


class FollowingTell(_Followed, TellState):
    def __init__(self, number: CallId, label: str) -> None:
        super().__init__(label)
        self.number = number

    def on_lost(self, error: DaftError) -> None:
        if not self._is_unsent(error):
            super().on_lost(error)

    def _over(self, error: BaseException | None = None) -> None:
        super()._over(error)
        self._let_go()


class FollowingCall(_Followed, CallState):
    """The result of a call that may be repeated also if it has begun."""

    # An attempt may have run.
    _doubtful = False

    @property
    def _apart(self) -> DaftError | None:
        """Why it is not made again: another call of the same call of a group has failed."""
        return None if self.siblings is None else self.siblings.failed

    def on_lost(self, error: DaftError) -> None:
        if self.settled or self._cancelling or self._apart is not None or not self._is_unsent(error):
            super().on_lost(error)

    def on_away(self, remote: PeerId) -> None:
        if self._cancelling:
            self.on_error(CallCancelled(f"{self.origin} was cancelled before it started", executed=False))
        elif self._apart is not None:
            self.on_error(copy_error(self._apart).with_executed(False))
        else:
            super().on_away(remote)

    def on_error(self, error: BaseException) -> None:
        if self.settled or self._made_again(error):
            return
        if self._doubtful and isinstance(error, DaftError) and error.executed is False:
            # Other calls may have the same error.
            error = copy_error(error).with_executed(None)
        super().on_error(error)

    def _made_again(self, error: BaseException) -> bool:
        request, target, failure = self.request, cast("FollowingTarget", self.target), failure_of(error)
        if failure is Failure.TURNED_AWAY and self.connection is not None:
            # Perhaps its process lives without the actor (or an argument is lost): the next call asks.
            target.not_found(self.connection.remote)
        if failure is Failure.FINAL or self._cancelling or self._apart is not None or target.ended is not None:
            return False
        if request is None or request.attempt >= self.spec.retries:
            return False
        request.attempt += 1
        self._doubtful = self._doubtful or failure is Failure.DOUBTFUL
        target.caller.sender.submit_later(request)
        if self.siblings is not None:
            self.siblings.made_again(self)
        return True

    def _settle(self, status: Status) -> None:
        super()._settle(status)
        self._let_go()

    def on_plain(self, value: Any) -> None:
        super().on_plain(value)
        self._let_go()

    def on_result(self, received: ReceivedValue) -> None:
        super().on_result(received)
        self._let_go()


class PinnedCall(CallState):
    def on_lost(self, error: DaftError) -> None:
        if error.executed is False and not self.settled:
            cast("PinnedTarget", self.target).refuse(self, self.connection)
        else:
            super().on_lost(error)

    def on_away(self, remote: PeerId) -> None:
        cast("PinnedTarget", self.target).refuse(self, self.connection)


class PinnedTarget(Target):
    """One incarnation of a supervised actor: when it is gone, calls are refused."""

    __slots__ = ("followed",)

    state_class: ClassVar[type[CallState]] = PinnedCall

    def __init__(self, followed: FollowingTarget, place: Location) -> None:
        super().__init__(followed.caller, place.peer, place.actor, followed.label, followed.sink)
        self.followed = followed

    @property
    def lane(self) -> Target:
        return self.followed

    def reduce(self, cls: type) -> tuple[Any, ...]:
        cluster = self.caller.process.options.cluster
        return _rebuild, (cluster, self.followed.owner, self.remote, self.actor, self.label, cls, False)

    def missed(self, request: Request, connection: Connection | None) -> None:
        self.refuse(request.state, connection)

    def refuse(self, state: PendingCall, connection: Connection | None) -> None:
        task = self._refuse(state, connection)
        self.caller.process.tasks.create_task(task, name=f"refuse a call of {self.label}")

    async def _refuse(self, state: PendingCall, connection: Connection | None) -> None:
        try:
            _, reason = await self.followed.find(connection, wait=False)
        except asyncio.CancelledError:
            state.on_error(unsent(self.process.closing))
            raise
        except Exception as problem:  # noqa: BLE001 - the caller gets it
            state.on_error(unsent(problem))
            return
        stale = StaleHandle(f"{self.label} was restarted: this handle leads to its epoch {epoch_of(self.actor)}")
        state.on_error(unsent(reason or stale))


class Followers:
    def __init__(self, caller: Caller, locate: Locate) -> None:
        self.caller = caller
        self.locate = locate
        self._known: weakref.WeakValueDictionary[tuple[PeerId, ActorId], FollowingTarget] = (
            weakref.WeakValueDictionary()
        )

    def get(self, owner: PeerId, place: Location, label: str, sink: UnhandledErrors | None = None) -> FollowingTarget:
        key = (owner, number_of(place.actor))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = FollowingTarget(self, place, owner, label, sink)
        else:
            known.heard(place)
        return known

    def left(self, owner: PeerId, actor: ActorId, remote: PeerId) -> None:
        known = self._known.get((owner, number_of(actor)))
        if known is not None:
            known.left(remote)


def followed(target: Target) -> Target:
    return target.followed if isinstance(target, PinnedTarget) else target


@builder
def _rebuild(
    runtime: PeerId, owner: PeerId, remote: PeerId, actor: ActorId, label: str, cls: type, follow: bool
) -> Any:
    place = Location(remote, actor)
    target = home_of(runtime, label).part(Followers).get(owner, place, label)
    return Handle(target if follow else PinnedTarget(target, place), cls)


# Calls of a system actor in the process of another actor, its host. Eager calls go to the process where the host is,
# or, if that is not known yet, its next one (`TargetBeside`). Those of a captured graph go to where the host is when
# the graph is deployed (`AlwaysBeside`).


class Beside(Target):
    """A system actor in the process of its host. `remote` is its process, or NOWHERE if the host is down."""

    __slots__ = ("_host",)

    def __init__(self, host: Target, remote: PeerId, actor: ActorId, label: str) -> None:
        super().__init__(host.caller, remote, actor, label, host.sink)
        self._host = host

    @property
    def host(self) -> Target:
        return self._host


class TargetBeside(Beside):
    """Calls wait until `found` gives the process, and fail with its error."""

    __slots__ = ("_backlog",)

    def __init__(self, host: Target, actor: ActorId, found: Coroutine[Any, Any, PeerId]) -> None:
        super().__init__(host, NOWHERE, actor, f"what is beside {host.label}")
        self._backlog = Backlog(self.caller, host.label)
        self.process.tasks.create_task(self._find(found), name=f"find {self.label}")

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]:
        if self.remote != NOWHERE:
            return super().call(spec, args, kwargs, number)
        if number is None:
            number = self.caller.next_number()
        state = CallState(self, spec, number)
        request = Request(self, spec, args, kwargs, number, WANT_REPLY, state)
        request.terms = current_terms.get()
        self._backlog.admit(request)
        return Ref(state)

    async def _find(self, found: Coroutine[Any, Any, PeerId]) -> None:
        try:
            self.remote = await found
        except asyncio.CancelledError:
            self._backlog.fail(self.process.closing)
            raise
        except Exception as error:  # noqa: BLE001 - the waiting calls fail with it
            self._backlog.fail(error)
            return
        for request in self._backlog.take_all():
            self.caller.sender.submit_later(request)


class AlwaysBeside(Beside):
    """A system actor in the process of its host, wherever that is, for captured graphs.

    `remote` is where it was at the capture; each deployment of the graph asks the host.
    """

    __slots__ = ()

    def __init__(self, host: Target, actor: ActorId) -> None:
        down = isinstance(host, FollowingTarget) and host.is_down
        super().__init__(host, NOWHERE if down else host.remote, actor, host.label)

    def __str__(self) -> str:
        return f"{self.label} in {self.host.remote}"
