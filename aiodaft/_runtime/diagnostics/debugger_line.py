"""The line from a debugger of an actor to its user: at the terminal of the program, or at that of `aiodaft debug`.

An actor has no terminal of its own. At a breakpoint it connects to an `aiodaft debug` that waits for one, else it opens
the terminal of the program, and locks it, so that others at breakpoints wait. Without either, the call goes on.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from typing import Final, TextIO

from aiodaft._runtime.platform.command_address import debug_addresses, may_debug
from aiodaft._runtime.platform.tasks import logger

_ADVICE: Final = (
    "is passed over: the program has no terminal. Start `aiodaft debug` in a terminal of this machine before the call, "
    "and the debugger opens there. PYTHONBREAKPOINT=0 turns breakpoints off"
)

# The lines that a debugger has open.
_open: set[Line] = set()


def is_debugged() -> bool:
    return bool(_open)


class Line:
    """The input and output of a debugger, once it is open."""

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
    """The descriptor of a connection to an `aiodaft debug` that is there for this process."""
    for address in debug_addresses():
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            # A stranger that listens there, and accepts nothing, is not waited for.
            connection.setblocking(False)
            connection.connect(address)
            connection.setblocking(True)
            if may_debug(connection):
                logger.warning("%s waits for `aiodaft debug`", where)
                return connection.detach()
    return None


def _to_terminal(path: str, where: str) -> int | None:
    """The descriptor of a terminal, which nothing else debugs at."""
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
