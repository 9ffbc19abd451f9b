"""Making actors and stopping them, by calls to the agents of their processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol.ids import AGENT, ActorId, PeerId, epoch_of
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._runtime.agent import Agent
from aiodaft._runtime.calls.call import CallState, Request, Target
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError
from aiodaft.methods import MethodSpec, Options, specs_of
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from aiodaft._runtime.objects.stored import StoredValue
    from aiodaft._runtime.peer import Peer


# Said to whom it concerns when an actor is stopped.
WHY_STOPPED: Final = "stopped by its owner"


# Seconds in which a process that lives answers, however short the grace times are.
_ANSWER_TIME: Final = 1.0


class ChildSpec:
    """How an actor is made: its class, and the arguments of its constructor.

    One that is to be used again encodes the arguments once. Refs among them are held, and resolved anew each time.
    """

    def __init__(
        self, cls: type, label: str, args: tuple[Any, ...], kwargs: dict[str, Any], max_queue: int | None
    ) -> None:
        self.cls = cls
        self.label = label
        self._max_queue = max_queue
        self._args = args
        self._kwargs = kwargs
        self._request: Request | None = None

    def make(self, peer: Peer, remote: PeerId, actor: ActorId, *, again: bool) -> Ref[Any]:
        """Have a process make the actor; `again` if the recipe is to be used another time."""
        target = Target(peer, remote, AGENT, f"agent of {remote}", None)
        spec, number = host_spec(self.cls), peer.process.next_number()
        state = CallState(target, spec, number)
        arguments = (actor, self.label, self._max_queue, self.cls, *self._args)
        request = Request(target, spec, arguments, self._kwargs, number, WANT_REPLY, state)
        request.again, request.attempt, request.kept = again, epoch_of(actor), self._kept
        self._request = request
        peer.sender.submit(request)
        return Ref(state)

    def made(self) -> None:
        """The first one was made: from now on the encoded arguments are all there is."""
        assert self._request is not None
        self._args = self._request.args = ()
        self._kwargs = self._request.kwargs = {}

    @property
    def _kept(self) -> StoredValue | None:
        return None if self._request is None else self._request.kept

    def free(self) -> None:
        """It is not used again. Idempotent."""
        kept, self._request = self._kept, None
        if kept is not None:
            kept.release()


async def stop_actor(peer: Peer, target: Target, reason: str, grace: float) -> bool:
    """Have an actor end its calls within the grace time, and leave its instance. Nothing if it is gone.

    Returns:
        Whether its process answers. One that has not said anything within the two grace times (it is stopped, or a call
        keeps its interpreter or its loop) can only be killed.
    """
    stopping = peer.agent_of(target.remote).stop(target.actor, reason, grace)
    # What becomes of it concerns nobody else.
    state_of(stopping).mark_seen()
    now = asyncio.get_running_loop().time
    # The answer comes when the process has begun to stop the actor.
    answers = await _is_over(_ask(peer, target), now() + _answer_time(peer, grace))
    ended = answers and await _is_over(stopping, now() + grace + 2 * peer.process.grace + 1.0)
    if not ended:
        logger.debug("%s does not answer, and is killed", target.label)
    return answers


async def stop_in_turn(peer: Peer, targets: Sequence[Target], reason: str, grace: float) -> list[bool]:
    """Stop actors, each when the one before it has been left. For each of them, see `stop_actor`.

    All are asked at the beginning whether they answer, so the time for that passes once, however many do not.
    """
    asked = [_ask(peer, target) for target in targets]
    deadline = asyncio.get_running_loop().time() + _answer_time(peer, grace)
    return [
        await _is_over(answer, deadline) and await stop_actor(peer, target, reason, grace)
        for target, answer in zip(targets, asked, strict=True)
    ]


def _ask(peer: Peer, target: Target) -> Ref[None]:
    answer = peer.agent_of(target.remote).answer()
    # What becomes of it concerns nobody else.
    state_of(answer).mark_seen()
    return answer


def _answer_time(peer: Peer, grace: float) -> float:
    return grace + max(peer.process.grace, _ANSWER_TIME)


async def _is_over(ref: Ref[None], deadline: float) -> bool:
    """Wait for a call until a time of the loop's clock. The call is not cancelled, which would take time."""
    with suppress(TimeoutError, DaftError):
        async with asyncio.timeout_at(deadline):
            await ref.ready()
    return ref.done()


def host_spec(cls: type) -> MethodSpec:
    """The method that makes an actor, named in errors by the actor's class."""
    spec = specs_of(Agent)["host"]
    return MethodSpec(cls.__name__, spec.name, spec.fn, Options(spec.rules), hidden=4)
