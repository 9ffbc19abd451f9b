"""The messages between the launcher and the fork server, and how both pack and read them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.platform.linux import fresh_python


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


# In place of a descriptor: the kernel ends the worker with its parent.
BY_KERNEL: Final = -1


def start_fresh(
    order: Spawn, environment: Mapping[str, str], fds: Sequence[int], lifeline: int = BY_KERNEL
) -> subprocess.Popen[bytes]:
    """Start a worker, in a session of its own; the caller closes its descriptors here.

    Args:
        order: The worker to start.
        environment: That of all workers; the order may add to it.
        fds: Those of its connection, its output, its errors and its heartbeat.
        lifeline: The pipe that it reads, and with which it ends: the pipe ends with the process that starts it.

    Raises:
        OSError: The machine refuses it.
    """
    import tempfile  # noqa: PLC0415 - takes long to import, and few workers are started so

    connection, out, err, heartbeat = fds
    kept = [fd for fd in (connection, heartbeat, lifeline) if fd >= 0]
    # A pipe has no room for any settings, and nothing reads it yet.
    with tempfile.TemporaryFile(prefix="aiodaft-") as settings:
        settings.write(order.settings)
        settings.seek(0)
        numbers = connection, settings.fileno(), heartbeat, lifeline
        return subprocess.Popen(
            fresh_python("aiodaft._runtime.node.worker_main", *numbers, front=order.code, path=order.path),
            env={**environment, **order.environment},
            cwd=order.directory,
            pass_fds=(*kept, settings.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
