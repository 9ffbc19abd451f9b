"""`aiodaft stack`: prints the stacks of every process of a running controller."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import click

from aiodaft._runtime.diagnostics.attach import STACK_SIGNAL, address, is_trusted

from .output import FAILED, Failed

# Seconds until a controller connects, and between parts of its answer.
_PATIENCE: Final = 10.0
_FORK_SERVER: Final = b"aiodaft._runtime.node.forkserver"


@click.command()
@click.option("--pid", type=int, help="The controller's process.  [default: all controllers of this user]")
def stack(pid: int | None) -> int:
    """Show what all processes of a program do."""
    servers = [server for server in _fork_servers() if pid is None or pid in _parents(server)]
    if not servers:
        where = "on this machine" if pid is None else f"in process {pid}"
        raise Failed(f"there is no aiodaft runtime with actors {where}")
    failed = 0
    for server in servers:
        try:
            click.echo(_ask(server))
        except OSError as error:
            failed = FAILED
            why = error or "timed out"
            click.echo(f"aiodaft: the controller with fork server {server} does not answer: {why}", err=True)
    return failed


def _ask(server: int) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address(server))
        listener.listen(1)
        listener.settimeout(_PATIENCE)
        os.kill(server, STACK_SIGNAL)
        connection, _ = listener.accept()
        with connection:
            if not is_trusted(connection):
                raise PermissionError("a process of another user has answered")
            connection.settimeout(_PATIENCE)
            with connection.makefile(encoding="utf-8", errors="replace") as answer:
                return answer.read()


def _fork_servers() -> list[int]:
    """The fork servers that this user may send a signal."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError):
            status = _status(int(name))
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            # Forked workers have the same command line. The signal ends a process that does not catch it.
            if _FORK_SERVER in command and int(status["SigCgt"], 16) >> (STACK_SIGNAL - 1) & 1:
                found.append(int(name))
    return sorted(found)


def _parents(pid: int) -> Iterator[int]:
    """The parent of a process and that one's parent: with `isolation`, one process is between server and controller."""
    with suppress(OSError, KeyError):
        for _ in range(2):
            pid = int(_status(pid)["PPid"])
            yield pid


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}
