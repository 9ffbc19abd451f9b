"""Mutual proof of the cluster key before anything else is read from a socket. Sans-IO.

The server sends first, so the handshake costs the client one round trip. Every message has a fixed size: the stranger
chooses no length. After a failure the server closes the connection without an answer.

    server -> client   CHALLENGE   magic 8 | nonce 32
    client -> server   HELLO       magic 8 | nonce 32 | name 64, padded | mac 32
    server -> client   ACCEPT      mac 32

Each MAC is HMAC-SHA256 over all earlier messages, under a key derived from the cluster key and the direction. This
prevents replay, reflection and swapped roles.
"""

from __future__ import annotations

from typing import Final

from aiodaft_transport.exceptions import HandshakeError

MAGIC: Final = b"AIODAFT\x01"
KEY_SIZE: Final = 32
NONCE_SIZE: Final = 32
CHALLENGE_SIZE: Final = len(MAGIC) + NONCE_SIZE
_NAME_SIZE: Final = 64
_MAC_SIZE: Final = 32
HELLO_SIZE: Final = len(MAGIC) + NONCE_SIZE + _NAME_SIZE + _MAC_SIZE
ACCEPT_SIZE: Final = _MAC_SIZE


class Key:
    """The secret of one cluster; never shown."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_SIZE:
            raise ValueError(f"a cluster key has {KEY_SIZE} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return "Key(...)"

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        """Authenticate `parts` for one purpose."""
        import hmac  # noqa: PLC0415 - slow, and most processes need no handshake

        purpose = hmac.digest(self._secret, b"aiodaft/1 " + label, "sha256")
        return hmac.digest(purpose, b"".join(parts), "sha256")

    def made(self, proof: bytes, label: bytes, *parts: bytes) -> bool:
        """Whether `proof` is the `mac` of `parts`, in constant time."""
        import hmac  # noqa: PLC0415 - see above

        return hmac.compare_digest(proof, self.mac(label, *parts))

    def secret(self) -> bytes:
        """The bytes of the key, for a process of the same cluster, over an inherited socket."""
        return self._secret


class ServerHandshake:
    """The side that accepts the connection."""

    def __init__(self, key: Key, nonce: bytes) -> None:
        self._key = key
        self.challenge = MAGIC + nonce

    def receive_hello(self, hello: bytes) -> tuple[str, bytes]:
        """Check a HELLO of exactly HELLO_SIZE bytes.

        Returns:
            The client's name, and the ACCEPT to send.

        Raises:
            HandshakeError: The client does not hold the key; close without an answer.
        """
        said, proof = hello[:-_MAC_SIZE], hello[-_MAC_SIZE:]
        if len(hello) != HELLO_SIZE or not said.startswith(MAGIC):
            raise HandshakeError("the other side does not speak this protocol")
        if not self._key.made(proof, b"client", self.challenge, said):
            raise HandshakeError("the other side does not hold the cluster key")
        try:
            name = said[len(MAGIC) + NONCE_SIZE :].rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise HandshakeError("the other side's name is not ASCII") from error
        return name, self._key.mac(b"server", self.challenge, hello)


class ClientHandshake:
    """The side that connects."""

    def __init__(self, key: Key, nonce: bytes, name: str) -> None:
        encoded = name.encode("ascii")
        if len(encoded) > _NAME_SIZE:
            raise ValueError(f"a peer's name has at most {_NAME_SIZE} bytes: {name!r}")
        self._key = key
        self._said = MAGIC + nonce + encoded.ljust(_NAME_SIZE, b"\0")
        self._challenge = b""
        self._hello = b""

    def receive_challenge(self, challenge: bytes) -> bytes:
        """Answer a CHALLENGE of exactly CHALLENGE_SIZE bytes with the HELLO to send."""
        if len(challenge) != CHALLENGE_SIZE or not challenge.startswith(MAGIC):
            raise HandshakeError("the other side does not speak this protocol")
        self._challenge = challenge
        self._hello = self._said + self._key.mac(b"client", challenge, self._said)
        return self._hello

    def receive_accept(self, accept: bytes) -> None:
        """Check the server's proof, before anything else is sent."""
        if not self._key.made(accept, b"server", self._challenge, self._hello):
            raise HandshakeError("the other side does not hold the cluster key")
