"""Calls that a process makes, without processes: sent in order, answered once, and led to where an actor is now."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from log_ear import listening
from rooms import ELSEWHERE, THERE, Bench, turns

import aiodaft
from aiodaft import Actor, method
from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import FrameDecoder
from aiodaft._protocol.ids import (
    COLLECTIVES,
    FIRST_USER_ACTOR,
    SUPERVISOR,
    ActorId,
    CallId,
    PeerId,
    incarnation,
    sibling_ids,
)
from aiodaft._runtime.calls.call import Caller, CallState, Target
from aiodaft._runtime.calls.following import Followers, FollowingTarget, PinnedTarget
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.broadcast import DIRECT
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.peer import Replies
from aiodaft._runtime.serialization.errors import encode_error
from aiodaft.actor import Handle, target_of
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    DaftError,
    Overloaded,
    PeerLost,
    RemoteProtocolError,
    RuntimeClosed,
    StaleHandle,
)
from aiodaft.methods import specs_of
from aiodaft.ref import Ref

OWNER = PeerId("owner")
ACTOR = FIRST_USER_ACTOR
NEXT = incarnation(ACTOR, 1)
# Nothing can change it: the helper thread copies it.
LARGE = bytes(2 << 20)


class Place(NamedTuple):
    """A tuple that must stay one of this class."""

    x: int
    y: int


class Desk(Actor):
    """The called actor."""

    @method
    async def note(self, word: Any) -> Any:
        return word

    @method
    async def note_all(self, *words: Any) -> Any:
        return words

    @method(idempotent=True, retries=1)
    async def note_twice(self, word: Any) -> Any:
        return word

    @method
    async def where(self) -> Location:
        raise NotImplementedError


class Office(Bench):
    """A process that makes calls; its connections lead nowhere, and keep its messages."""

    def __init__(self, *, grace: float = 60.0, max_pending: int = 8) -> None:
        super().__init__(grace=grace, max_pending=max_pending)
        self.connections = Connections(self.process, self)
        owner: Any = self
        self.objects = Objects(self.process, self.connections, self.store, owner)
        self.caller = Caller(self.process, self.connections, self.objects, {})
        inbound: Any = None
        self.outgoing = Outgoing(self.caller, inbound)
        self.replies = Replies(self.objects)
        self.followers = Followers(self.caller, self.locate)
        # The questions for the place of an actor that are not answered.
        self.asked: list[CallState] = []
        self._decoders: dict[PeerId, FrameDecoder] = {}
        self.explained: list[tuple[Connection, DaftError]] = []

    def handle(self) -> Any:
        return self.caller.handle(THERE, ACTOR, "Desk-1", Desk)

    def sent_to(self, remote: PeerId) -> list[Any]:
        """The calls that were sent since the last time: actor, method and argument, if that is small."""
        decoder = self._decoders.setdefault(remote, FrameDecoder())
        frames = decoder.feed(self.connections.to(remote).session.data_to_send())
        return [tuple(frame[1:5]) for frame in frames if frame[0] in (m.CALL, m.SEND)]

    def words_to(self, remote: PeerId) -> list[Any]:
        """The arguments of the calls that were sent since the last time; "large" for one that is."""
        return [rest[0] if isinstance(rest, list | tuple) else "large" for *_, rest in self.sent_to(remote)]

    def kinds_to(self, remote: PeerId) -> list[int]:
        """The kinds of messages that were sent since the last time."""
        decoder = self._decoders.setdefault(remote, FrameDecoder())
        return [frame[0] for frame in decoder.feed(self.connections.to(remote).session.data_to_send())]

    async def encode(self) -> None:
        """The helper thread does its work."""
        while self.helper.jobs:
            self.helper.turn()
            await turns(8)

    def lose(self, remote: PeerId) -> Connection:
        connection = self.connections.to(remote)
        connection.connected = True
        connection.close(PeerLost(f"{remote} ended"))
        return connection

    def refuse(self, remote: PeerId, number: int, error: DaftError) -> None:
        """The actor's process answers that it did not run a call."""
        message = m.error(CallId(number), encode_error(error), error.executed)
        self.replies.error_came(self.connections.to(remote), message)

    def locate(self, owner: PeerId, number: ActorId, wait: bool) -> Ref[Location]:
        assert (owner, number) == (OWNER, ACTOR)
        target = Target(self.caller, OWNER, SUPERVISOR, "supervisor", None)
        state = CallState(target, specs_of(Desk)["where"], self.process.next_number())
        self.asked.append(state)
        return Ref(state)

    def followed(self, place: Location) -> tuple[FollowingTarget, Any]:
        target = self.followers.get(OWNER, place, "Desk-1")
        return target, Handle(target, Desk)

    # As owner of its connections.

    def introduce(self, remote: PeerId, known: int) -> Awaitable[str]:
        return asyncio.sleep(0, "")

    def ask(self, remote: PeerId) -> Awaitable[object]:
        raise NotImplementedError

    def connection_lost(self, connection: Connection) -> None: ...

    def connection_explained(self, connection: Connection, error: DaftError) -> None:
        self.explained.append((connection, error))
        self.replies.connection_lost(connection, error)

    def connection_renewed(self, remote: PeerId) -> None: ...

    def revoke(self, connection: Connection, blobs: Any) -> None: ...

    def take_note(self, *note: Any) -> None:
        raise NotImplementedError

    def ask_stream(self, remote: PeerId, number: int) -> Awaitable[object]:
        raise NotImplementedError

    def take_stream(self, remote: PeerId, stream: socket.socket) -> None:
        raise NotImplementedError

    # As owner of its objects.

    def running_call(self, owner: PeerId, number: CallId) -> None: ...


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    made = Office()
    yield made
    await made.process.tasks.aclose()


