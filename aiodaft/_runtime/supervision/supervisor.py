"""Supervisors: the actors of one restart policy, and their restarts.

`Siblings` decides which children a death concerns, `TRANSITIONS` the fate of each (`_protocol/supervision.py`
has the states); this file stops and starts them. One task per supervisor does that, or one per child where each is
restarted by itself (one_for_one).
"""

from __future__ import annotations

import asyncio
import textwrap
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar

from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.ids import ActorId, PeerId, epoch_of, incarnation, node_of
from aiodaft._protocol.numbers import next_state
from aiodaft._protocol.supervision import (
    SETTLED,
    TRANSITIONS,
    Again,
    ChildEvent,
    ChildState,
    GiveUp,
    Gone,
    Kind,
    Restart,
    Siblings,
    next_task,
)
from aiodaft._runtime.agent import ChildSpec, stop_actor
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.node.nodes import Nodes
from aiodaft._runtime.node.worker import Place
from aiodaft._runtime.platform.tasks import logger, printable
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, RestartLimitReached
from aiodaft.ref import Ref

T = TypeVar("T")
# The part of the grace for which an actor waits until others have left its node.
_TURN: Final = 4
Move: TypeAlias = Callable[[ActorId, PeerId | None], Coroutine[Any, Any, Place]]


class Child:
    """One supervised actor.

    Args:
        move: Finds a place on another node for an incarnation: in a process, or where there is room.
    """

    def __init__(
        self, target: FollowingTarget, spec: ChildSpec, supervisor: Supervisor, beside: Target | None, move: Move
    ) -> None:
        self.target = target
        self.move = move
        # The id that its incarnations have in common, and its name in errors.
        self.number, self.label = target.number, target.label
        self.spec = spec
        self.supervisor = supervisor
        self.beside = beside
        self.state = ChildState.STARTING
        # The current incarnation, or the last one; and the process that serves its node, until it leaves that.
        self.place = target.place
        self.node = supervisor.node_of(target.place.peer)
        # Finds its next place before it leaves its node, which is being drained.
        self.next: asyncio.Task[Place] | None = None
        # It is stopped because of that.
        self.departs = False
        self.restarts = 0
        self.last_error: BaseException | None = None
        # The end of its process, if that came while it was being made.
        self.crash: OutcomeUnknown | None = None
        # The error that ends it if it shares the process of an actor that is gone for good.
        self.homeless: ActorDied | None = None
        # The error that callers get once it is over: its end is no loss, or its policy allows no more restarts.
        self.final: DaftError | None = None
        self.due = 0.0
        # The call or task that its restart waits for.
        self.pending: Ref[Any] | asyncio.Task[Any] | None = None
        self._changed = asyncio.Event()

    @property
    def epoch(self) -> int:
        return epoch_of(self.place.actor)

    def handle(self, event: ChildEvent) -> None:
        self.state = next_state(TRANSITIONS, self.state, event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, what: Ref[T] | asyncio.Task[T]) -> T:
        self.pending = what
        if self.state is ChildState.ENDING:
            self.interrupt()
        try:
            return await what
        except asyncio.CancelledError:
            if not (self.state is ChildState.ENDING and isinstance(what, asyncio.Task) and what.cancelled()):
                raise
            raise ActorDied(f"{self.label} was stopped", executed=False) from None
        finally:
            self.pending = None

    def interrupt(self) -> None:
        if self.pending is not None:
            self.pending.cancel()

    def lost_its_host(self, host: Target) -> ActorDied:
        """Note that no process can make it again; the error for its callers."""
        why = f"{self.label} cannot be made again: {host.label}, in the process of which it lived, is gone"
        self.homeless = ActorDied(why, executed=False)
        self.homeless.actor = self.label
        return self.homeless

    async def settled(self) -> None:
        while self.state not in SETTLED:
            await self.changed()

    async def stopped(self) -> None:
        while self.state is ChildState.LEAVING:
            await self.changed()

    async def changed(self) -> None:
        await self._changed.wait()


