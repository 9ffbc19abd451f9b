"""A node's message before TLS is that which it sent."""

from __future__ import annotations

import pytest

from aiodaft._protocol.connections.versions import Software
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.far import WELCOME_SIZE, Answer, Welcome
from aiodaft.exceptions import NotAuthenticated
from aiodaft_transport import Key

SESSION = Key(bytes(range(32)))
WELCOME = Welcome(Answer.LATER, PeerId("node-1@a"), PeerId("node-2@b"), Software("0.1.0", "cpython 3.12.1"))


def test_a_welcome_arrives_as_it_was_sent() -> None:
    sealed = WELCOME.sealed(SESSION)
    assert len(sealed) == WELCOME_SIZE
    assert Welcome.opened(sealed, SESSION) == WELCOME


def test_the_bytes_of_a_welcome_are_those_of_every_release() -> None:
    """A release that changes them cannot tell, nor be told, that it is another one."""
    packed = bytes([2]) + b"".join(
        text.ljust(size, b"\0")
        for text, size in ((b"node-1@a", 96), (b"node-2@b", 96), (b"0.1.0", 32), (b"cpython 3.12.1", 32))
    )
    assert WELCOME.sealed(SESSION) == packed + SESSION.mac(b"welcome", packed)


def test_f95_a_welcome_that_was_changed_or_is_of_another_connection_is_refused() -> None:
    sealed = WELCOME.sealed(SESSION)
    for index in range(len(sealed)):
        changed = sealed[:index] + bytes([sealed[index] ^ 1]) + sealed[index + 1 :]
        with pytest.raises(NotAuthenticated, match="was changed on its way"):
            Welcome.opened(changed, SESSION)
    with pytest.raises(NotAuthenticated):
        Welcome.opened(sealed, Key(bytes(32)))