async def error_of(ref: Ref[Any]) -> DaftError:
    with pytest.raises(DaftError) as caught:
        await ref
    return caught.value


async def test_small_and_keyword_arguments_need_no_other_message_than_plain_ones(office: Office) -> None:
    desk = office.handle()
    refs = [desk.note(1), desk.note([1, {"a": (2,)}]), desk.note(word=1), desk.note(word=[1])]
    assert office.kinds_to(THERE)[1:] == [m.CALL] * len(refs)
    async with aiodaft.deadline(10):
        refs.append(desk.note([1]))
    refs.append(desk.note(object()))
    assert office.kinds_to(THERE) == [m.SEND, m.SEND]


async def test_words_that_are_long_together_are_encoded_and_so_count_in_the_window(office: Office) -> None:
    office.connections.to(THERE).connected = True
    desk, few, many = office.handle(), ["x" * 1024] * 16, ["x" * 1024] * 17
    for words in (few, many, range(100)):
        desk.note_all(*words)
    assert [type(rest) for *_, rest in office.sent_to(THERE)] == [tuple, bytes, tuple]
    ref = desk.note(0)
    for words in (few, many):
        desk.note_all(ref, *words)
    assert office.kinds_to(THERE) == [m.CALL, m.APPLY, m.SEND]


async def test_a_short_tuple_of_plain_values_is_in_the_message_as_it_is(office: Office) -> None:
    office.connections.to(THERE).connected = True
    desk, plain = office.handle(), (1, "a", None, b"b", -0.5, True)
    desk.note_all(plain, 2, ())
    assert [rest for *_, rest in office.sent_to(THERE)] == [(plain, 2, ())]
    for other in (Place(1, 2), (1, (2,)), (1, [2]), (1 << 64,), ("x" * 1024, "y"), tuple(range(17))):
        desk.note_all(plain, other)
    assert [isinstance(rest, tuple) for *_, rest in office.sent_to(THERE)] == [False] * 6


async def test_a_call_that_fitted_says_nothing_of_another(office: Office) -> None:
    desk = office.handle()
    for _ in range(2):
        desk.note(word=1)
        for args, kwargs in (((), {"other": 1}), ((1,), {"word": 1}), ((), {"word": 1, "other": 1}), ((1, 2), {})):
            with pytest.raises(TypeError, match="Desk.note"):
                desk.note(*args, **kwargs)
    assert office.kinds_to(THERE)[1:] == [m.CALL] * 2


