"""Plain data survives with its exact types; bytes that are no frames are a protocol error, and cost little."""

from __future__ import annotations

import enum
import struct
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.connections.codec import (
    BIG_INT,
    MAX_FRAME,
    Ext,
    FrameDecoder,
    FrameEncoder,
    pack,
    pack_exts,
    unpack,
    unpack_stream,
)
from aiodaft.exceptions import RemoteProtocolError

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=80)

_MIB = 1 << 20

_text = st.text(st.characters(codec=None, categories=None))
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | _text | st.binary()
_keys = st.none() | st.integers() | _text | st.binary()
_values: st.SearchStrategy[Any] = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_keys, inner, max_size=6), max_leaves=30
)
_wire_ints = st.integers(-(1 << 63), (1 << 64) - 1)
_fields: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | _wire_ints | st.floats() | _text | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=5).map(tuple),
    max_leaves=15,
)
_frames = st.lists(st.lists(_fields, min_size=1, max_size=6).map(tuple), max_size=6)


class Level(enum.IntEnum):
    """Looks like an integer, and is none."""

    LOW = 1


class Name(str):
    """Looks like text, and is none."""

    __slots__ = ()


def exact(value: Any) -> Any:
    """Something that is equal for two values only if their types, bits and order are."""
    if isinstance(value, float):
        return float, struct.pack(">d", value)
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    return type(value), value


def no_extensions(code: int, content: bytes) -> Any:
    raise ValueError(f"extension {code}")


def tagged(code: int, content: bytes) -> Any:
    """An extension that says what it is."""
    return "extension", code, unpack(content, tagged)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def encoded(frames: Iterable[Any]) -> bytes:
    encoder = FrameEncoder()
    for frame in frames:
        encoder.pack(frame)
    return encoder.take()


def decoded(*pieces: bytes | bytearray | memoryview) -> list[Any]:
    """The frames that a decoder makes of a stream that comes in pieces."""
    decoder = FrameDecoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


