"""Calls that come to an actor, without processes: admitted, ordered, refused, withdrawn, cancelled, late."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from rooms import HERE, THERE, Bench, TurnedThread, Wire, turns

from aiodaft import Actor, method
from aiodaft._protocol.calls.mailbox import BoundedMailbox
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.diagnostics.failures import CallAt, Reason
from aiodaft._protocol.ids import FIRST_USER_ACTOR, INBOXES, CallId
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.diagnostics.process_view import WaitGraph
from aiodaft._runtime.objects.transfer import Delivery
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft._runtime.serialization.decoder import Plain, ReceivedValue
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    DaftError,
    DeadlineExceeded,
    Overloaded,
    OwnerDied,
    PeerLost,
    RemoteProtocolError,
)
from aiodaft.methods import specs_of
from aiodaft.testing import AutojumpLoop


class Desk(Actor):
    """Notes the calls that begin, and has a gate to wait at."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.gate, self.cleaned = asyncio.Event(), asyncio.Event()

    @method
    async def note(self, word: str) -> str:
        self.begun.append(word)
        return word

    @method(concurrency=1)
    async def alone(self, word: str) -> str:
        self.begun.append(word)
        await self.gate.wait()
        return word

    @method
    async def slow_to_stop(self) -> str:
        self.begun.append("slow")
        with suppress(asyncio.CancelledError):
            await self.gate.wait()
        await self.cleaned.wait()
        return "too late"

    @method
    async def refuse(self, executed: bool | None) -> None:
        raise ActorDied("it was stopped", executed=executed)

    @method
    def heavy(self, word: str) -> str:
        self.begun.append(word)
        return word


class Arguments:
    """Fetches arguments: they are here when the test says so."""

    def __init__(self) -> None:
        self.wanted: list[asyncio.Future[None]] = []

    async def receive(self, args: Delivery) -> ReceivedValue:
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wanted.append(here)
        await here
        return ReceivedValue(args.payload, args.inline, [], [])


class Home(Bench):
    """A process with one actor, which another process calls."""

    def __init__(self, *, grace: float = 60.0) -> None:
        super().__init__(grace=grace)
        self.host = Host(self.process, self.store, RingPoller(self.process.loop))
        self.arguments = Arguments()
        fetching: Any = self.arguments
        refs: Any = None
        self.inbound = Inbound(self.host, fetching, refs)
        self.desk = Desk()
        self.hosted = HostedActor(self.host, FIRST_USER_ACTOR, "Desk-1", specs_of(Desk).get)
        self.hosted.instance = self.desk
        self.host.actors[self.hosted.id] = self.hosted
        self.wire = Wire()
        self._numbers = itertools.count(1)

    @property
    def thread(self) -> TurnedThread:
        return self.threads["Desk-1"]

    @property
    def caller(self) -> Any:
        return self.wire

    def call(self, name: str, *args: Any, actor: int = FIRST_USER_ACTOR) -> int:
        """CALL comes; the number of the call."""
        number = next(self._numbers)
        self.inbound.call_came(self.caller, (m.CALL, number, actor, name, args))
        return number

    def send(self, name: str, *args: Any, left: int | None = None, fetched: bool = True) -> int:
        """SEND comes, with a deadline (in us), or with arguments that have to be fetched; the number of the call."""
        number = CallId(next(self._numbers))
        payload = self.store.keep([list(args), {}], Names("arguments")).payload
        arguments = (payload, None, () if fetched else ("a ref",), ())
        message = m.send(number, FIRST_USER_ACTOR, name, WANT_REPLY, left, arguments, 0)
        self.inbound.send_came(self.caller, message)
        return number

    def cancel(self, number: int) -> None:
        self.inbound.cancel_came(self.caller, m.cancel(CallId(number)))

    async def error(self, number: int) -> DaftError:
        with pytest.raises(DaftError) as caught:
            await self.wire.result(number)
        return caught.value


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    made = Home()
    yield made
    await made.process.tasks.aclose()
    made.host.starter.close()