async def test_a_call_waits_while_the_argument_of_an_earlier_one_is_copied(office: Office) -> None:
    desk = office.handle()
    refs = [desk.note(LARGE), desk.note("second")]
    await turns(8)
    assert office.words_to(THERE) == []
    await office.encode()
    assert office.words_to(THERE) == ["large", "second"]
    assert not any(ref.done() for ref in refs)


async def test_a_call_that_is_cancelled_while_its_argument_is_copied_lets_the_next_one_go(office: Office) -> None:
    desk = office.handle()
    large, second = desk.note(LARGE), desk.note("second")
    await turns(8)
    large.cancel()
    error = await error_of(large)
    assert (type(error), error.executed) == (CallCancelled, False)
    with listening() as ear:
        await office.encode()
    assert (office.words_to(THERE), ear.lines) == (["second"], [])
    assert not second.done()


async def test_a_call_with_a_ref_that_is_turned_away_uses_the_ref_once(office: Office) -> None:
    office.connections.to(THERE).connected = office.connections.to(ELSEWHERE).connected = True
    target, desk = office.followed(Location(THERE, ACTOR))
    word = office.handle().note("word")
    call = desk.note_twice(word)
    assert office.kinds_to(THERE)[1:] == [m.CALL, m.APPLY]
    target.move(Location(ELSEWHERE, NEXT))
    office.replies.error_came(office.connections.to(THERE), m.away(state_of(call).number))
    assert office.kinds_to(ELSEWHERE)[1:] == [m.SEND]
    assert state_of(word).in_use
    office.replies.replied(office.connections.to(ELSEWHERE), (m.REPLY, state_of(call).number, "noted"))
    assert not state_of(word).in_use


async def test_calls_fail_with_a_lost_connection_although_a_filter_of_the_log_raises(office: Office) -> None:
    desk, problems = office.handle(), list[Any]()
    target_of(desk).tell(specs_of(Desk)["note"], ("told",), {})
    asked = desk.note("asked")
    office.process.loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))

    def refuse(_: logging.LogRecord) -> bool:
        raise ValueError("not this one")

    logger = logging.getLogger("aiodaft")
    logger.addFilter(refuse)
    try:
        office.lose(THERE)
        assert type(await error_of(asked)) is PeerLost
    finally:
        logger.removeFilter(refuse)
    assert [repr(problem) for problem in problems] == ["ValueError('not this one')"]


class Run:
    """A run of a graph that an actor is in, and that may not go yet."""

    lanes: tuple[Target, ...] = ()

    def may_go(self) -> bool:
        return False

    def go(self) -> None:
        raise NotImplementedError


async def test_a_call_that_is_cancelled_while_it_waits_behind_a_run_is_not_sent(office: Office) -> None:
    desk, run = office.handle(), Run()
    target: Any = target_of(desk)
    run.lanes = (target,)
    office.outgoing.order.enter(run)
    cancelled, stays = desk.note("cancelled"), desk.note("stays")
    cancelled.cancel()
    assert (await error_of(cancelled)).executed is False
    office.outgoing.order.leave(run)
    office.outgoing.look_again(run.lanes)
    assert office.words_to(THERE) == ["stays"]
    assert not stays.done()


async def test_an_answer_that_comes_after_the_grace_time_of_a_cancellation_changes_nothing() -> None:
    office = Office(grace=0)
    desk = office.handle()
    plain, stored = desk.note("plain"), desk.note("stored")
    numbers = [number for number, *_ in office.sent_to(THERE)]
    plain.cancel()
    stored.cancel()
    errors = [await error_of(plain), await error_of(stored)]
    assert [(type(error), error.executed) for error in errors] == [(CallCancelled, None)] * 2
    assert office.kinds_to(THERE) == [m.CANCEL, m.CANCEL]
    connection = office.connections.to(THERE)
    office.replies.replied(connection, (m.REPLY, numbers[0], "a value"))
    office.replies.stored_came(connection, m.stored(numbers[1], 10, ""))
    # The producer's values are freed there.
    assert office.kinds_to(THERE) == [m.RELEASE]
    assert [type(await error_of(ref)) for ref in (plain, stored)] == [CallCancelled] * 2
    assert not connection.session.calls
    await office.process.tasks.aclose()