def peak_of(action: Callable[[], object]) -> int:
    """The most memory that was allocated at a time meanwhile, in bytes."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Values.


@_quick
@given(_values)
def test_any_plain_value_survives_with_its_exact_types(value: Any) -> None:
    assert exact(unpack(pack(value), no_extensions)) == exact(value)


@pytest.mark.parametrize("bits", [62, 63, 64, 65, 100, 100_000])
def test_integers_of_any_size_survive(bits: int) -> None:
    for value in ((1 << bits) - 1, 1 << bits, -(1 << bits), -(1 << bits) - 1):
        # Not in the assertion itself: a failure would print the number.
        same = unpack(pack({value: [value]}), no_extensions) == {value: [value]}
        assert same


@pytest.mark.parametrize("value", [(), {1}, object(), Level.LOW, Name("x"), 1j, [Level.LOW], {Name("x"): 1}])
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot pack"):
        pack(value)


def test_a_value_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="recursion"):
        pack(nested(100_000))


@_quick
@given(st.integers(BIG_INT + 1, 127), _values)
def test_an_extension_goes_to_the_hook_with_its_code(code: int, value: Any) -> None:
    got = unpack(pack([pack_exts(code, value), 1]), tagged)
    assert exact(got) == exact([("extension", code, value), 1])


def test_extensions_nest() -> None:
    inner = pack_exts(3, [1 << 70])
    assert unpack(pack_exts(2, inner).data, tagged) == ("extension", 3, [1 << 70])


@_quick
@given(st.binary(max_size=200))
def test_garbage_instead_of_a_value_is_an_ordinary_error(data: bytes) -> None:
    try:
        value = unpack(data, no_extensions)
    except (ValueError, TypeError):
        return
    assert data
    assert not isinstance(value, tuple)


@_quick
@given(_values, st.data())
def test_a_value_that_was_cut_off_is_an_error(value: Any, data: st.DataObject) -> None:
    packed = pack(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError, match=r"incomplete|exceeds"):
        unpack(packed[:cut], no_extensions)


@pytest.mark.parametrize("content", [b"", b"twelve", b"\xff"])
def test_a_big_integer_of_something_else_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"int|decode"):
        unpack(pack(Ext(BIG_INT, content)), no_extensions)


@_quick
@given(st.lists(_values, max_size=5))
def test_values_in_a_row_are_decoded_one_after_the_other(values: list[Any]) -> None:
    row = memoryview(b"".join(pack(value) for value in values))
    assert exact(list(unpack_stream(row, no_extensions))) == exact(values)


def test_values_in_a_row_may_hold_extensions() -> None:
    row = memoryview(pack([1 << 80]) + pack(pack_exts(5, "x")))
    assert list(unpack_stream(row, tagged)) == [[1 << 80], ("extension", 5, "x")]


# Frames.


@_quick
@given(_frames, st.lists(st.integers(0, 2000), max_size=8))
def test_frames_come_out_the_same_wherever_the_stream_is_cut(frames: list[Any], cuts: list[int]) -> None:
    stream = encoded(frames)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(bounds)]
    assert exact(decoded(*pieces)) == exact(frames)


@_quick
@given(_frames)
def test_frames_come_out_the_same_byte_by_byte(frames: list[Any]) -> None:
    assert exact(decoded(*(bytes([byte]) for byte in encoded(frames)))) == exact(frames)


@_quick
@given(_frames, st.data())
def test_a_cut_off_stream_gives_the_frames_before_the_cut(frames: list[Any], data: st.DataObject) -> None:
    stream = encoded(frames)
    cut = data.draw(st.integers(0, len(stream)))
    whole = [frame for i, frame in enumerate(frames) if len(encoded(frames[: i + 1])) <= cut]
    assert exact(decoded(stream[:cut])) == exact(whole)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_fed(kind: Callable[[bytes], bytes | bytearray | memoryview]) -> None:
    assert decoded(kind(encoded([(7, "x")]))) == [(7, "x")]


def test_what_was_fed_may_be_overwritten_at_once() -> None:
    stream = encoded([(1, b"content", "text")])
    buffer, decoder = bytearray(stream[:5]), FrameDecoder()
    assert list(decoder.feed(memoryview(buffer))) == []
    buffer[:] = bytes(5)
    assert list(decoder.feed(stream[5:])) == [(1, b"content", "text")]


def test_the_encoder_gives_everything_once() -> None:
    encoder = FrameEncoder()
    assert encoder.take() == b""
    encoder.pack((1, "a"))
    encoder.pack((2, "b"))
    assert decoded(encoder.take()) == [(1, "a"), (2, "b")]
    assert encoder.take() == b""
    encoder.pack((3,))
    assert decoded(encoder.take()) == [(3,)]


@pytest.mark.parametrize("wrong", [(1 << 64,), (object(),), ("begun", {1})])
def test_a_frame_that_cannot_be_packed_takes_no_other_with_it(wrong: Any) -> None:
    encoder = FrameEncoder()
    encoder.pack((1, "before"))
    with pytest.raises((OverflowError, TypeError)):
        encoder.pack(wrong)
    encoder.pack((2, "after"))
    assert decoded(encoder.take()) == [(1, "before"), (2, "after")]


@settings(_quick, max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_garbage_is_a_protocol_error_or_a_frame(pieces: list[bytes]) -> None:
    try:
        frames = decoded(*pieces)
    except RemoteProtocolError:
        return
    # Each frame takes a byte at least: nothing comes out of nothing.
    assert len(frames) <= sum(map(len, pieces))


@_quick
@given(_frames, st.integers(0), st.integers(0, 255))
def test_a_stream_with_a_wrong_byte_is_a_protocol_error_or_frames(frames: list[Any], where: int, byte: int) -> None:
    stream = bytearray(encoded([*frames, (1, "end")]))
    stream[where % len(stream)] = byte
    try:
        got = decoded(stream)
    except RemoteProtocolError:
        return
    assert len(got) <= len(stream)


def _u32(number: int) -> bytes:
    return struct.pack(">I", number)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\xdd" + _u32((1 << 17) + 1), id="array"),
        pytest.param(b"\xdd" + _u32((1 << 32) - 1), id="four billion items"),
        pytest.param(b"\x91\xdd" + _u32((1 << 32) - 1), id="array in an array"),
        pytest.param(b"\x81", id="map"),
        pytest.param(b"\xdf" + _u32((1 << 32) - 1), id="large map"),
        pytest.param(b"\xd4\x05\x00", id="extension"),
        pytest.param(b"\xc9" + _u32((1 << 32) - 1) + b"\x05", id="large extension"),
        pytest.param(b"\xd6\xff" + bytes(4), id="timestamp"),
        pytest.param(b"\xc7\x00\xff", id="empty timestamp"),
        pytest.param(b"\xc1", id="no type"),
        pytest.param(b"\xa1\xff", id="text that is no UTF-8"),
    ],
)
def test_what_no_frame_has_is_refused_as_soon_as_it_is_seen(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no frame: "):
        decoded(header)


def test_a_frame_that_is_nested_too_deep_is_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match=r"no frame: \w+"):
        decoded(b"\x91" * 100_000)


def test_more_than_the_buffer_at_once_is_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match=r"no frame: \w+"):
        decoded(bytes(2 * MAX_FRAME + 1))


@pytest.mark.parametrize("code", [b"\xdb", b"\xc6"])
@pytest.mark.parametrize("size", [MAX_FRAME + 1, (1 << 32) - 1])
def test_a_field_beyond_the_bound_is_refused_before_more_than_the_buffer_came(code: bytes, size: int) -> None:
    decoder, part = FrameDecoder(), bytes(_MIB)
    assert list(decoder.feed(b"\x92" + code + _u32(size))) == []
    with pytest.raises(RemoteProtocolError):
        for _ in range(2 * MAX_FRAME // _MIB + 1):
            list(decoder.feed(part))


def test_a_frame_of_many_parts_is_bounded_as_a_whole() -> None:
    decoder, part = FrameDecoder(), b"\xc6" + _u32(_MIB) + bytes(_MIB)
    assert list(decoder.feed(b"\xdc\xff\xff")) == []
    with pytest.raises(RemoteProtocolError):
        for _ in range(2 * MAX_FRAME // _MIB):
            list(decoder.feed(part))


def test_a_stream_of_any_length_passes_in_frames_within_the_bound() -> None:
    decoder, frame = FrameDecoder(), encoded([(1, bytes(_MIB))])
    # Cut in the middle of frames, so that there is always an unfinished one.
    stream = (frame * 2)[_MIB // 2 :][: len(frame)]
    assert list(decoder.feed(frame[: _MIB // 2])) == []
    for _ in range(MAX_FRAME // _MIB + 4):
        assert [len(got[1]) for got in decoder.feed(stream)] == [_MIB]


def test_what_is_only_announced_costs_no_memory() -> None:
    decoder = FrameDecoder()
    assert peak_of(lambda: list(decoder.feed(b"\x92\xc6" + _u32(MAX_FRAME)))) < 3 * _MIB


def test_arrays_that_are_only_announced_cost_bounded_memory() -> None:
    decoder = FrameDecoder()
    announced = (b"\xdd" + _u32(1 << 17)) * 1000
    assert peak_of(lambda: list(decoder.feed(announced))) < 128 * _MIB
