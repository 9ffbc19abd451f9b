"""No process gets in without the cluster key, and nothing that a stranger sends does more than fail."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodaft_transport import HandshakeError, Key
from aiodaft_transport.handshake import (
    ACCEPT_SIZE,
    CHALLENGE_SIZE,
    HELLO_SIZE,
    KEY_SIZE,
    MAGIC,
    NONCE_SIZE,
    ClientHandshake,
    ServerHandshake,
)

KEY = Key(bytes(range(KEY_SIZE)))
OTHER_KEY = Key(bytes(KEY_SIZE))
SERVER_NONCE = b"s" * NONCE_SIZE
CLIENT_NONCE = b"c" * NONCE_SIZE


def server(key: Key = KEY, nonce: bytes = SERVER_NONCE) -> ServerHandshake:
    return ServerHandshake(key, nonce)


def client(key: Key = KEY, nonce: bytes = CLIENT_NONCE, name: str = "worker-1") -> ClientHandshake:
    return ClientHandshake(key, nonce, name)


def flipped(message: bytes, index: int) -> bytes:
    """The message with one bit of one byte changed."""
    return message[:index] + bytes([message[index] ^ (1 << index % 8)]) + message[index + 1 :]


def test_two_holders_of_the_key_accept_each_other_and_the_name_arrives() -> None:
    caller, called = client(), server()
    name, accept = called.receive_hello(caller.receive_challenge(called.challenge))
    caller.receive_accept(accept)
    assert name == "worker-1"


@pytest.mark.parametrize("name", ["", "a", "n" * 64, "node-2/worker.17"])
def test_a_name_of_up_to_64_characters_arrives_unchanged(name: str) -> None:
    called = server()
    assert called.receive_hello(client(name=name).receive_challenge(called.challenge))[0] == name


@pytest.mark.parametrize("name", ["n" * 65, "wörker"])
def test_a_name_that_does_not_fit_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(ValueError, match=r"64 bytes|ordinal not in range"):
        client(name=name)


def test_every_message_has_its_announced_size() -> None:
    caller, called = client(), server()
    hello = caller.receive_challenge(called.challenge)
    _, accept = called.receive_hello(hello)
    assert (
        (len(called.challenge), len(hello), len(accept)) == (CHALLENGE_SIZE, HELLO_SIZE, ACCEPT_SIZE) == (40, 136, 32)
    )


def test_the_bytes_on_the_wire_are_those_of_version_1() -> None:
    """Computed here from the description alone: a change of them is a new version."""

    def mac(label: bytes, *parts: bytes) -> bytes:
        purpose = hmac.new(bytes(range(32)), b"aiodaft/1 " + label, hashlib.sha256).digest()
        return hmac.new(purpose, b"".join(parts), hashlib.sha256).digest()

    challenge = b"AIODAFT\x01" + SERVER_NONCE
    said = b"AIODAFT\x01" + CLIENT_NONCE + b"worker-1".ljust(64, b"\0")
    hello = said + mac(b"client", challenge, said)
    assert server().challenge == challenge
    assert client().receive_challenge(challenge) == hello
    assert server().receive_hello(hello) == ("worker-1", mac(b"server", challenge, hello))


def test_a_client_with_another_key_is_refused() -> None:
    called = server()
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        called.receive_hello(client(OTHER_KEY).receive_challenge(called.challenge))


def test_a_server_with_another_key_is_refused() -> None:
    caller, impostor = client(), server(OTHER_KEY)
    hello = caller.receive_challenge(impostor.challenge)
    accept = OTHER_KEY.mac(b"server", impostor.challenge, hello)
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        caller.receive_accept(accept)


def test_a_recorded_hello_does_not_open_another_connection() -> None:
    recorded = client().receive_challenge(server().challenge)
    with pytest.raises(HandshakeError):
        server(nonce=b"t" * NONCE_SIZE).receive_hello(recorded)


def test_a_recorded_accept_does_not_convince_another_client() -> None:
    called = server()
    _, recorded = called.receive_hello(client().receive_challenge(called.challenge))
    caller = client(nonce=b"d" * NONCE_SIZE)
    caller.receive_challenge(called.challenge)
    with pytest.raises(HandshakeError):
        caller.receive_accept(recorded)


def test_an_accept_for_another_name_is_refused() -> None:
    called = server()
    _, for_another = called.receive_hello(client(name="worker-2").receive_challenge(called.challenge))
    caller = client(name="worker-1")
    caller.receive_challenge(called.challenge)
    with pytest.raises(HandshakeError):
        caller.receive_accept(for_another)


def test_the_clients_own_proof_reflected_is_no_proof_of_the_server() -> None:
    caller = client()
    hello = caller.receive_challenge(server().challenge)
    with pytest.raises(HandshakeError):
        caller.receive_accept(hello[-ACCEPT_SIZE:])


def test_the_servers_proof_reflected_is_no_proof_of_a_client() -> None:
    called = server()
    hello = client().receive_challenge(called.challenge)
    _, accept = called.receive_hello(hello)
    with pytest.raises(HandshakeError):
        called.receive_hello(hello[:-ACCEPT_SIZE] + accept)


def test_a_challenge_reflected_as_a_hello_is_refused() -> None:
    called = server()
    with pytest.raises(HandshakeError):
        called.receive_hello(called.challenge.ljust(HELLO_SIZE, b"\0"))


def test_two_clients_that_were_connected_with_each_other_refuse() -> None:
    one, two = client(), client(nonce=b"d" * NONCE_SIZE, name="worker-2")
    hello = one.receive_challenge(MAGIC + CLIENT_NONCE)
    with pytest.raises(HandshakeError):
        two.receive_challenge(hello)


def test_an_accept_before_the_challenge_is_refused() -> None:
    with pytest.raises(HandshakeError):
        client().receive_accept(bytes(ACCEPT_SIZE))


def test_a_hello_with_one_bit_changed_anywhere_is_refused() -> None:
    called = server()
    hello = client().receive_challenge(called.challenge)
    for index in range(HELLO_SIZE):
        with pytest.raises(HandshakeError):
            called.receive_hello(flipped(hello, index))


def test_an_accept_with_one_bit_changed_anywhere_is_refused() -> None:
    caller, called = client(), server()
    _, accept = called.receive_hello(caller.receive_challenge(called.challenge))
    for index in range(ACCEPT_SIZE):
        with pytest.raises(HandshakeError):
            caller.receive_accept(flipped(accept, index))
    caller.receive_accept(accept)


def test_a_challenge_changed_on_its_way_is_noticed_by_one_of_the_two() -> None:
    for index in range(CHALLENGE_SIZE):
        called = server()
        with pytest.raises(HandshakeError):
            called.receive_hello(client().receive_challenge(flipped(called.challenge, index)))


def test_a_message_cut_short_or_too_long_is_refused() -> None:
    caller, called = client(), server()
    hello = caller.receive_challenge(called.challenge)
    _, accept = called.receive_hello(hello)
    for size in (*range(HELLO_SIZE), HELLO_SIZE + 1, 1 << 20):
        with pytest.raises(HandshakeError):
            called.receive_hello(hello[:size].ljust(size, b"\0"))
    for size in (*range(CHALLENGE_SIZE), CHALLENGE_SIZE + 1, 1 << 20):
        with pytest.raises(HandshakeError):
            client().receive_challenge(called.challenge[:size].ljust(size, b"\0"))
    for size in (*range(ACCEPT_SIZE), ACCEPT_SIZE + 1, 1 << 20):
        with pytest.raises(HandshakeError):
            caller.receive_accept(accept[:size].ljust(size, b"\0"))


def test_another_protocol_or_another_version_is_told_from_a_wrong_key() -> None:
    for start in (b"GET / HT", b"AIODAFT\x02"):
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            client().receive_challenge(start.ljust(CHALLENGE_SIZE, b"\0"))
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            server().receive_hello(start.ljust(HELLO_SIZE, b"\0"))


def test_a_member_with_a_name_that_is_no_text_is_refused_like_any_other_nonsense() -> None:
    called = server()
    said = MAGIC + CLIENT_NONCE + b"\xff" * 64
    with pytest.raises(HandshakeError):
        called.receive_hello(said + KEY.mac(b"client", called.challenge, said))


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: MAGIC + rest))
def test_garbage_only_ever_fails_the_handshake(garbage: bytes) -> None:
    with pytest.raises(HandshakeError):
        server().receive_hello(garbage)
    with pytest.raises(HandshakeError):
        client().receive_accept(garbage)


@given(st.binary(min_size=HELLO_SIZE - len(MAGIC), max_size=HELLO_SIZE - len(MAGIC)))
def test_garbage_of_the_right_size_and_beginning_is_no_hello(garbage: bytes) -> None:
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        server().receive_hello(MAGIC + garbage)


@given(st.binary(max_size=100).filter(lambda data: len(data) != CHALLENGE_SIZE or not data.startswith(MAGIC)))
def test_garbage_is_no_challenge(garbage: bytes) -> None:
    with pytest.raises(HandshakeError):
        client().receive_challenge(garbage)


@given(secret=st.binary(min_size=32, max_size=32), name=st.text("abcdefghijklmnop-./0123456789", max_size=64))
def test_any_key_and_name_work_when_both_sides_have_the_same(secret: bytes, name: str) -> None:
    caller, called = client(Key(secret), name=name), server(Key(secret))
    received, accept = called.receive_hello(caller.receive_challenge(called.challenge))
    caller.receive_accept(accept)
    assert received == name


def test_a_key_has_32_bytes_and_is_never_shown() -> None:
    secret = b"correct horse battery staple 32b"
    key = Key(secret)
    assert key.secret() == secret
    assert "horse" not in f"{key!r} {key} {[key]}"
    for size in (0, 31, 33):
        with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
            Key(bytes(size))


def test_a_mac_depends_on_its_purpose() -> None:
    assert KEY.mac(b"client", b"x") != KEY.mac(b"server", b"x")
    assert KEY.mac(b"client", b"x", b"y") == KEY.mac(b"client", b"xy")
