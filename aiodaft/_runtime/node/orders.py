"""The messages between the launcher and the fork server, and how both pack and read them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias, cast

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.ids import PeerId


class Spawn(NamedTuple):
    """Start a worker; has its descriptors."""

    worker: PeerId
    directory: str
    path: list[str]
    # Folders in front of `path`, for this worker alone.
    code: list[str]
    # To the environment of the fork server; None removes a variable.
    changes: dict[str, str | None]
    # To be imported before the fork.
    modules: list[str]
    # Variables for this worker alone.
    environment: dict[str, str]
    settings: bytes


class Kill(NamedTuple):
    """Send a signal to a worker."""

    worker: PeerId
    signal: int


class Spawned(NamedTuple):
    """A worker runs."""

    worker: PeerId
    pid: int


class Failed(NamedTuple):
    """A worker was not started."""

    worker: PeerId
    why: str


class Exited(NamedTuple):
    """A worker ended; exit code and signal are None if unknown."""

    worker: PeerId
    exit_code: int | None
    signal: str | None


class Importing(NamedTuple):
    """The fork server imports a module."""

    module: str


class Unforkable(NamedTuple):
    """The import of a module has initialised CUDA: from now on workers are new interpreters."""

    module: str


class Visited(NamedTuple):
    """A command wants to ask something; has the pid of the fork server outside of its PID namespace."""

    pid: int


Message: TypeAlias = Spawn | Kill | Spawned | Failed | Exited | Importing | Unforkable | Visited

_KINDS: Final[tuple[type[Message], ...]] = (Spawn, Kill, Spawned, Failed, Exited, Importing, Unforkable, Visited)


def packed(message: Message) -> bytes:
    return pack([_KINDS.index(type(message)), *message])


def unpacked(data: bytes) -> Message:
    kind, *fields = unpack(data)
    made: Message = cast("Any", _KINDS[kind])(*fields)
    return made
