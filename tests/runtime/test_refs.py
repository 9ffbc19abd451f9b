"""The code that awaits a call is told of an error of its argument, once; and when a producer is told of consumers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from actors import Echo

import aiodaft
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId, PeerId
from aiodaft._protocol.objects.value import FAILED, FREED, Borrowing
from aiodaft._runtime.calls.call import CallState, PendingCall, Target, TellState
from aiodaft._runtime.objects.ref_state import ABSENT
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft.methods import specs_of


class Recorder:
    """The objects of a process that notes the errors which no code saw."""

    def __init__(self) -> None:
        numbers, loop = itertools.count(100), asyncio.get_running_loop()
        self.process = SimpleNamespace(loop=loop, next_number=numbers.__next__, recorder=None)
        self.borrowing: Borrowing[Any] = Borrowing(PeerId("here"))
        self.unheld: list[BaseException] = []

    def on_unheld(self, error: BaseException, what: str) -> None:
        self.unheld.append(error)


def call(peer: Any) -> CallState:
    caller: Any = SimpleNamespace(objects=peer)
    target = Target(caller, PeerId("worker"), FIRST_USER_ACTOR, "Echo-1", None)
    return CallState(target, specs_of(Echo)["echo"], CallId(1))


def stream(peer: Any) -> StreamState:
    return StreamState(peer, CallId(1), "Streamer.numbers")


def tell(peer: Any) -> TellState:
    return TellState("Log.note")


def test_a_call_of_the_runtime_itself_fails_in_silence_where_a_process_ends(caplog: pytest.LogCaptureFixture) -> None:
    for error in (aiodaft.exceptions.RuntimeClosed("the node agent is gone"), aiodaft.ActorDied("it was stopped")):
        TellState("Agent.give_back", own=True).on_error(error)
    assert caplog.text == ""
    TellState("Log.note").on_error(aiodaft.exceptions.RuntimeClosed("the node agent is gone"))
    assert "Log.note, called by tell(), failed" in caplog.text


def argument_of(user: PendingCall, peer: Any) -> CallState:
    """A call with a ref that only `user` has."""
    argument = call(peer)
    argument.add_use()
    argument.drop_handle()
    user.inputs = [argument]
    return argument


@pytest.mark.parametrize("make", [call, stream, tell])
@pytest.mark.parametrize("argument_first", [True, False])
async def test_the_error_of_an_argument_is_reported_by_the_call_that_fails_of_it(
    make: Callable[[Any], PendingCall], argument_first: bool
) -> None:
    peer = Recorder()
    user = make(peer)
    argument = argument_of(user, peer)
    error = ValueError("of the argument")
    # The callee may hear of it before the owner does.
    for state in (argument, user) if argument_first else (user, argument):
        state.on_error(error)
    assert peer.unheld == []


@pytest.mark.parametrize("make", [call, stream, tell])
async def test_the_error_of_an_argument_is_reported_by_itself_if_its_call_went_well(
    make: Callable[[Any], PendingCall],
) -> None:
    peer = Recorder()
    user = make(peer)
    argument = argument_of(user, peer)
    user.on_plain(None)
    error = ValueError("of the argument")
    argument.on_error(error)
    assert peer.unheld == [error]


class Sent:
    """A connection that notes sent messages, and those that are written before the end of the turn."""

    def __init__(self) -> None:
        self.unwritten: list[Message] = []
        self.written: list[Message] = []
        self.followers = 0

    def follow(self) -> None:
        self.followers += 1

    def send(self, message: Message) -> None:
        self.unwritten.append(message)

    def flush(self) -> None:
        self.written += self.unwritten
        self.unwritten = []


async def test_a_value_goes_to_the_first_consumers_while_calls_of_others_are_made() -> None:
    producer, connection = call(Recorder()), Sent()
    producer.connection = connection  # type: ignore[assignment]  # a stand-in
    forwards = [m.forward(CallId(1), PeerId(name)) for name in "abc"]
    producer.forward_to(PeerId("a"))
    assert (connection.written, connection.unwritten) == ([], forwards[:1])
    producer.forward_to(PeerId("b"))
    producer.forward_to(PeerId("c"))
    assert (connection.written, connection.unwritten, connection.followers) == (forwards, [], 3)


async def test_a_plain_answer_that_comes_after_the_error_changes_nothing() -> None:
    state, error = call(Recorder()), ValueError("it was given up")
    state.on_error(error)
    state.on_plain("late")
    assert (state.status, state.error, state.value) == (FAILED, error, ABSENT)
    freed = call(Recorder())
    freed.on_plain("a value")
    freed.advance(FREED)
    freed.value = ABSENT
    freed.on_plain("again")
    assert (freed.status, freed.value) == (FREED, ABSENT)
