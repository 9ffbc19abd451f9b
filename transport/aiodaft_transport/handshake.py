"""AD1, version 3: mutual proof of the cluster key before anything else is read from a socket. Sans-IO.

The server sends first, so the handshake costs the client one round trip. Every message has a fixed size: the stranger
chooses no length. After a failure the server closes the connection without an answer.

    server -> client   CHALLENGE   magic 8 | oldest 1 | newest 1 | flags 2 | cluster 16 | nonce 32
    client -> server   HELLO       magic 8 | version 1 | purpose 1 | flags 2 | cluster 16 | nonce 32
                                   | sender 96, padded | to 96, padded | mac 32
    server -> client   ACCEPT      mac 32

`oldest` and `newest` are the versions that the server speaks; the client takes the newest that both speak. `cluster` is
derived from the key and public: it tells a wrong key from a broken peer. Each MAC is HMAC-SHA256 over all earlier
messages, under a key derived from the cluster key and the direction. This prevents replay, reflection, swapped roles
and downgrade. The session key is derived from the CHALLENGE and the HELLO: no two connections have the same one.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from typing import Final, NamedTuple, NoReturn

from aiodaft_transport.exceptions import HandshakeError, UnknownVersion

MAGIC: Final = b"AIODAFT\0"
# Raised also when the messages after the handshake change (see `Welcome` in far.py): members of versions that do not
# meet find that out here.
VERSION: Final = 3
OLDEST_VERSION: Final = 3
KEY_SIZE: Final = 32
NONCE_SIZE: Final = 32
MAC_SIZE: Final = 32
# Flags: connections for CONTROL, and those for DATA, go on with TLS.
_TLS: Final = 1
_DATA_TLS: Final = 2
_CHALLENGE: Final = struct.Struct("<8sBBH16s32s")
_HELLO: Final = struct.Struct("<8sBBH16s32s96s96s")
_NAME: Final = re.compile(rb"([A-Za-z0-9_][A-Za-z0-9_.@-]{0,95})\0*")
CHALLENGE_SIZE: Final = _CHALLENGE.size
HELLO_SIZE: Final = _HELLO.size + MAC_SIZE
ACCEPT_SIZE: Final = MAC_SIZE


class Key:
    """Never shown, never pickled."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_SIZE:
            raise ValueError(f"a cluster key has {KEY_SIZE} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled")

    @property
    def cluster(self) -> bytes:
        """The public id of the cluster: 16 bytes."""
        return self.mac(b"cluster")[:16]

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        import hmac  # noqa: PLC0415 - slow, and most processes need no handshake

        purpose = hmac.digest(self._secret, b"aiodaft/1 " + label, "sha256")
        return hmac.digest(purpose, b"".join(parts), "sha256")

    def made(self, proof: bytes, label: bytes, *parts: bytes) -> bool:
        """Compares in constant time."""
        import hmac  # noqa: PLC0415 - see above

        return hmac.compare_digest(proof, self.mac(label, *parts))

    def secret(self) -> bytes:
        """For a process of the same cluster, over an inherited socket."""
        return self._secret


class Purpose(IntEnum):
    CONTROL = 1
    DATA = 2


class Hello(NamedTuple):
    sender: str
    to: str
    purpose: Purpose


class Admitted(NamedTuple):
    hello: Hello
    accept: bytes
    session: Key


