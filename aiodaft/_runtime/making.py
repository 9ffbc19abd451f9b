"""Making actors and stopping them, by calls to the agents of their processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol.ids import AGENT, ActorId, PeerId, epoch_of
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft.exceptions import DaftError
from aiodaft.ref import Ref

from .agent import host_spec
from .calls import Request, Target
from .refkinds import CallState
from .tasks import logger

if TYPE_CHECKING:
    from .kept import Kept
    from .peer import Peer


# Said to whom it concerns when an actor is stopped.
WHY_STOPPED: Final = "stopped by its owner"


class Recipe:
    """How an actor is made: its class, and the arguments of its constructor.

    One that is to be used again encodes the arguments once. Refs among them are held, and resolved anew each time.
    """

    def __init__(self, cls: type, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cls = cls
        self.label = label
        self._args = args
        self._kwargs = kwargs
        self._request: Request | None = None

    def make(self, peer: Peer, remote: PeerId, actor: ActorId, *, again: bool) -> Ref[Any]:
        """Have a process make the actor; `again` if the recipe is to be used another time."""
        target = Target(peer, remote, AGENT, f"agent of {remote}", None)
        spec, number = host_spec(self.cls), peer.next_number()
        state = CallState(target, spec, number)
        arguments = (actor, self.label, self.cls, *self._args)
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
    def _kept(self) -> Kept | None:
        return None if self._request is None else self._request.kept

    def free(self) -> None:
        """It is not used again. Idempotent."""
        kept, self._request = self._kept, None
        if kept is not None:
            kept.release()


async def stop_actor(peer: Peer, target: Target, reason: str, grace: float) -> None:
    """Have an actor end its calls within the grace time, and leave its instance. Nothing if it is gone.

    A process that does not answer (it is frozen, or C code holds its interpreter) is given up soon after that.
    """
    try:
        async with asyncio.timeout(grace + 2 * peer.grace + 1.0):
            await peer.agent_of(target.remote).stop(target.actor, reason, grace)
    except (DaftError, TimeoutError) as error:
        logger.debug("%s was gone before it was stopped: %s", target.label, error)
