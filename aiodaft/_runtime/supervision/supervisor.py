"""Supervisors: the actors of one restart policy, and how they are restarted.

`Siblings` decides whom a death concerns, `next_state` what becomes of each of them (see `_protocol/child.py` for the
states); this file stops and starts them. One task per supervisor does that, or one per child where each is restarted by
itself (one_for_one).
"""

from __future__ import annotations

import asyncio
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from aiodaft._protocol.child import SETTLED, ChildEvent, ChildState, next_state, next_task
from aiodaft._protocol.following import Location
from aiodaft._protocol.ids import ActorId, epoch_of, incarnation
from aiodaft._protocol.supervision import Again, GiveUp, Gone, Kind, Restart, Siblings
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.platform.error_log import printable
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft._runtime.supervision.child_spec import ChildSpec, SupervisionOwner, stop_actor
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, RestartLimitReached
from aiodaft.ref import Ref

T = TypeVar("T")


class Child:
    """One supervised actor."""

    def __init__(self, target: FollowingTarget, spec: ChildSpec, supervisor: Supervisor, beside: Target | None) -> None:
        self.target = target
        self.spec = spec
        self.supervisor = supervisor
        self.beside = beside
        self.state = ChildState.STARTING
        # The current incarnation, or the last one.
        self.place = target.place
        self.restarts = 0
        self.last_error: BaseException | None = None
        # The end of its process, if that came while it was being made.
        self.crash: OutcomeUnknown | None = None
        # The error that callers get once it is over.
        self.final: DaftError | None = None
        # The time of its next start.
        self.due = 0.0
        # The call that its restart waits for.
        self.pending: Ref[Any] | None = None
        self._changed = asyncio.Event()

    @property
    def number(self) -> ActorId:
        """The id that its incarnations have in common."""
        return self.target.number

    @property
    def label(self) -> str:
        """Its name in errors."""
        return self.target.label

    @property
    def epoch(self) -> int:
        """The number of its incarnation."""
        return epoch_of(self.place.actor)

    def handle(self, event: ChildEvent) -> None:
        """Change the state, and wake the tasks that wait for that."""
        self.state = next_state(self.state, event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, ref: Ref[T]) -> T:
        """Wait for a call that is part of a restart."""
        self.pending = ref
        if self.state is ChildState.ENDING:
            self.interrupt()
        try:
            return await ref
        finally:
            self.pending = None

    def interrupt(self) -> None:
        """Cancel the restart under way."""
        if self.pending is not None:
            self.pending.cancel()

    async def settled(self) -> None:
        """Wait until its supervisor is done with it."""
        while self.state not in SETTLED:
            await self.changed()

    async def changed(self) -> None:
        """Wait until the state changes."""
        await self._changed.wait()


