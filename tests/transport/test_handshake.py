"""No process gets in without the cluster key, and nothing that a stranger sends does more than fail."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodaft_transport import HandshakeError, Key, UnknownVersion
from aiodaft_transport.handshake import (
    ACCEPT_SIZE,
    CHALLENGE_SIZE,
    HELLO_SIZE,
    KEY_SIZE,
    MAGIC,
    NONCE_SIZE,
    Admitted,
    ClientHandshake,
    Hello,
    Purpose,
    ServerHandshake,
)

KEY = Key(bytes(range(KEY_SIZE)))
OTHER_KEY = Key(bytes(KEY_SIZE))
SERVER_NONCE = b"s" * NONCE_SIZE
CLIENT_NONCE = b"c" * NONCE_SIZE
ABOUT = Hello("node-1@a", "worker-2@b", Purpose.CONTROL)
# The beginnings of the fields of a CHALLENGE and a HELLO.
VERSIONS, FLAGS, SENDER = 8, 10, 60


def server(key: Key = KEY, nonce: bytes = SERVER_NONCE, *, tls: bool = True) -> ServerHandshake:
    return ServerHandshake(key, nonce, tls=tls)


def client(key: Key = KEY, nonce: bytes = CLIENT_NONCE, about: Hello = ABOUT, *, tls: bool = True) -> ClientHandshake:
    return ClientHandshake(key, nonce, about, tls=tls)


def shaken(caller: ClientHandshake, called: ServerHandshake) -> tuple[Admitted, Key]:
    """Both sides' results of a whole handshake."""
    admitted = called.receive_hello(caller.receive_challenge(called.challenge))
    return admitted, caller.receive_accept(admitted.accept)


def flipped(message: bytes, index: int) -> bytes:
    """The message with one bit of one byte changed."""
    return message[:index] + bytes([message[index] ^ (1 << index % 8)]) + message[index + 1 :]


def proved(said: bytes, called: ServerHandshake) -> bytes:
    """A HELLO of a member that says what it likes."""
    return said + KEY.mac(b"client", called.challenge, said)


def test_two_holders_of_the_key_accept_each_other_and_have_a_key_of_their_own() -> None:
    admitted, session = shaken(client(), server())
    assert admitted.hello == ABOUT
    assert admitted.session.secret() == session.secret() != KEY.secret()


@pytest.mark.parametrize("name", ["a", "n" * 96, "controller-0123456789ab@" + "n" * 63, "_x-1.b@C"])
def test_names_of_up_to_96_characters_arrive_unchanged(name: str) -> None:
    for about in (Hello(name, "worker-1", Purpose.DATA), Hello("worker-1", name, Purpose.CONTROL)):
        assert shaken(client(about=about), server())[0].hello == about


@pytest.mark.parametrize("name", ["", "n" * 97, "wörker", ".hidden", "-x", "@a", "a b", "a/b", "a\0", "a\n"])
def test_a_name_that_is_none_is_refused_before_anything_is_sent(name: str) -> None:
    for about in (Hello(name, "worker-1", Purpose.DATA), Hello("worker-1", name, Purpose.DATA)):
        with pytest.raises(ValueError, match="the name of a process has 1 to 96"):
            client(about=about)


def test_every_message_has_its_announced_size() -> None:
    caller, called = client(), server()
    hello = caller.receive_challenge(called.challenge)
    accept = called.receive_hello(hello).accept
    assert (
        (len(called.challenge), len(hello), len(accept)) == (CHALLENGE_SIZE, HELLO_SIZE, ACCEPT_SIZE) == (60, 284, 32)
    )


