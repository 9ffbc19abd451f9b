"""The links to a running program, in which nothing listens, of commands in other terminals and of debuggers.

A command listens on an abstract socket, writes its address where only the user of a fork server and root can, and sends
the fork server a signal. The fork server tells its node, and that the programs that are attached to it. Each of them
connects to the command, sends a greeting, and answers questions until the command ends. Both ends check the other's
user (SO_PEERCRED).

Messages are lines of JSON: a `Greeting`; then, for each question `[name, arguments]`, any number of `["item", value]`,
and `["end", null]` or `["failed", "why"]`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple, TextIO, TypeAlias

from aiodaft._protocol.connections.versions import __version__
from aiodaft._runtime.platform.linux import address, debug_addresses, may_debug, other_end
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process

ITEM: Final = "item"
END: Final = "end"
FAILED: Final = "failed"
_ROOT: Final = 0
_READ_SIZE: Final = 64 << 10

Answers: TypeAlias = Mapping[str, Callable[..., AsyncGenerator[Any, None]]]


class Greeting(NamedTuple):
    """The first message of a process to a command.

    Attributes:
        listens: The address where a node of a cluster listens; "" for a program.
        attached: The number of programs that a node has told to greet the command, too.
    """

    id: str
    node: str
    release: str = __version__
    listens: str = ""
    attached: int = 0


def encoded(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Messages:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._whole: deque[bytes] = deque()

    async def receive(self) -> Any:
        loop = asyncio.get_running_loop()
        while not self._whole:
            try:
                data = await loop.sock_recv(self._connection, _READ_SIZE)
            except ConnectionError:
                return None
            if not data:
                return None
            self._parts.append(data)
            if b"\n" in data:
                *whole, begun = b"".join(self._parts).split(b"\n")
                self._whole.extend(whole)
                self._parts = [begun]
        return json.loads(self._whole.popleft())


class Visits:
    def __init__(self, process: Process, answers: Answers) -> None:
        self._process = process
        self._answers = answers

    def begin(self, fork_server: int, greeting: Greeting | None = None) -> None:
        if self._process.closed is None:
            visiting = self._visit(fork_server, greeting or Greeting(self._process.id, self._process.options.agent))
            self._process.create_task(visiting, name="answer a command")

    async def _visit(self, fork_server: int, greeting: Greeting) -> None:
        loop = self._process.loop
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
            connection.setblocking(False)
            await loop.sock_connect(connection, address(fork_server))
            command = other_end(connection)
            if command.uid not in {os.geteuid(), _ROOT}:
                logger.warning("a process of the user %d asked what this program does: refused", command.uid)
                return
            await loop.sock_sendall(connection, encoded(greeting._asdict()))
            messages, answering = Messages(connection), None
            async with asyncio.TaskGroup() as group:
                # A command asks one question at a time.
                while (question := await messages.receive()) is not None:
                    answering = group.create_task(self._answer(connection, *question), name="answer a question")
                if answering is not None:
                    answering.cancel()

    async def _answer(self, connection: socket.socket, name: str, arguments: Mapping[str, Any]) -> None:
        async def send(kind: str, value: object) -> None:
            # If the command is gone, the end of its questions tells.
            with suppress(ConnectionError):
                await self._process.loop.sock_sendall(connection, encoded((kind, value)))

        try:
            if name not in self._answers:
                raise ValueError(f"it runs aiodaft {__version__}, which has no answer to {name!r}")
            async with aclosing(self._answers[name](**arguments)) as items:
                async for item in items:
                    await send(ITEM, item)
        except Exception as error:  # noqa: BLE001 - the command shows it
            # The command is to hear of the end of this program, not of an error that follows from it.
            if self._process.closed is None:
                await send(FAILED, str(error) or type(error).__name__)
        else:
            await send(END, None)


_ADVICE: Final = (
    "is passed over: the program has no terminal. Start `aiodaft debug` in a terminal of this machine before the call, "
    "and the debugger opens there. PYTHONBREAKPOINT=0 turns breakpoints off"
)

_open: set[Line] = set()


def is_debugged() -> bool:
    return bool(_open)


# An actor has no terminal of its own. At a breakpoint it connects to an `aiodaft debug` that waits for one, else it
# locks the terminal of the program, so that others at breakpoints wait. Without either, the call goes on.
class Line:
    def __init__(self, terminal: str) -> None:
        self._terminal = terminal
        self._reading: TextIO | None = None
        self._writing: TextIO | None = None

    def open(self, where: str) -> bool:
        """Open it for a user who is told where this is; False if there is none. Blocks while others debug."""
        if self._reading is not None:
            return True
        file = _to_debug_command(where) or _to_terminal(self._terminal, where)
        if file is None:
            logger.warning("%s %s", where, _ADVICE)
            return False
        self._reading = open(file, encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does
        self._writing = open(os.dup(file), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - as above
        _open.add(self)
        self.write(f"{where}\n")
        return True

    def close(self) -> None:
        _open.discard(self)
        for file in (self._writing, self._reading):
            with suppress(OSError):
                if file is not None:
                    file.close()
        self._reading = self._writing = None

    def readline(self) -> str:
        with suppress(OSError):
            return self._reading.readline() if self._reading is not None else ""
        return ""

    def write(self, text: str) -> int:
        with suppress(OSError):
            if self._writing is not None:
                self._writing.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            if self._writing is not None:
                self._writing.flush()


def _to_debug_command(where: str) -> int | None:
    for place in debug_addresses():
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            # A stranger that listens there, and accepts nothing, is not waited for.
            connection.setblocking(False)
            connection.connect(place)
            connection.setblocking(True)
            if may_debug(connection):
                logger.warning("%s waits for `aiodaft debug`", where)
                return connection.detach()
    return None


def _to_terminal(path: str, where: str) -> int | None:
    if not path:
        return None
    try:
        # The terminal does not become that of this process, so its signals go where they went before.
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        logger.warning("%s: the terminal %s cannot be opened: %s", where, path, error)
        return None
    try:
        fcntl.flock(terminal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("%s waits until the debugger of another actor is left", where)
        fcntl.flock(terminal, fcntl.LOCK_EX)
    return terminal
