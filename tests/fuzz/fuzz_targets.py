"""The code that bytes of a stranger or of a broken member can reach. Each target raises only if a rule is broken.

`python tests/fuzz TARGET SECONDS` looks for such bytes. The suite tries those that it kept, in the files `TARGET.hex`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.connections.codec import FrameDecoder, pack, unpack, unpack_stream
from aiodaft._protocol.connections.messages import CALL, check_all
from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft._runtime.process import MSGPACK, Process, closed, opened
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.encoder import FAR, PLAIN, SOLE, TABLE
from aiodaft._runtime.serialization.small import SMALL
from aiodaft.exceptions import LocalProtocolError, Overloaded, RemoteProtocolError, SerializationError
from aiodaft_transport import HandshakeError, Key
from aiodaft_transport.handshake import (
    HELLO_SIZE,
    MAC_SIZE,
    MAGIC,
    ClientHandshake,
    Hello,
    Purpose,
    ServerHandshake,
)

KEY: Final = Key(bytes(range(32)))
_MAX_PENDING: Final = 8


def handshake(data: bytes) -> None:
    """A stranger, a member that says what it likes, and a server that does; the first byte chooses."""
    choice, said = data[:1], data[1:]
    server = ServerHandshake(KEY, bytes(32), tls=True)
    if choice < b"\x40":
        with suppress(HandshakeError):
            server.receive_hello(said)
            raise AssertionError("a stranger got in")
    elif choice < b"\x80":
        said = MAGIC + said.ljust(HELLO_SIZE, b"\0")[: HELLO_SIZE - MAC_SIZE - len(MAGIC)]
        with suppress(HandshakeError):
            hello_of = server.receive_hello(said + KEY.mac(b"client", server.challenge, said)).hello
            # A client may send every HELLO that the server reads.
            ClientHandshake(KEY, bytes(32), hello_of, tls=True)
    else:
        client = ClientHandshake(KEY, bytes(32), Hello("a", "b", Purpose.DATA), tls=True)
        with suppress(HandshakeError):
            client.receive_challenge(said if choice < b"\xc0" else server.challenge)
            client.receive_accept(said)
            raise AssertionError("a stranger was taken for a member")
    with suppress(ValueError):
        assert str(parse_address(said.decode("latin-1"))).startswith("tcp://")


def frames(data: bytes) -> None:
    """Any bytes, cut in two anywhere, are the same messages or a protocol error."""
    cut = data[0] if data else 0
    assert _messages([data]) == _messages([data[:cut], data[cut:]])


def _messages(parts: list[bytes]) -> str:
    decoder, found = FrameDecoder(), list[Any]()
    with suppress(RemoteProtocolError):
        for part in parts:
            found += check_all(decoder.feed(part))
        # As text: a message with a NaN is not equal to itself.
        return repr(found)
    return "a protocol error"


def codec(data: bytes) -> None:
    """Any bytes are plain data, which packs to the same data again, or an error of one of a few kinds."""

    def keep(code: int, content: bytes) -> tuple[str, int, bytes]:
        return "extension", code, content

    refused = (ValueError, TypeError, RecursionError, OverflowError)
    value: Any = None
    with suppress(*refused):
        value = unpack(data, keep)
    with suppress(*refused):
        assert repr(unpack(pack(value), keep)) == repr(value)
    # Its callers take any error; it must only end, in bounded memory.
    with suppress(Exception):
        assert len(list(unpack_stream(memoryview(data), keep))) <= len(data)


def session(data: bytes) -> None:
    """Bytes of a peer between calls, answers and withdrawals: an error of the peer, and a window that holds."""
    numbers = iter(range(1, 1 << 16))
    made = Session[str](PeerId("a"), 1, remote=PeerId("b"), max_pending=_MAX_PENDING, window=2)
    if data[:1] < b"\x80":
        made.receive_data(_greeting())
    steps = iter(data[1:])
    for step in steps:
        number = CallId(next(steps, 0) % _MAX_PENDING)
        match step % 8:
            case 0:
                with suppress(Overloaded):
                    new = CallId(next(numbers))
                    made.submit(new, "a call", (CALL, new, ActorId(16), "f", ()), cost=number << 24)
            case 1:
                with suppress(Overloaded):
                    made.submit(CallId(next(numbers)), "a call", None)
            case 2:
                made.settle(number)
            case 3:
                made.withdraw(number)
            case 4:
                with suppress(LocalProtocolError):
                    made.provide(number, (CALL, number, ActorId(16), "f", ()))
            case 5:
                made.look_for_stall()
            case 6:
                made.submit_own(CallId(next(numbers) + (1 << 20)), "own", None if number else (CALL, 1, 0, "f", ()))
            case _:
                part = bytes(byte for _, byte in zip(range(4 * number), steps, strict=False))
                try:
                    made.receive_data(part)
                except RemoteProtocolError:
                    return
        made.data_to_send()
        assert made.waiting >= 0
        assert sum(1 for _ in made.under_way()) <= len(made.calls)


def _greeting() -> bytes:
    return Session[str](PeerId("b"), 2, remote=PeerId("a"), max_pending=1).data_to_send()


class _Refusing:
    """As much of a process as it takes to refuse pickle."""

    options = SimpleNamespace(codec=MSGPACK)


def values(data: bytes) -> None:
    """Any payload of a member, where pickle is refused, is a value or a SerializationError."""
    refusing = cast("Process", _Refusing())
    opened(refusing, lambda: None)
    try:
        for kind in (PLAIN, SMALL, TABLE, FAR, SOLE):
            with suppress(SerializationError):
                decode(bytes((kind,)) + data, [memoryview(bytearray(data))], patient=True)
    finally:
        closed(refusing)


def kept(target: str) -> list[bytes]:
    """The inputs that were found to reach different code."""
    return [bytes.fromhex(line) for line in corpus_of(target).read_text(encoding="ascii").splitlines()]


def corpus_of(target: str) -> Path:
    return Path(__file__).with_name(f"{target}.hex")


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (handshake, frames, codec, session, values)
}