class Supervisor:
    """The children of one policy, in the order in which they were spawned.

    Args:
        owner: The process.
        end: Called with a child that is over, and why.
        policy: The policy.
        grace: Seconds that calls under way get when a child is stopped.
        fail: Called with the error when the policy allows no more restarts.
    """

    def __init__(
        self,
        owner: SupervisionOwner,
        end: Callable[[Child, DaftError], object],
        policy: Restart,
        grace: float,
        fail: Callable[[BaseException, str], object],
    ) -> None:
        self._owner = owner
        self._process = owner.process
        self._end = end
        self.policy = policy
        self._grace = grace
        self._fail = fail
        self._siblings: Siblings[Child, BaseException] = Siblings(policy, self._process.env.random.random)
        self._children: list[Child] = []
        # Set when a task has more to do: the one of a child (one_for_one), or the one of all (None).
        self._working: dict[Child | None, asyncio.Event] = {}

    def join(self, child: Child, kind: Kind) -> None:
        """Supervise an actor that was made."""
        child.spec.made()
        self._children.append(child)
        self._siblings.add(child, kind)
        child.handle(ChildEvent.MADE)
        if child.crash is not None:
            self.crashed(child, child.crash)

    def leave(self, child: Child) -> None:
        """Restart an actor no more."""
        self._siblings.remove(child)
        changed = self._working.get(self._key(child))
        if changed is not None:
            changed.set()

    def forget(self, child: Child) -> None:
        """Remove an actor that is over."""
        self.leave(child)
        if child in self._children:
            self._children.remove(child)

    # Deciding.

    def crashed(self, child: Child, error: BaseException) -> None:
        """An actor died, or could not be made again."""
        child.last_error = error
        child.target.leave()
        child.handle(ChildEvent.FAILED)
        normal = isinstance(error, ActorDied) and error.exit_code == 0
        match self._siblings.failed(child, error, normal=normal, now=self._process.env.monotonic()):
            case Gone():
                logger.info("%s ended, and is not restarted: %s", child.label, printable(str(error)))
                self._end(child, error if isinstance(error, OutcomeUnknown) else ActorDied(str(error)))
            case GiveUp(down, evidence):
                self._give_up(child, down, evidence)
            case Again() as again:
                self._begin(child, again)

    def _begin(self, child: Child, again: Again[Child]) -> None:
        siblings = len(again.start) - 1
        logger.warning(
            "%s died: restart %d (of %d within %g s)%s in %.3g s: %s",
            child.label, again.count, self.policy.intensity, self.policy.period,
            f", with {siblings} siblings," if siblings else "", again.delay, printable(str(child.last_error)),
        )  # fmt: skip
        for sibling in again.gone:
            sibling.final = ActorDied(f"{sibling.label} was stopped with its siblings", executed=False)
        due = self._process.env.monotonic() + again.delay
        for sibling in dict.fromkeys((*again.stop, *again.start)):
            sibling.target.leave()
            sibling.handle(ChildEvent.DROP if sibling in again.gone else ChildEvent.RESTART)
            sibling.due = due
        self._work(child)

    def _give_up(self, child: Child, down: tuple[Child, ...], evidence: tuple[BaseException, ...]) -> None:
        error = _limit_reached(child, self.policy, evidence)
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

    # Carrying out.

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
        place, reason = child.place, "one of its siblings died"
        target = self._owner.target(place.peer, place.actor, child.label)
        answers = await stop_actor(self._owner, target, reason, self._grace)
        await self._owner.node.vacate(place.peer, place.actor, reason, keep=True, answers=answers)
        self._left(child, ChildEvent.STOPPED)

    def _left(self, child: Child, event: ChildEvent) -> None:
        """Nothing is left of an incarnation."""
        child.handle(event)
        if child.state is ChildState.OVER:
            assert child.final is not None
            self._end(child, child.final)

    async def _start(self, child: Child) -> None:
        """Make the next incarnation; a failure counts as one more death."""
        child.place = Location(child.place.peer, incarnation(child.place.actor, child.epoch + 1))
        child.crash = None
        child.handle(ChildEvent.TURN)
        error: BaseException | None = None
        try:
            await self._make(child)
        except Exception as caught:  # noqa: BLE001 - every error means that the actor is not there
            error = caught
        if child.state is ChildState.STARTING:
            error = error or child.crash
            if error is not None:
                self.crashed(child, error)
            else:
                self._came_up(child)
        elif error is not None:
            self._left(child, ChildEvent.FAILED)

    def _came_up(self, child: Child) -> None:
        self._siblings.came_up(child)
        child.restarts += 1
        child.handle(ChildEvent.MADE)
        child.target.move(child.place)
        logger.info("%s is up again, with epoch %d, in %s", child.label, child.epoch, child.place.peer)

    async def _make(self, child: Child) -> None:
        node = self._owner.node
        beside = None if child.beside is None else child.beside.remote
        if isinstance(child.beside, FollowingTarget):
            location = await child.wait_for(child.beside.locate(wait=True))
            if location.ended is not None:
                raise copy_error(location.ended)
            beside = location.peer
        found = await child.wait_for(node.place_again(child.label, child.place.actor, beside))
        child.place = Location(found.peer, found.actor)
        try:
            await child.wait_for(child.spec.make(self._owner, found.peer, found.actor, again=True))
        except Exception:
            await node.vacate(found.peer, found.actor, "it could not be made", keep=True)
            raise


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
