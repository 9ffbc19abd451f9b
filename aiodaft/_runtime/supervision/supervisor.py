"""Actors under one restart policy, and what brings them back. Decisions are `Siblings`'; here they are carried out."""

from __future__ import annotations

import asyncio
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aiodaft._protocol.ids import incarnation
from aiodaft._protocol.supervision import Again, GiveUp, Gone, Kind, Siblings
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, Location
from aiodaft._runtime.platform.error_log import printable
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.supervision.child_spec import stop_actor
from aiodaft._runtime.supervision.directory import Child, ChildState
from aiodaft.exceptions import ActorDied, OutcomeUnknown, RestartLimitReached

if TYPE_CHECKING:
    from aiodaft._runtime.supervision.directory import Directory
    from aiodaft.supervision import Restart


class Supervisor:
    """The actors of one policy, in the order in which they were spawned."""

    def __init__(
        self, supervisor: Directory, policy: Restart, grace: float, fail: Callable[[BaseException, str], object]
    ) -> None:
        self._supervisor = supervisor
        self._peer = supervisor.peer
        self.policy = policy
        self._grace = grace
        # Told when it is enough.
        self._fail = fail
        chance = self._peer.process.env.random.random
        self._siblings: Siblings[Child, BaseException] = Siblings(
            policy.strategy, policy.intensity, policy.period, policy.backoff, chance
        )
        self._lives: list[Child] = []
        # What brings back one actor (one_for_one), or all of them in their order (under None).
        self._working: dict[Child | None, asyncio.Event] = {}

    def join(self, life: Child, kind: Kind) -> None:
        """An actor was made, and is up from now on."""
        life.recipe.made()
        self._lives.append(life)
        self._siblings.add(life, kind)
        life.become(ChildState.UP)
        if life.crash is not None:
            self.crashed(life, life.crash)

    def leave(self, life: Child) -> None:
        """An actor is not restarted any more."""
        self._siblings.remove(life)
        changed = self._working.get(self._key(life))
        if changed is not None:
            changed.set()

    def forget(self, life: Child) -> None:
        """An actor is gone for good."""
        self.leave(life)
        if life in self._lives:
            self._lives.remove(life)

    # Deciding.

    def crashed(self, life: Child, error: BaseException) -> None:
        """An actor died, or could not be made again."""
        life.last_error = error
        life.target.leave()
        life.become(ChildState.DOWN)
        normal = isinstance(error, ActorDied) and error.exit_code == 0
        now = self._peer.process.env.monotonic()
        match self._siblings.failed(life, error, normal=normal, now=now):
            case Gone():
                logger.info("%s ended, and is not restarted: %s", life.label, printable(str(error)))
                self._supervisor.end(life, error if isinstance(error, OutcomeUnknown) else ActorDied(str(error)))
            case GiveUp(down, evidence):
                self._give_up(life, down, evidence)
            case Again() as again:
                self._begin(life, again)

    def _begin(self, life: Child, again: Again[Child]) -> None:
        others = len(again.start) - 1
        logger.warning(
            "%s died: restart %d (of %d within %g s)%s in %.3g s: %s",
            life.label, again.count, self.policy.intensity, self.policy.period,
            f", with {others} siblings," if others else "", again.delay, printable(str(life.last_error)),
        )  # fmt: skip
        for other in (*again.stop, *again.start):
            other.target.leave()
            if other.state is ChildState.UP or other.state is ChildState.STARTING:
                other.become(ChildState.LEAVING)
        for other in again.gone:
            other.final = ActorDied(f"{other.label} was stopped with its siblings", executed=False)
        due = self._peer.process.env.monotonic() + again.delay
        for other in again.start:
            other.due = due
        self._work(life)

    def _give_up(self, life: Child, down: tuple[Child, ...], evidence: tuple[BaseException, ...]) -> None:
        error = _limit_reached(life, self.policy, evidence)
        for other in list(self._lives):
            if other not in down:
                other.become(ChildState.RETIRED)
            elif other.state is ChildState.DOWN:
                self._supervisor.end(other, error)
            else:
                # It has a process, which is stopped first.
                other.final = error
                other.target.end(error)
                other.interrupt()
        self._fail(error, f"{life.label} died more often than its restart policy allows")

    # Carrying out.

    def _key(self, life: Child) -> Child | None:
        return life if self.policy.strategy == "one_for_one" else None

    def _work(self, life: Child) -> None:
        key = self._key(life)
        if key in self._working:
            self._working[key].set()
        else:
            self._working[key] = asyncio.Event()
            self._peer.process.tasks.create_task(self._bring_back(key), name=f"restart {life.label}")

    async def _bring_back(self, key: Child | None) -> None:
        """Stop who has to be stopped, then start who has to be started, until nobody has to be."""
        changed = self._working[key]
        try:
            while True:
                changed.clear()
                lives = list(self._lives) if key is None else [key]
                leaving = [life for life in lives if life.state is ChildState.LEAVING]
                down = [life for life in lives if life.state is ChildState.DOWN]
                if leaving:
                    await self._halt(leaving[-1])
                elif not down:
                    return
                elif (wait := max(life.due for life in down) - self._peer.process.env.monotonic()) > 0:
                    await _pause(changed, wait)
                else:
                    await self._start(down[0])
        finally:
            del self._working[key]

    async def _halt(self, life: Child) -> None:
        place, reason = life.place, "one of its siblings died"
        leaving = Target(self._peer, place.peer, place.actor, life.label, None)
        answers = await stop_actor(self._peer, leaving, reason, self._grace)
        await self._peer.node_agent().vacate(place.peer, place.actor, reason, keep=True, answers=answers)
        self._stopped(life)

    def _stopped(self, life: Child) -> None:
        if life.final is not None:
            self._supervisor.end(life, life.final)
        else:
            life.become(ChildState.DOWN)

    async def _start(self, life: Child) -> None:
        """Make the next incarnation; what goes wrong is one more death."""
        life.place = Location(life.place.peer, incarnation(life.place.actor, life.epoch + 1))
        life.crash = None
        life.become(ChildState.STARTING)
        error: BaseException | None = None
        try:
            await self._make(life)
        except Exception as caught:  # noqa: BLE001 - whatever it is, the actor is not there
            error = caught
        wanted = life.state is ChildState.STARTING and life.final is None
        if wanted and (error := error or life.crash) is not None:
            self.crashed(life, error)
        elif wanted:
            self._came_up(life)
        elif error is not None:
            self._stopped(life)
        else:
            # It was made in vain: a sibling died meanwhile, or its owner stopped it.
            life.become(ChildState.LEAVING)

    def _came_up(self, life: Child) -> None:
        self._siblings.came_up(life)
        life.restarts += 1
        life.become(ChildState.UP)
        life.target.move(life.place)
        logger.info("%s is up again, with epoch %d, in %s", life.label, life.epoch, life.place.peer)

    async def _make(self, life: Child) -> None:
        node = self._peer.node_agent()
        beside = None if life.beside is None else life.beside.remote
        if isinstance(life.beside, FollowingTarget):
            beside = await life.wait_for(life.beside.supervisor().process_of(life.beside.number))
        found = await life.wait_for(node.place_again(life.label, life.place.actor, beside))
        life.place = Location(found.peer, found.actor)
        try:
            await life.wait_for(life.recipe.make(self._peer, found.peer, found.actor, again=True))
        except Exception:
            await node.vacate(found.peer, found.actor, "it could not be made", keep=True)
            raise


async def _pause(changed: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()


def _limit_reached(life: Child, policy: Restart, evidence: tuple[BaseException, ...]) -> RestartLimitReached:
    error = RestartLimitReached(
        f"{life.label} died, which makes {len(evidence)} deaths within {policy.period:g} s: "
        f"its policy allows {policy.intensity} restarts"
    )
    error.actor = life.label
    error.attempts = evidence
    last = error.__cause__ = evidence[-1]
    if isinstance(last, OutcomeUnknown):
        error.last_method, error.last_method_for, error.last_lines = (
            last.last_method,
            last.last_method_for,
            last.last_lines,
        )
    if isinstance(last, ActorDied):
        error.exit_code, error.signal, error.oom = last.exit_code, last.signal, last.oom
    for index, attempt in enumerate(evidence, 1):
        text = "".join(traceback.format_exception_only(attempt)).rstrip()
        error.add_note(f"death {index} of {len(evidence)}: " + textwrap.indent(text, "  ").lstrip())
    return error
