"""`aiodaft debug`: opens the debugger here when an actor comes to a breakpoint."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
from contextlib import suppress
from typing import Final

import click

from aiodaft._runtime.platform.command_address import debug_address, other_end

from ..output import Failed
from .programs import check_can_ask, check_may_ask

_READ_SIZE: Final = 64 << 10
# Actors that come to breakpoints while another one is debugged.
_BACKLOG: Final = 4096


@click.command()
@click.option("--pid", type=int, help="A program, or one of its actors.  [default: all programs of this user]")
def debug(pid: int | None) -> int:
    """Open the debugger here when an actor comes to a breakpoint.

    It waits until Ctrl-C, or until the process ends. Of several actors at breakpoints, one is debugged after the other.
    """
    check_can_ask()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        whose = "all programs of this user" if pid is None else f"process {pid}"
        process = _opened(pid)
        user = os.geteuid() if pid is None else check_may_ask(pid)
        _bind(listener, debug_address(pid), whose)
        listener.listen(_BACKLOG)
        click.echo(f"waiting for breakpoints of {whose}; Ctrl-C ends this", err=True)
        watched: list[socket.socket | int] = [listener, *process]
        while listener in select.select(watched, [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if other_end(connection).uid == user:
                    _debug(connection)
        click.echo(f"{whose} has ended", err=True)
    return 0


def _bind(listener: socket.socket, address: str, whose: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        who = "another process"
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
            question.setblocking(False)
            question.connect(address)
            holder = other_end(question)
            who = "another `aiodaft debug`" if holder.uid == os.geteuid() else f"process {holder.pid} of another user"
        raise Failed(f"{who} waits for breakpoints of {whose}") from None


def _opened(pid: int | None) -> list[int]:
    """A descriptor that shows the end of the process, if there is one."""
    if pid is None:
        return []
    try:
        return [os.pidfd_open(pid)]
    except OSError as error:
        raise Failed(f"there is no process {pid}: {error.strerror}") from None


def _debug(connection: socket.socket) -> None:
    """Show the actor's output, and send it the user's input, until it goes on."""
    watched: list[socket.socket | int] = [connection, sys.stdin.fileno()]
    with suppress(ConnectionError):
        while True:
            ready, _, _ = select.select(watched, [], [])
            if connection in ready:
                shown = connection.recv(_READ_SIZE)
                if not shown:
                    return
                sys.stdout.buffer.write(shown)
                sys.stdout.flush()
            elif typed := os.read(sys.stdin.fileno(), _READ_SIZE):
                connection.sendall(typed)
            else:
                # The end of the input, or Ctrl-D: the call goes on.
                connection.shutdown(socket.SHUT_WR)
                watched.pop()
