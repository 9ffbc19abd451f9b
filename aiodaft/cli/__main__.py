"""`aiodaft COMMAND`, also as `python -m aiodaft.cli`."""

from __future__ import annotations

import errno
import io
import signal
import sys
from importlib import import_module
from typing import Any, Final

import click

from aiodaft import __version__
from aiodaft.cli.options import Failed

_MODULES: Final = {
    "new": ".new",
    "run": ".run",
    "plan": ".plan",
    "ps": ".running.looks",
    "top": ".running.looks",
    "memory": ".running.looks",
    "logs": ".running.actors",
    "stack": ".running.actors",
    "trace": ".running.actors",
    "debug": ".running.actors",
    "kill": ".running.actors",
    "doctor": ".doctor",
    "key": ".key",
    "up": ".node",
    "join": ".node",
    "stop": ".cluster",
    "drain": ".cluster",
    "down": ".cluster",
    "completion": ".options",
}
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


class _Commands(click.Group):
    """Loads the module of a command when it is used: a node never loads code that draws tables."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        command: click.Command = getattr(import_module(_MODULES[cmd_name], __package__), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # As a shell says it.
            raise SystemExit(128 + signal.SIGINT) from None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise Failed(str(error)) from None


@click.group(cls=_Commands)
@click.version_option(__version__, message="aiodaft %(version)s")
def main() -> None:
    """Distributed actors, futures and tasks for asyncio.

    Answers go to standard output, errors to standard error. The exit status is 0, 1 if a command failed, 2 for wrong
    usage, and for `run` that of the script.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that a terminal of another encoding lacks are escaped.
            stream.reconfigure(errors="backslashreplace")


@main.result_callback()
def _end(status: int | None) -> None:
    raise SystemExit(status or 0)


if __name__ == "__main__":
    main()