async def test_only_actors_of_the_runtime_may_say_whether_a_call_of_them_did_something(home: Home) -> None:
    hosted = HostedActor(home.host, INBOXES, "inboxes", specs_of(Desk).get)
    hosted.instance = home.desk
    home.host.actors[INBOXES] = hosted
    for actor, told in ((INBOXES, [False, None, True]), (FIRST_USER_ACTOR, [True, True, True])):
        calls = [home.call("refuse", executed, actor=actor) for executed in (False, None, True)]
        assert [(await home.error(call)).executed for call in calls] == told


async def test_a_call_keeps_its_place_while_its_arguments_are_fetched(home: Home) -> None:
    first, second = home.send("note", "first", fetched=False), home.call("note", "second")
    await turns()
    assert home.desk.begun == []
    home.arguments.wanted[0].set_result(None)
    assert [await home.wire.result(first), await home.wire.result(second)] == ["first", "second"]
    assert home.desk.begun == ["first", "second"]


async def test_a_call_without_its_arguments_fails_and_lets_the_next_one_go(home: Home) -> None:
    first, second = home.send("note", "first", fetched=False), home.call("note", "second")
    await turns()
    home.arguments.wanted[0].set_exception(OwnerDied("its owner is gone"))
    assert await home.wire.result(second) == "second"
    error = await home.error(first)
    assert (type(error), error.executed, home.desk.begun) == (OwnerDied, False, ["second"])


async def test_a_call_that_is_cancelled_while_its_arguments_are_fetched_ends_the_fetch(home: Home) -> None:
    first, second = home.send("note", "first", fetched=False), home.call("note", "second")
    await turns()
    home.cancel(first)
    assert await home.wire.result(second) == "second"
    await turns()
    assert home.arguments.wanted[0].cancelled()
    error = await home.error(first)
    assert (type(error), error.executed, home.desk.begun) == (CallCancelled, False, ["second"])


async def test_a_call_that_is_cancelled_in_the_queue_never_begins(home: Home) -> None:
    calls = [home.call("alone", word) for word in ("a", "b", "c")]
    home.cancel(calls[1])
    error = await home.error(calls[1])
    assert (type(error), error.executed) == (CallCancelled, False)
    home.desk.gate.set()
    assert await home.wire.result(calls[2]) == "c"
    assert (home.desk.begun, home.wire.answered) == (["a", "c"], [calls[1], calls[0], calls[2]])


async def test_a_call_that_finds_too_many_waiting_is_refused_and_the_others_are_not(home: Home) -> None:
    home.hosted.mailbox = home.hosted.bounds = BoundedMailbox(1)
    calls = [home.call("alone", word) for word in ("runs", "waits", "is refused")]
    error = await home.error(calls[2])
    assert (type(error), error.executed) == (Overloaded, False)
    home.desk.gate.set()
    assert await home.wire.result(calls[1]) == "waits"
    # A refused call takes no room.
    assert await home.wire.result(home.call("note", "later")) == "later"
    assert home.inbound.responders()[0].calls == {}


async def test_a_call_that_is_cancelled_before_the_thread_takes_it_is_withdrawn(home: Home) -> None:
    first, second = home.call("heavy", "first"), home.call("heavy", "second")
    home.cancel(first)
    error = await home.error(first)
    assert (type(error), error.executed) == (CallCancelled, False)
    home.thread.turn()
    home.thread.turn()
    assert await home.wire.result(second) == "second"
    assert (home.desk.begun, home.hosted.running, home.wire.answered) == (["second"], {}, [first, second])


async def test_a_call_that_is_cancelled_on_the_thread_is_answered_at_once_and_only_once(home: Home) -> None:
    number = home.call("heavy", "it runs on")
    call = home.inbound.find(THERE, CallId(number))
    assert call is not None
    # The thread has claimed the call.
    assert call.take()
    home.cancel(number)
    error = await home.error(number)
    assert (type(error), error.executed) == (CallCancelled, None)
    call.responder.answer(call, "its result")
    call.responder.fail(call, ValueError("its error"), executed=True)
    assert home.wire.answered == [number]