def test_the_bytes_on_the_wire_are_those_of_version_3() -> None:
    """Computed here from the description alone: a change of them is a new version."""

    def mac(label: bytes, *parts: bytes) -> bytes:
        purpose = hmac.new(bytes(range(32)), b"aiodaft/1 " + label, hashlib.sha256).digest()
        return hmac.new(purpose, b"".join(parts), hashlib.sha256).digest()

    cluster = mac(b"cluster")[:16]
    challenge = b"AIODAFT\0" + bytes([3, 3]) + struct.pack("<H", 1) + cluster + SERVER_NONCE
    names = b"node-1@a".ljust(96, b"\0") + b"worker-2@b".ljust(96, b"\0")
    said = b"AIODAFT\0" + bytes([3, 1]) + struct.pack("<H", 1) + cluster + CLIENT_NONCE + names
    hello = said + mac(b"client", challenge, said)
    assert server().challenge == challenge
    assert client().receive_challenge(challenge) == hello
    about, accept, session = server().receive_hello(hello)
    assert (about, accept) == (ABOUT, mac(b"server", challenge, hello))
    assert session.secret() == mac(b"session", challenge, hello)


def test_no_two_connections_have_the_same_key() -> None:
    other = Hello("node-1@a", "worker-3@b", Purpose.CONTROL)
    sessions = [
        shaken(client(), server()),
        shaken(client(nonce=b"d" * 32), server()),
        shaken(client(), server(nonce=b"t" * 32)),
        shaken(client(about=other), server()),
        shaken(client(about=other._replace(purpose=Purpose.DATA)), server()),
    ]
    assert len({session.secret() for _, session in sessions}) == len(sessions)


def test_a_client_of_another_cluster_says_nothing() -> None:
    with pytest.raises(HandshakeError, match="belongs to another cluster: it has another key"):
        client(OTHER_KEY).receive_challenge(server().challenge)


def test_a_client_with_another_key_is_refused() -> None:
    called = server()
    said = client().receive_challenge(called.challenge)[:-ACCEPT_SIZE]
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        called.receive_hello(said + OTHER_KEY.mac(b"client", called.challenge, said))


def test_a_server_with_another_key_is_refused() -> None:
    caller, called = client(), server()
    hello = caller.receive_challenge(called.challenge)
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        caller.receive_accept(OTHER_KEY.mac(b"server", called.challenge, hello))


def test_a_recorded_hello_does_not_open_another_connection() -> None:
    recorded = client().receive_challenge(server().challenge)
    with pytest.raises(HandshakeError):
        server(nonce=b"t" * NONCE_SIZE).receive_hello(recorded)


def test_a_recorded_accept_does_not_convince_another_client() -> None:
    called = server()
    recorded = called.receive_hello(client().receive_challenge(called.challenge)).accept
    caller = client(nonce=b"d" * NONCE_SIZE)
    caller.receive_challenge(called.challenge)
    with pytest.raises(HandshakeError):
        caller.receive_accept(recorded)


def test_an_accept_for_another_process_or_purpose_is_refused() -> None:
    called = server()
    for other in (
        ABOUT._replace(sender="node-9@a"),
        ABOUT._replace(to="worker-9@b"),
        ABOUT._replace(purpose=Purpose.DATA),
    ):
        for_another = called.receive_hello(client(about=other).receive_challenge(called.challenge)).accept
        caller = client()
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
    with pytest.raises(HandshakeError):
        called.receive_hello(hello[:-ACCEPT_SIZE] + called.receive_hello(hello).accept)


def test_a_challenge_reflected_as_a_hello_is_refused() -> None:
    called = server()
    with pytest.raises(HandshakeError):
        called.receive_hello(called.challenge.ljust(HELLO_SIZE, b"\0"))


def test_two_clients_or_two_servers_that_were_connected_with_each_other_refuse() -> None:
    hello = client().receive_challenge(server().challenge)
    with pytest.raises(HandshakeError):
        client(nonce=b"d" * NONCE_SIZE).receive_challenge(hello)
    with pytest.raises(HandshakeError):
        server().receive_hello(server(nonce=b"t" * NONCE_SIZE).challenge)


def test_an_accept_before_the_challenge_is_refused() -> None:
    with pytest.raises(HandshakeError):
        client().receive_accept(bytes(ACCEPT_SIZE))


