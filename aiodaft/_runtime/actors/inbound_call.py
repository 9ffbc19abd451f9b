"""A call that an actor of this process receives: data, which a `HostedActor` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiodaft._protocol.calls.call import Life
from aiodaft._protocol.connections.messages import Awaited
from aiodaft._protocol.diagnostics.deadlock import CallAt
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Place
from aiodaft._runtime.serialization.small import Small
from aiodaft.methods import MethodSpec

if TYPE_CHECKING:
    from aiodaft._runtime.actors.hosted_actor import HostedActor

# Replaced, never changed. A dict is passed on faster than a read-only view of it.
_NO_KWARGS: Final[dict[str, Any]] = {}

current_call: ContextVar[InboundCall | None] = ContextVar("aiodaft_current_call", default=None)


class Responder(Protocol):
    """Answers the calls of one caller."""

    # Results are not encoded: the caller is in this process, or wants none.
    is_local: bool

    def answer(self, call: InboundCall, result: Any) -> None:
        """Give a plain result, or to a local caller any result."""

    def answer_stored(self, call: InboundCall, stored: StoredValue | Small) -> None:
        """Give a result that is encoded and packed."""

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        """Give an error, unless the call is answered already."""

    def turn_away(self, call: InboundCall) -> None:
        """Have a call that has not begun be made again where the actor moves to."""

    async def item(self, call: InboundCall, value: Any) -> None:
        """Give the next item of a stream."""


class InboundCall(Life):
    """A call from its arrival to its answer."""

    # Defaults live in the class: most calls set only what they need.
    kwargs: Mapping[str, Any] = _NO_KWARGS
    # Arguments that are not decoded yet, and the values of the refs among them.
    received: ReceivedValue | None = None
    slots: Sequence[ReceivedValue] = ()
    timer: asyncio.TimerHandle | None = None
    # The number of earlier attempts; for the call that makes an actor, the actor's epoch.
    attempt = 0
    # The task of an async method; of a `def` method, the task that waits for a ref in its place.
    task: asyncio.Task[Any] | None = None
    # The context of its arrival, if it had to wait: another call's end starts it, in another context.
    context: Context | None = None
    # Fetch its arguments.
    fetching: tuple[asyncio.Task[None], ...] = ()
    # The arguments that other calls make, by position.
    awaited: dict[int, Awaited] = {}  # noqa: RUF012 - replaced, never changed
    # Between two steps of a graph: the segment whose values it waits for.
    waits_at: int | None = None
    # Why it takes part in nothing with other members of its group any more.
    apart: str | None = None
    # The number of items that the consumer of a stream still takes.
    credit = 0
    _credit_wanted: asyncio.Event | None = None
    _pullers: list[Callable[[Place], object]] | None = None
    _token: list[None] | None = None

    def __init__(
        self,
        responder: Responder,
        caller: PeerId,
        number: CallId,
        hosted: HostedActor,
        spec: MethodSpec,
        mode: int,
        args: Sequence[Any],
    ) -> None:
        self.responder = responder
        self.caller = caller
        self.number = number
        self.hosted = hosted
        self.spec = spec
        self.rules = spec.rules
        self.mode = mode
        self.args = args
        if spec.rules.on_thread:
            self._token = [None]

    def take(self) -> bool:
        """Claim the right to start the call, or to withdraw it: True for the first claim.

        The actor's thread and the loop may ask at the same time; popping from a list is atomic.
        """
        if self._token is None:
            return True
        try:
            self._token.pop()
        except IndexError:
            return False
        return True

    @property
    def label(self) -> str:
        """What was called, such as "Model.execute"."""
        return self.spec.label

    def waits_for(self) -> list[CallAt]:
        """The calls of which one has to end before it has its arguments."""
        return [CallAt(producer, owner, number) for _, owner, number, producer, _ in self.awaited.values()][:1]

    def add_puller(self, found: Callable[[Place], object]) -> None:
        """Register a callback for another process that pulls the result."""
        if self._pullers is None:
            self._pullers = []
        self._pullers.append(found)

    @property
    def pulled(self) -> bool:
        """Whether another process than the caller's waits for the result."""
        return self._pullers is not None

    def tell_pullers(self, place: Place) -> None:
        """Call these callbacks: the result exists."""
        pullers, self._pullers = self._pullers, None
        for found in pullers or ():
            found(place)

    def add_credit(self, count: int) -> None:
        """The consumer of the stream takes `count` more items."""
        self.credit += count
        if self._credit_wanted is not None:
            self._credit_wanted.set()

    async def wait_credit(self) -> None:
        """Wait until the consumer takes another item, and use up one credit."""
        while self.credit <= 0:
            if self._credit_wanted is None:
                self._credit_wanted = asyncio.Event()
            self._credit_wanted.clear()
            await self._credit_wanted.wait()
        self.credit -= 1
