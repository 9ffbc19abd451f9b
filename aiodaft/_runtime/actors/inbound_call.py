"""One call that a peer (or this very process) made to an actor hosted here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import Context, ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import WANT_STREAM
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import is_plain

if TYPE_CHECKING:
    from aiodaft._runtime.actors.hosted_actor import HostedActor
    from aiodaft._runtime.objects.transfer import Place
    from aiodaft.methods import MethodSpec

_NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})

current_call: ContextVar[InboundCall | None] = ContextVar("aiodaft_current_call", default=None)


class Responder(Protocol):
    """Who made a call, and how to answer."""

    @property
    def id(self) -> PeerId:
        """The caller's process."""
        ...

    def answer(self, call: InboundCall, result: Any) -> None:
        """Give a result that needs no encoding worth mentioning."""
        ...

    async def answer_encoded(self, call: InboundCall, result: Any) -> None:
        """Give any result. Returns once the actor may change what it returned."""
        ...

    def answer_kept(self, call: InboundCall, kept: StoredValue) -> None:
        """Give a result that is encoded and packed."""
        ...

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        """Say that there is no result."""
        ...

    async def item(self, call: InboundCall, value: Any) -> None:
        """Give the next item of a stream."""
        ...


class InboundCall:
    """A call from its arrival to its answer."""

    # Defaults live in the class: most calls set only what they need.
    kwargs: Mapping[str, Any] = _NO_KWARGS
    # Arguments that are not decoded yet, and the values of the refs among them.
    arrived: ReceivedValue | None = None
    slots: Sequence[ReceivedValue] = ()
    # When it is too late, on the loop's clock; it was under way when that had come.
    deadline: float | None = None
    timer: asyncio.TimerHandle | None = None
    late = False
    # How often it was made before; for the call that makes an actor, the actor's epoch.
    attempt = 0
    # Its arguments are here; it was handed to its task or thread, behind others; that took it up (of a row: the last
    # call); it never will start.
    ready = True
    started = False
    behind = False
    begun = False
    last_begun = False
    withdrawn = False
    # It is answered, or nobody waits for the answer.
    over = False
    # That of an async method; for a `def` method, what waits for a ref in its place.
    task: asyncio.Task[Any] | None = None
    # That in which it came, if it had to wait: whoever ends and lets it begin has one of his own.
    context: Context | None = None
    # Fetches its arguments, until they are here.
    bringing: asyncio.Task[None] | None = None
    # Nobody waits for it any more, and it runs on all the same.
    given_up = False
    # When it began, on the clock of `Env`.
    since = 0.0
    # Items that the consumer of a stream takes.
    credit = 0
    _credit_wanted: asyncio.Event | None = None
    _pullers: list[Callable[[Place], object]] | None = None
    _token: list[None] | None = None

    def __init__(
        self,
        caller: Responder,
        caller_id: PeerId,
        number: CallId,
        hosted: HostedActor,
        spec: MethodSpec,
        mode: int,
        args: tuple[Any, ...],
    ) -> None:
        self.caller_connection = caller
        self.caller = caller_id
        self.number = number
        self.hosted = hosted
        self.spec = spec
        self.rules = spec.rules
        self.mode = mode
        self.args = args
        if spec.rules.on_thread:
            self._token = [None]

    async def work(self) -> None:
        """On the loop: run it, and answer."""
        hosted = self.hosted
        hosted.enter(self)
        executed = False
        try:
            if self.arrived is not None:
                hosted.decode_arguments(self)
            executed = True
            made = self.spec.fn(hosted.instance, *self.args, **self.kwargs)
            result: Any = await (self._give_items(made) if self.spec.is_stream else made)
            if self.late:
                # It did not obey, but its time was over.
                hosted.fail_late(self)
            elif is_plain(result):
                self.caller_connection.answer(self, result)
            else:
                await self.caller_connection.answer_encoded(self, result)
        except (SystemExit, KeyboardInterrupt) as error:
            hosted.peer.exit_requested(error)
        except BaseException as error:  # noqa: BLE001 - whatever a method raises is its caller's
            hosted.failed(self, error, executed)
        finally:
            hosted.end(self)

    async def _give_items(self, items: AsyncGenerator[Any, None]) -> None:
        try:
            await self.wait_credit()
            async for item in items:
                await self.caller_connection.item(self, item)
                await self.wait_credit()
        finally:
            # Leaving the loop does not end an async generator, and garbage collection would do it too late.
            await items.aclose()

    def take(self) -> bool:
        """Claim the right to start the call, or to say that it never will: True for the first who asks.

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

    @property
    def wants_stream(self) -> bool:
        """Whether items are expected."""
        return self.mode == WANT_STREAM

    def add_puller(self, found: Callable[[Place], object]) -> None:
        """Somebody else wants the result."""
        if self._pullers is None:
            self._pullers = []
        self._pullers.append(found)

    @property
    def pulled(self) -> bool:
        """Whether somebody besides the caller waits for the result."""
        return self._pullers is not None

    def tell_pullers(self, place: Place) -> None:
        """The result is there."""
        pullers, self._pullers = self._pullers, None
        for found in pullers or ():
            found(place)

    def add_credit(self, count: int) -> None:
        """The consumer of the stream takes that many more items."""
        self.credit += count
        if self._credit_wanted is not None:
            self._credit_wanted.set()

    async def wait_credit(self) -> None:
        """Wait until the consumer takes another item, and use that up."""
        while self.credit <= 0:
            if self._credit_wanted is None:
                self._credit_wanted = asyncio.Event()
            self._credit_wanted.clear()
            await self._credit_wanted.wait()
        self.credit -= 1