@pytest.mark.parametrize(("oldest", "newest"), [(0, 0), (2, 2), (4, 4), (4, 255), (3, 2)])
def test_versions_that_do_not_meet_are_told_by_the_client(oldest: int, newest: int) -> None:
    challenge = server().challenge
    changed = challenge[:VERSIONS] + bytes([oldest, newest]) + challenge[FLAGS:]
    with pytest.raises(
        UnknownVersion, match=f"versions {oldest} to {newest} of the handshake, this process 3 to 3: install"
    ):
        client().receive_challenge(changed)


def test_a_range_of_versions_that_was_changed_on_its_way_is_noticed() -> None:
    """An attacker would do so to have both sides use an older version than they could."""
    called = server()
    changed = called.challenge[:VERSIONS] + bytes([2, 3]) + called.challenge[FLAGS:]
    hello = client().receive_challenge(changed)
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        called.receive_hello(hello)


@pytest.mark.parametrize("version", [0, 2, 4, 255])
def test_a_member_that_chooses_a_version_that_was_not_offered_is_refused(version: int) -> None:
    called = server()
    said = client().receive_challenge(called.challenge)[:-ACCEPT_SIZE]
    with pytest.raises(HandshakeError, match=f"chose version {version} of the handshake, which was not offered"):
        called.receive_hello(proved(said[:VERSIONS] + bytes([version]) + said[VERSIONS + 1 :], called))


@pytest.mark.parametrize("purpose", [0, 3, 255])
def test_a_member_that_asks_for_an_unknown_kind_of_connection_is_refused(purpose: int) -> None:
    called = server()
    said = client().receive_challenge(called.challenge)[:-ACCEPT_SIZE]
    with pytest.raises(HandshakeError, match=f"the unknown kind {purpose}"):
        called.receive_hello(proved(said[: VERSIONS + 1] + bytes([purpose]) + said[FLAGS:], called))


@pytest.mark.parametrize("tls", [False, True])
def test_both_sides_use_tls_or_neither_does(tls: bool) -> None:
    called = server(tls=not tls)
    with pytest.raises(HandshakeError, match="TLS between hosts, and the other side does"):
        client(tls=tls).receive_challenge(called.challenge)
    said = client(tls=not tls).receive_challenge(called.challenge)[:-ACCEPT_SIZE]
    with pytest.raises(HandshakeError, match="TLS between hosts, and the other side does"):
        called.receive_hello(proved(said[:FLAGS] + struct.pack("<H", tls) + said[FLAGS + 2 :], called))


@pytest.mark.parametrize("own", [False, True])
def test_both_sides_encrypt_payloads_or_neither_does(own: bool) -> None:
    called = ServerHandshake(KEY, SERVER_NONCE, tls=True, data_tls=not own)
    with pytest.raises(HandshakeError, match="TLS for payloads, and the other side does"):
        ClientHandshake(KEY, CLIENT_NONCE, ABOUT, tls=True, data_tls=own).receive_challenge(called.challenge)
    caller = ClientHandshake(KEY, CLIENT_NONCE, ABOUT, tls=True, data_tls=not own)
    admitted, session = shaken(caller, called)
    assert admitted.session.secret() == session.secret()


@pytest.mark.parametrize("name", [b"", b"\xff" * 96, b"a\0b", b"a\n", b"../x"])
def test_a_member_with_a_name_that_is_none_is_refused(name: bytes) -> None:
    called = server()
    said = client().receive_challenge(called.challenge)[:-ACCEPT_SIZE]
    padded = name.ljust(96, b"\0")
    for start in (SENDER, SENDER + 96):
        with pytest.raises(HandshakeError, match="a name that is none"):
            called.receive_hello(proved(said[:start] + padded + said[start + 96 :], called))


def test_a_hello_with_one_bit_changed_anywhere_is_refused() -> None:
    called = server()
    hello = client().receive_challenge(called.challenge)
    for index in range(HELLO_SIZE):
        with pytest.raises(HandshakeError):
            called.receive_hello(flipped(hello, index))


