"""Makes and stops supervised and other actors: calls to the agents of their processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import AGENT, ActorId, PeerId, epoch_of, node_of
from aiodaft._runtime.agent import Agent, agent_of
from aiodaft._runtime.calls.call import Caller, CallState, Request, Target
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.definitions import Origin, origin_of
from aiodaft.exceptions import DaftError
from aiodaft.methods import MethodSpec, Options, specs_of
from aiodaft.ref import Ref

WHY_STOPPED: Final = "stopped by its owner"


class Enrolment:
    """The place of an actor in a group; the owner of the group changes it.

    Args:
        renew: Gives the group a new epoch.
    """

    def __init__(self, roster: Roster[Any], rank: int, renew: Callable[[], object]) -> None:
        self.roster = roster
        self.rank = rank
        self._renew = renew
        # The roster that the newest incarnation was told.
        self._told: Roster[Any] | None = None
        # The `since` of the members of which it was told.
        self._known: int | None = None

    @property
    def is_behind(self) -> bool:
        told = self._told
        return told is None or (told.epoch, told.is_complete) != (self.roster.epoch, self.roster.is_complete)

    @property
    def knows_members(self) -> bool:
        return self.roster.is_complete and self.roster.since == self._known

    def tell(
        self, caller: Caller, remote: PeerId, actor: ActorId, members: Ref[tuple[Any, ...]] | None = None
    ) -> Ref[None]:
        """Tell the actor, or the process that is about to make it.

        Args:
            members: The members, if more than one actor is told of them: they are encoded once.
        """
        self._told = roster = self.roster
        self._known = roster.since if roster.is_complete else None
        given = roster.members if members is None else members
        told: Ref[None] = agent_of(caller, remote).enlist(actor, replace(roster, members=()), self.rank, given)
        return told

    def tell_epoch(self, caller: Caller, remote: PeerId, actor: ActorId) -> Ref[bool]:
        """Tell the actor, which knows the members, of the epoch. False: it does not know them."""
        self._told = self.roster
        told: Ref[bool] = agent_of(caller, remote).renew(actor, self.roster.epoch, self.roster.since)
        return told

    def doubt(self) -> None:
        self._known = None

    def begin_anew(self) -> None:
        """Give the group a new epoch before the next incarnation, if it may have done something together in this one.

        Else the others could take collectives of the next incarnation for those of the last one.
        """
        if not self.is_behind and self.roster.is_complete:
            self._renew()


class ChildSpec:
    """The recipe of an actor: its class, and the arguments of its constructor.

    A spec that is used again encodes the arguments once. Refs among them are held, and resolved for each use.
    """

    def __init__(
        self,
        cls: type,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_queue: int | None,
        enrolment: Enrolment | None = None,
    ) -> None:
        self.cls = cls
        self.label = label
        self._max_queue = max_queue
        self._args = args
        self._kwargs = kwargs
        self._enrolment = enrolment
        self.follow: bool | None = None
        self._origin: Origin | None = None
        self._request: Request | None = None

    def make(self, caller: Caller, remote: PeerId, actor: ActorId, *, again: bool) -> Ref[Any]:
        if self._enrolment is not None:
            self.begin_anew()
            # Before it is made: its constructor may ask for its rank.
            state_of(self.catch_up(caller, remote, actor)).mark_seen()
        target, spec = Target(caller, remote, AGENT, f"agent of {remote}", None), host_spec(self.cls)
        number = caller.process.next_number()
        state = CallState(target, spec, number)
        if node_of(remote) and self._origin is None:
            # Once: a file that is changed later must not keep the actor from being restarted.
            self._origin = origin_of(self.cls)
        arguments = (actor, self.label, self._max_queue, self.follow, self._origin, self.cls, *self._args)
        request = Request(target, spec, arguments, self._kwargs, number, WANT_REPLY, state)
        request.again, request.attempt, request.stored = again, epoch_of(actor), self._stored
        self._request = request
        caller.sender.submit(request)
        return Ref(state)

    @property
    def is_member(self) -> bool:
        return self._enrolment is not None

    @property
    def is_behind(self) -> bool:
        return self._enrolment is not None and self._enrolment.is_behind

    def begin_anew(self) -> None:
        if self._enrolment is not None:
            self._enrolment.begin_anew()

    def catch_up(self, caller: Caller, remote: PeerId, actor: ActorId) -> Ref[None]:
        assert self._enrolment is not None
        return self._enrolment.tell(caller, remote, actor)

    def made(self) -> None:
        """Let go of the arguments: from the first success on, only their encoding is used."""
        assert self._request is not None
        self._args = self._request.args = ()
        self._kwargs = self._request.kwargs = {}

    @property
    def _stored(self) -> StoredValue | None:
        return None if self._request is None else self._request.stored

    def free(self) -> None:
        stored, self._request = self._stored, None
        if stored is not None:
            stored.release()


async def stop_actor(caller: Caller, target: Target, reason: str, grace: float, *, moves: bool = False) -> bool:
    """Have an actor end its calls within the grace time, and leave its instance. Nothing if it is gone.

    If it moves to another process, calls that have not begun are made again there.

    Returns:
        Whether its process answers. A process that is silent for the two grace times (it is stopped, or a call keeps
        its interpreter or its loop) can only be killed.
    """
    mover = caller.process.id if moves else ""
    stopping = agent_of(caller, target.remote).stop(target.actor, reason, grace, mover)
    state_of(stopping).mark_seen()
    process = caller.process
    # The answer comes when the process has begun to stop the actor.
    answers = await _wait_until(_ask(caller, target), _answer_deadline(process, grace))
    ended = answers and await _wait_until(stopping, process.loop.time() + grace + 2 * process.grace + 1.0)
    if not ended:
        logger.debug("%s does not answer, and is killed", target.label)
    return answers


async def stop_in_turn(caller: Caller, targets: Sequence[Target], reason: str, grace: float) -> list[bool]:
    """Stop actors, each when the one before it has been left. For each of them, see `stop_actor`.

    All are asked at the beginning whether they answer, so the time for that passes once, however many do not.
    """
    asked = [_ask(caller, target) for target in targets]
    deadline = _answer_deadline(caller.process, grace)
    return [
        await _wait_until(answer, deadline) and await stop_actor(caller, target, reason, grace)
        for target, answer in zip(targets, asked, strict=True)
    ]


def _ask(caller: Caller, target: Target) -> Ref[None]:
    answer = agent_of(caller, target.remote).answer()
    state_of(answer).mark_seen()
    return answer


def _answer_deadline(process: Process, grace: float) -> float:
    return process.loop.time() + grace + max(process.grace, process.env.timeouts.answer)


async def _wait_until(ref: Ref[None], deadline: float) -> bool:
    """Wait for a call until a time of the loop's clock. The call is not cancelled, which would take time."""
    with suppress(TimeoutError, DaftError):
        async with asyncio.timeout_at(deadline):
            await ref.ready()
    return ref.done()


def host_spec(cls: type) -> MethodSpec:
    """The method that makes an actor, named in errors by the actor's class."""
    spec = specs_of(Agent)["host"]
    return MethodSpec(cls.__name__, spec.name, spec.fn, Options(spec.rules), hidden=6)