async def test_an_answer_to_a_call_that_was_not_sent_is_an_error(office: Office) -> None:
    waits = office.handle().note(LARGE)
    (number,) = office.connections.to(THERE).session.calls
    for unknown in (number, CallId(number + 1)):
        with pytest.raises(RemoteProtocolError, match="which is not under way"):
            office.replies.replied(office.connections.to(THERE), (m.REPLY, unknown, "x"))
    assert not waits.done()
    await turns()
    await office.encode()


async def test_a_lost_connection_fails_what_was_sent_and_what_was_not_with_different_marks(office: Office) -> None:
    desk = office.handle()
    sent, unsent = desk.note("sent"), desk.note(LARGE)
    await turns()
    office.lose(THERE)
    assert [(await error_of(ref)).executed for ref in (sent, unsent)] == [None, False]
    after = await error_of(desk.note("after"))
    assert (type(after), after.executed) == (PeerLost, False)
    await office.encode()


async def test_a_renewed_connection_ends_the_search_for_the_cause_of_the_loss_of_the_one_before(office: Office) -> None:
    cause: asyncio.Future[DaftError] = asyncio.get_running_loop().create_future()
    office.connections.explain = lambda connection, reason: cause
    call = office.handle().note("over the first")
    lost = office.lose(THERE)
    office.connections.renew(THERE)
    assert (await error_of(call)).executed is None
    # An error that is found later does not end calls over the new one.
    later = office.handle().note("over the second")
    cause.set_result(ActorDied("its process ended"))
    await turns(3)
    assert type(await office.connections.explanation(lost)) is PeerLost
    assert not later.done()
    assert [connection for connection, _ in office.explained] == [lost]


