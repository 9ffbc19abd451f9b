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
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._protocol.session import Session
from aiodaft.actor import Handle
from aiodaft.exceptions import (
    ActorDied,
    DaftError,
    DeadlineExceeded,
    NotDelivered,
    PeerLost,
    RuntimeClosed,
    StaleHandle,
)
from aiodaft.ref import Ref

from .calls import Request, Target
from .failures import copy_error
from .link import Link
from .pickling import home
from .refkinds import CallState
from .replies import State, TellState

if TYPE_CHECKING:
    from aiodaft.methods import MethodSpec

    from .peer import Peer
    from .sinks import ErrorSink
    from .supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Whereabouts:
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


class Followed(Target):
    """A supervised actor as this process reaches it: one object for all handles, so that they follow together.

    While the actor is down its address is this very process, where nobody has its number.
    """

    __slots__ = ("__weakref__", "_finding", "_hall", "_waiting", "ended", "owner")

    def __init__(self, peer: Peer, place: Whereabouts, owner: PeerId, label: str, sink: ErrorSink | None) -> None:
        # A handle may have travelled for long: without a connection to that process it is worth asking.
        super().__init__(peer, place.peer if place.peer in peer.links else peer.id, place.actor, label, sink)
        self.owner = owner
        self.ended: DaftError | None = None
        # Calls that wait, by number; the link without a socket bounds them, and lets them be cancelled.
        self._waiting: dict[CallId, tuple[Request, asyncio.TimerHandle | None]] = {}
        session: Session[State] = Session(peer.id, peer.pid, remote=peer.id, max_pending=peer.options.max_pending)
        self._hall = Link(peer, session, peer.id, peer.loop)
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
    def place(self) -> Whereabouts:
        """Where it is, as far as this process knows."""
        down = self.remote == self.peer.id and self.actor not in self.peer.cells
        return Whereabouts(NOWHERE if down else self.remote, self.actor)

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        """Call a method and return a ref of its result at once."""
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        number = self.peer.next_number()
        state = FollowedCall(self, spec, number)
        request = state.request = Request(self, spec, args, kwargs, number, WANT_REPLY, state)
        request.again = spec.retries > 0
        self.peer.outgoing.submit(request)
        return Ref(state)

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        return _rebuild, (self.owner, self.place, self.label, cls, True)

    # Waiting for the next incarnation.

    def missed(self, request: Request, link: Link | None) -> None:
        """It is down, or somewhere else: the call waits.

        Raises:
            SerializationError: An argument cannot travel.
            Overloaded: Too many calls are waiting.
        """
        if self.ended is not None:
            request.state.on_error(copy_error(self.ended).with_executed(False))
            return
        number, state = request.number, request.state
        self._hall.session.submit(number, state, None)
        if not self._prepare(request):
            self._hall.session.withdraw(number)
            return
        if not isinstance(state, TellState):
            state.link = self._hall
        deadline = request.deadline
        timer = None if deadline is None else self.peer.loop.call_at(deadline, self._expire, request)
        self._waiting[number] = (request, timer)
        if self._finding is None:
            self._finding = self.peer.tasks.create_task(self._find(link), name=f"find {self.label}")

    def _prepare(self, request: Request) -> bool:
        # Its state frees the arguments; those of streams and tells are freed when they are sent.
        request.again = request.again or isinstance(request.state, FollowedCall)
        try:
            return self.peer.sender.prepare(request)
        except BaseException:
            self._hall.session.withdraw(request.number)
            raise

    def _expire(self, request: Request) -> None:
        if self._take(request):
            late = DeadlineExceeded(f"the deadline of {request.spec.label} passed before it was sent", executed=False)
            request.state.on_error(late)

    def _take(self, request: Request) -> bool:
        """Take a call out; False if it was cancelled meanwhile."""
        _, timer = self._waiting.pop(request.number, (None, None))
        if timer is not None:
            timer.cancel()
        return self._hall.session.withdraw(request.number)

    async def _find(self, link: Link | None) -> None:
        """Ask where it is, which is answered when it is somewhere."""
        try:
            # Its process is gone if the supervisor is to know more; two processes may also have fallen out.
            lost = None if link is None else await self.peer.explanation(link)
            found = await self.supervisor().whereabouts(self.number, wait=True)
        except asyncio.CancelledError:
            self._fail_waiting(RuntimeClosed(self.peer.closed or "the runtime is closed"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait get it
            self._finding = None
            self._fail_waiting(error)
            return
        self._finding = None
        if found.ended is not None:
            self.end(found.ended)
        elif lost is not None and link is not None and found.peer == link.remote:
            self._fail_waiting(lost)
        else:
            self.move(found)

    def supervisor(self) -> Supervisor:
        """Who knows where it is."""
        from .supervisor import Supervisor  # noqa: PLC0415 - it is itself made of what callers see

        return cast("Supervisor", self.peer.handle(self.owner, SUPERVISOR, "supervisor", Supervisor))

    # Being told.

    def move(self, place: Whereabouts) -> None:
        """It is there now; news that are older than what is known are ignored."""
        if self.ended is None and epoch_of(place.actor) >= self.epoch:
            self.remote, self.actor = place.peer, place.actor
            for request, _ in list(self._waiting.values()):
                if self._take(request):
                    self.peer.sender.submit_later(request)

    def leave(self) -> None:
        """It is down."""
        self.remote = self.peer.id

    def end(self, error: DaftError) -> None:
        """It is gone for good."""
        if self.ended is None:
            self.ended = error
            self.leave()
            self._fail_waiting(error, shared=True)

    def _fail_waiting(self, error: BaseException, *, shared: bool = False) -> None:
        for request, _ in list(self._waiting.values()):
            if self._take(request):
                # The end of an actor is one error, however many wait for it.
                own = error if shared or not isinstance(error, DaftError) else copy_error(error)
                request.state.on_error(own.with_executed(False) if isinstance(own, DaftError) else own)


class FollowedCall(CallState):
    """The result of a call of a supervised actor: the call may wait for an incarnation, and be made again."""

    request: Request
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
        request, target = self.request, cast("Followed", self.target)
        if not isinstance(error, NotDelivered | ActorDied | PeerLost) or error.executed or target.ended is not None:
            return False
        turned_away = error.executed is False and isinstance(error, StaleHandle | ActorDied)
        told = target.owner == self.peer.id
        if turned_away and not told and self.link is not None and self.link.remote == target.remote:
            # Perhaps its process lives, and has no such actor: the next call asks where that is. (Perhaps an argument
            # is lost.) The owner's own process is told of every move, and must not forget where the actor is.
            target.leave()
        if self._cancelling or request.attempt >= self.spec.retries:
            return False
        request.attempt += 1
        self._doubtful = self._doubtful or error.executed is None
        self.peer.sender.submit_later(request)
        return True

    def _settle(self, status: Any) -> None:
        super()._settle(status)
        self._let_go()

    def on_plain(self, value: Any) -> None:
        super().on_plain(value)
        self._let_go()

    def _let_go(self) -> None:
        kept, self.request.kept = self.request.kept, None
        if kept is not None and self.request.again:
            kept.release()


class Pinned(Target):
    """One incarnation of a supervised actor: when that is gone, calls are refused."""

    __slots__ = ("life",)

    def __init__(self, life: Followed, place: Whereabouts) -> None:
        super().__init__(life.peer, place.peer, place.actor, life.label, life.sink)
        self.life = life

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        return _rebuild, (self.life.owner, Whereabouts(self.remote, self.actor), self.label, cls, False)

    def missed(self, request: Request, link: Link | None) -> None:
        """The incarnation is gone."""
        self.peer.tasks.create_task(self._refuse(request, link), name=f"refuse a call of {self.label}")

    async def _refuse(self, request: Request, link: Link | None) -> None:
        error: BaseException
        try:
            lost = None if link is None else await self.peer.explanation(link)
            found = await self.life.supervisor().whereabouts(number_of(self.actor), wait=False)
        except Exception as problem:  # noqa: BLE001 - the caller gets it
            error = problem
        else:
            epoch = epoch_of(self.actor)
            stale = StaleHandle(f"{self.label} was restarted: this handle leads to its incarnation of epoch {epoch}")
            still_there = lost is not None and found.peer == self.remote
            error = copy_error(found.ended or (lost if still_there and lost is not None else stale))
        request.state.on_error(error.with_executed(False) if isinstance(error, DaftError) else error)


class Followers:
    """The supervised actors that one process knows of."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._known: weakref.WeakValueDictionary[tuple[PeerId, ActorId], Followed] = weakref.WeakValueDictionary()

    def get(self, owner: PeerId, place: Whereabouts, label: str, sink: ErrorSink | None = None) -> Followed:
        """The actor with this owner and number."""
        key = (owner, number_of(place.actor))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Followed(self._peer, place, owner, label, sink)
        elif epoch_of(place.actor) > known.epoch:
            known.leave()
        return known


def _rebuild(owner: PeerId, place: Whereabouts, label: str, cls: type, follow: bool) -> Any:
    peer: Peer = home()
    life = peer.followers.get(owner, place, label)
    return Handle(life if follow else Pinned(life, place), cls)