class Supervisor:
    def __init__(
        self,
        caller: Caller,
        nodes: Nodes,
        end: Callable[[Child, DaftError], object],
        policy: Restart,
        grace: float,
        fail: Callable[[BaseException, str], object],
    ) -> None:
        self._caller = caller
        self._process = caller.process
        self._nodes = nodes
        self._end = end
        self.policy = policy
        self._grace = grace
        # Called with an error that ends children for good, and the name of the failed part.
        self._fail = fail
        self._siblings: Siblings[Child, BaseException] = Siblings(policy, self._process.env.random.random)
        self._children: list[Child] = []
        self.on_up: Callable[[Child], object] = lambda child: None
        # Set when a task has more to do: the one of a child (one_for_one), or the one of all (None).
        self._working: dict[Child | None, asyncio.Event] = {}

    def node_of(self, peer: PeerId) -> PeerId | None:
        return self._nodes.server_of(node_of(peer))

    def join(self, child: Child, kind: Kind) -> None:
        child.spec.made()
        self._children.append(child)
        self._siblings.add(child, kind)
        child.handle(ChildEvent.MADE)
        if child.crash is not None:
            self.crashed(child, child.crash)
        else:
            self.on_up(child)

    def leave(self, child: Child) -> None:
        self._siblings.remove(child)
        changed = self._working.get(self._key(child))
        if changed is not None:
            changed.set()

    def forget(self, child: Child) -> None:
        self.leave(child)
        if child.next is not None:
            self._process.tasks.create_task(self._give_back(child.next), name=f"give back a place of {child.label}")
            child.next = None
        if child in self._children:
            self._children.remove(child)

    def crashed(self, child: Child, error: BaseException) -> None:
        child.last_error = error
        child.target.leave()
        child.handle(ChildEvent.FAILED)
        normal, homeless = isinstance(error, ActorDied) and error.exit_code == 0, error is child.homeless
        now = self._process.env.monotonic()
        match self._siblings.failed(child, error, normal=normal, homeless=homeless, now=now):
            case Gone():
                logger.info("%s ended, and is not restarted: %s", child.label, printable(str(error)))
                ended = error if isinstance(error, OutcomeUnknown) else ActorDied(str(error))
                if not (homeless or child.spec.is_member):
                    child.final = ended
                self._end(child, ended)
                if homeless:
                    self._fail(error, f"{child.label} cannot be made again")
            case GiveUp(down, evidence):
                self._give_up(child, down, evidence)
            case Again() as again:
                self._begin(child, again)

    def _begin(self, child: Child, again: Again[Child]) -> None:
        siblings, limit = len(again.start) - 1, self.policy.intensity
        logger.warning(
            "%s died: restart %d (%s)%s in %.3g s: %s",
            child.label, again.count, "in a row" if limit is None else f"of {limit} within {self.policy.period:g} s",
            f", with {siblings} siblings," if siblings else "", again.delay, printable(str(child.last_error)),
        )  # fmt: skip
        for sibling in again.gone:
            sibling.final = ActorDied(f"{sibling.label} was stopped with its siblings", executed=False)
        due = self._process.env.monotonic() + again.delay
        for sibling in dict.fromkeys((*again.stop, *again.start)):
            sibling.target.leave()
            sibling.handle(ChildEvent.DROP if sibling in again.gone else ChildEvent.RESTART)
            sibling.due = due
        for sibling in again.start:
            # Now, so that the others know it before they get the next call of this process.
            sibling.spec.begin_anew()
        self._work(child)

    def _give_up(self, child: Child, down: tuple[Child, ...], evidence: tuple[BaseException, ...]) -> None:
        error = _limit_reached(child, self.policy, evidence)
        self._process.note_failure("limit", child.label, error)
        for sibling in list(self._children):
            sibling.handle(ChildEvent.NO_MORE)
            if sibling.state is ChildState.OVER:
                self._end(sibling, error)
            elif sibling in down:
                # It has a process, which is stopped first.
                sibling.final = error
                sibling.target.end(error)
                sibling.interrupt()
        self._fail(error, f"{child.label} died more often than its restart policy allows")

    def depart(self, child: Child) -> None:
        """Make a child again on another node, as soon as there is a place for it. Idempotent."""
        if child.next is None:
            moving = child.move(incarnation(child.place.actor, child.epoch + 1), None)
            child.next = self._process.tasks.start(moving, name=f"find another place for {child.label}")
            self._process.tasks.create_task(self._depart(child, child.next), name=f"move {child.label}")

    async def _depart(self, child: Child, finding: asyncio.Task[Place]) -> None:
        await asyncio.wait([finding])
        if child.next is not finding:
            return
        problem = "the search was cancelled" if finding.cancelled() else finding.exception()
        if problem is not None:
            child.next = None
            logger.warning("%s stays on a node that is being drained: %s", child.label, printable(str(problem)))
            return
        async with self._nodes.in_turn(self._time_left(child) / _TURN):
            if child.next is finding and child.state is ChildState.UP:
                self.leave_node(child)
                await child.stopped()

    def leave_node(self, child: Child) -> None:
        """Stop a child on its node, and start it where it is to be. That is no death."""
        child.departs, child.due = True, self._process.env.monotonic()
        child.target.leave()
        child.handle(ChildEvent.RESTART)
        self._work(child)

    async def _give_back(self, finding: asyncio.Task[Place]) -> None:
        with suppress(DaftError):
            found = await finding
            await self._nodes.vacate(found.peer, found.actor, "it is not needed any more")

    def _time_left(self, child: Child) -> float:
        until = self._nodes.draining.get(child.node or NOWHERE, 0.0)
        return max(0.0, until - self._process.env.monotonic())

    async def _stop_departing(self, child: Child) -> None:
        place, reason, child.departs = child.place, "it moves, because its node is being drained", False
        target = Target(self._caller, place.peer, place.actor, child.label, None)
        if await stop_actor(self._caller, target, reason, self._time_left(child), moves=True):
            self._nodes.tell_moved(place.peer, place.actor)
        else:
            await self._nodes.vacate(place.peer, place.actor, reason, answers=False)

    def _key(self, child: Child) -> Child | None:
        return child if self.policy.strategy == "one_for_one" else None

    def _work(self, child: Child) -> None:
        key = self._key(child)
        if key in self._working:
            self._working[key].set()
        else:
            self._working[key] = asyncio.Event()
            self._process.tasks.create_task(self._restart(key), name=f"restart {child.label}")

    async def _restart(self, key: Child | None) -> None:
        """Stop the children that are to be stopped, then start the children that are down, until all run."""
        changed = self._working[key]
        try:
            while True:
                changed.clear()
                children = list(self._children) if key is None else [key]
                match next_task(children):
                    case None:
                        return
                    case child, None:
                        await self._stop(child)
                    case child, due if due <= self._process.env.monotonic():
                        await self._start(child)
                    case _, due:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(due - self._process.env.monotonic()):
                                await changed.wait()
        finally:
            del self._working[key]

    async def _stop(self, child: Child) -> None:
        if child.departs:
            await self._stop_departing(child)
        else:
            place, reason = child.place, "one of its siblings died"
            target = Target(self._caller, place.peer, place.actor, child.label, None)
            answers = await stop_actor(self._caller, target, reason, self._grace)
            await self._nodes.vacate(place.peer, place.actor, reason, keep=True, answers=answers)
        self._left(child, ChildEvent.STOPPED)

    def _left(self, child: Child, event: ChildEvent) -> None:
        child.handle(event)
        if child.state is ChildState.OVER:
            assert child.final is not None
            self._end(child, child.final)

    async def _start(self, child: Child) -> None:
        child.place = Location(child.place.peer, incarnation(child.place.actor, child.epoch + 1))
        child.crash = None
        child.handle(ChildEvent.TURN)
        error: BaseException | None = None
        try:
            await self._make(child)
        except Exception as caught:  # noqa: BLE001 - every error means that the actor is not there
            error = caught
            if not isinstance(error, OutcomeUnknown):
                # The node of a process remembers its death.
                self._process.note_failure("start", child.label, error)
        if child.state is ChildState.STARTING:
            error = error or child.crash
            if error is not None:
                self.crashed(child, error)
            else:
                self._siblings.came_up(child, self._process.env.monotonic())
                child.restarts += 1
                child.handle(ChildEvent.MADE)
                child.target.move(child.place)
                logger.info("%s is up again, with epoch %d, in %s", child.label, child.epoch, child.place.peer)
                self.on_up(child)
        elif error is not None:
            self._left(child, ChildEvent.FAILED)

    async def _make(self, child: Child) -> None:
        found = await self._find_place(child)
        if found.peer != child.place.peer:
            # The process that it left has ended meanwhile.
            child.crash = None
        child.place = Location(found.peer, found.actor)
        try:
            await child.wait_for(child.spec.make(self._caller, found.peer, found.actor, again=True))
            while child.spec.is_behind:
                # Calls go to it from now on: the group has changed while it was made.
                await child.wait_for(child.spec.catch_up(self._caller, found.peer, found.actor))
        except Exception:
            await self._nodes.vacate(found.peer, found.actor, "it could not be made", keep=True)
            raise

    async def _find_place(self, child: Child) -> Place:
        host, beside = child.beside, None
        if isinstance(host, FollowingTarget):
            location = await child.wait_for(host.locate(wait=True))
            if location.ended is not None:
                raise child.lost_its_host(host) from copy_error(location.ended)
            beside = location.peer
        elif host is not None:
            beside = host.remote
        try:
            stays = child.node is not None and self.node_of(beside or child.place.peer) == child.node
            if stays and child.node not in self._nodes.draining:
                node, number = self._nodes.of(child.place.peer), child.place.actor
                try:
                    return await child.wait_for(node.place_again(self._process.id, child.label, number, beside))
                except ActorDied:
                    if host is not None:
                        raise
            # Its node is gone, being drained, or has given up this process; or its host was made again on another one.
            if child.node is not None:
                # It keeps the resources of the actor, also while others do not hear it.
                child.node = None
                self._nodes.tell_to_vacate(child.place.peer, child.place.actor, "it is made again on another node")
            finding, child.next = child.next, None
            if finding is None:
                moving = child.move(child.place.actor, beside)
                finding = self._process.tasks.start(moving, name=f"move {child.label}")
            found = await child.wait_for(finding)
            child.node = self.node_of(found.peer)
            return found
        except ActorDied as error:
            if host is None or isinstance(host, FollowingTarget):
                # The host may come back.
                raise
            raise child.lost_its_host(host) from error


def _limit_reached(child: Child, policy: Restart, evidence: tuple[BaseException, ...]) -> RestartLimitReached:
    error = RestartLimitReached(
        f"{child.label} died, which makes {len(evidence)} deaths within {policy.period:g} s: "
        f"its policy allows {policy.intensity} restarts"
    )
    error.actor = child.label
    error.attempts = evidence
    last = error.__cause__ = evidence[-1]
    if isinstance(last, OutcomeUnknown):
        error.last_method, error.last_method_for = last.last_method, last.last_method_for
        error.last_lines = last.last_lines
    if isinstance(last, ActorDied):
        error.exit_code, error.signal, error.oom = last.exit_code, last.signal, last.oom
    for index, attempt in enumerate(evidence, 1):
        text = "".join(traceback.format_exception_only(attempt)).rstrip()
        error.add_note(f"death {index} of {len(evidence)}: " + textwrap.indent(text, "  ").lstrip())
    return error