async def test_the_cause_of_a_loss_can_be_asked_for_at_once(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    asking: list[Coroutine[Any, Any, DaftError]] = []

    def lost(connection: Connection) -> None:
        asking.append(office.connections.explanation(connection))
        # Eager tasks begin like this.
        asking[0].send(None)

    monkeypatch.setattr(office, "connection_lost", lost)
    office.lose(THERE)
    await turns()
    with pytest.raises(StopIteration) as found:
        asking[0].send(None)
    assert isinstance(found.value.value, PeerLost)


async def test_a_supervised_actor_is_called_over_a_renewed_connection_if_the_call_was_not_sent(office: Office) -> None:
    office.connections.explain = lambda connection, reason: asyncio.get_running_loop().create_future()
    target, desk = office.followed(Location(NOWHERE, ACTOR))
    target.move(Location(THERE, ACTOR))
    call = desk.note("not sent")
    office.connections.to(THERE).close(PeerLost("there cannot be reached"))
    office.connections.renew(THERE)
    await turns()
    office.asked[0].on_plain(Location(THERE, ACTOR))
    await turns()
    assert office.words_to(THERE) == ["not sent"]
    assert not call.done()


async def test_the_end_of_the_process_ends_the_search_for_the_cause_of_a_loss(office: Office) -> None:
    office.connections.explain = lambda connection, reason: asyncio.get_running_loop().create_future()
    far: Any = SimpleNamespace(reached_by=())
    office.connections.far = far
    target, desk = office.followed(Location(NOWHERE, ACTOR))
    target.move(Location(THERE, ACTOR))
    pinned = Handle(PinnedTarget(target, target.place), Desk)
    calls = [office.handle().note("under way")]
    office.lose(THERE)
    calls += [handle.note("later") for handle in (office.handle(), pinned, desk)]
    never_connected = office.connections.to(ELSEWHERE)
    calls.append(Handle(PinnedTarget(target, Location(ELSEWHERE, ACTOR)), Desk).note("not sent"))
    waiting = asyncio.gather(*map(error_of, calls))
    await turns()
    office.process.closed = "the runtime is closed"
    office.connections.close(office.process.closed)
    await office.process.tasks.aclose()
    errors = await waiting
    assert [(type(error), error.executed) for error in errors] == [(RuntimeClosed, None), *[(RuntimeClosed, False)] * 4]
    # It is the end: no other connection is made.
    assert office.connections.to(ELSEWHERE) is never_connected


async def test_too_many_calls_without_an_answer_are_refused_where_they_are_made() -> None:
    office = Office(max_pending=1)
    desk = office.handle()
    first = desk.note("first")
    with pytest.raises(Overloaded, match=r"Desk\.note of Desk-1 is refused"):
        desk.note("second")
    (call,) = office.sent_to(THERE)
    office.replies.replied(office.connections.to(THERE), (m.REPLY, call[0], "first"))
    assert await first == "first"
    desk.note("third")
    assert office.words_to(THERE) == ["third"]
    await office.process.tasks.aclose()


async def test_a_call_with_an_argument_that_has_failed_is_not_sent(office: Office) -> None:
    desk = office.handle()
    argument = desk.note("an argument")
    ((number, *_),) = office.sent_to(THERE)
    office.refuse(THERE, number, ActorDied("it is gone"))
    error = await error_of(desk.note(argument))
    assert (type(error), error.executed, office.sent_to(THERE)) == (ActorDied, False, [])


# Actors that are restarted.


async def test_calls_wait_for_a_restarted_actor_and_go_to_its_new_place_in_order(office: Office) -> None:
    target, desk = office.followed(Location(NOWHERE, NEXT))
    desk.note("a")
    for word in ("b", "c"):
        # Each is one of three calls of a call of a group.
        number = sibling_ids(office.process.next_number(), 3)[1]
        target.call(specs_of(Desk)["note"], (word,), {}, number)
    await turns()
    desk.note("d")
    await turns()
    (question,) = office.asked
    question.on_plain(Location(ELSEWHERE, NEXT))
    await turns()
    assert [(actor, *args) for _, actor, _, args in office.sent_to(ELSEWHERE)] == [(NEXT, word) for word in "abcd"]
    desk.note("e")
    assert office.words_to(ELSEWHERE) == ["e"]
    assert (target.place, len(office.asked)) == (Location(ELSEWHERE, NEXT), 1)


async def test_a_call_that_is_cancelled_while_it_waits_for_a_restart_is_not_sent(office: Office) -> None:
    _, desk = office.followed(Location(NOWHERE, NEXT))
    cancelled, stays = desk.note("cancelled"), desk.note("stays")
    await turns()
    cancelled.cancel()
    assert (await error_of(cancelled)).executed is False
    office.asked[0].on_plain(Location(ELSEWHERE, NEXT))
    await turns()
    assert office.words_to(ELSEWHERE) == ["stays"]
    assert not stays.done()


async def test_old_news_of_an_actor_do_not_lead_back(office: Office) -> None:
    target, desk = office.followed(Location(NOWHERE, NEXT))
    target.move(Location(ELSEWHERE, NEXT))
    target.move(Location(THERE, ACTOR))
    desk.note("a")
    assert (office.words_to(ELSEWHERE), office.words_to(THERE)) == (["a"], [])
    # A handle that comes from a process which knew it first.
    assert office.followed(Location(THERE, ACTOR))[0] is target
    assert target.place == Location(ELSEWHERE, NEXT)


async def test_the_calls_of_an_actor_that_is_gone_for_good_fail_and_later_ones_ask_no_more(office: Office) -> None:
    _, desk = office.followed(Location(NOWHERE, NEXT))
    waits = desk.note("waits")
    await turns()
    office.asked[0].on_plain(Location(NOWHERE, NEXT, ActorDied("it is over")))
    errors = [await error_of(waits)]
    errors.append(await error_of(desk.note("later")))
    assert [(type(error), error.executed) for error in errors] == [(ActorDied, False)] * 2
    assert len(office.asked) == 1


async def test_a_question_that_fails_fails_the_calls_that_waited_and_the_next_call_asks_again(office: Office) -> None:
    _, desk = office.followed(Location(NOWHERE, NEXT))
    waits = desk.note("waits")
    await turns()
    office.asked[0].on_error(PeerLost("the owner ended"))
    error = await error_of(waits)
    assert (type(error), error.executed) == (PeerLost, False)
    desk.note("again")
    await turns()
    office.asked[1].on_plain(Location(ELSEWHERE, NEXT))
    await turns()
    assert office.words_to(ELSEWHERE) == ["again"]


async def test_a_stored_value_is_sent_for_and_asked_for_if_the_connection_to_its_producer_is_lost(
    office: Office,
) -> None:
    for remote in (THERE, ELSEWHERE):
        office.connections.to(remote).connected = True
        assert office.kinds_to(remote) == [m.HELLO]
    stored = office.handle().note("a large value")
    ((number, *_),) = office.sent_to(THERE)
    office.replies.stored_came(office.connections.to(THERE), m.stored(number, DIRECT, ""))
    # An actor of the user, and one of the runtime.
    calls = [office.caller.handle(ELSEWHERE, actor, "Desk-2", Desk).note(stored) for actor in (ACTOR, COLLECTIVES)]
    assert office.kinds_to(ELSEWHERE) == [m.APPLY, m.APPLY]
    assert office.kinds_to(THERE) == [m.FORWARD, m.FORWARD]
    office.lose(THERE)
    await turns()
    assert office.kinds_to(ELSEWHERE) == [m.ASK]
    # It is lost: the calls get its error from this process.
    calls.append(office.caller.handle(ELSEWHERE, ACTOR, "Desk-2", Desk).note(stored))
    assert office.kinds_to(ELSEWHERE) == [m.SEND]


async def test_a_value_that_consumers_pass_on_to_each_other_is_asked_for(office: Office) -> None:
    for remote in (THERE, ELSEWHERE):
        office.connections.to(remote).connected = True
        assert office.kinds_to(remote) == [m.HELLO]
    stored = office.handle().note("a large value")
    ((number, *_),) = office.sent_to(THERE)
    office.replies.stored_came(office.connections.to(THERE), m.stored(number, 2 * DIRECT, ""))
    calls = [office.caller.handle(remote, ACTOR, "Desk", Desk).note(stored) for remote in (THERE, ELSEWHERE)]
    assert (office.kinds_to(THERE), office.kinds_to(ELSEWHERE)) == ([m.APPLY], [m.SEND])
    assert not any(call.done() for call in calls)


async def test_a_call_is_made_again_as_often_as_its_method_allows(office: Office) -> None:
    office.connections.to(THERE)
    _, desk = office.followed(Location(THERE, ACTOR))
    once, twice = desk.note("once"), desk.note_twice("twice")
    office.lose(THERE)
    error = await error_of(once)
    assert (type(error), error.executed) == (PeerLost, None)
    await turns(8)
    office.asked[0].on_plain(Location(ELSEWHERE, NEXT))
    await turns()
    ((number, actor, *_),) = office.sent_to(ELSEWHERE)
    assert actor == NEXT
    office.refuse(ELSEWHERE, number, ActorDied("it was stopped", executed=False))
    error = await error_of(twice)
    # The first attempt may have run.
    assert (type(error), error.executed) == (ActorDied, None)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Location(ELSEWHERE, NEXT), StaleHandle),
        (Location(NOWHERE, NEXT, ActorDied("it is over")), ActorDied),
        (Location(THERE, ACTOR), PeerLost),
    ],
)
async def test_a_handle_of_one_incarnation_says_what_became_of_it(
    office: Office, found: Location, expected: type[DaftError]
) -> None:
    office.connections.to(THERE)
    followed, _ = office.followed(Location(THERE, ACTOR))
    desk: Any = Handle(PinnedTarget(followed, Location(THERE, ACTOR)), Desk)
    office.lose(THERE)
    refused = desk.note("refused")
    await turns(8)
    (question,) = office.asked
    question.on_plain(found)
    error = await error_of(refused)
    assert (type(error), error.executed) == (expected, False)
    assert office.sent_to(ELSEWHERE) == []