async def test_a_deadline_that_passes_in_the_queue_refuses_the_call(home: Home) -> None:
    running, late = home.call("alone", "runs"), home.send("alone", "late", left=0)
    error = await home.error(late)
    assert (type(error), error.executed) == (DeadlineExceeded, False)
    home.desk.gate.set()
    assert await home.wire.result(running) == "runs"
    assert home.desk.begun == ["runs"]


@pytest.mark.parametrize(("cleanup", "answered_after"), [(2, 12), (100, 15)])
def test_a_call_that_is_late_is_answered_after_its_cleanup_or_the_grace_time(
    cleanup: float, answered_after: float
) -> None:
    async def main() -> None:
        home, loop = Home(grace=5), asyncio.get_running_loop()
        late = home.send("slow_to_stop", left=10_000_000)
        loop.call_later(10 + cleanup, home.desk.cleaned.set)
        error = await home.error(late)
        assert (type(error), error.executed, loop.time()) == (DeadlineExceeded, None, answered_after)
        await home.desk.cleaned.wait()
        await turns()
        assert (home.hosted.running, home.wire.answered) == ({}, [late])
        home.host.starter.close()

    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        runner.run(main())


async def test_a_stopped_actor_refuses_what_waits_and_cancels_what_runs(home: Home) -> None:
    runs, waits = home.call("alone", "runs"), home.call("alone", "waits")
    await turns()
    await home.hosted.stop("a test", 0)
    home.host.remove(home.hosted)
    waited, ran = await home.error(waits), await home.error(runs)
    assert (type(waited), waited.executed) == (ActorDied, False)
    assert (type(ran), ran.executed) == (CallCancelled, None)
    assert re.match(r"Desk.alone in Desk-1 \(pid .*\) was cancelled: Desk-1 was stopped: a test$", str(ran))
    after = await home.error(home.call("note", "after"))
    assert (type(after), after.executed) == (ActorDied, False)
    assert "Desk-1 was stopped" in str(after)
    assert home.desk.begun == ["runs"]


async def test_a_stopped_actor_lets_calls_end_within_the_grace_time(home: Home) -> None:
    runs = home.call("alone", "runs")
    stopping = asyncio.ensure_future(home.hosted.stop("a test", 60))  # noqa: TID251 - the test waits for it
    await turns()
    refused = await home.error(home.call("note", "meanwhile"))
    assert (type(refused), refused.executed) == (ActorDied, False)
    home.desk.gate.set()
    await stopping
    assert await home.wire.result(runs) == "runs"


