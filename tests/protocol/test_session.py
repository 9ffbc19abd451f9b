"""A conversation: greeting, calls within a window, nothing lost, nothing sent twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import FrameDecoder, FrameEncoder
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.connections.session import WINDOW_BYTES, Session
from aiodaft._protocol.ids import CallId, PeerId, sibling_ids
from aiodaft.exceptions import LocalProtocolError, Overloaded, RemoteProtocolError

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=100)

A, B = PeerId("peer-a"), PeerId("peer-b")
MAX_PENDING = 5


def session(local: PeerId = A, *, remote: PeerId = B, window: int = 3, max_pending: int = MAX_PENDING) -> Session[str]:
    """One end of a conversation, before the other has said anything."""
    return Session(local, 100, remote=remote, max_pending=max_pending, window=window)


def greeted(*, window: int = 3, max_pending: int = MAX_PENDING) -> Session[str]:
    """One end of a conversation, after both greetings."""
    one = session(window=window, max_pending=max_pending)
    one.data_to_send()
    assert one.receive_data(frames(hello())) == []
    return one


def hello(oldest: int = 1, newest: int = 1, peer: str = B, pid: int = 200) -> Message:
    return (m.HELLO, oldest, newest, peer, pid)


def frames(*messages: Any) -> bytes:
    encoder = FrameEncoder()
    for message in messages:
        encoder.pack(message)
    return encoder.take()


def call(number: int) -> Message:
    return (m.CALL, number, 16, "method", (number,))


def submit(one: Session[str], *numbers: int, cost: int = 0) -> None:
    for number in numbers:
        one.submit(CallId(number), f"call {number}", call(number), cost)


def prepare(one: Session[str], number: int) -> None:
    """Submit a call; its message is made later."""
    one.submit(CallId(number), f"call {number}", None)


def sent(one: Session[str]) -> list[int]:
    """Numbers of the calls that went out since the last time."""
    return [message[1] for message in FrameDecoder().feed(one.data_to_send())]


# The greeting.


def test_each_side_greets_first_and_knows_the_other_then() -> None:
    one, two = session(A, remote=B), session(B, remote=A)
    assert one.remote_pid is None
    assert two.receive_data(one.data_to_send()) == []
    assert one.receive_data(two.data_to_send()) == []
    assert (two.remote_pid, two.version) == (100, m.WIRE_VERSION)
    assert one.data_to_send() == b""


def test_what_follows_the_greeting_at_once_is_handed_on() -> None:
    one = session()
    assert one.receive_data(frames(hello(), call(1), (m.CANCEL, 1))) == [call(1), (m.CANCEL, 1)]


def test_a_greeting_may_come_byte_by_byte() -> None:
    one = session()
    got = [message for byte in frames(hello(), call(1)) for message in one.receive_data(bytes([byte]))]
    assert got == [call(1)]
    assert one.remote_pid == 200


def test_anything_before_the_greeting_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="expected HELLO"):
        session().receive_data(frames(call(1), hello()))


def test_another_peer_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="leads to peer-x, not to peer-b"):
        session().receive_data(frames(hello(peer="peer-x")))


@pytest.mark.parametrize(("oldest", "newest"), [(1, 1), (1, 2), (0, 1), (-5, 1000), (1, (1 << 64) - 1)])
def test_the_newest_version_that_both_speak_is_spoken(oldest: int, newest: int) -> None:
    one = session()
    one.receive_data(frames(hello(oldest, newest)))
    assert one.version == m.WIRE_VERSION == 1


def test_another_version_is_told_although_its_messages_are_not_known() -> None:
    with pytest.raises(RemoteProtocolError, match=r"peer-b speaks wire versions 2 to 2, this process 1 to 1: install"):
        session().receive_data(frames(hello(2, 2), (m.KINDS + 1, {}), (m.CALL,)))


@pytest.mark.parametrize(("oldest", "newest"), [(2, 2), (2, 9), (0, 0), (-3, -1), (2, 1), (1 << 63, (1 << 64) - 1)])
def test_no_version_in_common_is_refused(oldest: int, newest: int) -> None:
    one = session()
    with pytest.raises(RemoteProtocolError, match=f"speaks wire versions {oldest} to {newest}"):
        one.receive_data(frames(hello(oldest, newest)))
    assert one.remote_pid is None


@pytest.mark.parametrize(
    "wrong",
    [(m.HELLO, 1, 1, B), ("hello", 1, 1, B, 2), (m.HELLO, 1, 1, 5, 2), (m.HELLO, 1.0, 1, B, 2), None, "GET / HTTP/1.1"],
)
def test_a_stranger_is_refused(wrong: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        session().receive_data(frames(wrong))


def test_a_web_browser_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        session().receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


@_quick
@given(st.binary(max_size=100), st.booleans())
def test_garbage_is_a_protocol_error_or_nothing(data: bytes, greets: bool) -> None:
    one = greeted() if greets else session()
    try:
        got = one.receive_data(data)
    except RemoteProtocolError:
        return
    assert all(type(message) is tuple for message in got)


# Calls.


def test_calls_within_the_window_go_at_once_and_the_others_wait_in_order() -> None:
    one = greeted(window=2)
    submit(one, 1, 2, 3, 4)
    assert sent(one) == [1, 2]
    assert one.waiting == 2
    assert [number for number in range(5) if one.is_waiting(CallId(number))] == [3, 4]
    assert one.settle(CallId(2)) == "call 2"
    assert sent(one) == [3]
    assert one.settle(CallId(1)) == "call 1"
    assert sent(one) == [4]
    assert one.waiting == 0


def test_an_answer_counts_once() -> None:
    one = greeted()
    submit(one, 1)
    assert one.settle(CallId(1)) == "call 1"
    assert one.settle(CallId(1)) is None
    assert one.settle(CallId(99)) is None
    assert one.calls == {}


def test_an_answer_to_a_call_that_was_not_sent_is_unknown() -> None:
    one = greeted(window=1)
    submit(one, 1, 2)
    assert one.settle(CallId(2)) is None
    assert one.waiting == 1
    one.settle(CallId(1))
    assert sent(one) == [1, 2]
    assert one.settle(CallId(2)) == "call 2"


def test_more_calls_without_an_answer_than_allowed_are_refused_and_leave_nothing() -> None:
    one = greeted(window=1, max_pending=3)
    submit(one, 1, 2, 3)
    with pytest.raises(Overloaded, match=r"3 calls to peer-b have no answer yet.*max_pending=3") as caught:
        submit(one, 4)
    assert caught.value.executed is False
    assert list(one.calls) == [1, 2, 3]
    one.settle(CallId(1))
    submit(one, 5)
    for number in (2, 3):
        one.settle(CallId(number))
    assert sent(one) == [1, 2, 3, 5]


def test_a_call_that_was_admitted_before_is_not_refused() -> None:
    one = greeted(window=1, max_pending=1)
    submit(one, 1)
    one.submit(CallId(2), "call 2", call(2), admitted=True)
    assert sent(one) == [1]
    one.settle(CallId(1))
    assert sent(one) == [2]


def test_no_more_calls_are_sent_than_may_be_without_an_answer() -> None:
    one = greeted(window=100, max_pending=2)
    submit(one, 1, 2)
    with pytest.raises(Overloaded):
        submit(one, 3)
    with pytest.raises(Overloaded):
        prepare(one, 3)
    assert not one.look_for_stall()
    one.settle(CallId(1))
    submit(one, 4)
    assert sent(one) == [1, 2, 4]


def test_4096_calls_have_no_answer_and_64_mib_of_arguments_are_on_their_way_at_most() -> None:
    one = Session[str](A, 100, remote=B, max_pending=100_000)
    submit(one, *range(1, 4096 + 2))
    assert (len(one.calls), one.waiting, WINDOW_BYTES) == (4097, 1, 64 << 20)


# The runtime's own calls.


def submit_own(one: Session[str], *numbers: int) -> None:
    for number in numbers:
        one.submit_own(CallId(number), f"call {number}", call(number))


def test_own_calls_go_at_once_and_leave_the_window_to_others() -> None:
    one = greeted(window=2, max_pending=3)
    submit(one, 1)
    submit_own(one, 10, 11)
    submit(one, 2, 3)
    submit_own(one, 12)
    assert sent(one) == [1, 10, 11, 2, 12]
    with pytest.raises(Overloaded, match="3 calls"):
        submit(one, 4)
    assert [*one.under_way()] == ["call 1", "call 10", "call 11", "call 2", "call 12"]
    assert one.settle(CallId(11)) == "call 11"
    assert one.settle(CallId(11)) is None
    # That was no room for another call, nor a sign that the window moves.
    assert sent(one) == []
    assert one.look_for_stall() is False
    assert sent(one) == [3]


def test_own_calls_keep_their_order_while_one_is_being_prepared() -> None:
    one = greeted()
    assert one.has_room_for_own
    one.submit_own(CallId(1), "call 1", None)
    assert not one.has_room_for_own
    submit_own(one, 2)
    submit(one, 3)
    assert sent(one) == [3]
    assert one.is_waiting(CallId(2))
    assert one.unsent(CallId(2)) == call(2)
    assert one.unsent(CallId(1)) is None
    assert one.settle(CallId(2)) is None
    one.provide(CallId(1), call(1))
    assert sent(one) == [1, 2]


def test_a_plain_call_waits_as_bytes_and_another_as_it_is() -> None:
    one = greeted(window=1)
    other = (m.SEND, 3, 16, "method", 0, None, b"", None, (), (), 0)
    submit(one, 1, 2)
    one.submit(CallId(3), "call 3", other)
    assert [one.unsent(CallId(number)) for number in (1, 2, 3)] == [None, None, other]
    for number in (1, 2):
        assert sent(one) == [number]
        one.settle(CallId(number))
    assert sent(one) == [3]


def test_an_own_call_does_not_overtake_what_is_being_prepared() -> None:
    one = greeted()
    prepare(one, 1)
    submit(one, 2)
    submit_own(one, 3)
    prepare(one, 4)
    assert sent(one) == []
    one.provide(CallId(1), call(1))
    assert sent(one) == [1, 2, 3]


def test_an_own_call_waits_for_no_window() -> None:
    one = greeted(window=1)
    submit(one, 1)
    prepare(one, 2)
    submit_own(one, 3)
    one.provide(CallId(2), call(2))
    assert sent(one) == [1, 3]


def test_an_own_call_that_was_not_sent_can_be_withdrawn() -> None:
    one = greeted()
    prepare(one, 1)
    submit_own(one, 2, 3)
    assert one.withdraw(CallId(2))
    assert not one.withdraw(CallId(2))
    assert one.withdraw(CallId(1))
    assert sent(one) == [3]
    assert list(one.calls) == [3]


def test_what_is_no_call_does_not_wait_for_the_window() -> None:
    one = greeted(window=1)
    submit(one, 1, 2)
    one.send((m.CANCEL, 1))
    assert sent(one) == [1, 1]


def test_a_run_goes_behind_the_calls_that_wait_and_takes_no_place_in_the_window() -> None:
    one = greeted(window=1, max_pending=2)
    one.line_up((m.SKIP, 0, 0))
    submit(one, 1, 2)
    one.line_up((m.SKIP, 7, 0))
    assert sent(one) == [0, 1]
    assert one.waiting == 1
    one.settle(CallId(1))
    assert sent(one) == [2, 7]
    one.settle(CallId(2))
    assert (one.waiting, one.calls) == (0, {})


def test_a_run_goes_when_the_calls_before_it_are_withdrawn() -> None:
    one = greeted(window=1)
    submit(one, 1, 2)
    one.line_up((m.SKIP, 7, 0))
    assert one.withdraw(CallId(2))
    assert sent(one) == [1, 7]


def test_a_call_that_was_not_sent_can_be_withdrawn() -> None:
    one = greeted(window=1)
    submit(one, 1, 2, 3)
    assert one.withdraw(CallId(2))
    assert not one.withdraw(CallId(2))
    assert not one.withdraw(CallId(1))
    assert not one.withdraw(CallId(99))
    one.settle(CallId(1))
    assert sent(one) == [1, 3]
    assert list(one.calls) == [3]


def test_a_call_that_is_being_prepared_keeps_its_place() -> None:
    one = greeted()
    prepare(one, 1)
    submit(one, 2)
    assert sent(one) == []
    one.provide(CallId(1), call(1))
    assert sent(one) == [1, 2]


def test_calls_may_be_prepared_in_any_order() -> None:
    one = greeted()
    for number in (1, 2, 3):
        prepare(one, number)
    for number in (3, 1, 2):
        one.provide(CallId(number), call(number))
    assert sent(one) == [1, 2, 3]


def test_withdrawing_a_call_that_is_being_prepared_lets_the_next_go() -> None:
    one = greeted()
    prepare(one, 1)
    submit(one, 2)
    assert one.withdraw(CallId(1))
    assert sent(one) == [2]


@pytest.mark.parametrize("number", [1, 99])
def test_a_message_for_a_call_that_does_not_wait_is_a_bug_of_ours(number: int) -> None:
    one = greeted()
    submit(one, 1)
    with pytest.raises(LocalProtocolError, match=f"call {number} is not waiting"):
        one.provide(CallId(number), call(number))
    assert sent(one) == [1]


# The bytes that arguments take at the other side.


def test_large_arguments_wait_for_room() -> None:
    one = greeted(window=10)
    submit(one, 1, 2, 3, cost=WINDOW_BYTES // 2)
    assert sent(one) == [1, 2]
    one.settle(CallId(1))
    assert sent(one) == [3]


def test_a_call_behind_large_arguments_does_not_overtake() -> None:
    one = greeted(window=10)
    submit(one, 1, 2, cost=WINDOW_BYTES)
    submit(one, 3)
    assert sent(one) == [1]
    one.settle(CallId(1))
    assert sent(one) == [2, 3]


def test_calls_of_a_group_wait_for_room_and_none_is_mistaken_for_what_lines_up() -> None:
    one = greeted(window=1)
    first, second, third = sibling_ids(CallId(1), 3)
    submit(one, first, second, third, cost=WINDOW_BYTES)
    for _ in range(-third):
        one.line_up((m.SKIP, 7, 0))
    assert (sent(one), one.waiting) == ([first], 2)
    assert one.settle(first) == f"call {first}"
    assert (sent(one), one.waiting) == ([second], 1)
    one.settle(second)
    assert (sent(one), one.waiting) == ([third, *[7] * -third], 0)


def test_one_call_may_exceed_the_byte_window_alone() -> None:
    one = greeted(window=10)
    submit(one, 1, 2, cost=10 * WINDOW_BYTES)
    assert sent(one) == [1]
    one.settle(CallId(1))
    assert sent(one) == [2]


def test_a_small_call_without_order_passes_large_arguments_but_not_a_full_window() -> None:
    one = greeted(window=4, max_pending=7)
    prepare(one, 1)
    submit(one, 2)
    assert one.submit(CallId(3), "ping", call(3), ordered=False)
    assert not one.submit(CallId(4), "large", call(4), 1 << 20, ordered=False)
    assert sent(one) == [3]
    one.provide(CallId(1), call(1), 10 * WINDOW_BYTES)
    assert sent(one) == [1]
    assert one.submit(CallId(5), "ping", call(5), ordered=False)
    assert one.submit(CallId(6), "ping", call(6), ordered=False)
    assert not one.submit(CallId(7), "ping", call(7), ordered=False)
    with pytest.raises(Overloaded):
        one.submit(CallId(8), "ping", call(8), ordered=False)
    assert sent(one) == [5, 6]
    one.settle(CallId(1))
    assert sent(one) == [2]


# Windows that bring no answer.


def test_a_window_without_answers_is_opened_and_closed_again() -> None:
    one = greeted(window=2, max_pending=20)
    submit(one, *range(12))
    assert sent(one) == [0, 1]
    assert one.look_for_stall()
    assert sent(one) == [2, 3]
    assert one.look_for_stall()
    assert sent(one) == [4, 5, 6, 7]
    one.settle(CallId(0))
    assert sent(one) == [8]
    assert one.look_for_stall()
    # Back to two, of which seven are taken.
    for number in range(1, 7):
        one.settle(CallId(number))
        assert sent(one) == []
    one.settle(CallId(7))
    assert sent(one) == [9]


def test_looking_for_a_stall_ends_when_nothing_waits() -> None:
    one = greeted(window=1)
    submit(one, 1, 2)
    assert not one.look_for_stall()
    assert sent(one) == [1, 2]


def test_large_arguments_without_answers_do_not_block_the_call_that_frees_them() -> None:
    one = greeted(window=10)
    submit(one, 1, 2, 3, cost=WINDOW_BYTES // 2)
    submit(one, 4)
    assert sent(one) == [1, 2]
    for _ in range(3):
        one.look_for_stall()
    assert sent(one) == [3, 4]
