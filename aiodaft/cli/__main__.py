"""`aiodaft COMMAND`, also as `python -m aiodaft.cli`."""

from __future__ import annotations

import argparse

from aiodaft import __version__
from aiodaft.program import run

from .doctor import examine
from .stack import show_stacks


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aiodaft", description="Distributed actors, futures and tasks for asyncio.")
    parser.add_argument("--version", action="version", version=f"aiodaft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what works on this machine, what does not, and why")
    stack = commands.add_parser("stack", help="show the stacks of every process of a running controller")
    stack.add_argument("--pid", type=int, help="the controller's process; default: all controllers of this user")
    arguments = parser.parse_args()
    return show_stacks(arguments.pid) if arguments.command == "stack" else run(examine())


if __name__ == "__main__":
    raise SystemExit(main())