class Lingering(HelperThread):
    """A thread that goes on until its end is waited for."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, loop)
        self._awaited = threading.Event()

    def abandon(self) -> None:
        self._awaited.set()
        super().abandon()

    def _work(self) -> None:
        super()._work()
        self._awaited.wait()


async def test_when_an_actor_has_stopped_its_thread_has_ended(home: Home) -> None:
    thread = home.hosted.thread = Lingering("Desk-1", asyncio.get_running_loop())
    assert await home.wire.result(home.call("heavy", "word")) == "word"
    (began,) = (one for one in threading.enumerate() if one.ident == thread.ident)
    await home.hosted.stop("a test", 0)
    try:
        assert not began.is_alive()
    finally:
        thread.abandon()


async def test_the_calls_of_a_caller_that_is_gone_are_cancelled_and_not_answered(home: Home) -> None:
    home.call("alone", "runs")
    home.call("alone", "waits")
    await turns()
    home.wire.lost = PeerLost("it ended")
    home.inbound.connection_lost(home.caller)
    while home.hosted.running:
        await turns()
    assert (home.desk.begun, home.wire.sent, home.host.calls()) == (["runs"], [], [])


async def test_results_for_a_caller_that_is_gone_are_not_remembered(home: Home) -> None:
    number = home.call("note", "a result")
    await home.wire.result(number)
    (responder,) = home.inbound.responders()
    assert isinstance(responder.recall(CallId(number)), Plain)
    home.wire.lost = PeerLost("it ended")
    home.inbound.connection_lost(home.caller)
    assert responder.recall(CallId(number)) is None


async def test_a_process_that_pulls_the_result_of_a_caller_that_is_gone_is_sent_to_the_caller(home: Home) -> None:
    call = home.inbound.find(THERE, CallId(home.call("alone", "runs")))
    assert call is not None
    places: list[Any] = []
    call.add_puller(places.append)
    home.wire.lost = PeerLost("it ended")
    call.responder.answer_stored(call, home.store.keep(["a result"], Names("result")))
    assert places == [THERE]
    home.desk.gate.set()
    while home.hosted.running:
        await turns()


async def test_what_a_cancelled_call_returns_is_not_sent_and_cannot_be_pulled(home: Home) -> None:
    number = home.call("slow_to_stop")
    call = home.inbound.find(THERE, CallId(number))
    assert call is not None
    await turns()
    places: list[Any] = []
    call.add_puller(places.append)
    home.cancel(number)
    home.desk.cleaned.set()
    assert await home.wire.result(number) is None
    (responder,) = home.inbound.responders()
    assert (places, responder.recall(CallId(number))) == ([THERE], None)


async def test_an_encoded_result_of_a_cancelled_call_is_not_kept(home: Home) -> None:
    number = home.call("slow_to_stop")
    call = home.inbound.find(THERE, CallId(number))
    assert call is not None
    await turns()
    home.cancel(number)
    call.responder.answer_stored(call, home.store.keep(["a result"], Names("result")))
    assert await home.wire.result(number) is None
    assert not home.store.entries
    home.desk.cleaned.set()
    while home.hosted.running:
        await turns()


async def test_calls_that_lead_nowhere_are_turned_away(home: Home) -> None:
    with pytest.raises(AttributeError, match="Desk-1 has no remote method 'nothing'"):
        await home.wire.result(home.call("nothing"))
    error = await home.error(home.call("note", "to no actor", actor=FIRST_USER_ACTOR + 1))
    assert (type(error), error.executed) == (ActorDied, False)


async def test_a_number_that_is_under_way_may_not_be_used_again(home: Home) -> None:
    number = home.call("alone", "runs")
    with pytest.raises(RemoteProtocolError, match="twice"):
        home.inbound.call_came(home.caller, (m.CALL, number, FIRST_USER_ACTOR, "alone", ("again",)))
    home.desk.gate.set()
    assert await home.wire.result(number) == "runs"


# Waits.


def waits_of(home: Home) -> WaitGraph:
    unused: Any = SimpleNamespace(find=lambda at: None)
    return WaitGraph(home.host, unused, unused, home.inbound.find)


def at(number: int) -> CallAt:
    return CallAt(HERE, THERE, CallId(number))


async def test_a_call_waits_for_the_one_that_has_the_room_of_its_method(home: Home) -> None:
    runs, waits = home.call("alone", "runs"), home.call("alone", "waits")
    await turns()
    graph = waits_of(home)
    waiting = graph.look(at(waits))
    assert waiting is not None
    assert (waiting.actor, waiting.method, waiting.begun) == ("Desk-1", "Desk.alone", False)
    assert (waiting.reason, waiting.on) == (Reason.QUEUED, (at(runs),))
    # It waits for an event, of which nothing is known.
    assert graph.look(at(runs)) is None
    assert [graph.place(call) for call in graph.in_the_way(home.hosted)] == [at(runs)]
    home.desk.gate.set()
    await home.wire.result(waits)
    assert (graph.look(at(waits)), graph.in_the_way(home.hosted)) == (None, [])


async def test_a_call_behind_one_without_its_arguments_waits_for_that_one(home: Home) -> None:
    first, second = home.send("note", "first", fetched=False), home.call("note", "second")
    await turns()
    graph = waits_of(home)
    waiting = graph.look(at(second))
    assert waiting is not None
    assert (waiting.reason, waiting.on) == (Reason.QUEUED, (at(first),))
    assert graph.look(at(first)) is None
    home.cancel(first)
    await home.wire.result(second)
    assert graph.look(at(second)) is None
