"""Only messages of our kinds, with fields of the right types, come through; anything else is a protocol error."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import Ext, FrameDecoder, FrameEncoder
from aiodaft._protocol.connections.messages import Message, check_all
from aiodaft.exceptions import RemoteProtocolError

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=300)

_MIB = 1 << 20

# One of each kind, as it is sent.
_EXAMPLES: dict[int, Message] = {
    m.HELLO: (m.HELLO, 1, 1, "peer-a", 100),
    m.CALL: (m.CALL, 1, 16, "add", (1, 2.5, "x", b"y", None, True)),
    m.SEND: (m.SEND, 2, 16, "use", m.WANT_REPLY, None, b"payload", None, (), (), 0),
    m.REPLY: (m.REPLY, 1, 3),
    m.RESULT: (m.RESULT, 2, b"payload", b"buffers", (("peer-a", 7, "peer-b", "Model.make"),)),
    m.STORED: (m.STORED, 3, 1 << 30, "float32[16]"),
    m.ERROR: (m.ERROR, 4, b"error", False),
    m.CANCEL: (m.CANCEL, 5),
    m.ITEM: (m.ITEM, 6, b"payload", (b"grant",), ()),
    m.CREDIT: (m.CREDIT, 6, 16),
    m.PULL: (m.PULL, "peer-a", 7),
    m.VALUE: (m.VALUE, "peer-a", 7, b"payload", None, ()),
    m.MOVED: (m.MOVED, "peer-a", 7, "peer-c"),
    m.BROKEN: (m.BROKEN, "peer-a", 7, b"error"),
    m.RELEASE: (m.RELEASE, (1, 2, 3)),
    m.ADOPTED: (m.ADOPTED, 2),
    m.NOTE: (m.NOTE, "shm", b"note", 2),
    m.INTRODUCE: (m.INTRODUCE, "peer-d"),
    m.BYE: (m.BYE, "the scope ended"),
    m.BORROW: (m.BORROW, 7),
    m.JOIN: (m.JOIN, "peer-a", 7, True),
    m.LEAVE: (m.LEAVE, "peer-a", 7, "peer-c"),
    m.RING: (m.RING, m.RING_OFFERED),
    m.RUN: (m.RUN, 8, 1, 1, None, (9,), ((0, 1.5), (1, b"payload", None, (), ()))),
    m.FLOW: (m.FLOW, "peer-a", 8, 1, ((2, b"error", False),)),
    m.REPORT: (m.REPORT, 8, 1, ((3,), (4, "x"))),
    m.SKIP: (m.SKIP, 8, 1),
    m.APPLY: (m.APPLY, 2, 16, "add", (1, None), ((1, "peer-a", 7, "peer-b", "Model.make"),)),
    m.FORWARD: (m.FORWARD, 7, "peer-b"),
    m.ASK: (m.ASK, 7),
    m.GIVEN: (m.GIVEN, "peer-a", 7, 3),
    m.DEFINE: (m.DEFINE, b"name", b"source"),
    m.FORGET: (m.FORGET, b"name"),
    m.ADMIT: (m.ADMIT, "peer-d", b"key"),
    m.DATA: (m.DATA, "peer-d", 3, b"key"),
    m.REACH: (m.REACH, ("ucx",)),
    m.TELL: (m.TELL, 2, 16, "add", (1, "x")),
    m.OVER: (m.OVER, (2, 3)),
    m.RENEWED: (m.RENEWED, "it was reset"),
}

# Fields that may be of several types: (kind, position, another value that may stand there).
_ALTERNATIVES: list[tuple[int, int, Any]] = [
    (m.CALL, 4, b"payload"),
    (m.TELL, 4, b"payload"),
    *((kind, place, value) for kind, place in ((m.REPLY, 2), (m.GIVEN, 3))
      for value in (None, False, -1, (1 << 64) - 1, 0.5, "", b"")),
    *((kind, place, terms) for kind, place in ((m.SEND, 5), (m.RUN, 4)) for terms in (2500, (None, "00", "", ""))),
    *((kind, place, blobs) for kind, place in ((m.SEND, 7), (m.RESULT, 3), (m.ITEM, 3), (m.VALUE, 4))
      for blobs in (None, b"", ())),
    (m.ERROR, 3, None),
    (m.ERROR, 3, True),
]  # fmt: skip

# One value of every type that a frame can carry.
_OF_EACH_TYPE: list[Any] = [None, True, 1, 1.0, "1", b"1", (1,), {}, Ext(1, b"")]


def changed(message: Message, place: int, value: Any) -> Message:
    return (*message[:place], value, *message[place + 1 :])


def over_the_wire(*frames: Any) -> list[Any]:
    encoder = FrameEncoder()
    for frame in frames:
        encoder.pack(frame)
    return list(FrameDecoder().feed(encoder.take()))


def test_every_kind_has_its_own_number() -> None:
    assert sorted(_EXAMPLES) == list(range(m.KINDS))


def test_a_message_of_each_kind_comes_through_unchanged() -> None:
    sent = list(_EXAMPLES.values())
    assert check_all(over_the_wire(*sent)) == sent


@pytest.mark.parametrize(
    "name",
    [
        "send",
        "apply",
        "forward",
        "given",
        "result",
        "stored",
        "error",
        "item",
        "credit",
        "note",
        "join",
        "leave",
        "skip",
    ],
)
def test_what_a_reader_returns_is_what_the_builder_takes(name: str) -> None:
    message = _EXAMPLES[getattr(m, name.upper())]
    assert getattr(m, name)(*getattr(m, f"read_{name}")(message)) == message


def test_no_messages_are_no_messages() -> None:
    assert check_all([]) == []


@pytest.mark.parametrize(("kind", "place", "value"), _ALTERNATIVES)
def test_a_field_may_be_of_each_of_its_types(kind: int, place: int, value: Any) -> None:
    message = changed(_EXAMPLES[kind], place, value)
    assert check_all(over_the_wire(message)) == [message]


@pytest.mark.parametrize("kind", _EXAMPLES)
def test_a_field_of_any_other_type_is_refused(kind: int) -> None:
    message = _EXAMPLES[kind]
    allowed = {(k, place, type(value)) for k, place, value in _ALTERNATIVES}
    allowed |= {(kind, place, type(value)) for place, value in enumerate(message)}
    for place in range(1, len(message)):
        for value in _OF_EACH_TYPE:
            if (kind, place, type(value)) not in allowed:
                with pytest.raises(RemoteProtocolError, match=f"kind {kind} has the wrong fields"):
                    check_all([changed(message, place, value)])


@pytest.mark.parametrize("kind", _EXAMPLES)
def test_a_message_with_a_field_less_or_more_is_refused(kind: int) -> None:
    message = _EXAMPLES[kind]
    for wrong in (message[:-1], message[:1], *((*message, extra) for extra in _OF_EACH_TYPE)):
        with pytest.raises(RemoteProtocolError):
            check_all([wrong])


@pytest.mark.parametrize(
    "kind", [m.KINDS, -1, 1000, (1 << 64) - 1, -(1 << 63), None, "CALL", b"\x01", 1.5, float("nan"), (), (1,), {}]
)
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    for wrong in ((kind,), *(changed(message, 0, kind) for message in _EXAMPLES.values())):
        with pytest.raises(RemoteProtocolError, match="not a message"):
            check_all([wrong])


@pytest.mark.parametrize("kind", [True, 1.0, 7.0])
def test_a_kind_that_only_equals_one_of_ours_is_refused(kind: Any) -> None:
    for message in (_EXAMPLES[int(kind)], (kind, 1)):
        with pytest.raises(RemoteProtocolError):
            check_all([changed(message, 0, kind)])


@pytest.mark.parametrize(
    "wrong", [None, True, 7, -1, 0.5, "", "text", "\x07\x05", b"", {}, (), Ext(7, b""), Ext(14, b"")], ids=repr
)
def test_what_is_no_array_is_refused(wrong: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        check_all(over_the_wire(wrong))


@pytest.mark.parametrize("kind", [m.CANCEL, m.CREDIT, m.ADOPTED])
def test_bytes_that_spell_a_message_of_numbers_are_refused(kind: int) -> None:
    wrong = bytes([kind, *_EXAMPLES[kind][1:2], 1][: len(_EXAMPLES[kind])])
    with pytest.raises(RemoteProtocolError):
        check_all(over_the_wire(wrong))


def test_one_wrong_message_spoils_those_that_came_with_it() -> None:
    with pytest.raises(RemoteProtocolError):
        check_all([_EXAMPLES[m.CALL], (m.CANCEL, "x"), _EXAMPLES[m.REPLY]])


def test_what_the_decoder_refuses_is_passed_on() -> None:
    with pytest.raises(RemoteProtocolError, match="no frame"):
        check_all(FrameDecoder().feed(b"\x92\x07\x05\xc1"))


@settings(_quick, max_examples=100)
@given(st.lists(st.recursive(
    st.none() | st.booleans() | st.integers(-5, 25) | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=5).map(tuple) | st.just({}), max_leaves=12,
), max_size=3))  # fmt: skip
def test_any_frames_are_messages_or_a_protocol_error(frames: list[Any]) -> None:
    try:
        checked = check_all(over_the_wire(*frames))
    except RemoteProtocolError:
        return
    for message in checked:
        example = _EXAMPLES[message[0]]
        assert type(message) is tuple
        assert len(message) == len(example)


@pytest.mark.parametrize("depth", [10, 500, 1000, 1023])
def test_nesting_of_any_depth_is_refused_without_exhausting_the_stack(depth: int) -> None:
    with pytest.raises(RemoteProtocolError):
        check_all(FrameDecoder().feed(b"\x91" * depth + b"\xc0"))
    with pytest.raises(RemoteProtocolError):
        check_all(FrameDecoder().feed(b"\x92\x07" + b"\x91" * (depth - 1) + b"\xc0"))


@pytest.mark.parametrize("wrong", [("x" * _MIB,), (m.CANCEL, bytes(_MIB)), bytes(_MIB), (m.BYE, "x", "y" * _MIB)])
def test_a_large_wrong_message_is_described_in_few_words_and_little_memory(wrong: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError) as caught:
            check_all([wrong])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300
    assert peak < _MIB // 2


def test_layouts_say_nothing_of_what_is_inside_an_array() -> None:
    # Their reader has to look: arguments may be anything, and descriptors have two forms.
    deep: Any = ()
    for _ in range(50):
        deep = (deep, {})
    message = changed(_EXAMPLES[m.CALL], 4, (deep,))
    assert check_all(over_the_wire(message)) == [message]