def test_an_accept_with_one_bit_changed_anywhere_is_refused() -> None:
    caller, called = client(), server()
    accept = called.receive_hello(caller.receive_challenge(called.challenge)).accept
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
    accept = called.receive_hello(hello).accept
    for size in (*range(HELLO_SIZE), HELLO_SIZE + 1, 1 << 20):
        with pytest.raises(HandshakeError):
            called.receive_hello(hello[:size].ljust(size, b"\0"))
    for size in (*range(CHALLENGE_SIZE), CHALLENGE_SIZE + 1, 1 << 20):
        with pytest.raises(HandshakeError):
            client().receive_challenge(called.challenge[:size].ljust(size, b"\0"))
    for size in (*range(ACCEPT_SIZE), ACCEPT_SIZE + 1, 1 << 20):
        with pytest.raises(HandshakeError):
            caller.receive_accept(accept[:size].ljust(size, b"\0"))


def test_another_protocol_is_told_from_a_wrong_key() -> None:
    for start in (b"GET / HT", b"AIODAFT\x01"):
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            client().receive_challenge(start.ljust(CHALLENGE_SIZE, b"\0"))
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            server().receive_hello(start.ljust(HELLO_SIZE, b"\0"))


@given(st.binary(max_size=400) | st.binary(max_size=400).map(lambda rest: MAGIC + rest))
def test_garbage_only_ever_fails_the_handshake(garbage: bytes) -> None:
    with pytest.raises(HandshakeError):
        server().receive_hello(garbage)
    with pytest.raises(HandshakeError):
        client().receive_accept(garbage)


@given(st.binary(min_size=HELLO_SIZE - len(MAGIC), max_size=HELLO_SIZE - len(MAGIC)))
def test_garbage_of_the_right_size_and_beginning_is_no_hello(garbage: bytes) -> None:
    with pytest.raises(HandshakeError, match="does not hold the cluster key"):
        server().receive_hello(MAGIC + garbage)


@given(st.binary(min_size=HELLO_SIZE - ACCEPT_SIZE - len(MAGIC), max_size=HELLO_SIZE - ACCEPT_SIZE - len(MAGIC)))
def test_garbage_of_a_member_is_refused_or_read(garbage: bytes) -> None:
    called = server()
    try:
        admitted = called.receive_hello(proved(MAGIC + garbage, called))
    except HandshakeError:
        return
    assert isinstance(admitted.hello.purpose, Purpose)


@given(st.binary(max_size=100) | st.binary(min_size=CHALLENGE_SIZE - 8, max_size=CHALLENGE_SIZE - 8).map(MAGIC.__add__))
def test_garbage_is_no_challenge(garbage: bytes) -> None:
    with pytest.raises(HandshakeError):
        client().receive_challenge(garbage)


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,95}", fullmatch=True)


@given(secret=st.binary(min_size=32, max_size=32), sender=NAMES, to=NAMES, purpose=st.sampled_from(Purpose))
def test_any_key_and_names_work_when_both_sides_have_the_same(
    secret: bytes, sender: str, to: str, purpose: Purpose
) -> None:
    about = Hello(sender, to, purpose)
    admitted, session = shaken(client(Key(secret), about=about), server(Key(secret)))
    assert (admitted.hello, admitted.session.secret()) == (about, session.secret())


def test_a_key_has_32_bytes_and_is_never_shown() -> None:
    secret = b"correct horse battery staple 32b"
    key = Key(secret)
    assert key.secret() == secret
    assert "horse" not in f"{key!r} {key} {[key]}"
    with pytest.raises(TypeError, match="a key is not pickled"):
        pickle.dumps(key)
    for size in (0, 31, 33):
        with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
            Key(bytes(size))


def test_a_mac_depends_on_its_purpose() -> None:
    assert KEY.mac(b"client", b"x") != KEY.mac(b"server", b"x")
    assert KEY.mac(b"client", b"x", b"y") == KEY.mac(b"client", b"xy")