class ServerHandshake:
    """The side that accepts the connection.

    Args:
        nonce: NONCE_SIZE random bytes, used once.
        tls: Whether connections for CONTROL go on with TLS.
    """

    def __init__(self, key: Key, nonce: bytes, *, tls: bool, data_tls: bool = False) -> None:
        self._key = key
        self._flags = tls * _TLS | data_tls * _DATA_TLS
        self.challenge = _CHALLENGE.pack(MAGIC, OLDEST_VERSION, VERSION, self._flags, key.cluster, nonce)

    def receive_hello(self, hello: bytes) -> Admitted:
        """Check a HELLO of exactly HELLO_SIZE bytes.

        Raises:
            HandshakeError: Close without an answer.
        """
        if len(hello) != HELLO_SIZE or not hello.startswith(MAGIC):
            raise HandshakeError("the other side does not speak this protocol")
        said, proof = hello[:-MAC_SIZE], hello[-MAC_SIZE:]
        # Nothing is looked at before the proof.
        if not self._key.made(proof, b"client", self.challenge, said):
            raise HandshakeError("the other side does not hold the cluster key")
        _, version, purpose, flags, _, _, sender, to = _HELLO.unpack(said)
        if not OLDEST_VERSION <= version <= VERSION:
            raise HandshakeError(f"the other side chose version {version} of the handshake, which was not offered")
        if flags != self._flags:
            raise HandshakeError(_disagreement(self._flags, flags))
        if purpose not in set(Purpose):
            raise HandshakeError(f"the other side asks for a connection of the unknown kind {purpose}")
        about = Hello(_read_name(sender), _read_name(to), Purpose(purpose))
        accept = self._key.mac(b"server", self.challenge, hello)
        return Admitted(about, accept, _session(self._key, self.challenge, hello))


class ClientHandshake:
    """The side that connects; `nonce`, `tls` and `data_tls` are as for `ServerHandshake`.

    Raises:
        ValueError: A name in `about` is none: 1 to 96 ASCII letters, digits and `_.@-`, none of `.@-` first.
    """

    def __init__(self, key: Key, nonce: bytes, about: Hello, *, tls: bool, data_tls: bool = False) -> None:
        self._key = key
        self._nonce = nonce
        self._names = _name(about.sender), _name(about.to)
        self._purpose = about.purpose
        self._flags = tls * _TLS | data_tls * _DATA_TLS
        self._challenge = b""
        self._hello = b""

    def receive_challenge(self, challenge: bytes) -> bytes:
        """Answer a CHALLENGE of exactly CHALLENGE_SIZE bytes with the HELLO to send.

        Raises:
            HandshakeError: Nothing was said to the server.
            UnknownVersion: There is no version that both speak.
        """
        if len(challenge) != CHALLENGE_SIZE or not challenge.startswith(MAGIC):
            raise HandshakeError("the other side does not speak this protocol")
        _, oldest, newest, flags, cluster, _ = _CHALLENGE.unpack(challenge)
        version = min(VERSION, newest)
        if version < max(OLDEST_VERSION, oldest):
            raise UnknownVersion(
                f"the other side speaks versions {oldest} to {newest} of the handshake, "
                f"this process {OLDEST_VERSION} to {VERSION}: install the same release of aiodaft on both machines"
            )
        if cluster != self._key.cluster:
            raise HandshakeError("the other side belongs to another cluster: it has another key")
        if flags != self._flags:
            raise HandshakeError(_disagreement(self._flags, flags))
        said = _HELLO.pack(MAGIC, version, self._purpose, flags, cluster, self._nonce, *self._names)
        self._challenge = challenge
        self._hello = said + self._key.mac(b"client", challenge, said)
        return self._hello

    def receive_accept(self, accept: bytes) -> Key:
        """Call it before anything else is sent. Returns the key of this connection.

        Raises:
            HandshakeError: The server does not hold the key.
        """
        if not self._key.made(accept, b"server", self._challenge, self._hello):
            raise HandshakeError("the other side does not hold the cluster key")
        return _session(self._key, self._challenge, self._hello)


def _session(key: Key, challenge: bytes, hello: bytes) -> Key:
    return Key(key.mac(b"session", challenge, hello))


def _disagreement(flags: int, others: int) -> str:
    flag, what = (_TLS, "TLS between hosts") if (flags ^ others) & _TLS else (_DATA_TLS, "TLS for payloads")
    own, other = ("uses", "does not") if flags & flag else ("does not use", "does")
    return f"this process {own} {what}, and the other side {other}"


def _name(name: str) -> bytes:
    encoded = name.encode("ascii", "replace")
    found = _NAME.fullmatch(encoded)
    if found is None or found[1] != encoded:
        raise ValueError(f"the name of a process has 1 to 96 letters, digits, and _ . @ - inside: {name!r}")
    return encoded


def _read_name(padded: bytes) -> str:
    found = _NAME.fullmatch(padded)
    if found is None:
        raise HandshakeError("the other side gives a process a name that is none")
    return found[1].decode("ascii")
